//! Instance with caps and groups under construction, in the form that strategies work on.
//!
//! Every item is a row of *columns*: the time in each module, then the share of each cap. A column has a
//! *limit* that no group may exceed; modules are unlimited. A group's *value* is the largest module, and the
//! makespan is the largest value.
//!
//! Loads and values follow every group change, in integers. Strategies build on this module; it imports none.

use super::bound;
use super::bound::LowerBound;
use crate::error::Result;
use crate::instance::{Capped, Caps, Instance};
use std::borrow::Cow;

/// Fixed-point 1.0, for comparing caps with each other.
const ONE: u64 = 1 << 32;

/// Partition problem as rows of columns, with limits and lower bound: the input for a strategy.
#[derive(Debug)]
pub struct Problem<'a> {
    pub(crate) items: usize,
    pub(crate) groups: usize,
    /// Number of module columns; they come first, capped columns follow.
    pub(crate) modules: usize,
    /// Limit for each column per group.
    pub(crate) limits: Vec<u64>,
    pub(crate) bound: LowerBound,
    /// Seed for all random choices.
    pub(crate) seed: u64,
    /// `[items * width]`.
    rows: Cow<'a, [u64]>,
    /// Instance, whose constants pipelines count; `None` for a problem with only the caps.
    instance: Option<&'a Instance>,
}

impl<'a> Problem<'a> {
    /// Joins an instance with caps.
    pub(crate) fn new(instance: &'a Instance, caps: &Caps) -> Result<Self> {
        let capped = caps.columns(instance)?;
        let modules = instance.modules();
        let bound = bound::lower_bound(instance);
        let mut limits = vec![u64::MAX; modules];
        limits.extend(capped.iter().map(|cap| cap.max));
        Ok(Self {
            items: instance.items(),
            groups: instance.groups(),
            modules,
            limits,
            bound,
            seed: instance.seed(),
            rows: join_columns(instance, &capped),
            instance: Some(instance),
        })
    }

    /// Returns the number of items.
    #[must_use]
    pub fn items(&self) -> usize {
        self.items
    }

    /// Returns the number of groups.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the seed for random choices.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns an item's time in each module, nanoseconds.
    ///
    /// # Panics
    /// If there is no such item.
    #[must_use]
    pub fn times_ns(&self, item: u32) -> &[u64] {
        &self.row(item)[..self.modules]
    }

    /// Lists the caps: the item's share of each cap, and the group limit.
    ///
    /// # Panics
    /// If there is no such item.
    pub fn shares(&self, item: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let columns = self.modules..self.width();
        columns.map(move |column| (self.row(item)[column], self.limits[column]))
    }

    /// Returns the lower bound on the makespan for any partition, nanoseconds.
    #[must_use]
    pub fn bound_ns(&self) -> u64 {
        self.bound.ns
    }

    /// Builds the problem to meet only the caps: a result with a value of at most `bound.ns` meets them.
    pub(crate) fn caps_only(&self) -> Problem<'static> {
        let limits = &self.limits[self.modules..];
        let goal = if let [limit] = limits { *limit } else { ONE };
        // Rounded up, so a group within the goal is within every limit.
        let share = |value: u64, limit: u64| {
            if limits.len() == 1 || value == 0 {
                return value;
            }
            (u128::from(value) * u128::from(ONE)).div_ceil(u128::from(limit)) as u64
        };
        let rows = self.rows.chunks_exact(self.width());
        let rows = rows.flat_map(|row| row[self.modules..].iter().zip(limits).map(|(v, l)| share(*v, *l)));
        Problem {
            items: self.items,
            groups: self.groups,
            modules: limits.len(),
            limits: vec![u64::MAX; limits.len()],
            // A search ends at its bound, here as soon as all caps are met.
            bound: LowerBound { ns: goal, kind: bound::BoundKind::MeanLoad },
            seed: self.seed,
            rows: rows.collect(),
            instance: None,
        }
    }

    /// Returns a microbatch's time in a module, from the sum over item times.
    pub(crate) fn microbatch_ns(&self, module: usize, items_ns: u64) -> u64 {
        self.instance.map_or(items_ns, |instance| instance.microbatch_ns(module, items_ns))
    }

    /// Returns the number of columns per row.
    pub(crate) fn width(&self) -> usize {
        self.limits.len()
    }

    /// Whether any cap is set.
    pub(crate) fn has_caps(&self) -> bool {
        self.limits.len() > self.modules
    }

    /// Returns an item's columns, `[width]`.
    pub(crate) fn row(&self, item: u32) -> &[u64] {
        let start = item as usize * self.width();
        &self.rows[start..start + self.width()]
    }

    /// Returns a load's value: the largest module.
    pub(crate) fn value(&self, load: &[u64]) -> u64 {
        load[..self.modules].iter().copied().max().unwrap_or(0)
    }

    /// Returns the limits for a group whose modules may not exceed `target`, `[width]`.
    pub(crate) fn limits_within(&self, target: u64) -> Vec<u64> {
        let is_module = |column: usize| column < self.modules;
        let limits = self.limits.iter().enumerate();
        limits.map(|(column, limit)| if is_module(column) { target } else { *limit }).collect()
    }

    /// Whether a load minus a contained row stays within the given limits.
    pub(crate) fn fits(&self, load: &[u64], less: Option<&[u64]>, limits: &[u64]) -> bool {
        let fits = |column: usize| load[column] - less.map_or(0, |less| less[column]) <= limits[column];
        (0..self.width()).all(fits)
    }

    /// Whether a load stays within all limits.
    pub(crate) fn is_within(&self, load: &[u64]) -> bool {
        load.iter().zip(&self.limits).all(|(load, limit)| load <= limit)
    }
}

