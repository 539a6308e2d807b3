//! Step plan that all ranks share: microbatch sizes, media, and the encoder replica for each medium.

use xxhash_rust::xxh3::Xxh3;

use super::assign_media::assign_pool;
use super::job::Job;
use super::route::{RoutePlan, RoutedMedium};
use crate::error::{Error, Result};
use dflop_models::ModuleKind;

/// Image, video or audio clip in a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MediumPlan {
    /// Encoder module.
    pub module: ModuleKind,
    /// Number of LLM tokens for the medium.
    pub tokens: usize,
    /// Predicted time in an encoder stage, in nanoseconds; only ratios matter.
    pub cost_ns: u64,
}

/// LLM microbatch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MicrobatchPlan {
    /// Planned number of tokens, including media. Texts may have more or fewer once they are tokenized; all
    /// stages in a replica must count the same number. A microbatch planned without tokens has none.
    pub tokens: usize,
    /// Media, in token order in [`TextBatch::media_places`](dflop_models::TextBatch::media_places).
    pub media: Vec<MediumPlan>,
}

/// Step plan: the same on all ranks, with everything that they need to know about each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineStepPlan {
    step: u64,
    target_tokens: u64,
    microbatches: Vec<MicrobatchPlan>,
    /// Routes for every module before the LLM.
    routes: Vec<RoutePlan>,
    /// Number of media rows in every microbatch.
    media_tokens: Vec<usize>,
    /// Number of microbatches per LLM DP rank.
    rounds: usize,
}

pub(crate) fn name(module: ModuleKind) -> &'static str {
    match module {
        ModuleKind::Vision => "vision",
        ModuleKind::Audio => "audio",
        ModuleKind::Llm => "the LLM",
    }
}

impl PipelineStepPlan {
    /// Assigns media to encoder replicas and routes media tokens. Encoder replicas share the media of a round
    /// in each pool ([`assign_media`](super::assign_media()), [`Job::media_pools`]).
    ///
    /// - `target_tokens`: number of target tokens in all microbatches together
    /// - `microbatches`: `[rounds * D]`; microbatch `k` on LLM DP rank `d` is at `k * D + d`
    ///
    /// # Errors
    /// [`Error::Plan`] if the number of microbatches is not a multiple of the DP size, or a microbatch has
    /// media for a module that does not run, or more media tokens than tokens.
    pub fn new(job: &Job, step: u64, target_tokens: u64, microbatches: Vec<MicrobatchPlan>) -> Result<Self> {
        let dp_size = job.llm().dp_size;
        if microbatches.is_empty() || !microbatches.len().is_multiple_of(dp_size) {
            let problem = format!("{} microbatches for {dp_size} DP ranks", microbatches.len());
            return Err(refused(step, microbatches.len(), problem));
        }
        for (index, microbatch) in microbatches.iter().enumerate() {
            check(job, step, index, microbatch)?;
        }
        let rounds = microbatches.len() / dp_size;
        let encoders = 0..job.modules.len() - 1;
        let routes = encoders.map(|module| route(job, module, &microbatches)).collect::<Result<_>>()?;
        let media_tokens = microbatches.iter().map(tokens_of_media).collect();
        Ok(Self { step, target_tokens, microbatches, routes, media_tokens, rounds })
    }

    /// Returns the step number.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the number of target tokens in all microbatches.
    #[must_use]
    pub fn target_tokens(&self) -> u64 {
        self.target_tokens
    }

    /// Returns the factor that turns the loss sum into the mean loss: 1 / target tokens, or 1 without target
    /// tokens.
    #[must_use]
    pub fn loss_scale(&self) -> f64 {
        1.0 / self.target_tokens.max(1) as f64
    }

    /// Returns the LLM microbatches, `k * D + d`.
    #[must_use]
    pub fn microbatches(&self) -> &[MicrobatchPlan] {
        &self.microbatches
    }

    /// Returns the number of microbatches per LLM DP rank.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Returns the route for encoder media; `None` for the LLM and for a module that does not run.
    #[must_use]
    pub fn route(&self, job: &Job, module: ModuleKind) -> Option<&RoutePlan> {
        self.routes.get(job.module_index(module)?)
    }

    /// Returns the module microbatches that a replica runs: `k * E + replica` with `E` replicas.
    ///
    /// Encoder microbatches are numbered by encoder replica; [`RoutePlan::source_media`] lists the media in a
    /// microbatch.
    pub fn replica_microbatches(
        &self,
        job: &Job,
        module: ModuleKind,
        replica: usize,
    ) -> impl Iterator<Item = u32> {
        let replicas = job.module_index(module).map_or(0, |index| job.modules[index].dp_size);
        (0..self.rounds).map(move |round| (round * replicas + replica) as u32)
    }

