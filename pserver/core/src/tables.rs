//! The embedding tables of one slot: the rows of its ranges, and their updates.
//!
//! A row exists from its first update on. Before that, and again once it has expired, its values are the
//! initial ones, which are a function of the job's seed, the table and the id: readers create nothing, and it
//! does not matter who asks first.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use steadfast_common::ids::Pass;
use steadfast_common::job::learning_rate::{learning_rate, reduced};
use steadfast_common::job::spec::{LearningRateSpec, PlateauSpec};
use steadfast_common::tensor::layout::{Layout, TableParam};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{Initial, RANGES, Rows, is_expired, range_of};
use steadfast_pserver_storage::{
    RowCounts, RowStore, RowsSnapshot, SnapshotRow, StorageError, Usage,
};

use crate::optimizer::{Optimizer, State};
use crate::rules::Rules;
use crate::update::{Mean, squares};

/// A range of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRange {
    /// Index of the table among those of the layout.
    pub table: u32,
    pub range: u32,
    /// Index of the range's entry in [`ShardSnapshot::applied`](crate::block_store::ShardSnapshot::applied).
    pub applied: usize,
}

/// Stored rows, by ascending id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredRows {
    pub ids: Vec<u64>,
    pub counts: Vec<RowCounts>,
    /// For each row its parameters, then the vectors of the optimizer's state.
    pub values: Vec<f32>,
}

/// The rows of a slot at one version: a part of a checkpoint. They are read from it in pieces, while training goes
/// on.
#[derive(Debug)]
pub struct TablesSnapshot {
    spaces: Spaces,
    ranges: Vec<HeldRange>,
    rows: Box<dyn RowsSnapshot>,
    pass: Pass,
}

/// The kinds of stored rows of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// Rows that exist.
    Rows,
    /// Ids that are counted and not admitted yet; without values.
    Candidates,
}

/// A part of the rows of a range in a [`TablesSnapshot`].
#[derive(Debug, Default, PartialEq)]
pub struct RowsPiece {
    pub rows: StoredRows,
    /// Rows that no reader needs any more.
    pub obsolete: Obsolete,
    /// The id at which the next piece begins.
    pub next: Option<u64>,
}

/// Stored rows that no reader needs any more, by key space and id.
#[derive(Debug, Default, PartialEq)]
pub struct Obsolete(Vec<(usize, u64)>);

/// The stored rows of a slot: of a new job none, otherwise those of a checkpoint.
#[derive(Debug)]
pub struct TableRows {
    spaces: Spaces,
    ranges: Vec<HeldRange>,
    store: Box<dyn RowStore>,
}

/// Which ranges a slot has, and where the rows of each are in its store.
#[derive(Clone, Debug)]
struct Spaces {
    ranges: Range<u32>,
    /// The rules of the rows of each table.
    rules: Arc<[TableRules]>,
}

/// The most obsolete rows that a snapshot finds, of 16 bytes each.
const OBSOLETE_MAX: usize = 1 << 20;

/// Rows that are read from the disk together.
const FETCHED_TOGETHER: usize = 1 << 10;

/// The most rows of a part of [`Obsolete::in_parts`].
const FORGOTTEN_TOGETHER: usize = 1 << 10;

/// How a step or a push changes rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowUpdate<'a> {
    pub mean: Mean,
    /// Number of updates before this one.
    pub updates: u64,
    /// The pass of the records.
    pub pass: Pass,
    /// The learning rate of the job, how evaluations reduce it, and how often they have.
    pub learning_rate: &'a LearningRateSpec,
    pub plateau: Option<&'a PlateauSpec>,
    pub reductions: u32,
}

/// The tables of the model, and which part of them a slot has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TablesHeld {
    /// Number under which rows of the first table are sent; the others follow.
    pub first_number: u32,
    pub names: Vec<String>,
    pub widths: Vec<usize>,
    /// The slot's ranges of each table.
    pub ranges: Range<u32>,
}

impl TablesHeld {
    /// Returns the index and the width of the table whose rows are sent under `number`, or `None` if no table has this
    /// number.
    pub fn table_of(&self, number: u32) -> Option<(usize, usize)> {
        let table = number.checked_sub(self.first_number)? as usize;
        Some((table, *self.widths.get(table)?))
    }
}

/// The embedding tables of one slot.
#[derive(Debug)]
pub struct Tables {
    rows: TableRows,
    held: Arc<TablesHeld>,
}