/// Appends the capped columns to every item's times; borrows if there are none.
fn join_columns<'a>(instance: &'a Instance, capped: &[Capped<'_>]) -> Cow<'a, [u64]> {
    if capped.is_empty() {
        return Cow::Borrowed(instance.rows_ns());
    }
    let rows = instance.rows_ns().chunks_exact(instance.modules()).enumerate();
    rows.flat_map(|(item, row)| row.iter().copied().chain(capped.iter().map(move |cap| cap.column[item])))
        .collect()
}

/// Partition under construction: items, loads and values for every group.
#[derive(Debug, Clone)]
pub(crate) struct Partition {
    pub(crate) groups: Vec<Vec<u32>>,
    /// `[groups * width]`.
    loads: Vec<u64>,
    /// `[groups]`, the largest module in each group.
    values: Vec<u64>,
}

impl Partition {
    /// Creates empty groups.
    pub(crate) fn empty(problem: &Problem<'_>) -> Self {
        let groups = problem.groups;
        Self {
            groups: vec![Vec::new(); groups],
            loads: vec![0; groups * problem.width()],
            values: vec![0; groups],
        }
    }

    /// Sums the loads of given groups.
    pub(crate) fn from_groups(problem: &Problem<'_>, groups: Vec<Vec<u32>>) -> Self {
        let mut partition = Self::empty(problem);
        for (group, items) in groups.into_iter().enumerate() {
            partition.set(problem, group, items);
        }
        partition
    }

    /// Replaces a group's items.
    pub(crate) fn set(&mut self, problem: &Problem<'_>, group: usize, items: Vec<u32>) {
        let width = problem.width();
        let load = &mut self.loads[group * width..(group + 1) * width];
        load.fill(0);
        for &item in &items {
            add_row(load, problem.row(item));
        }
        self.values[group] = problem.value(load);
        self.groups[group] = items;
    }

    /// Adds an item to a group.
    pub(crate) fn add(&mut self, problem: &Problem<'_>, group: usize, item: u32) {
        let width = problem.width();
        let load = &mut self.loads[group * width..(group + 1) * width];
        add_row(load, problem.row(item));
        self.values[group] = problem.value(load);
        self.groups[group].push(item);
    }

    /// Removes the item at a position from a group; the last item moves to this position.
    pub(crate) fn take(&mut self, problem: &Problem<'_>, group: usize, position: usize) -> u32 {
        let width = problem.width();
        // The order inside a group has no meaning until `into_groups` sorts it.
        let item = self.groups[group].swap_remove(position);
        let load = &mut self.loads[group * width..(group + 1) * width];
        for (load, value) in load.iter_mut().zip(problem.row(item)) {
            *load -= value;
        }
        self.values[group] = problem.value(load);
        item
    }

    /// Exchanges two groups with all items.
    pub(crate) fn swap_groups(&mut self, problem: &Problem<'_>, first: usize, second: usize) {
        let width = problem.width();
        for column in 0..width {
            self.loads.swap(first * width + column, second * width + column);
        }
        self.values.swap(first, second);
        self.groups.swap(first, second);
    }

    /// Returns a group's columns, `[width]`.
    pub(crate) fn load(&self, problem: &Problem<'_>, group: usize) -> &[u64] {
        let width = problem.width();
        &self.loads[group * width..(group + 1) * width]
    }

    /// Returns a group's largest module.
    pub(crate) fn value(&self, group: usize) -> u64 {
        self.values[group]
    }

    /// Whether a group stays within the limits with an additional item.
    pub(crate) fn has_room(&self, problem: &Problem<'_>, group: usize, item: u32) -> bool {
        let sums = self.load(problem, group).iter().zip(problem.row(item));
        sums.zip(&problem.limits).all(|((load, value), limit)| load + value <= *limit)
    }

    /// Returns the first group with the largest value.
    pub(crate) fn slowest(&self) -> usize {
        let mut slowest = 0;
        for (group, value) in self.values.iter().enumerate() {
            // Strictly larger, so that ties go to the lower index on every machine.
            if *value > self.values[slowest] {
                slowest = group;
            }
        }
        slowest
    }

    /// Returns the largest value.
    pub(crate) fn makespan(&self) -> u64 {
        self.value(self.slowest())
    }

    /// Whether every group keeps within the limits.
    pub(crate) fn is_within(&self, problem: &Problem<'_>) -> bool {
        self.loads.chunks_exact(problem.width()).all(|load| problem.is_within(load))
    }

    /// Returns the groups, items ascending.
    pub(crate) fn into_groups(mut self) -> Vec<Vec<u32>> {
        self.groups.iter_mut().for_each(|items| items.sort_unstable());
        self.groups
    }
}

fn add_row(load: &mut [u64], row: &[u64]) {
    for (load, value) in load.iter_mut().zip(row) {
        *load += value;
    }
}
