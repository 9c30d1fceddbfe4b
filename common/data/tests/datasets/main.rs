//! Datasets in all formats: splitting into tasks, and reading.

#![allow(clippy::unwrap_used)]

mod codecs;
mod columns;
mod compressed;
mod converted;
mod crosses;
mod damaged;
mod divisions;
mod files;
mod formats;
mod integers;
mod missing;
mod planning;
mod reading;
mod wide;