    /// Returns the number of rows that an LLM microbatch receives from encoders.
    ///
    /// # Panics
    /// If there is no such microbatch.
    #[must_use]
    pub fn media_tokens(&self, microbatch: u32) -> usize {
        self.media_tokens[microbatch as usize]
    }

    /// Returns the route of a module by index.
    pub(super) fn module_route(&self, module: usize) -> &RoutePlan {
        &self.routes[module]
    }

    /// Returns a digest over the plan and the job layout, for comparison between ranks.
    #[must_use]
    pub fn digest(&self, job: &Job) -> u64 {
        let mut digest = Xxh3::new();
        let mut add = |word: u64| digest.update(&word.to_le_bytes());
        add(self.step);
        add(self.target_tokens);
        job.schedule.to_string().bytes().for_each(|byte| add(u64::from(byte)));
        job.placement.name().bytes().for_each(|byte| add(u64::from(byte)));
        job.chain_stages.iter().for_each(|&stage| add(stage as u64));
        for module in &job.modules {
            for word in [module.module as usize, module.dp_size, module.tp_size] {
                add(word as u64);
            }
            module.stages.iter().for_each(|layers| add(layers.end as u64));
        }
        for microbatch in &self.microbatches {
            add(microbatch.tokens as u64);
            add(microbatch.media.len() as u64);
            microbatch.media.iter().for_each(|medium| add(medium.tokens as u64));
        }
        // Routes follow from the costs, so costs need no words in the digest.
        for row in self.routes.iter().flat_map(RoutePlan::rows) {
            for word in [row.medium as u64, u64::from(row.source), u64::from(row.destination)] {
                add(word);
            }
        }
        digest.digest()
    }
}

fn refused(step: u64, microbatch: usize, problem: String) -> Error {
    Error::Plan { step, module: name(ModuleKind::Llm), microbatch, problem }
}

fn tokens_of_media(microbatch: &MicrobatchPlan) -> usize {
    microbatch.media.iter().map(|medium| medium.tokens).sum()
}

fn check(job: &Job, step: u64, index: usize, microbatch: &MicrobatchPlan) -> Result<()> {
    let runs = |module| module != ModuleKind::Llm && job.module_index(module).is_some();
    if let Some(medium) = microbatch.media.iter().position(|medium| !runs(medium.module)) {
        let module = name(microbatch.media[medium].module);
        return Err(refused(
            step,
            index,
            format!("has medium {medium} for {module}, which does not run in this job"),
        ));
    }
    let tokens = tokens_of_media(microbatch);
    if tokens > microbatch.tokens {
        return Err(refused(step, index, format!("has {} tokens, its media {tokens}", microbatch.tokens)));
    }
    Ok(())
}

/// Routes the media for an encoder.
fn route(job: &Job, module: usize, microbatches: &[MicrobatchPlan]) -> Result<RoutePlan> {
    let (kind, replicas) = (job.modules[module].module, job.modules[module].dp_size);
    let (dp_size, pools) = (job.llm().dp_size, job.media_pools(module));
    let sharers = replicas / pools;
    let rounds = microbatches.len() / dp_size;
    let (mut rows, mut costs_ns) = (Vec::new(), vec![vec![Vec::new(); rounds]; pools]);
    for (destination, microbatch) in microbatches.iter().enumerate() {
        let (round, pool) = (destination / dp_size, destination % dp_size * pools / dp_size);
        let mut destination_offset = 0;
        for (index, medium) in microbatch.media.iter().enumerate() {
            if medium.module == kind {
                rows.push(RoutedMedium {
                    medium: index,
                    tokens: medium.tokens,
                    // The first replica in the pool; media are assigned to the pool's replicas below.
                    source: (round * replicas + pool * sharers) as u32,
                    source_offset: 0,
                    destination: destination as u32,
                    destination_offset,
                });
                costs_ns[pool][round].push(medium.cost_ns);
            }
            destination_offset += medium.tokens;
        }
    }
    // Rows are in round order, and so are the media in each pool.
    let assigned =
        costs_ns.iter().map(|rounds| Ok(assign_pool(rounds, sharers, pools)?.concat().into_iter()));
    let mut assigned = assigned.collect::<Result<Vec<_>>>()?;
    for row in &mut rows {
        let pool = row.destination as usize % dp_size * pools / dp_size;
        row.source += assigned[pool].next().unwrap_or(0) as u32;
    }
    Ok(RoutePlan::new(rows))
}
