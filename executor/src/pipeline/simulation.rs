//! Simulates a step of a job from the times of its passes.

use std::collections::BTreeMap;
use std::ops::Range;

use dflop_balancer::schedule::{Part, Pass, PassKind};
use dflop_balancer::{Communication, StageTimes};

use super::job::Job;
use super::pass_times::PassTimes;
use super::shared_ranks::{RankPasses, neighbors};
use super::topology::Topology;
use crate::error::{Error, Result};

/// Pipeline rank, pass, and time range of the pass in nanoseconds.
pub(crate) type Simulated = (usize, Pass, Range<u64>);

/// Simulates the action lists of a job's ranks; messages and gradient sums take no time.
///
/// - `microbatches`: per DP rank of the LLM
/// - returns the end of the last rank in nanoseconds, and all passes
pub(crate) fn simulate(job: &Job, microbatches: usize, times: &PassTimes) -> Result<(u64, Vec<Simulated>)> {
    let topology = Topology::new(job, microbatches)?;
    if let Some(passes) = topology.shared() {
        return simulate_shared(job, &topology, passes, times);
    }
    let layout = topology.layout();
    let lists = layout.schedule(topology.schedule())?;
    let free = Communication::free(layout.stages(), layout.microbatches());
    let (mut makespan_ns, mut passes) = (0, Vec::new());
    for replica in 0..topology.replicas() {
        let part_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            // Modules with fewer replicas have fewer microbatches; their remaining cells stay empty.
            if inside < layout.microbatches_of(stage) {
                let microbatch = topology.outside(inside as u32, replica);
                times.part_ns(Part { microbatch, stage: stage as u16 })
            } else {
                [0, 0]
            }
        };
        // Without a measured part, the balancer splits the backward pass in half.
        let weight_ns = |cell: usize| {
            let (stage, inside) = (cell / layout.microbatches(), cell % layout.microbatches());
            if inside >= layout.microbatches_of(stage) {
                return Some(0);
            }
            let part = Part { microbatch: topology.outside(inside as u32, replica), stage: stage as u16 };
            if times.part_ns(part)[1] == 0 { Some(0) } else { times.weight_ns(part) }
        };
        let cells = 0..layout.stages() * layout.microbatches();
        let (forward_ns, backward_ns) =
            cells.map(part_ns).map(|[forward, backward]| (forward, backward)).unzip();
        let mut stage_times =
            StageTimes::new(layout.stages(), layout.microbatches(), forward_ns, backward_ns)?;
        let measured: Option<Vec<u64>> =
            (0..layout.stages() * layout.microbatches()).map(weight_ns).collect();
        if let Some(measured) = measured {
            stage_times = stage_times.weight_ns(measured)?;
        }
        let simulation = layout.simulate(&lists, &stage_times, &free)?;
        makespan_ns = makespan_ns.max(simulation.makespan_ns);
        passes.extend(simulation.events.into_iter().map(|event| {
            let microbatch = topology.outside(event.microbatch, replica);
            let part = Part { microbatch, stage: event.stage as u16 };
            let rank = event.rank + replica * layout.ranks();
            (rank, Pass { kind: event.kind, part }, event.start_ns..event.end_ns)
        }));
    }
    Ok((makespan_ns, passes))
}

/// Simulates the passes of ranks that several modules share: each rank runs its passes in order, and the
/// ranks of a tensor-parallel group start theirs together.
fn simulate_shared(
    job: &Job,
    topology: &Topology,
    ranks: &RankPasses,
    times: &PassTimes,
) -> Result<(u64, Vec<Simulated>)> {
    let (mut next, mut free_ns) = (vec![0; ranks.len()], vec![0_u64; ranks.len()]);
    // Ends of forward passes, and of the passes that give the gradient of the input.
    let mut done_ns: BTreeMap<(bool, Part), u64> = BTreeMap::new();
    let mut passes = Vec::new();
    loop {
        let before = passes.len();
        for rank in 0..ranks.len() {
            while let Some(&pass) = ranks[rank].get(next[rank]) {
                let pipeline_rank = topology.rank(pass.part);
                let members = job.world_ranks(pipeline_rank);
                let is_next = |member: &usize| ranks[*member].get(next[*member]) == Some(&pass);
                let is_forward = pass.kind == PassKind::Forward;
                let (inputs, _) = neighbors(topology, pass);
                let mut inputs = inputs.iter().map(|part| done_ns.get(&(is_forward, *part)).copied());
                let ready = inputs.try_fold(0, |latest: u64, end| end.map(|end| latest.max(end)));
                let Some(ready_ns) = ready.filter(|_| members.iter().all(is_next)) else { break };
                let start_ns = members.iter().map(|member| free_ns[*member]).fold(ready_ns, u64::max);
                let end_ns = start_ns + pass_ns(times, pass);
                for &member in members {
                    (next[member], free_ns[member]) = (next[member] + 1, end_ns);
                }
                if pass.kind != PassKind::BackwardWeight {
                    done_ns.insert((is_forward, pass.part), end_ns);
                }
                passes.push((pipeline_rank, pass, start_ns..end_ns));
            }
        }
        if passes.len() == before {
            break;
        }
    }
    if let Some(rank) = (0..ranks.len()).find(|&rank| next[rank] < ranks[rank].len()) {
        let action = ranks[rank][next[rank]].to_string();
        return Err(Error::Balancer(dflop_balancer::Error::Deadlock { rank, action }));
    }
    Ok((free_ns.into_iter().max().unwrap_or(0), passes))
}

/// Returns the time of a pass; without a measured part, half of a backward pass is for weights.
fn pass_ns(times: &PassTimes, Pass { kind, part }: Pass) -> u64 {
    let [forward_ns, backward_ns] = times.part_ns(part);
    let weight_ns = times.weight_ns(part).unwrap_or(backward_ns / 2);
    match kind {
        PassKind::Forward => forward_ns,
        PassKind::Backward => backward_ns,
        PassKind::BackwardInput => backward_ns - weight_ns,
        PassKind::BackwardWeight => weight_ns,
    }
}
