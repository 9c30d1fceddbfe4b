//! Datasets in files of every format: how they are cut into tasks, and what is read of them.

mod damaged;
mod files;
mod planning;
mod reading;
