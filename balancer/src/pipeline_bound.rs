//! Lower bounds of a pipeline's makespan: what no order of any microbatches can beat.
//!
//! A bound is a proof, so it is computed in integers and rounded up. [`crate::bound`] has those of plain
//! partitions.

use crate::bound::{BoundKind, LowerBound, lower_bound_for};
use crate::instance::Instance;
use crate::pipeline::PipelineConfig;
use crate::simulate::split_time;

/// Returns the best lower bound of a pipeline's makespan; `config` fits the instance.
///
/// Whatever bounds a partition into `dp_size` groups bounds the slowest rank, one stage of which works
/// through a whole group. Besides:
/// - *Fill and drain.* The last stage of a module starts after the first microbatch passed all stages
///   before, and its last gradient still has to pass them back. Every microbatch holds an item (if there
///   are enough), first and last ones of different ranks different items, and no microbatch is faster
///   than one of its items. So the ranks together take at least the module's total and the `dp_size`
///   smallest fills and drains of an item, and the slowest takes the mean of that.
/// - *Longest path.* A microbatch passes all stages twice, no faster than any of its items would.
pub(crate) fn pipeline_lower_bound(instance: &Instance, config: &PipelineConfig) -> LowerBound {
    let mut best = lower_bound_for(instance, config.dp_size);
    if instance.items() >= instance.groups() {
        for module in 0..instance.modules() {
            let ns = fill_and_drain(instance, config, module);
            if ns > best.ns {
                best = LowerBound { ns, kind: BoundKind::FillAndDrain };
            }
        }
    }
    let path = |row: &[u64]| row.iter().zip(&config.stages).map(|(time, count)| time * *count as u64).sum();
    let ns = instance.rows_ns().chunks_exact(instance.modules()).map(path).max().unwrap_or(0);
    if ns > best.ns {
        best = LowerBound { ns, kind: BoundKind::LongestPath };
    }
    best
}

/// The mean over ranks of a module's load and the cheapest ways to and from its last stage.
fn fill_and_drain(instance: &Instance, config: &PipelineConfig, module: usize) -> u64 {
    let mut stages_before = config.stages[..=module].to_vec();
    stages_before[module] -= 1;
    let cheapest = |part: fn(u64) -> u64| -> u64 {
        let way = |row: &[u64]| {
            row.iter().zip(&stages_before).map(|(time, count)| part(*time) * *count as u64).sum()
        };
        let mut ways: Vec<u64> = instance.rows_ns().chunks_exact(instance.modules()).map(way).collect();
        ways.sort_unstable();
        ways[..config.dp_size].iter().sum()
    };
    let total: u64 = instance.module_ns(module).sum();
    let all = total + cheapest(|time| split_time(time).0) + cheapest(|time| split_time(time).1);
    all.div_ceil(config.dp_size as u64)
}
