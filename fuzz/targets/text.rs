//! CSV and TSV: any split into tasks gives the same records, or the file is rejected.

#![no_main]

use libfuzzer_sys::fuzz_target;
use steadfast_common::job::spec::{DataFormat, Header};
use steadfast_fuzz::datasets::{is_compressed, records, spec};
use steadfast_fuzz::{seeds, within};

/// The name of a column, of one letter, is stored several times.
const TIMES_MAX: usize = 512;

fuzz_target!(init: seeds("text", well_formed()), |data: &[u8]| {
    let Some((form, file)) = data.split_first() else { return };
    if is_compressed(file) {
        return;
    }
    let format = if form & 1 == 0 { DataFormat::Csv } else { DataFormat::Tsv };
    let spec = match form & 2 {
        0 => spec(format, Header::Present, "y"),
        _ => spec(format, Header::Absent, "0"),
    };
    let by = |size| within(TIMES_MAX * file.len() + (1 << 20), || records(&spec, size, file).ok());
    let whole = by(None);
    assert_eq!(by(Some(1)), whole);
    assert_eq!(by(Some(u32::from(form >> 2) + 1)), whole);
});

fn well_formed() -> Vec<Vec<u8>> {
    [
        &b"\0x,y\n1,2\n3.5,-4e2\n"[..],
        b"\0\"a \"\"b\",y,\"x\ny\"\r\n1,\"2\",3\r\n\r\ntrue, false ,0",
        b"\x09y\tx\n1\t2\n3\t4\n5\t6\n",
        b"\x021,2\n3,4\n",
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}
