//! Step plan that all ranks share: microbatch sizes, media, and the encoder replica for each medium.
//!
//! The rows for a medium are a part of the output of one encoder microbatch, the *source*, and of the media
//! rows in one LLM microbatch, the *destination*. Every rank computes the same routes, so no shape is ever
//! sent. One message goes from a source to a destination, with the rows for all media that they share; none
//! if there are no rows. Gradients go the same way back: the transposed route swaps source and destination
//! and keeps the offsets, so it is the inverse.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
use dflop_device::ops::elementwise::CopyRange;
use dflop_models::ModuleKind;
use xxhash_rust::xxh3::Xxh3;

use super::layout::JobLayout;
use crate::error::{Error, Result};

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
    /// in each pool ([`assign_media`](assign_media()), [`JobLayout::media_pools`]).
    ///
    /// - `target_tokens`: number of target tokens in all microbatches together
    /// - `microbatches`: `[rounds * D]`; microbatch `k` on LLM DP rank `d` is at `k * D + d`
    ///
    /// # Errors
    /// [`Error::Plan`] if the number of microbatches is not a multiple of the DP size, or a microbatch has
    /// media for a module that does not run, or more media tokens than tokens.
    pub fn new(
        job: &JobLayout,
        step: u64,
        target_tokens: u64,
        microbatches: Vec<MicrobatchPlan>,
    ) -> Result<Self> {
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
    pub fn route(&self, job: &JobLayout, module: ModuleKind) -> Option<&RoutePlan> {
        self.routes.get(job.module_index(module)?)
    }

    /// Returns the module microbatches that a replica runs: `k * E + replica` with `E` replicas.
    ///
    /// Encoder microbatches are numbered by encoder replica; [`RoutePlan::source_media`] lists the media in a
    /// microbatch.
    pub fn replica_microbatches(
        &self,
        job: &JobLayout,
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
    pub fn digest(&self, job: &JobLayout) -> u64 {
        let mut digest = Xxh3::new();
        job.add_to(&mut digest);
        let mut add = |word: u64| digest.update(&word.to_le_bytes());
        add(self.step);
        add(self.target_tokens);
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

fn check(job: &JobLayout, step: u64, index: usize, microbatch: &MicrobatchPlan) -> Result<()> {
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
fn route(job: &JobLayout, module: usize, microbatches: &[MicrobatchPlan]) -> Result<RoutePlan> {
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

/// Assigns the media in every round to replicas and minimizes the maximum replica load, first within each
/// round, then over all rounds so far.
///
/// Pure, and the same on every rank: costs are integers, and the search is bounded in work units for all
/// rounds together. With fewer media than replicas, some replicas get none. The heaviest group in a round
/// goes to the replica with the least load in earlier rounds.
///
/// - `rounds`: media costs in every round, in nanoseconds
/// - returns the replica for every medium, by round
///
/// # Errors
/// [`crate::Error::Balancer`] if the total cost of a round does not fit into 63 bits, or there is no replica.
pub fn assign_media(rounds: &[Vec<u64>], replicas: usize) -> Result<Vec<Vec<usize>>> {
    assign_pool(rounds, replicas, 1)
}

/// Assigns media in one of `pools` pools, each of which has separate replicas.
pub(super) fn assign_pool(rounds: &[Vec<u64>], replicas: usize, pools: usize) -> Result<Vec<Vec<usize>>> {
    // One budget for all rounds and pools, so that the effort per step does not grow with their number.
    let work = Strategy::SEARCH.work_default() / (rounds.len() * pools).max(1) as u64;
    let mut before_ns = vec![0_u64; replicas];
    rounds.iter().map(|costs_ns| assign_round(costs_ns, work, &mut before_ns)).collect()
}

/// - `work`: number of work units that the search may spend
/// - `before_ns`: load of every replica in earlier rounds, in nanoseconds; the load of this round is added
fn assign_round(costs_ns: &[u64], work: u64, before_ns: &mut [u64]) -> Result<Vec<usize>> {
    let replicas = before_ns.len();
    if costs_ns.is_empty() || replicas == 1 {
        return Ok(vec![0; costs_ns.len()]);
    }
    let instance = Instance::with_empty_groups(replicas, 1, costs_ns.to_vec())?;
    let groups = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(work))?.groups;
    let load_ns = |group: &[u32]| group.iter().map(|&medium| costs_ns[medium as usize]).sum::<u64>();
    let mut heaviest: Vec<usize> = (0..groups.len()).collect();
    // Both sorts are stable, so equal loads keep their order and all ranks agree.
    heaviest.sort_by_key(|&group| Reverse(load_ns(&groups[group])));
    let mut idlest: Vec<usize> = (0..replicas).collect();
    idlest.sort_by_key(|&replica| before_ns[replica]);
    let mut replica_of = vec![0; costs_ns.len()];
    for (group, replica) in heaviest.into_iter().zip(idlest) {
        before_ns[replica] = before_ns[replica].saturating_add(load_ns(&groups[group]));
        groups[group].iter().for_each(|&medium| replica_of[medium as usize] = replica);
    }
    Ok(replica_of)
}

/// Route for a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutedMedium {
    /// Index among the media in the destination.
    pub medium: usize,
    /// Number of rows that the LLM reads.
    pub tokens: usize,
    /// Encoder microbatch that encodes the medium.
    pub source: u32,
    /// First row in the source output.
    pub source_offset: usize,
    /// LLM microbatch that reads the medium.
    pub destination: u32,
    /// First row among the media rows in the destination.
    pub destination_offset: usize,
}

/// Route ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteEnd {
    /// The encoder.
    Source,
    /// The LLM.
    Destination,
}

/// Routes for all media that an encoder encodes in a step, sorted by destination and position there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoutePlan {
    rows: Vec<RoutedMedium>,
    /// Indices into `rows` by source and destination.
    pairs: BTreeMap<(u32, u32), Vec<usize>>,
    /// Number of tokens in every source that has media.
    source_tokens: BTreeMap<u32, usize>,
}

impl RoutedMedium {
    fn offset(&self, end: RouteEnd) -> usize {
        match end {
            RouteEnd::Source => self.source_offset,
            RouteEnd::Destination => self.destination_offset,
        }
    }
}

impl RoutePlan {
    /// Sorts media by destination and sets the source offsets in that order; ignores source offsets in the
    /// argument.
    #[must_use]
    pub fn new(mut rows: Vec<RoutedMedium>) -> Self {
        rows.sort_by_key(|row| (row.destination, row.medium));
        let (mut pairs, mut source_tokens) = (BTreeMap::new(), BTreeMap::new());
        for (index, row) in rows.iter_mut().enumerate() {
            let tokens: &mut usize = source_tokens.entry(row.source).or_default();
            row.source_offset = *tokens;
            *tokens += row.tokens;
            let pair: &mut Vec<usize> = pairs.entry((row.source, row.destination)).or_default();
            pair.push(index);
        }
        Self { rows, pairs, source_tokens }
    }

    /// Returns the routes for all media.
    #[must_use]
    pub fn rows(&self) -> &[RoutedMedium] {
        &self.rows
    }

    /// Returns the media in a source, in encoding order.
    pub fn source_media(&self, source: u32) -> impl Iterator<Item = &RoutedMedium> {
        let pairs = self.pairs.range((source, 0)..=(source, u32::MAX));
        pairs.flat_map(|(_, rows)| rows).map(|&row| &self.rows[row])
    }

    /// Returns the number of output rows for a source.
    #[must_use]
    pub fn source_tokens(&self, source: u32) -> usize {
        self.source_tokens.get(&source).copied().unwrap_or(0)
    }

    /// Returns the media that go from a source to a destination, in message order.
    pub fn between(&self, source: u32, destination: u32) -> impl Iterator<Item = &RoutedMedium> {
        self.pairs.get(&(source, destination)).into_iter().flatten().map(|&row| &self.rows[row])
    }

    /// Returns the number of rows in the message from a source to a destination; without rows no message is
    /// sent.
    #[must_use]
    pub fn tokens_between(&self, source: u32, destination: u32) -> usize {
        self.between(source, destination).map(|row| row.tokens).sum()
    }

    /// Returns the row elements at one end, in the order of the message from a source to a destination; `to`
    /// counts message elements.
    #[must_use]
    pub fn elements(&self, [source, destination]: [u32; 2], end: RouteEnd, width: usize) -> Vec<CopyRange> {
        let mut to = 0;
        let mut next = |row: &RoutedMedium| {
            let len = row.tokens * width;
            to += len;
            CopyRange { from: row.offset(end) * width, to: to - len, len }
        };
        self.between(source, destination).map(&mut next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(costs: &[u64], replica_of: &[usize], replicas: usize) -> Vec<u64> {
        let load = |replica| {
            costs.iter().zip(replica_of).filter(|(_, of)| **of == replica).map(|(cost, _)| cost).sum()
        };
        (0..replicas).map(load).collect()
    }

    #[test]
    fn every_medium_has_a_replica_and_loads_of_a_round_are_even() {
        let rounds = [vec![80, 40, 40, 30, 30, 20], vec![], vec![0; 5], vec![5, 5]];
        let replica_of = assign_media(&rounds, 3).unwrap();
        assert_eq!(replica_of, assign_media(&rounds, 3).unwrap());
        assert!(rounds.iter().map(Vec::len).eq(replica_of.iter().map(Vec::len)));
        assert!(replica_of.iter().flatten().all(|&replica| replica < 3));
        assert_eq!(loads(&rounds[0], &replica_of[0], 3), [80, 80, 80]);
        assert_eq!(loads(&rounds[3], &replica_of[3], 3).into_iter().max(), Some(5));
        assert_eq!(assign_media(&[vec![7, 7]], 1).unwrap(), [[0, 0]]);
    }

    #[test]
    fn replicas_take_turns_where_rounds_have_few_media() {
        let rounds: Vec<Vec<u64>> = (0..9).map(|_| vec![10]).collect();
        let replica_of = assign_media(&rounds, 3).unwrap().concat();
        assert_eq!(loads(&[10; 9], &replica_of, 3), [30, 30, 30]);
    }
}
