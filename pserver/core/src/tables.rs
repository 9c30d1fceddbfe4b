//! The embedding tables of one slot: the rows of its ranges, and their updates.
//!
//! A row exists from its first update on. Before that, and again once it has expired, its values are the
//! initial ones, which are a function of the job's seed, the table and the id: readers create nothing, and it
//! does not matter who asks first.

use std::ops::Range;
use std::sync::Arc;

use steadfast_common::ids::Pass;
use steadfast_common::layout::{Layout, TableParam};
use steadfast_common::spec::LearningRateSpec;
use steadfast_common::table::{Initial, RANGES, Rows, range_of};
use steadfast_pserver_storage::{RowCounts, RowStore, StorageError};

use crate::learning_rate::learning_rate;
use crate::optimizer::{Optimizer, State};
use crate::rules::Rules;
use crate::update::{Mean, squares};

/// The rows of one range of a table: a part of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct RangeSnapshot {
    /// Index of the table among those of the layout.
    pub table: u32,
    pub range: u32,
    /// Index of the range's entry in [`ShardSnapshot::applied`](crate::block_store::ShardSnapshot::applied).
    pub applied: usize,
    pub rows: Arc<StoredRows>,
    /// Ids that are counted and not admitted yet; without values.
    pub candidates: Arc<StoredRows>,
}

/// Stored rows, by ascending id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredRows {
    pub ids: Vec<u64>,
    pub counts: Vec<RowCounts>,
    /// For each row its parameters, then the vectors of the optimizer's state.
    pub values: Vec<f32>,
}

/// How a step or a push changes rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowUpdate {
    pub mean: Mean,
    /// Number of updates before this one.
    pub updates: u64,
    /// The pass of the records.
    pub pass: Pass,
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
    /// Returns index and width of the table whose rows are sent under a number.
    pub fn table_of(&self, number: u32) -> Option<(usize, usize)> {
        let table = number.checked_sub(self.first_number)? as usize;
        Some((table, *self.widths.get(table)?))
    }
}

/// The embedding tables of one slot.
#[derive(Debug)]
pub struct Tables {
    tables: Vec<Table>,
    held: Arc<TablesHeld>,
}

#[derive(Debug)]
struct Table {
    rules: TableRules,
    /// By the slot's ranges.
    ranges: Vec<TableRange>,
}

#[derive(Debug)]
struct TableRules {
    /// Index of the parameter.
    param: u32,
    width: usize,
    initial: Initial,
    seed: u64,
    optimizer: Optimizer,
    learning_rate: LearningRateSpec,
    admit_after: u32,
    expire_after: Option<u32>,
}

#[derive(Debug)]
struct TableRange {
    applied: usize,
    rows: Box<dyn RowStore>,
    /// Ids that are counted and not admitted yet.
    candidates: Box<dyn RowStore>,
}

impl RangeSnapshot {
    /// The ranges of all tables of a slot before the first update.
    pub fn initial(layout: &Layout, ranges: Range<u32>) -> Vec<Self> {
        let empty = |table, range| Self {
            table,
            range,
            applied: 0,
            rows: Arc::default(),
            candidates: Arc::default(),
        };
        let tables = 0..layout.tables().len() as u32;
        tables.flat_map(|table| ranges.clone().map(move |range| empty(table, range))).collect()
    }
}

impl StoredRows {
    /// Returns the rows of a store that have not expired in `pass`. Removes those that no reader needs: a reader
    /// may need the version before, which may be of the pass before.
    fn of(store: &mut dyn RowStore, rules: &TableRules, pass: Pass) -> Result<Self, StorageError> {
        let (mut all, mut obsolete) = (Self::default(), Vec::new());
        let before = Pass(pass.0.saturating_sub(1));
        store.scan(&mut |id, counts, values| {
            if !rules.is_expired(counts, pass) {
                all.ids.push(id);
                all.counts.push(counts);
                all.values.extend_from_slice(values);
            } else if rules.is_expired(counts, before) {
                obsolete.push(id);
            }
        })?;
        obsolete.into_iter().try_for_each(|id| store.remove(id))?;
        Ok(all)
    }

