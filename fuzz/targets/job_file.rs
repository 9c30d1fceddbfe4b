//! Job files of both kinds: an invalid one gives error messages, and a valid spec survives serialization to etcd.

#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use steadfast_common::job::job_file::{JobFile, parse_any};
use steadfast_fuzz::{seeds, within};

/// A parsed TOML document consists of many small allocations.
const TIMES_MAX: usize = 1024;

fuzz_target!(init: seeds("job_file", well_formed()), |data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match within(TIMES_MAX * text.len() + (256 << 10), || parse_any(text)) {
        Ok(JobFile::Training(spec)) => {
            let again = written_and_read(&*spec);
            assert_eq!(again.digest(), spec.digest());
            assert!(again.errors().is_empty());
        }
        Ok(JobFile::Elastic(spec)) => {
            let again = written_and_read(&spec);
            assert_eq!(again.digest(), spec.digest());
            assert!(again.range().is_some());
        }
        Err(error) => {
            assert!(!error.errors.is_empty());
            assert!(error.errors.iter().all(|error| !error.is_empty()));
        }
    }
});

fn written_and_read<T: Serialize + DeserializeOwned + PartialEq + Debug>(spec: &T) -> T {
    let json = serde_json::to_string(spec).expect("a spec is plain data");
    let again: T = serde_json::from_str(&json).expect("it was just written");
    assert_eq!(again, *spec);
    again
}

fn well_formed() -> Vec<Vec<u8>> {
    [
        &include_bytes!("../../examples/digits.toml")[..],
        include_bytes!("../../examples/digits-async.toml"),
        include_bytes!("../../examples/linear.toml"),
        include_bytes!("../../examples/own-model.toml"),
        br#"
            kind = "elastic"
            name = "ddp"
            [nodes]
            min = 1
            max = 4
            last_call = "1m 30s"
            join_timeout = "500ms"
        "#,
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}
