//! Lower bounds on a pipeline's makespan, for all microbatches in any order.
//!
//! A bound is a proof, so it is computed in integers and rounded up. [`lower_bound`](crate::lower_bound)
//! computes bounds for plain partitions.

use super::config::PipelineConfig;
use super::relaxation::Relaxation;
use crate::error::Result;
use crate::instance::Instance;
use crate::partition::{BoundKind, LowerBound, lower_bound_for};
use crate::simulate::split_time;

/// Returns the best lower bound on a pipeline's makespan; `config` fits the instance.
///
/// A bound for a partition into `dp_size` groups also bounds the slowest rank, because a stage on that rank
/// works through a whole group; this holds for modules with the pipelines' DP size. A module with `E` ranks
/// takes at least its total / `E`, in every pipeline. Microbatch constants count in totals, and in a
/// partition with a module's smallest constants. In addition, for all modules:
/// - *Fill and drain.* A module's last stage starts after the first microbatch passed all previous stages,
///   and its last gradient still has to pass back through them. Every microbatch holds an item (if there are
///   enough), first and last microbatches on different ranks hold different items, and no microbatch is
///   faster than any item in it. So the ranks together take at least the module's total plus the `dp_size`
///   smallest fills and drains over items, and the slowest rank takes at least the mean.
/// - *Rank stages.* A rank that holds several stages runs them all.
/// - *Longest path.* A microbatch passes all stages twice, no faster than any single item in it.
/// - *Relaxation.* See [`super::relaxation`].
pub(crate) fn pipeline_lower_bound(
    instance: &Instance,
    config: &PipelineConfig,
    relaxation: &Relaxation,
) -> Result<LowerBound> {
    let mut best = own_modules_bound(instance, config)?;
    let mut offer = |ns: u64, kind: BoundKind| {
        if ns > best.ns {
            best = LowerBound { ns, kind };
        }
    };
    for module in 0..instance.modules() {
        let dp_size = config.module_dp_size(module) as u64;
        offer(total_ns(instance, config, module).div_ceil(u128::from(dp_size)) as u64, BoundKind::MeanLoad);
        offer(instance.module_ns(module).max().unwrap_or(0), BoundKind::LargestItem);
        // With fewer items the first or last microbatch may be empty, and then fills nothing.
        if instance.items() >= instance.groups() {
            offer(fill_and_drain(instance, config, module), BoundKind::FillAndDrain);
        }
    }
    offer(rank_load(instance, config), BoundKind::MeanLoad);
    let path = |row: &[u64]| longest_path(least_ns(instance, row), &config.stages, config);
    let paths = instance.rows_ns().chunks_exact(instance.modules()).map(path);
    offer(paths.max().unwrap_or(0), BoundKind::LongestPath);
    offer(relaxation.bound_ns, BoundKind::Relaxation);
    Ok(best)
}

/// Returns the bound for a partition into `dp_size` groups, over the modules with that DP size.
fn own_modules_bound(instance: &Instance, config: &PipelineConfig) -> Result<LowerBound> {
    let is_own = |module: usize| config.module_dp_size(module) == config.dp_size;
    let own = (0..instance.modules()).filter(|&module| is_own(module)).count();
    if own == instance.modules() {
        let bound = lower_bound_for(instance, config.dp_size);
        let microbatches = (instance.groups() / config.dp_size) as u64;
        let bases = (0..instance.modules()).map(|module| instance.common_constants(module).base_ns);
        return Ok(LowerBound { ns: bound.ns + microbatches * bases.min().unwrap_or(0), ..bound });
    }
    if own == 0 {
        return Ok(LowerBound { ns: 0, kind: BoundKind::MeanLoad });
    }
    let rows = instance.rows_ns().iter().enumerate();
    let times_ns = rows.filter(|(cell, _)| is_own(cell % instance.modules())).map(|(_, time)| *time);
    let instance = Instance::with_empty_groups(config.dp_size, own, times_ns.collect())?;
    Ok(lower_bound_for(&instance, config.dp_size))
}

/// Lists the minimum microbatch time in each module if the microbatch holds an item with the given times.
fn least_ns(instance: &Instance, row: &[u64]) -> impl Iterator<Item = u64> {
    row.iter().enumerate().map(|(module, ns)| instance.common_constants(module).microbatch_ns(*ns))
}

/// Returns the minimum total microbatch time in a module: items plus constants, or the floors. A pool for
/// several pipelines has a single constant.
fn total_ns(instance: &Instance, config: &PipelineConfig, module: usize) -> u128 {
    let constants = instance.common_constants(module);
    let microbatches = (instance.groups() / config.dp_size * config.module_dp_size(module)) as u128;
    let items_ns: u128 = instance.module_ns(module).map(u128::from).sum();
    let with_base_ns = items_ns + microbatches * u128::from(constants.base_ns);
    with_base_ns.max(microbatches * u128::from(constants.floor_ns))
}

/// Returns the mean load on the fullest pipeline rank if ranks hold several stages; otherwise the fullest
/// stage's mean load.
fn rank_load(instance: &Instance, config: &PipelineConfig) -> u64 {
    let shape = config.step_shape(1);
    let totals: Vec<u128> =
        (0..instance.modules()).map(|module| total_ns(instance, config, module)).collect();
    let mut loads = vec![0; shape.stages];
    for (stage, module) in config.rows().into_iter().enumerate() {
        // A stage in a module with separate ranks is not a pipeline stage.
        if config.module_dp_size(module) == config.dp_size {
            loads[shape.first_of_rank(stage)] += totals[module];
        }
    }
    let most = loads.into_iter().max().unwrap_or(0);
    most.div_ceil(config.dp_size as u128) as u64
}

/// Returns the mean over ranks, for a module's load plus the cheapest paths to and from the module's last
/// stage.
fn fill_and_drain(instance: &Instance, config: &PipelineConfig, module: usize) -> u64 {
    let mut stages_before = config.stages[..=module].to_vec();
    stages_before[module] -= 1;
    let last = instance.modules() - 1;
    if config.has_parallel_encoders && module < last {
        stages_before[..module].fill(0);
    }
    let cheapest = |part: fn(u64) -> u64| -> u128 {
        let way = |row: &[u64]| longest_path(least_ns(instance, row).map(part), &stages_before, config);
        let mut ways: Vec<u64> = instance.rows_ns().chunks_exact(instance.modules()).map(way).collect();
        ways.sort_unstable();
        ways[..config.dp_size].iter().copied().map(u128::from).sum()
    };
    let total = total_ns(instance, config, module);
    let ways = cheapest(|time| split_time(time).0) + cheapest(|time| split_time(time).1);
    // Mean over the ranks of total / E plus a path each, rounded up once.
    let (ranks, module_ranks) = (config.dp_size as u128, config.module_dp_size(module) as u128);
    (total * ranks + ways * module_ranks).div_ceil(ranks * module_ranks) as u64
}

/// Returns the longest path's time through this many stages per module, over the first modules or all.
fn longest_path(times_ns: impl Iterator<Item = u64>, stages: &[usize], config: &PipelineConfig) -> u64 {
    let last = config.stages.len() - 1;
    let (mut before_ns, mut after_ns) = (0, 0);
    for (module, (time_ns, count)) in times_ns.zip(stages).enumerate() {
        let all_ns = time_ns * *count as u64;
        if config.has_parallel_encoders && module < last {
            before_ns = all_ns.max(before_ns);
        } else {
            after_ns += all_ns;
        }
    }
    before_ns + after_ns
}
