//! JSON lines, TFRecord, LibSVM and tar archives: any split into tasks gives the same records, or the file is
//! rejected.

#![no_main]

use libfuzzer_sys::fuzz_target;
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};
use steadfast_fuzz::datasets::{is_compressed, records, spec};
use steadfast_fuzz::{seeds, within};

/// A byte of a list is a value of 32 bytes, in a list that grows by doubling.
const TIMES_MAX: usize = 512;
const FORMATS: [DataFormat; 4] =
    [DataFormat::Jsonl, DataFormat::Tfrecord, DataFormat::Libsvm, DataFormat::Webdataset];

fuzz_target!(init: seeds("rows", well_formed()), |data: &[u8]| {
    let Some((form, file)) = data.split_first() else { return };
    if is_compressed(file) {
        return;
    }
    let format = FORMATS[usize::from(form & 3)];
    let columns = DatasetSpec {
        features: vec![],
        label: String::new(),
        columns: vec!["*".to_owned()],
        feature_scale: 1.0,
        ..spec(format, Header::Present, "")
    };
    let spec = match form & 4 {
        0 => columns,
        _ => spec(format, Header::Present, "label"),
    };
    let by = |size| within(TIMES_MAX * file.len() + (8 << 20), || records(&spec, size, file).ok());
    let whole = by(None);
    assert_eq!(by(Some(1)), whole);
    assert_eq!(by(Some(u32::from(form >> 3) + 1)), whole);
});

fn well_formed() -> Vec<Vec<u8>> {
    let fixture = |form: u8, bytes: &[u8]| [&[form], bytes].concat();
    let records = include_bytes!("../../common/data/tests/datasets/files/columns.tfrecord");
    vec![
        b"\0{\"x\": 1, \"label\": [1, 2]}\n{\"label\": [], \"x\": 0.5}\n".to_vec(),
        b"\x04{\"x\": 1, \"label\": 2}\n\n{\"label\": true, \"x\": 0.5}".to_vec(),
        b"\x02+1 1:0.5 3:-2 # a\n\n-1 2:1e1\n".to_vec(),
        b"\x061 1:0.5 3:-2\n0 2:1e1\n".to_vec(),
        // The first three records.
        fixture(1, &records[..3 * records.len() / 40]),
        fixture(3, &tar()),
    ]
}

/// An archive of two records.
fn tar() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in [("a.cls", "1"), ("a.txt", "x"), ("b.cls", "2"), ("b.txt", "")] {
        let mut header = [0; 512];
        let mut put = |at: usize, text: &str| {
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
        };
        put(0, name);
        put(100, "0000644\0");
        put(124, &format!("{:011o}\0", content.len()));
        put(136, "00000000000\0");
        put(148, "        0");
        put(257, "ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend(header);
        if !content.is_empty() {
            bytes.extend(content.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}
