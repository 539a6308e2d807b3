//! Groups under construction, with loads.
//!
//! Loads and values follow every group change, in integers. Strategies build on this module; it imports none.

use crate::partition::problem::Problem;

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