#[derive(Debug)]
struct TableRules {
    /// Index of the parameter.
    param: u32,
    width: usize,
    initial: Initial,
    seed: u64,
    optimizer: Optimizer,
    /// The schedule of the job holds when absent.
    learning_rate: Option<LearningRateSpec>,
    admit_after: u32,
    expire_after: Option<u32>,
}

/// The stored rows of one range.
struct RangeStore<'a> {
    store: &'a mut dyn RowStore,
    /// Key space of the rows; that of ids that are not admitted yet follows.
    space: usize,
    rules: &'a TableRules,
}

impl StoredRows {
    fn push(&mut self, row: &SnapshotRow<'_>) {
        self.ids.push(row.id);
        self.counts.push(row.counts);
        self.values.extend_from_slice(row.values);
    }

    /// Returns the size in bytes of the ids, counts and values of all rows.
    pub fn bytes(&self) -> usize {
        self.ids.len() * (size_of::<u64>() + size_of::<RowCounts>())
            + size_of_val(self.values.as_slice())
    }
}

impl Obsolete {
    /// Adds the rows of `other` until a bound on memory is reached. A later snapshot finds the rows that are left out.
    pub fn append(&mut self, mut other: Self) {
        other.0.truncate(OBSOLETE_MAX.saturating_sub(self.0.len()));
        self.0.append(&mut other.0);
    }

    /// Divides the rows into parts, each of which can be removed within a few milliseconds.
    pub fn in_parts(self) -> impl Iterator<Item = Self> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let rest = left.len().saturating_sub(FORGOTTEN_TOGETHER);
            (!left.is_empty()).then(|| Self(left.split_off(rest)))
        })
    }
}

impl Spaces {
    fn new(layout: &Layout, ranges: Range<u32>, rules: &Rules) -> Self {
        let of_table = |param: &TableParam| TableRules::new(param, rules);
        Self { ranges, rules: layout.tables().iter().map(of_table).collect() }
    }

    /// Opens a store with two key spaces for each range: one for its rows, and one for its ids that are not admitted
    /// yet.
    fn open(&self, rules: &Rules) -> Result<Box<dyn RowStore>, StorageError> {
        let of_table = |rules: &TableRules| {
            std::iter::repeat_n([rules.stride(), 0], self.ranges.len()).flatten()
        };
        rules.stores.open(&self.rules.iter().flat_map(of_table).collect::<Vec<_>>())
    }

    /// Lists the ranges of all tables, table by table, each with entry 0 of the applied records.
    fn list(&self) -> Vec<HeldRange> {
        let tables = 0..self.rules.len() as u32;
        let of_table =
            |table| self.ranges.clone().map(move |range| HeldRange { table, range, applied: 0 });
        tables.flat_map(of_table).collect()
    }

    /// Returns the index of a range in [`Spaces::list`].
    fn index(&self, table: usize, range: u32) -> usize {
        table * self.ranges.len() + (range - self.ranges.start) as usize
    }

    /// Returns the key space of the rows of a range. The next key space has the ids that are not admitted yet.
    fn of(&self, table: usize, range: u32) -> usize {
        2 * self.index(table, range)
    }

    /// Returns the rules of the table to which a key space belongs.
    fn rules_of(&self, space: usize) -> &TableRules {
        &self.rules[space / 2 / self.ranges.len()]
    }
}

impl TablesSnapshot {
    pub fn ranges(&self) -> &[HeldRange] {
        &self.ranges
    }

    /// Returns the slot's ranges, which are the same in each table.
    pub fn held(&self) -> Range<u32> {
        self.spaces.ranges.clone()
    }

    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// Returns whether the model has tables.
    pub fn has_tables(&self) -> bool {
        !self.spaces.rules.is_empty()
    }

    /// Returns, by table, the number of passes without an update after which a row expires.
    pub fn expire_after(&self) -> Vec<Option<u32>> {
        self.spaces.rules.iter().map(|rules| rules.expire_after).collect()
    }

    /// Returns the number of snapshots of the slot's rows before this one, since the rows were opened.
    pub fn number(&self) -> u32 {
        self.rows.number()
    }