    fn restore(&self, store: &mut dyn RowStore) -> Result<(), StorageError> {
        let stride = store.stride();
        for (index, (id, counts)) in self.ids.iter().zip(&self.counts).enumerate() {
            let row = store.entry(*id)?;
            *row.counts = *counts;
            row.values.copy_from_slice(&self.values[index * stride..(index + 1) * stride]);
        }
        Ok(())
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
            learning_rate: own.learning_rate.unwrap_or_else(|| rules.learning_rate.clone()),
            admit_after: own.admit_after,
            expire_after: own.expire_after,
        }
    }

    /// Values of a stored row.
    fn stride(&self) -> usize {
        self.width * (1 + self.optimizer.state_names().len())
    }

    /// Whether a row had no update for so many passes that it begins again.
    fn is_expired(&self, counts: RowCounts, pass: Pass) -> bool {
        self.expire_after.is_some_and(|after| after < pass.0.saturating_sub(counts.pass))
    }

    fn begin(&self, id: u64, values: &mut [f32]) {
        self.initial.fill(self.seed, self.param, id, values);
    }
}

impl TableRange {
    /// Appends the values of a row.
    fn read(
        &mut self,
        id: u64,
        rules: &TableRules,
        pass: Pass,
        values: &mut Vec<f32>,
    ) -> Result<(), StorageError> {
        match self.rows.get(id)? {
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

    /// Whether an update may change a row: it exists, or this update creates it. Counts the update otherwise.
    fn admits(&mut self, id: u64, rules: &TableRules, pass: Pass) -> Result<bool, StorageError> {
        let exists = |(counts, _): (RowCounts, &[f32])| !rules.is_expired(counts, pass);
        if rules.admit_after <= 1 || self.rows.get(id)?.is_some_and(exists) {
            return Ok(true);
        }
        let counts = self.candidates.entry(id)?.counts;
        if rules.is_expired(*counts, pass) {
            *counts = RowCounts::default();
        }
        counts.count(pass.0);
        let is_admitted = rules.admit_after <= counts.updates;
        if is_admitted {
            self.candidates.remove(id)?;
        }
        Ok(is_admitted)
    }

    /// Applies the sum of the gradients of one row. If that changes the row, appends its values before to
    /// `before`.
    fn apply(
        &mut self,
        (id, gradient): (u64, &mut [f32]),
        rules: &TableRules,
        update: &RowUpdate,
        rate: f32,
        before: &mut Rows,
    ) -> Result<(), StorageError> {
        if !self.admits(id, rules, update.pass)? {
            return Ok(());
        }
        let row = self.rows.entry(id)?;
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

impl Table {
    fn range_of(&mut self, first: u32, id: u64) -> (&TableRules, &mut TableRange) {
        (&self.rules, &mut self.ranges[(range_of(id) - first) as usize])
    }
}

impl Tables {
    /// Restores the tables of a slot. The snapshots are those of the same ranges for each table, in order.
    ///
    /// # Errors
    /// If a store has no space.
    pub(crate) fn restore(
        layout: &Layout,
        snapshots: &[RangeSnapshot],
        rules: &Rules,
    ) -> Result<Self, StorageError> {
        // None on a slot beyond the number of ranges.
        let count = snapshots.len() / layout.tables().len().max(1);
        let first = snapshots.first().map_or(0, |it| it.range);
        let open = |rules_of_table: &TableRules, snapshot: &RangeSnapshot| {
            let mut rows = rules.stores.open(rules_of_table.stride())?;
            snapshot.rows.restore(rows.as_mut())?;
            let mut candidates = rules.stores.open(0)?;
            snapshot.candidates.restore(candidates.as_mut())?;
            Ok(TableRange { applied: snapshot.applied, rows, candidates })
        };
        let tables = layout.tables().iter().enumerate().map(|(index, param)| {
            let rules = TableRules::new(param, rules);
            let own = &snapshots[index * count..(index + 1) * count];
            let ranges = own.iter().map(|snapshot| open(&rules, snapshot));
            Ok(Table { ranges: ranges.collect::<Result<_, StorageError>>()?, rules })
        });
        let held = TablesHeld {
            first_number: layout.number_of_table(0),
            names: layout.tables().iter().map(|table| table.name.clone()).collect(),
            widths: layout.tables().iter().map(|table| table.width).collect(),
            ranges: first..first + count as u32,
        };
        Ok(Self { tables: tables.collect::<Result<_, StorageError>>()?, held: held.into() })
    }

    /// The tables of the model, and which part of them is here.
    pub fn held(&self) -> &Arc<TablesHeld> {
        &self.held
    }

    /// Returns rows of one table, which lie in the slot's ranges, as they are in `pass`; `before` has those that
    /// were others at the wanted version.
    ///
    /// # Errors
    /// If a store cannot read.
    pub(crate) fn read(
        &mut self,
        table: usize,
        ids: Vec<u64>,
        pass: Pass,
        before: Option<&Rows>,
    ) -> Result<Rows, StorageError> {
        let first = self.held.ranges.start;
        let table = &mut self.tables[table];
        let width = table.rules.width;
        let mut values = Vec::with_capacity(ids.len() * width);
        for id in &ids {
            match before.and_then(|rows| Some(rows.row(rows.place_of(*id)?))) {
                Some(row) => values.extend_from_slice(row),
                None => {
                    let (rules, range) = table.range_of(first, *id);
                    range.read(*id, rules, pass, &mut values)?;
                }
            }
        }
        Ok(Rows::of(width, ids, values))
    }

    /// Applies the sum of the gradients of one table's rows to those in ranges with one of the entries `applied`;
    /// returns the values of the changed rows before that.
    ///
    /// # Errors
    /// If a store cannot read or write; some rows may have changed then.
    pub(crate) fn apply(
        &mut self,
        table: usize,
        sum: &mut Rows,
        update: &RowUpdate,
        applied: impl Fn(usize) -> bool,
    ) -> Result<Rows, StorageError> {
        let first = self.held.ranges.start;
        let table = &mut self.tables[table];
        let rate = learning_rate(&table.rules.learning_rate, update.updates);
        let mut before = Rows::new(table.rules.width);
        for row in sum.iter_mut() {
            let (rules, range) = table.range_of(first, row.0);
            if applied(range.applied) {
                range.apply(row, rules, update, rate, &mut before)?;
            }
        }
        Ok(before)
    }

    /// Returns all rows that have not expired in `pass`.
    ///
    /// # Errors
    /// If a store cannot read.
    pub(crate) fn snapshot(&mut self, pass: Pass) -> Result<Vec<RangeSnapshot>, StorageError> {
        let mut all = Vec::new();
        for (index, table) in self.tables.iter_mut().enumerate() {
            for (range, stored) in self.held.ranges.clone().zip(&mut table.ranges) {
                all.push(RangeSnapshot {
                    table: index as u32,
                    range,
                    applied: stored.applied,
                    rows: StoredRows::of(stored.rows.as_mut(), &table.rules, pass)?.into(),
                    candidates: StoredRows::of(stored.candidates.as_mut(), &table.rules, pass)?
                        .into(),
                });
            }
        }
        Ok(all)
    }

    /// Returns the rows of one range of a table that have not expired in `pass`, without their state; `None`
    /// if the range is elsewhere.
    ///
    /// # Errors
    /// If the store cannot read.
    pub(crate) fn rows_of(
        &mut self,
        table: usize,
        range: u32,
        pass: Pass,
    ) -> Result<Option<Rows>, StorageError> {
        let held = &self.held.ranges;
        if !held.contains(&range) {
            return Ok(None);
        }
        let Some(Table { rules, ranges }) = self.tables.get_mut(table) else { return Ok(None) };
        let mut rows = Rows::new(rules.width);
        ranges[(range - held.start) as usize].rows.scan(&mut |id, counts, values| {
            if !rules.is_expired(counts, pass) {
                rows.push(id, &values[..rules.width]);
            }
        })?;
        Ok(Some(rows))
    }

    /// Returns the number of rows of each table.
    pub fn row_counts(&self) -> Vec<u64> {
        let of_table =
            |table: &Table| table.ranges.iter().map(|range| range.rows.len() as u64).sum();
        self.tables.iter().map(of_table).collect()
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
