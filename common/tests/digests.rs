//! The canonical form of a job does not change: its digest decides whether a job that runs is the one of a job file.

use std::fs;
use std::path::{Path, PathBuf};

use steadfast_common::job::job_file;
use steadfast_common::job::spec::JobSpec;

/// Digests of the job files among the examples.
const EXAMPLES: &[(&str, &str)] = &[
    ("clicks.toml", "cda48b9b72800c1587a4ab2955e2feb38b27a6dd5ba6feeab538b9d62091f476"),
    ("criteo.toml", "801cd18018d55b5339afc18fb0257aaac85082b7fb2d78b079820460e531299a"),
    ("deepfm.toml", "f4c7785b3259f6af6da6800d8091310ed6c7302914ac3357084de10c5c6d8455"),
    ("digits-async.toml", "9f4666a8f951cc0b8fbd2edc43a10e447d42ffcb460a82ec64634f3140d14093"),
    ("digits.toml", "1cc706ea7ae1643f856e0263e93204c8ccc34e46991d70a632c6f8dbd8004496"),
    ("linear.toml", "8adfd95298d0b55050a889223e47b4786818003b9a9f577ccb930def358d0e79"),
    ("mushrooms.toml", "b3a3ba8d1ed9de2c6b91e31e9cf358449be6448b5d1bbb9385491dd4001b3505"),
    ("own-model.toml", "fcc96c9bc9b9901163329c572d245cabafd1e40d43d3a40d51d833fc925e5828"),
    ("python/clicks.toml", "559daf0bedf4392f081b6d148a96939f910ad8b3d1c91e841fcec1d4bd042b71"),
    ("python/convolution.toml", "3bc91ddb4186a8a0cec74fed9074dd1a7fd9a3a9c380075b5e6a876ea04a0fa7"),
    ("python/digits.toml", "4b2caf054073fbf098e481a31afbd493ed740fa3e22487772144dff5aa3bca13"),
    ("python/own_loop.toml", "a64ed25dc40be2a98e9834ede483d78163304aa898477e443d5d464bbe615ebb"),
    ("python/reviews.toml", "bead75f1fe1fd30541cd357d6dcb40be86fb9d8337aae6c59b0930177d193bd3"),
    ("python/transformer.toml", "26c4ad210104b1db5cb2194ace9689965a88310a5e998e39927e76c6b159b195"),
    ("wide-deep.toml", "287e9fc674b530d5951e80c9bdb962a0c71eab855ee3640bef78ab0f7896920c"),
];

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn the_canonical_form_of_a_job_stays_the_same() {
    let mut files = 0;
    for entry in fs::read_dir(here("tests/golden")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|it| it == "toml") {
            let spec = job_file::parse(&text(&path)).unwrap();
            let expected = text(&path.with_extension("json"));
            let shown = path.display();
            assert_eq!(serde_json::to_string(&spec).unwrap(), expected.trim(), "{shown}");
            assert_eq!(serde_json::from_str::<JobSpec>(&expected).unwrap(), spec, "{shown}");
            files += 1;
        }
    }
    assert_eq!(files, 16);
}

#[test]
fn the_digests_of_the_examples_stay_the_same() {
    for (name, digest) in EXAMPLES {
        let spec = job_file::parse(&text(&here("../examples").join(name))).unwrap();
        assert_eq!(spec.digest(), *digest, "{name}");
    }
}