    /// Reads the next rows of a range, beginning at id `from`, that have not expired at the snapshot's position: all,
    /// or those which have changed since the snapshot with the number `since`. Reads about `bytes_max` bytes at most.
    ///
    /// # Errors
    /// If the rows cannot be read.
    ///
    /// # Panics
    /// If the slot does not have the range.
    pub fn read(
        &self,
        held: &HeldRange,
        kind: RowKind,
        from: u64,
        since: Option<u32>,
        bytes_max: usize,
    ) -> Result<RowsPiece, StorageError> {
        let rules = &self.spaces.rules[held.table as usize];
        let space = self.spaces.of(held.table as usize, held.range) + (kind as usize);
        // A reader may need the version before, which may be of the pass before.
        let before = Pass(self.pass.0.saturating_sub(1));
        let mut piece = RowsPiece::default();
        self.rows.scan(space, from, &mut |row| {
            if bytes_max <= piece.rows.bytes() {
                piece.next = Some(row.id);
                return ControlFlow::Break(());
            }
            if !rules.is_expired(row.counts, self.pass) {
                if since.is_none_or(|number| number < row.changed) {
                    piece.rows.push(&row);
                }
            } else if rules.is_expired(row.counts, before) && piece.obsolete.0.len() < OBSOLETE_MAX
            {
                piece.obsolete.0.push((space, row.id));
            }
            ControlFlow::Continue(())
        })?;
        Ok(piece)
    }

    /// Returns the rows of one range of a table that have not expired, without their state. Returns `None` if the range
    /// is elsewhere.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn rows_of(&self, table: usize, range: u32) -> Result<Option<Rows>, StorageError> {
        if !self.spaces.ranges.contains(&range) || self.spaces.rules.len() <= table {
            return Ok(None);
        }
        let (rules, space) = (&self.spaces.rules[table], self.spaces.of(table, range));
        let mut rows = Rows::new(rules.width);
        self.rows.scan(space, 0, &mut |row| {
            if !rules.is_expired(row.counts, self.pass) {
                rows.push(row.id, &row.values[..rules.width]);
            }
            ControlFlow::Continue(())
        })?;
        Ok(Some(rows))
    }
}

impl TableRows {
    /// Creates the tables of a slot with the given ranges and without rows.
    ///
    /// # Errors
    /// If there is no space for rows.
    pub fn new(layout: &Layout, ranges: Range<u32>, rules: &Rules) -> Result<Self, StorageError> {
        let spaces = Spaces::new(layout, ranges, rules);
        Ok(Self { ranges: spaces.list(), store: spaces.open(rules)?, spaces })
    }

    /// Returns a snapshot of the current rows, taken in `pass`.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn snapshot(&mut self, pass: Pass) -> Result<TablesSnapshot, StorageError> {
        let (spaces, ranges) = (self.spaces.clone(), self.ranges.clone());
        Ok(TablesSnapshot { spaces, ranges, rows: self.store.snapshot()?, pass })
    }

    /// Sets which of the applied records are those of a range.
    ///
    /// # Panics
    /// If the slot does not have the range.
    pub fn set_applied(&mut self, held: HeldRange) {
        self.ranges[self.spaces.index(held.table as usize, held.range)] = held;
    }

    /// Adds rows of a range, which replace rows with the same ids.
    ///
    /// # Errors
    /// If there is no space for the rows.
    ///
    /// # Panics
    /// If the slot does not have the range, or rows have another length.
    pub fn add(
        &mut self,
        table: usize,
        range: u32,
        rows: &StoredRows,
        candidates: &StoredRows,
    ) -> Result<(), StorageError> {
        let (space, rules) = (self.spaces.of(table, range), &self.spaces.rules[table]);
        for (space, stride, rows) in [(space, rules.stride(), rows), (space + 1, 0, candidates)] {
            for (index, (id, counts)) in rows.ids.iter().zip(&rows.counts).enumerate() {
                let row = self.store.entry(space, *id)?;
                *row.counts = *counts;
                row.values.copy_from_slice(&rows.values[index * stride..(index + 1) * stride]);
            }
        }
        // An id was admitted since it was added.
        if 1 < rules.admit_after {
            rows.ids.iter().try_for_each(|id| self.store.remove(space + 1, *id))?;
        }
        Ok(())
    }

    /// Ends the addition of rows and returns the number of a snapshot that contains exactly the added rows.
    ///
    /// # Errors
    /// If the rows cannot be read.
    pub fn added(&mut self) -> Result<u32, StorageError> {
        Ok(self.store.snapshot()?.number())
    }
}

impl TableRules {
    fn new(param: &TableParam, rules: &Rules) -> Self {
        let own = rules.tables.get(&param.name).cloned().unwrap_or_default();
        Self {
            param: param.param,
            width: param.width,
            initial: param.initial,
            seed: rules.seed,
            optimizer: rules.optimizer_of(&param.name),
            learning_rate: own.learning_rate,
            admit_after: own.admit_after,
            expire_after: own.expire_after,
        }
    }

