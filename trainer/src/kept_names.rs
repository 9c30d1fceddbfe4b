//! The names of models that are kept because they were the best at some step.

use steadfast_common::ids::Version;
use steadfast_host::random;
use uuid::Uuid;

/// The names of the kept models of one job. Jobs may share a store.
#[derive(Debug)]
pub(crate) struct KeptNames {
    prefix: String,
}

impl KeptNames {
    /// Returns the names of a job.
    pub fn of(job: &str) -> Self {
        Self { prefix: format!("best-{job}-") }
    }

    /// Returns a name for the parameters of a version that no other attempt has: a late or failed one cannot spoil the
    /// file of another trainer.
    pub fn next(&self, version: Version) -> String {
        format!("{}{:012}-{}.safetensors", self.prefix, version.0, random::uuid())
    }

    /// Returns whether a name is one of these.
    pub fn contain(&self, name: &str) -> bool {
        let rest = name.strip_prefix(&self.prefix).and_then(|it| it.strip_suffix(".safetensors"));
        let Some((version, attempt)) = rest.and_then(|it| it.split_at_checked(12)) else {
            return false;
        };
        let attempt = attempt.strip_prefix('-').map(Uuid::parse_str);
        version.bytes().all(|it| it.is_ascii_digit()) && matches!(attempt, Some(Ok(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I9: the failed upload of a slow trainer does not truncate the file that another one has reported.
    #[test]
    fn two_attempts_for_one_version_have_files_of_their_own() {
        let names = KeptNames::of("digits");
        let (one, other) = (names.next(Version(7)), names.next(Version(7)));
        assert_ne!(one, other);
        assert!(names.contain(&one) && names.contain(&other));
    }

    #[test]
    fn files_of_others_are_not_taken_for_kept_models() {
        let names = KeptNames::of("digits");
        let of_another = KeptNames::of("digits-2").next(Version(7));
        for name in ["model.safetensors", "best-digits-7.safetensors", "best-digits-", &of_another]
        {
            assert!(!names.contain(name), "{name}");
        }
    }
}
