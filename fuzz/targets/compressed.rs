//! Compressed text files: the records are those of the text, however they are split into tasks, and damaged
//! files do no harm.

#![no_main]

use std::io::Write;

use libfuzzer_sys::fuzz_target;
use steadfast_common::job::spec::{DataFormat, Header};
use steadfast_fuzz::datasets::{records, spec};
use steadfast_fuzz::{seeds, within};

/// Memory of a decoder, and a block of text.
const BYTES_MAX: usize = 64 << 20;

fuzz_target!(init: seeds("compressed", well_formed()), |data: &[u8]| {
    let [form, place, flip, content @ ..] = data else { return };
    let spec = spec(DataFormat::Csv, Header::Present, "y");
    let by = |size, file: &[u8]| within(BYTES_MAX, || records(&spec, size, file).ok());
    if form & 0x80 != 0 {
        // Arbitrary from the first byte.
        let _ = by(None, content);
        return;
    }
    let mut file = compress(form % 3, content);
    let text = by(None, content);
    // Content that is itself compressed is decompressed only once.
    let is_text = content.first().is_some_and(u8::is_ascii_lowercase);
    if let Some(text) = text.filter(|_| is_text) {
        assert_eq!(by(None, &file), Some(text.clone()));
        assert_eq!(by(Some(1), &file), Some(text));
    }
    let place = usize::from(*place) * file.len() / 256;
    file[place] ^= flip;
    let _ = by(None, &file);
});

fn compress(codec: u8, text: &[u8]) -> Vec<u8> {
    const MEMORY: &str = "writing to memory succeeds";
    match codec {
        0 => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).expect(MEMORY);
            encoder.finish().expect(MEMORY)
        }
        1 => zstd::encode_all(text, 1).expect(MEMORY),
        _ => {
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            encoder.write_all(text).expect(MEMORY);
            encoder.finish().expect(MEMORY)
        }
    }
}

fn well_formed() -> Vec<Vec<u8>> {
    let text = b"x,y\n1,2\n3.5,-4e2\n";
    let mut inputs: Vec<Vec<u8>> =
        (0..3).map(|codec| [&[codec, 0, 0][..], text].concat()).collect();
    inputs.extend((0..3).map(|codec| [&[0x80, 0, 0][..], &compress(codec, text)].concat()));
    inputs
}