    /// Returns the number of values of a stored row: its parameters and the vectors of the optimizer's state.
    fn stride(&self) -> usize {
        self.width * (1 + self.optimizer.states())
    }

    /// Returns whether a row had no update for so many passes that it begins again with its initial values.
    fn is_expired(&self, counts: RowCounts, pass: Pass) -> bool {
        is_expired(self.expire_after, counts.pass, pass)
    }

    fn begin(&self, id: u64, values: &mut [f32]) {
        self.initial.fill(self.seed, self.param, id, values);
    }
}

impl RangeStore<'_> {
    /// Appends the values of a row to `values`: the stored ones or, if the row does not exist or has expired, the
    /// initial ones.
    fn read(&mut self, id: u64, pass: Pass, values: &mut Vec<f32>) -> Result<(), StorageError> {
        let rules = self.rules;
        match self.store.get(self.space, id)? {
            Some((counts, row)) if !rules.is_expired(counts, pass) => {
                values.extend_from_slice(&row[..rules.width]);
            }
            Some(_) | None => {
                let from = values.len();
                values.resize(from + rules.width, 0.0);
                rules.begin(id, &mut values[from..]);
            }
        }
        Ok(())
    }

    /// Returns whether an update may change a row: the row exists, or this update creates it. Otherwise counts the
    /// update for the admission of the id.
    fn admits(&mut self, id: u64, pass: Pass) -> Result<bool, StorageError> {
        let rules = self.rules;
        let exists = |(counts, _): (RowCounts, &[f32])| !rules.is_expired(counts, pass);
        if rules.admit_after <= 1 || self.store.get(self.space, id)?.is_some_and(exists) {
            return Ok(true);
        }
        let candidates = self.space + 1;
        let counts = self.store.entry(candidates, id)?.counts;
        if rules.is_expired(*counts, pass) {
            *counts = RowCounts::default();
        }
        counts.count(pass.0);
        let is_admitted = rules.admit_after <= counts.updates;
        if is_admitted {
            self.store.remove(candidates, id)?;
        }
        Ok(is_admitted)
    }

    /// Applies the sum of the gradients of one row. If this changes the row, appends its previous values to `before`.
    fn apply(
        &mut self,
        (id, gradient): (u64, &mut [f32]),
        update: &RowUpdate<'_>,
        rate: f32,
        before: &mut Rows,
    ) -> Result<(), StorageError> {
        if !self.admits(id, update.pass)? {
            return Ok(());
        }
        let rules = self.rules;
        let row = self.store.entry(self.space, id)?;
        let (params, state) = row.values.split_at_mut(rules.width);
        if row.is_new || rules.is_expired(*row.counts, update.pass) {
            *row.counts = RowCounts::default();
            rules.begin(id, params);
            rules.optimizer.begin_row(rules.width, state);
        }
        before.push(id, params);
        row.counts.count(update.pass.0);
        update.mean.of(gradient);
        let state = State::of_row(state, rules.width);
        rules.optimizer.apply(params, gradient, state, rate, update.updates + 1);
        Ok(())
    }
}

impl Tables {
    /// Creates the tables of a slot from its restored rows.
    pub(crate) fn new(layout: &Layout, rows: TableRows) -> Self {
        let held = TablesHeld {
            first_number: layout.number_of_table(0),
            names: layout.tables().iter().map(|table| table.name.clone()).collect(),
            widths: layout.tables().iter().map(|table| table.width).collect(),
            ranges: rows.spaces.ranges.clone(),
        };
        Self { rows, held: held.into() }
    }

    /// Returns a description of the model's tables and of the ranges that the slot has.
    pub fn held(&self) -> &Arc<TablesHeld> {
        &self.held
    }

    /// Returns the stored rows of the range that contains an id, and the index of the range's entry in the applied
    /// records.
    fn range_of(&mut self, table: usize, id: u64) -> (RangeStore<'_>, usize) {
        let TableRows { spaces, ranges, store } = &mut self.rows;
        let range = range_of(id);
        let applied = ranges[spaces.index(table, range)].applied;
        let (space, rules) = (spaces.of(table, range), &spaces.rules[table]);
        (RangeStore { store: store.as_mut(), space, rules }, applied)
    }

