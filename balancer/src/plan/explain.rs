//! Why a plan is the answer: what bounds its step, what memory it leaves, and why the next one lost.

use super::cluster::Placement;
use super::halving::Scored;
use super::report::Plan;
use super::space::{Candidate, Space};

/// What bounds the step.
#[derive(Debug, Clone, PartialEq)]
pub struct Bottleneck {
    /// `encoder` or `llm`.
    pub module: &'static str,
    /// Index of its stage.
    pub stage: usize,
    /// Stages of the module.
    pub stages: usize,
    /// Share of the step in which the stage's busiest rank computes, in `0..=1`.
    pub busy_fraction: f64,
    /// Share of the step in which the other module's busiest stage computes.
    pub other_busy_fraction: f64,
}

/// Memory of one module's fullest GPU over all batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModuleBytes {
    /// What it takes.
    pub bytes: u64,
    /// What is left.
    pub headroom_bytes: i64,
}

/// The best plan with other degrees.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerUp {
    /// The plan.
    pub plan: Plan,
    /// Its mean makespan.
    pub step_seconds: f64,
    /// What it loses by.
    pub reason: String,
}

/// Why a plan was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What bounds the step.
    pub bottleneck: Bottleneck,
    /// Of the encoder's fullest GPU; of the same GPU as the LLM's where they are colocated.
    pub encoder_memory: ModuleBytes,
    /// Of the LLM's fullest GPU.
    pub llm_memory: ModuleBytes,
    /// The next plan, if another one with other degrees was scored.
    pub runner_up: Option<RunnerUp>,
}

/// Batches that stages' work is added up on: one after another differs by a few percent.
const BATCHES: usize = 12;

impl Space<'_> {
    /// Explains the first of the finalizts; there is at least one.
    pub(super) fn explain(&self, finals: &[Scored]) -> Explanation {
        let best = &finals[0];
        let bottleneck = self.bottleneck(best);
        let bytes = |bytes: f64| ModuleBytes {
            bytes: bytes as u64,
            headroom_bytes: (self.cluster.memory_bytes as f64 - bytes) as i64,
        };
        // Of the sampled batches, and of the longest sample of all.
        let Candidate { family, microbatches } = best.candidate;
        let need = best.score.need().max(self.need(&family, microbatches, microbatches));
        let next = finals.iter().find(|plan| plan.candidate.family != best.candidate.family);
        let runner_up = next.or(finals.get(1)).map(|next| RunnerUp {
            plan: self.plan(&next.candidate),
            step_seconds: next.score.mean_ns() / 1e9,
            reason: self.reason(best, &bottleneck, next),
        });
        Explanation {
            bottleneck,
            encoder_memory: bytes(need.encoder_bytes),
            llm_memory: bytes(need.llm_bytes),
            runner_up,
        }
    }

    /// The busiest stage of all, its rank that computes longest, mean over the first batches.
    fn bottleneck(&self, plan: &Scored) -> Bottleneck {
        let batches = BATCHES.min(self.load.batches().len());
        let [encoder, llm] = self.busy_ns(&plan.candidate, batches);
        let makespan_ns = plan.score.range(0..batches).mean_ns().max(1.0);
        let busiest = |stages: &[f64]| {
            let stage = (0..stages.len()).max_by(|a, b| stages[*a].total_cmp(&stages[*b]).then(b.cmp(a)));
            stage.map_or((0, 0.0), |stage| (stage, stages[stage] / makespan_ns))
        };
        let (of_encoder, of_llm) = (busiest(&encoder), busiest(&llm));
        let is_encoder = of_encoder.1 > of_llm.1;
        let (module, stages, (stage, busy_fraction), other) = if is_encoder {
            ("encoder", encoder.len(), of_encoder, of_llm)
        } else {
            ("llm", llm.len(), of_llm, of_encoder)
        };
        Bottleneck { module, stage, stages, busy_fraction, other_busy_fraction: other.1 }
    }

    /// How long each stage of both modules computes, mean over the first batches, dealt out greedily.
    fn busy_ns(&self, candidate: &Candidate, batches: usize) -> [Vec<f64>; 2] {
        let mut busy = [Vec::new(), Vec::new()];
        for batch in &self.load.batches()[..batches] {
            let cells = self.greedily(candidate, batch);
            let step = cells.times(self, candidate);
            let sum = |row: &[Vec<u64>; 2], rank: usize, ranks: usize| {
                row.iter().flat_map(|pass| pass.iter().skip(rank).step_by(ranks)).sum::<u64>() as f64
            };
            let encoder = match candidate.family.placement {
                Placement::Disaggregated => {
                    step.encoder_stages.iter().map(|row| sum(&step.encoder_ns[*row], 0, 1)).collect()
                }
                Placement::Colocated => vec![cells.phase_ns(self, candidate) as f64],
            };
            let slowest = |row: &usize| {
                let rows = &step.llm_ns[*row];
                (0..step.ranks).map(|rank| sum(rows, rank, step.ranks)).fold(0.0, f64::max)
            };
            let llm: Vec<f64> = step.llm_stages.iter().map(slowest).collect();
            for (all, of_batch) in busy.iter_mut().zip([encoder, llm]) {
                all.resize(of_batch.len(), 0.0);
                all.iter_mut().zip(of_batch).for_each(|(all, ns)| *all += ns / batches as f64);
            }
        }
        busy
    }

    /// What the next plan loses by: longer work on its busiest stage, or more waiting.
    fn reason(&self, best: &Scored, bottleneck: &Bottleneck, next: &Scored) -> String {
        let (best_ns, next_ns) = (best.score.mean_ns(), next.score.mean_ns());
        let other = self.bottleneck(next);
        let busy_ns = [bottleneck.busy_fraction * best_ns, other.busy_fraction * next_ns];
        let [more_work, more_waiting] =
            [busy_ns[1] - busy_ns[0], (next_ns - busy_ns[1]) - (best_ns - busy_ns[0])];
        let percent = |ns: f64| 100.0 * ns / best_ns;
        let slower = percent(next_ns - best_ns);
        if more_work >= more_waiting {
            format!(
                "{slower:.2} % slower: its busiest stage, {} {} of {}, computes {:.2} % of the step longer",
                other.module,
                other.stage + 1,
                other.stages,
                percent(more_work)
            )
        } else {
            let pipeline = |plan: &Scored| {
                let family = &plan.candidate.family;
                let llm = self.llm_shapes[family.llm].pp;
                match family.placement {
                    Placement::Disaggregated => llm + self.encoder_shapes[family.encoder].pp,
                    Placement::Colocated => llm,
                }
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
}
