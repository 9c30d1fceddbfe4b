//! Reads the rows of a checkpoint's tables range by range, from all layers of row files.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use steadfast_common::records::ShardRecord;
use steadfast_common::tensor::table::{Rows, is_expired};
use steadfast_host::task::in_place;

use crate::error::CheckpointError;
use crate::reading::Checkpoint;
use crate::row_file::{RangeTensors, RowFileRecord, RowsMeta, table_of};
use crate::shard_file::ShardMeta;

/// Reads the rows of a checkpoint. Holds one file of each layer in memory, and the rows of one range.
pub(crate) struct RangeReader<'a> {
    checkpoint: &'a Checkpoint<'a>,
    rows: RowsMeta,
    /// The ranges of the shard, ascending.
    numbers: Vec<u32>,
    layers: Vec<Layer>,
    /// Names of the optimizer states of each table's rows.
    states: BTreeMap<usize, Vec<String>>,
}

/// The files of a layer that are to be read, and what was read beyond the current range.
struct Layer {
    files: VecDeque<(String, RowFileRecord)>,
    read: BTreeMap<u32, RangeTensors>,
}

impl<'a> RangeReader<'a> {
    pub fn new(checkpoint: &'a Checkpoint<'a>) -> Self {
        let (rows, numbers, layers, states) = Default::default();
        Self { checkpoint, rows, numbers, layers, states }
    }

    /// Begins to read a shard; returns the numbers of its ranges, ascending.
    ///
    /// # Errors
    /// If the shard has other row files than the manifest, or no such ranges exist.
    pub fn begin(
        &mut self,
        shard: &ShardRecord,
        meta: &ShardMeta,
    ) -> Result<Vec<u32>, CheckpointError> {
        let layers = self.checkpoint.row_files(shard, meta)?;
        let layer = |files: Vec<_>| Layer { files: files.into(), read: BTreeMap::new() };
        self.layers = layers.into_iter().map(layer).collect();
        self.rows = meta.rows.clone().unwrap_or_default();
        self.numbers = self.checkpoint.ranges(shard, meta)?;
        Ok(self.numbers.clone())
    }

    /// Returns the rows of a range that have not expired. Ranges must be asked for in ascending order.
    ///
    /// # Errors
    /// See [`CheckpointError`].
    pub async fn rows(&mut self, number: u32) -> Result<Rows, CheckpointError> {
        let (table, param, _) = table_of(self.checkpoint.layout(), number);
        let mut all = Merged::default();
        for layer in 0..self.layers.len() {
            let newer = self.layer(layer, number).await?;
            all = in_place(|| all.overlaid(newer, param.width));
        }
        let expire_after = self.rows.expire_after.get(table).copied().flatten();
        let mut rows = Rows::new(param.width);
        for ((id, pass), row) in all.keys.iter().zip(all.values.chunks_exact(param.width)) {
            if !is_expired(expire_after, *pass, self.rows.pass) {
                rows.push(*id, row);
            }
        }
        Ok(rows)
    }

    /// Returns the rows of a range in one layer. Reads the files of the layer that may have rows of the range.
    async fn layer(&mut self, layer: usize, number: u32) -> Result<Merged, CheckpointError> {
        let layer = &mut self.layers[layer];
        while layer.files.front().is_some_and(|(_, file)| file.ranges[0] <= number) {
            let Some((object, file)) = layer.files.pop_front() else { break };
            let read = self.checkpoint.read_rows(&object, &file, &|_| true).await?;
            let foreign = read.numbers().find(|it| self.numbers.binary_search(it).is_err());
            let damaged = |reason| CheckpointError::Damaged { object: object.clone(), reason };
            if let Some(number) = foreign {
                let name = self.checkpoint.names().name(number);
                return Err(damaged(format!("it has rows of `{name}`, which is not of its shard")));
            }
            for (number, range) in read.into_ranges() {
                let name = || self.checkpoint.names().name(number);
                let states: Vec<String> = range.states.keys().cloned().collect();
                let table = table_of(self.checkpoint.layout(), number).0;
                let known = self.states.entry(table).or_insert_with(|| states.clone());
                if *known != states {
                    return Err(damaged(format!(
                        "`{}` has the optimizer state {states:?}, other ranges have {known:?}",
                        name()
                    )));
                }
                let read = layer.read.entry(number).or_default();
                if read.ids.last().zip(range.ids.first()).is_some_and(|(last, next)| next <= last) {
                    return Err(damaged(format!("rows of `{}` do not ascend", name())));
                }
                read.append(range);
            }
        }
        let RangeTensors { ids, counts, values, .. } =
            layer.read.remove(&number).unwrap_or_default();
        let keys = ids.into_iter().zip(counts).map(|(id, [_, pass])| (id, pass)).collect();
        Ok(Merged { keys, values })
    }
}

/// Rows of a range from some layers.
#[derive(Default)]
struct Merged {
    /// Ids, ascending, and passes of the last updates.
    keys: Vec<(u64, u32)>,
    values: Vec<f32>,
}

impl Merged {
    /// Merges rows with those of the next layer, which replace rows with the same ids.
    fn overlaid(self, newer: Self, width: usize) -> Self {
        if self.keys.is_empty() {
            return newer;
        }
        let mut merged = Self::default();
        let (mut old, mut new) = (0, 0);
        loop {
            let (from, place) = match (self.keys.get(old), newer.keys.get(new)) {
                (None, None) => return merged,
                (Some(_), None) => (&self, &mut old),
                (None, Some(_)) => (&newer, &mut new),
                (Some((left, _)), Some((right, _))) => match left.cmp(right) {
                    Ordering::Less => (&self, &mut old),
                    Ordering::Greater => (&newer, &mut new),
                    Ordering::Equal => {
                        old += 1;
                        (&newer, &mut new)
                    }
                },
            };
            merged.keys.push(from.keys[*place]);
            merged.values.extend_from_slice(&from.values[*place * width..(*place + 1) * width]);
            *place += 1;
        }
    }
}