    /// Reads rows of one table, which are accessed next, into memory.
    fn fetch(&mut self, table: usize, ids: &[u64]) -> Result<(), StorageError> {
        let TableRows { spaces, store, .. } = &mut self.rows;
        store.fetch(&mut ids.iter().map(|id| (spaces.of(table, range_of(*id)), *id)))
    }

    /// Returns rows of one table as they are in `pass`; the ids lie in the slot's ranges. `before` has the rows that
    /// were different at the wanted version, and their values at that version.
    ///
    /// # Errors
    /// If a store cannot read.
    pub(crate) fn read(
        &mut self,
        table: usize,
        ids: RowIds,
        pass: Pass,
        before: Option<&Rows>,
    ) -> Result<Rows, StorageError> {
        let width = self.rows.spaces.rules[table].width;
        let mut values = Vec::with_capacity(ids.len() * width);
        for ids in ids.as_slice().chunks(FETCHED_TOGETHER) {
            self.fetch(table, ids)?;
            for id in ids {
                match before.and_then(|rows| Some(rows.row(rows.place_of(*id)?))) {
                    Some(row) => values.extend_from_slice(row),
                    None => self.range_of(table, *id).0.read(*id, pass, &mut values)?,
                }
            }
        }
        Ok(Rows::of(width, ids.into_vec(), values))
    }

    /// Applies the sum of the gradients of one table's rows to those in ranges with one of the entries `applied`.
    /// Returns the previous values of the changed rows.
    ///
    /// # Errors
    /// If a store cannot read or write; some rows may have changed then.
    pub(crate) fn apply(
        &mut self,
        table: usize,
        sum: &mut Rows,
        update: &RowUpdate<'_>,
        applied: impl Fn(usize) -> bool,
    ) -> Result<Rows, StorageError> {
        let rules = &self.rows.spaces.rules[table];
        let spec = rules.learning_rate.as_ref().unwrap_or(update.learning_rate);
        let rate = learning_rate(spec, update.updates);
        let rate = reduced(rate, update.plateau, update.reductions);
        let mut before = Rows::new(rules.width);
        let ids = sum.ids().to_vec();
        for (index, row) in sum.iter_mut().enumerate() {
            if index % FETCHED_TOGETHER == 0 {
                self.fetch(table, &ids[index..ids.len().min(index + FETCHED_TOGETHER)])?;
            }
            let (mut range, entry) = self.range_of(table, row.0);
            if applied(entry) {
                range.apply(row, update, rate, &mut before)?;
            }
        }
        Ok(before)
    }

    /// Returns the rows of all ranges as they are now, in `pass`.
    ///
    /// # Errors
    /// If the store cannot read.
    pub(crate) fn snapshot(&mut self, pass: Pass) -> Result<TablesSnapshot, StorageError> {
        self.rows.snapshot(pass)
    }

    /// Removes rows that no reader of `pass`, or of the pass before, needs.
    ///
    /// # Errors
    /// If the store cannot write.
    pub(crate) fn forget(&mut self, obsolete: Obsolete, pass: Pass) -> Result<(), StorageError> {
        let before = Pass(pass.0.saturating_sub(1));
        let TableRows { spaces, store, .. } = &mut self.rows;
        for (space, id) in obsolete.0 {
            let rules = spaces.rules_of(space);
            // Since the snapshot, an update may have created it anew.
            store.retain(space, id, &|counts| !rules.is_expired(counts, before))?;
        }
        Ok(())
    }

    /// Returns the number of rows of each table.
    pub fn row_counts(&self) -> Vec<u64> {
        let of_range = |table, range| self.rows.store.len(self.rows.spaces.of(table, range)) as u64;
        let of_table = |table| self.held.ranges.clone().map(|range| of_range(table, range)).sum();
        (0..self.rows.spaces.rules.len()).map(of_table).collect()
    }

    /// Returns how much memory and disk space the rows take, and how often they were accessed.
    pub fn usage(&self) -> Usage {
        self.rows.store.usage()
    }
}

/// Returns the squared norm of each range's part of a table's mean gradient, by range, for the ranges that have
/// any rows.
pub(crate) fn squares_by_range(mean: Mean, sum: &Rows) -> Vec<(u32, f64)> {
    let mut totals = vec![None; RANGES as usize];
    for (id, row) in sum.iter() {
        *totals[range_of(id) as usize].get_or_insert(0.0) += squares(mean, row);
    }
    (0..).zip(totals).filter_map(|(range, total)| Some((range, total?))).collect()
}
