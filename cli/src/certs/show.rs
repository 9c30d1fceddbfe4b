//! Lists the certificates of a directory.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use steadfast_net::tls::{CERTIFICATE_FILE, described_file};
use steadfast_process::{Failure, print_line};

use super::ShowArgs;
use crate::output::Output;

const DAY: i64 = 24 * 3600;

#[derive(Debug, Serialize)]
struct Row {
    directory: String,
    names: Vec<String>,
    /// Unix time in seconds.
    not_after: i64,
    /// Whole days until expiry; negative after it.
    days_left: i64,
}

/// Lists the certificates, sorted by directory.
pub fn run(args: &ShowArgs) -> Result<(), Failure> {
    let rows = rows(&args.dir)?;
    match args.form.output() {
        Output::Json => print_line(serde_json::json!(rows)),
        Output::Text => {
            print_line(format_args!("{:<10}{:>10}  names", "directory", "days left"));
            for row in rows {
                print_line(format_args!(
                    "{:<10}{:>10}  {}",
                    row.directory,
                    row.days_left,
                    row.names.join(", ")
                ));
            }
        }
    }
    Ok(())
}

fn rows(dir: &Path) -> Result<Vec<Row>, Failure> {
    let failed = |error| Failure::io(format!("cannot read {}", dir.display()), &error);
    let mut directories = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.join(CERTIFICATE_FILE).exists() {
            directories.push(path);
        }
    }
    directories.sort();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as i64;
    let row = |directory: &Path| {
        let it = described_file(&directory.join(CERTIFICATE_FILE))
            .map_err(|error| Failure::invalid(error.to_string()))?;
        Ok(Row {
            directory: directory.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            names: it.names,
            not_after: it.not_after,
            days_left: (it.not_after - now).div_euclid(DAY),
        })
    };
    directories.iter().map(|directory| row(directory)).collect()
}
