//! The records of a file do not depend on where its tasks begin.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};
use steadfast_data::{DataError, plan, read};

use crate::files::{Directory, spec};

/// Texts of which some are special at the start of a file or of a record.
const PIECES: [&str; 14] = [
    "\u{feff}",
    "\u{feff}",
    "a",
    "5",
    "\"",
    "\"\"",
    " ",
    "#",
    "\n",
    "\r\n",
    "\r",
    "\n\n",
    "\u{1f}\u{8b}",
    "{",
];

#[derive(Clone, Copy, Debug)]
enum Stored {
    Plain,
    Gzip,
}

/// All columns of a file, read in tasks of some size.
async fn records(
    directory: &Directory,
    format: DataFormat,
    header: Header,
    records_per_task: u32,
) -> Result<Records, DataError> {
    let spec = DatasetSpec {
        features: vec![],
        label: String::new(),
        columns: vec!["*".to_owned()],
        records_per_task: Some(records_per_task),
        header,
        ..spec(format, &["f"])
    };
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(&spec, &manifest);
    let mut found = Records::new(&options);
    for task in manifest.training_tasks() {
        found.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    Ok(found)
}

/// A text with records of `format` between pieces that may be none.
fn text(format: DataFormat, pieces: &[usize]) -> String {
    let mut text = match format {
        DataFormat::Csv => "\u{feff}x,y\n".to_owned(),
        DataFormat::Tsv => "\u{feff}x\ty\n".to_owned(),
        _ => "\u{feff}".to_owned(),
    };
    for (number, piece) in pieces.iter().enumerate() {
        let piece = PIECES[*piece];
        match format {
            DataFormat::Csv => text += &format!("{piece}{number},{piece}\n"),
            DataFormat::Tsv => text += &format!("{piece}{number}\t{piece}\n"),
            DataFormat::Jsonl => {
                let value = serde_json::to_string(piece).unwrap();
                let before =
                    if piece.trim_start_matches('\u{feff}').trim().is_empty() { piece } else { "" };
                text += &format!("{before}{{\"x\": {value}, \"y\": {number}}}\n");
            }
            _ => {
                let before =
                    if piece.trim_start_matches('\u{feff}').trim().is_empty() { piece } else { "" };
                let after = if piece == "#" { "# 5:1" } else { "" };
                text += &format!("{before}{number} 1:1 {}:2 {after}\n", number + 2);
            }
        }
    }
    text
}

fn stored(text: &str, stored: Stored) -> Vec<u8> {
    match stored {
        Stored::Plain => text.as_bytes().to_vec(),
        Stored::Gzip => {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(text.as_bytes()).unwrap();
            gzip.finish().unwrap()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Whatever a reader does at the start of a file, it does there alone.
    #[test]
    fn records_of_a_text_do_not_depend_on_its_division_into_tasks(
        pieces in prop::collection::vec(0..PIECES.len(), 1..24),
        format in prop::sample::select(vec![
            DataFormat::Csv, DataFormat::Tsv, DataFormat::Jsonl, DataFormat::Libsvm,
        ]),
        header in prop::sample::select(vec![Header::Present, Header::Absent]),
        how in prop::sample::select(vec![Stored::Plain, Stored::Gzip]),
        records_per_task in 1_u32..9,
    ) {
        let directory = Directory::new();
        let text = text(format, &pieces);
        directory.write_bytes("f", &stored(&text, how));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let read = |size| {
            let found = runtime.block_on(records(&directory, format, header, size));
            found.map_err(|error| error.to_string())
        };
        prop_assert_eq!(read(records_per_task), read(1000), "{:?}", text);
    }
}

/// A text file that was joined from others has byte-order marks within.
#[tokio::test]
async fn a_byte_order_mark_within_a_file_is_part_of_its_field() {
    let directory = Directory::new();
    for (format, header, before) in [
        (DataFormat::Csv, Header::Absent, ""),
        (DataFormat::Csv, Header::Present, "x,y\n"),
        (DataFormat::Tsv, Header::Present, "x\ty\n"),
    ] {
        let tab = if format == DataFormat::Tsv { "\t" } else { "," };
        let text = format!("\u{feff}{before}a{tab}b\n\u{feff}a{tab}b\n\u{feff}\"a\"{tab}b\n");
        directory.write("f", &text);
        for records_per_task in [1, 2, 3] {
            let found = records(&directory, format, header, records_per_task).await.unwrap();
            let expected = "a\u{feff}a\u{feff}\"a\"";
            let steadfast_common::job::columns::Values::Text(bytes) = &found.columns[0].values
            else {
                panic!()
            };
            assert_eq!(std::str::from_utf8(bytes).unwrap(), expected, "{format:?} {header:?}");
        }
        // The first record after a header, too.
        directory.write("f", &format!("{before}\u{feff}a{tab}b\n"));
        let found = records(&directory, format, header, 1).await.unwrap();
        let expected = if before.is_empty() { 1 } else { 4 };
        assert_eq!(found.columns[0].values.len(), expected, "{format:?} {header:?}");
    }
}
