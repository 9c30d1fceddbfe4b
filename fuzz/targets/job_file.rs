//! Job files: an invalid one gives error messages, and a valid spec survives serialization to etcd.

#![no_main]

use libfuzzer_sys::fuzz_target;
use steadfast_common::job_file::parse;
use steadfast_common::spec::JobSpec;
use steadfast_fuzz::{seeds, within};

/// A parsed TOML document consists of many small allocations.
const TIMES_MAX: usize = 1024;

fuzz_target!(init: seeds("job_file", well_formed()), |data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match within(TIMES_MAX * text.len() + (256 << 10), || parse(text)) {
        Ok(spec) => {
            let json = serde_json::to_string(&spec).expect("a spec is plain data");
            let again: JobSpec = serde_json::from_str(&json).expect("it was just written");
            assert_eq!(again, spec);
            assert_eq!(again.digest(), spec.digest());
            assert!(again.errors().is_empty());
        }
        Err(error) => {
            assert!(!error.errors.is_empty());
            assert!(error.errors.iter().all(|error| !error.is_empty()));
        }
    }
});

fn well_formed() -> Vec<Vec<u8>> {
    [
        &include_bytes!("../../examples/digits.toml")[..],
        include_bytes!("../../examples/digits-async.toml"),
        include_bytes!("../../examples/linear.toml"),
        include_bytes!("../../examples/own-model.toml"),
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}
