//! Search starts for when the first start exceeds stage memory.
//!
//! Peak order puts the largest microbatches next to each other, where a stage holds them together. The starts
//! here spread them over time, and even item memory over the microbatches.

use super::config::PipelineConfig;
use super::order;
use super::search::ScheduleState;
use crate::budget::Budget;
use crate::instance::{Caps, Instance};
use crate::partition::{self, Partition, Problem, Strategy};

/// Sum to which every column is scaled, so that times and bytes compare.
const COLUMN_SUM: u128 = 1 << 40;

/// Limit that the first start exceeds most, with every item's bytes.
struct Limiting {
    window: usize,
    is_shared: bool,
    /// Times in every module, then bytes, `[items * (modules + 1)]`; all columns have the same sum.
    columns: Vec<u64>,
    width: usize,
}

/// Uses the slots with the least excess, then makespan, among the given slots and the starts created here.
pub(super) fn improve(
    problem: &Problem<'_>,
    instance: &Instance,
    caps: &Caps,
    config: &PipelineConfig,
    state: &mut ScheduleState<'_>,
    budget: &mut Budget,
) {
    let Some(limiting) = Limiting::new(instance, config, state) else { return };
    let partitions = [
        Some(state.slots().groups.clone()),
        limiting.partition(instance, caps, 0, budget),
        limiting.partition(instance, caps, problem.modules, budget),
    ];
    let passes = 2 * (problem.groups * config.rows().len()) as u64;
    for groups in partitions.into_iter().flatten() {
        let loads = limiting.loads(&groups);
        let ranks = order::assign_ranks(&loads, limiting.width, config.dp_size);
        for is_spread in [true, false] {
            budget.spend(passes);
            let slots = limiting.order((&groups, &loads), &ranks, is_spread);
            let before = state.value();
            let present = state.replace(Partition::from_groups(problem, slots));
            if state.value() >= before {
                state.replace(present);
            }
        }
    }
}

impl Limiting {
    fn new(instance: &Instance, config: &PipelineConfig, state: &ScheduleState<'_>) -> Option<Self> {
        let (limits, fullest) = (config.memory.as_ref()?, state.fullest_window()?);
        let (limit, modules) = (&limits.stages[fullest.limit], instance.modules());
        let bytes = limits.units.chunks_exact(modules).map(|units| {
            limit.modules().map(|module| (limit.kept[module] + limit.working[module]) * units[module]).sum()
        });
        let mut by_column: Vec<Vec<u64>> =
            (0..modules).map(|module| instance.module_ns(module).collect()).collect();
        by_column.push(bytes.collect());
        for column in &mut by_column {
            let sum = column.iter().copied().map(u128::from).sum::<u128>().max(1);
            for value in column {
                *value = (u128::from(*value) * COLUMN_SUM / sum) as u64;
            }
        }
        let items = 0..instance.items();
        let columns = items.flat_map(|item| by_column.iter().map(move |column| column[item])).collect();
        let (window, is_shared) = (fullest.places.len(), fullest.rank.is_none());
        Some(Self { window, is_shared, columns, width: modules + 1 })
    }

    /// Partitions the items evenly in the columns from the given column on; `None` if no result meets the
    /// caps.
    fn partition(
        &self,
        instance: &Instance,
        caps: &Caps,
        from: usize,
        budget: &mut Budget,
    ) -> Option<Vec<Vec<u32>>> {
        let rows = self.columns.chunks_exact(self.width).flat_map(|row| row[from..].iter().copied());
        let mut even =
            Instance::with_empty_groups(instance.groups(), self.width - from, rows.collect()).ok()?;
        let [(_, tokens), (_, bytes)] = instance.capped_columns();
        if let Some(tokens) = tokens {
            even = even.tokens(tokens.to_vec()).ok()?;
        }
        if let Some(bytes) = bytes {
            even = even.bytes(bytes.to_vec()).ok()?;
        }
        budget.spend(instance.items() as u64 * instance.groups() as u64);
        let problem = Problem::new(&even, caps).ok()?;
        Some(partition::assign(&problem, Strategy::MULTI_LPT, budget).ok()?.into_groups())
    }

    /// Returns the columns of every group, `[groups * width]`.
    fn loads(&self, groups: &[Vec<u32>]) -> Vec<u64> {
        let mut loads = vec![0; groups.len() * self.width];
        for (load, items) in loads.chunks_exact_mut(self.width).zip(groups) {
            for &item in items {
                let row = &self.columns[item as usize * self.width..][..self.width];
                load.iter_mut().zip(row).for_each(|(load, value)| *load += value);
            }
        }
        loads
    }

    /// Orders the groups of each rank, spread or in peak order; returns them rank by rank.
    fn order(
        &self,
        (groups, loads): (&[Vec<u32>], &[u64]),
        ranks: &[Vec<u32>],
        is_spread: bool,
    ) -> Vec<Vec<u32>> {
        let mut slots = Vec::with_capacity(groups.len());
        for (rank, own) in ranks.iter().enumerate() {
            let load = |group: &u32| &loads[*group as usize * self.width..][..self.width];
            let order = if is_spread {
                let sizes: Vec<u64> = own.iter().map(|group| load(group)[self.width - 1]).collect();
                let mut order = order::spread_order(&sizes, self.window);
                // Ranks in a shared stage have their largest microbatches at different times.
                if self.is_shared && rank % 2 == 1 {
                    order.reverse();
                }
                order
            } else {
                let sizes: Vec<u64> =
                    own.iter().map(|group| load(group)[..self.width - 1].iter().sum()).collect();
                order::peak_order(&sizes)
            };
            slots.extend(order.into_iter().map(|slot| groups[own[slot as usize] as usize].clone()));
        }
        slots
    }
}
