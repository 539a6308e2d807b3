//! Explains the chosen plan: bottleneck, memory, and why the runner-up is slower.

use super::cluster::Placement;
use super::problem::ParallelismPlan;
use super::report::{Bottleneck, Explanation, ModuleBytes, RunnerUp};
use super::score::{self, ScoredPlan};
use super::space::{Candidate, SearchSpace, memory};

/// Number of batches for mean stage work: single batches differ by a few percent.
const BATCHES: usize = 12;

/// Explains the first finalist; there is at least one.
pub(super) fn explain(space: &SearchSpace<'_>, finals: &[ScoredPlan]) -> Explanation {
    let best = &finals[0];
    let bottleneck = find_bottleneck(space, best);
    let bytes = |bytes: f64| ModuleBytes::new(bytes, &space.cluster);
    // The sampled batches, and the longest sample overall, which may not be in them.
    let Candidate { family, microbatches } = best.candidate;
    let need = best.score.requirement().max(memory::requirement(space, &family, microbatches, microbatches));
    let next =
        finals.iter().find(|plan| space.has_other_degrees(&plan.candidate.family, &best.candidate.family));
    let runner_up = next.map(|next| RunnerUp {
        plan: ParallelismPlan::new(space, &next.candidate),
        // On the batches scored for both plans, scaled to all batches.
        step_seconds: best.score.mean_ns() / 1e9 * slowdown(best, next),
        reason: reason(space, best, &bottleneck, next),
    });
    Explanation {
        bottleneck,
        encoder_memory: need.encoder_bytes[..space.encoders.len()].iter().copied().map(bytes).collect(),
        llm_memory: bytes(need.llm_bytes),
        runner_up,
    }
}

/// Returns the next plan's time divided by the best plan's, on the batches scored for both.
fn slowdown(best: &ScoredPlan, next: &ScoredPlan) -> f64 {
    let first = best.score.range(0..next.score.makespans_ns.len());
    if first.mean_ns() > 0.0 { next.score.mean_ns() / first.mean_ns() } else { 1.0 }
}

/// Finds the busiest stage, by slowest rank and mean over the first batches.
fn find_bottleneck(space: &SearchSpace<'_>, plan: &ScoredPlan) -> Bottleneck {
    let batches = BATCHES.min(plan.score.makespans_ns.len());
    let busy = busy_ns(space, &plan.candidate, batches);
    let makespan_ns = plan.score.range(0..batches).mean_ns().max(1.0);
    let busiest = |stages: &Vec<f64>| {
        let stage = (0..stages.len()).max_by(|a, b| stages[*a].total_cmp(&stages[*b]).then(b.cmp(a)));
        // Batches are balanced greedily here, so that a stage may seem busier than it is.
        stage.map_or((0, 0.0), |stage| (stage, (stages[stage] / makespan_ns).min(1.0)))
    };
    let found: Vec<(usize, f64)> = busy.iter().map(busiest).collect();
    // Ties go to the LLM, which is last.
    let most = (0..found.len()).max_by(|a, b| found[*a].1.total_cmp(&found[*b].1)).unwrap_or(0);
    let others = (0..found.len()).filter(|module| *module != most).map(|module| found[module].1);
    let (stage, busy_fraction) = found[most];
    Bottleneck {
        module: space.encoders.get(most).map_or(space.llm.name, |module| module.name),
        stage,
        stages: busy[most].len(),
        busy_fraction,
        other_busy_fraction: others.fold(0.0, f64::max),
    }
}

/// Returns the computing time for each stage in each module, LLM last; mean over the first batches, balanced
/// greedily.
fn busy_ns(space: &SearchSpace<'_>, candidate: &Candidate, batches: usize) -> Vec<Vec<f64>> {
    let mut busy = vec![Vec::new(); space.encoders.len() + 1];
    for batch in &space.workload.batches()[..batches] {
        let assignment = score::balance_greedily(space, candidate, batch);
        let step = assignment.times(space, candidate);
        let of_encoder = |encoder: usize| match candidate.family.placement {
            Placement::Disaggregated => step.encoders[encoder].slowest_ns().collect(),
            Placement::Colocated => vec![assignment.phase_ns(space, candidate, encoder) as f64],
            // The encoder's layers are part of the LLM stages.
            Placement::Joint => Vec::new(),
        };
        let encoders = (0..space.encoders.len()).map(of_encoder);
        let mut of_llm = vec![0.0; space.llm_shape(&candidate.family).pp as usize];
        let ranks = of_llm.len();
        // A rank may hold several stages.
        step.llm.slowest_ns().enumerate().for_each(|(stage, ns)| of_llm[stage % ranks] += ns);
        let modules = encoders.chain([of_llm]);
        for (all, of_batch) in busy.iter_mut().zip(modules) {
            all.resize(of_batch.len(), 0.0);
            all.iter_mut().zip(of_batch).for_each(|(all, ns)| *all += ns / batches as f64);
        }
    }
    busy
}

/// Explains why the next plan is slower: longer work on its busiest stage, or more waiting.
fn reason(space: &SearchSpace<'_>, best: &ScoredPlan, bottleneck: &Bottleneck, next: &ScoredPlan) -> String {
    // The runner-up may be scored only on the first batches.
    let best = &ScoredPlan { score: best.score.range(0..next.score.makespans_ns.len()), ..best.clone() };
    let (best_ns, next_ns) = (best.score.mean_ns(), next.score.mean_ns());
    let other = find_bottleneck(space, next);
    let busy_ns = [bottleneck.busy_fraction * best_ns, other.busy_fraction * next_ns];
    let [more_work, more_waiting] =
        [busy_ns[1] - busy_ns[0], (next_ns - busy_ns[1]) - (best_ns - busy_ns[0])];
    let percent = |ns: f64| 100.0 * ns / best_ns;
    let slower = percent(next_ns - best_ns);
    if slower < 0.0 {
        return format!(
            "{:.2} % faster on these batches, but less certain: slower at the upper end of its 90 % interval",
            -slower
        );
    }
    if more_work >= more_waiting {
        format!(
            "{slower:.2} % slower: its busiest stage, {} {} of {}, computes {:.2} % of the step longer",
            other.module,
            other.stage + 1,
            other.stages,
            percent(more_work)
        )
    } else {
        let pipeline = |plan: &ScoredPlan| {
            let family = &plan.candidate.family;
            space.step_shape(family, 1).stages
        };
        format!(
            "{slower:.2} % slower: its busiest stage waits {:.2} % of the step longer ({} stages and {} \
             microbatches against {} and {})",
            percent(more_waiting),
            pipeline(next),
            next.candidate.microbatches,
            pipeline(best),
            best.candidate.microbatches
        )
    }
}
