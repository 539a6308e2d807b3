//! Instance with caps, in the form that strategies work on.
//!
//! Every item is a row of *columns*: the time in each module, then the share of each cap. A column has a
//! *limit* that no group may exceed; modules are unlimited. A group's *value* is the largest module, and the
//! makespan is the largest value.

use crate::caps::{Capped, Caps};
use crate::error::Result;
use crate::instance::Instance;
use crate::partition::bound::{self, LowerBound};
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
