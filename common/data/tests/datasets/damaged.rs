//! Parquet files with a damaged byte: they are rejected, or their records do not depend on the split into
//! tasks.

use parquet::file::metadata::ParquetMetaDataReader;
use steadfast_common::ids::TaskId;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, plan, read};

use crate::files::{Directory, PageIndex, large_parquet, parquet_of, parquet_of_new_pages, spec};

async fn records(
    directory: &Directory,
    records_per_task: Option<u32>,
) -> Result<Records, DataError> {
    let spec = DatasetSpec { records_per_task, ..spec(DataFormat::Parquet, &["a.parquet"]) };
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await?;
    let options = ReadOptions::new(&spec, &manifest);
    let mut all = Records::default();
    for task in manifest.training_tasks() {
        all.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    Ok(all)
}

/// F54: a damaged byte anywhere in the file.
#[tokio::test]
async fn records_of_a_damaged_file_do_not_depend_on_its_tasks() {
    let directory = Directory::new();
    let values: Vec<f64> = (0..200).map(f64::from).collect();
    for file in [parquet_of, parquet_of_new_pages].map(|write| write(&values, &values, 150)) {
        let mut read = 0;
        for place in (0..file.len()).step_by(3) {
            let mut damaged = file.clone();
            damaged[place] ^= 6;
            directory.write_bytes("a.parquet", &damaged);
            let (whole, split) =
                (records(&directory, None).await, records(&directory, Some(67)).await);
            if let (Ok(whole), Ok(split)) = (whole, split) {
                assert_eq!(whole, split, "byte {place} of {}", file.len());
                read += 1;
            }
        }
        assert!(0 < read && read < file.len(), "{read}");
    }
}

/// F54: a damaged byte in the page index of a large row group, by which parts of it are found.
#[tokio::test]
async fn a_damaged_page_index_does_not_mix_up_rows() {
    let directory = Directory::new();
    let values: Vec<f64> = (0..700_000).map(f64::from).collect();
    let file = large_parquet(&values, PageIndex::Present);
    let metadata = ParquetMetaDataReader::new();
    let metadata = metadata.parse_and_finish(&bytes::Bytes::from(file.clone())).unwrap();
    let list = metadata.row_group(0).column(0).offset_index_range().unwrap();
    let spec =
        DatasetSpec { records_per_task: Some(7000), ..spec(DataFormat::Parquet, &["a.parquet"]) };
    let mut read_well = 0;
    for place in list.clone() {
        let mut damaged = file.clone();
        damaged[place as usize] ^= 6;
        directory.write_bytes("a.parquet", &damaged);
        let Ok(manifest) = plan(&spec, &Default::default(), Some(directory.path())).await else {
            continue;
        };
        let options = ReadOptions::new(&spec, &manifest);
        for task in [1, 50, 98] {
            let chunks = manifest.chunks_of(TaskId(task));
            let Ok(records) = read(&manifest, &options, chunks).await else { continue };
            assert_eq!(records.features, records.labels, "byte {place} of {list:?}, task {task}");
            assert_eq!(records.labels[0], (task * 7000) as f32);
            read_well += 1;
        }
    }
    assert!(0 < read_well, "{list:?}");
}

/// F54: no memory is allocated for a dictionary that claims more values than it has bytes.
#[tokio::test]
async fn a_dictionary_that_lies_about_its_length_is_refused() {
    let directory = Directory::new();
    // A page header in Thrift's compact protocol: a dictionary of 8 bytes with 2³¹ − 1 plain values.
    let page = b"\x15\x04\x15\x10\x15\x10\x4c\x15\xfe\xff\xff\xff\x0f\x15\0\0\0--------";
    // The first column begins with its dictionary, after the magic number.
    let mut file = parquet_of(&[1.0; 40], &[2.0; 40], 40);
    file[4..][..page.len()].copy_from_slice(page);
    directory.write_bytes("a.parquet", &file);
    let error = records(&directory, None).await.unwrap_err().to_string();
    assert!(error.contains("claims 2147483647 values"), "{error}");
}

/// F54: pages may have checksums, which no writer here creates. The file is written by
/// `pyarrow.parquet.write_table(…, write_page_checksum=True)`: columns `x` and `y` of 40 numbers, plain
/// encoding.
#[tokio::test]
async fn a_page_with_a_wrong_checksum_is_rejected() {
    let directory = Directory::new();
    let file = include_bytes!("files/checksums.parquet");
    directory.write_bytes("a.parquet", file);
    let sound = records(&directory, None).await.unwrap();
    assert!(sound.labels.iter().map(|y| y / 8.0).eq(sound.features.iter().copied()));
    let value = 17.0_f64.to_le_bytes();
    let place = file.windows(8).position(|bytes| bytes == value).unwrap();
    let mut damaged = file.to_vec();
    damaged[place + 6] ^= 1;
    directory.write_bytes("a.parquet", &damaged);
    let error = records(&directory, None).await.unwrap_err().to_string();
    assert!(error.contains("CRC"), "{error}");
}
