//! Selects checkpoints by id.

use steadfast_common::error::ErrorKind;
use steadfast_process::Failure;

use super::manifests::Manifest;

/// Alias of the latest checkpoint.
const LATEST: &str = "latest";

/// Finds the checkpoints that `wanted` names by id or unique prefix; the latest one if `wanted` is empty.
///
/// # Errors
/// If an element matches no checkpoint, or several.
pub fn choose<'a>(
    job: &str,
    manifests: &'a [Manifest],
    wanted: &[String],
) -> Result<Vec<&'a Manifest>, Failure> {
    if wanted.is_empty() {
        return Ok(vec![latest(job, manifests)?]);
    }
    wanted.iter().map(|wanted| one(job, manifests, wanted)).collect()
}

fn latest<'a>(job: &str, manifests: &'a [Manifest]) -> Result<&'a Manifest, Failure> {
    let found = manifests.iter().find(|manifest| manifest.is_latest);
    found.ok_or_else(|| {
        let message = match manifests {
            [] => format!("job {job} has no checkpoint; take one with `steadfast checkpoint now`"),
            some => format!(
                "job {job} has no checkpoint to resume from; name one of these: {}",
                ids(some.iter())
            ),
        };
        Failure::new(ErrorKind::NotFound, message)
    })
}

/// Finds the checkpoint that `wanted` names.
///
/// # Errors
/// If it matches none, or several.
pub fn one<'a>(
    job: &str,
    manifests: &'a [Manifest],
    wanted: &str,
) -> Result<&'a Manifest, Failure> {
    if wanted == LATEST {
        return latest(job, manifests);
    }
    if let Some(found) = manifests.iter().find(|manifest| manifest.id == wanted) {
        return Ok(found);
    }
    let begin = |manifest: &&Manifest| !wanted.is_empty() && manifest.id.starts_with(wanted);
    let found: Vec<&Manifest> = manifests.iter().filter(begin).collect();
    match found.as_slice() {
        [only] => Ok(only),
        [] => Err(Failure::new(
            ErrorKind::NotFound,
            format!("job {job} has no checkpoint {wanted}; see `steadfast checkpoint list`"),
        )),
        several => Err(Failure::invalid(format!(
            "{wanted} matches {}; give more of the id",
            ids(several.iter().copied())
        ))),
    }
}

fn ids<'a>(manifests: impl Iterator<Item = &'a Manifest>) -> String {
    manifests.map(|manifest| manifest.id.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use steadfast_common::records::CheckpointRecord;

    use super::*;

    fn manifests() -> Vec<Manifest> {
        let manifest = |id: &str, is_latest| Manifest {
            id: id.to_owned(),
            create_revision: 1,
            record: Ok(CheckpointRecord::default()),
            is_latest,
        };
        vec![manifest("400-b", false), manifest("400-a", true), manifest("200-a", false)]
    }

    fn chosen(wanted: &[&str]) -> Result<Vec<String>, Failure> {
        let wanted: Vec<String> = wanted.iter().map(|it| (*it).to_owned()).collect();
        let manifests = manifests();
        let chosen = choose("digits", &manifests, &wanted)?;
        Ok(chosen.into_iter().map(|it| it.id.clone()).collect())
    }

    #[test]
    fn a_checkpoint_is_named_by_its_id_or_a_unique_prefix() {
        assert_eq!(chosen(&["400-b"]).unwrap(), ["400-b"]);
        assert_eq!(chosen(&["2", "400-a"]).unwrap(), ["200-a", "400-a"]);
        assert_eq!(chosen(&[]).unwrap(), ["400-a"]);
        assert_eq!(chosen(&["latest"]).unwrap(), ["400-a"]);
    }

    #[test]
    fn an_unknown_or_ambiguous_id_is_rejected_in_one_line_with_a_hint() {
        let ambiguous = chosen(&["400"]).unwrap_err();
        assert_eq!(ambiguous.message, "400 matches 400-b, 400-a; give more of the id");
        let unknown = chosen(&["400-a", "7"]).unwrap_err();
        let expected = "job digits has no checkpoint 7; see `steadfast checkpoint list`";
        assert_eq!((unknown.kind, unknown.message.as_str()), (ErrorKind::NotFound, expected));
        assert!(chosen(&[""]).is_err());
        let none = choose("digits", &[], &[]).unwrap_err();
        assert!(none.message.ends_with("take one with `steadfast checkpoint now`"), "{none}");
    }
}
