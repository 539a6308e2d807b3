//! Maps stages and microbatches to ranks, and parts to the parts they exchange messages with.

use super::action::Part;
use super::step_shape::{ModuleStages, Replicas, check_count, check_modules, check_parts};
use crate::error::{Error, Result};

/// Stages, ranks and microbatches in a step, for which schedules are built.
///
/// Ranks here are pipeline ranks: devices that share a stage by tensor parallelism count as a single rank. A
/// [`PipelineLayout::chain`] is a single pipeline. A [`PipelineLayout::from_modules`] is a whole job, with
/// modules that differ in stages and in DP size; stages, ranks and microbatches are numbered consecutively:
///
/// - stages: module by module
/// - ranks: module by module, in a module replica by replica, in a replica stage by stage; ranks that hold
///   several [chunks](ModuleStages::chunks) are numbered by their first stage
/// - microbatches: `u = k * D + d` is microbatch `k` on DP rank `d` in the last module, with DP size `D`; the
///   microbatches with the same `k` form a *round*
///
/// **Route.** In a module with DP size `E`, replica `u mod E` runs microbatch `u`, unless
/// [`PipelineLayout::route`] overrides it. So the replicas' numbers of microbatches differ by at most one,
/// for any two sizes: with fewer replicas than `D` each fans out to several LLM ranks, with more each LLM
/// rank is fed by several in turn. If items go to replicas independently of their microbatch, a module
/// [shares rounds](ModuleStages::share_rounds): its microbatch `k * E + e` is replica `e`'s share in round
/// `k`, and it feeds all microbatches in the round. Gradients return the same way.
///
/// A module that shares ranks with a different module (an encoder *colocated* with an LLM stage) does not
/// count as a module here: the times for both are added in that stage's row in
/// [`StageTimes`](crate::StageTimes).
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{PipelineLayout, ModuleStages, ScheduleKind};
///
/// // two encoder ranks feed four LLM pipelines of three stages, two microbatches each
/// let modules = [ModuleStages::new(1, 2), ModuleStages::new(3, 4)];
/// let layout = PipelineLayout::from_modules(&modules, 2)?;
/// let lists = layout.schedule(ScheduleKind::OneForwardOneBackward)?;
/// assert_eq!((lists.len(), layout.microbatches()), (2 + 3 * 4, 8));
/// assert_eq!(lists[0][1].to_string(), "send 0 in stage 0 to 2");
/// assert_eq!(lists[2][0].to_string(), "recv 0 in stage 1 from 0");
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineLayout {
    ranks: usize,
    /// Number of microbatches in the module with the most.
    microbatches: usize,
    /// Number of stages per rank.
    chunks: usize,
    stages: Vec<Stage>,
    modules: Vec<Replicas>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stage {
    module: usize,
    next: Option<u16>,
    before: Vec<u16>,
    /// First replica's rank.
    first_rank: usize,
    /// Number of stages between this stage and the loss.
    after: usize,
}

impl PipelineLayout {
    /// Describes a single pipeline; rank `r` holds the stages `r`, `r + ranks`, …, one for each chunk.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no rank or no chunk, or a number is too large.
    pub fn chain(ranks: usize, chunks: usize, microbatches: usize) -> Result<Self> {
        let count = ranks.saturating_mul(chunks);
        check_count("stages", count)?;
        check_parts(count, microbatches)?;
        let stages = (0..count).map(|stage| Stage {
            module: 0,
            next: (stage + 1 < count).then_some(stage as u16 + 1),
            before: stage.checked_sub(1).map(|before| before as u16).into_iter().collect(),
            first_rank: stage % ranks,
            after: count - stage - 1,
        });
        let only = Replicas::new(&[ModuleStages::new(count, 1)], 0, microbatches);
        Ok(Self { ranks, microbatches, chunks, stages: stages.collect(), modules: vec![only] })
    }

    /// Describes a job with several modules, the module with the loss last.
    ///
    /// - `microbatches`: number per DP rank in the last module
    ///
    /// # Errors
    /// [`Error::Config`] if a number is 0 or too large, or a module feeds a module that is not after it.
    pub fn from_modules(modules: &[ModuleStages], microbatches: usize) -> Result<Self> {
        let Some(last) = modules.last() else {
            return Err(Error::Config { setting: "modules", reason: "expected at least one".to_owned() });
        };
        let starts = check_modules(modules)?;
        let replicas: Vec<Replicas> =
            (0..modules.len()).map(|at| Replicas::new(modules, at, microbatches)).collect();
        let most = replicas.iter().map(|own| own.microbatches).max().unwrap_or(0);
        check_parts(starts.iter().map(|start| start.stage).max().unwrap_or(0) + last.stages, most)?;

        let mut stages: Vec<Stage> = Vec::new();
        for (module, (own, start)) in modules.iter().zip(&starts).enumerate() {
            let fed = (module + 1 < modules.len()).then(|| starts[own.feeds.unwrap_or(module + 1)].stage);
            stages.extend((0..own.stages).map(|stage| {
                let inside = (stage + 1 < own.stages).then_some(start.stage + stage + 1);
                let next = inside.or(fed).map(|next| next as u16);
                let first_rank = start.rank + stage % own.replica_ranks();
                Stage { module, next, before: Vec::new(), first_rank, after: 0 }
            }));
        }
        for stage in (0..stages.len()).rev() {
            if let Some(next) = stages[stage].next {
                stages[stage].after = stages[next as usize].after + 1;
                // Stages are visited backwards, so inserting in front keeps them ascending.
                stages[next as usize].before.insert(0, stage as u16);
            }
        }
        Ok(Self {
            ranks: starts.last().map_or(0, |start| start.rank) + last.replica_ranks() * last.dp_size,
            microbatches: most,
            chunks: last.chunks,
            stages,
            modules: replicas,
        })
    }

    /// Sets the replica that runs each microbatch in a module, for example to even out the replicas' work.
    ///
    /// - `replicas`: `[microbatches]` in the last module, each below this module's DP size
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if the module does not exist, is the last or shares rounds
    /// (microbatches are then numbered by rank), or does not have the replica.
    pub fn route(mut self, module: usize, replicas: Vec<u16>) -> Result<Self> {
        let invalid = |reason| Err(Error::Config { setting: "route", reason });
        if module + 1 >= self.modules.len() || self.modules[module].shares_rounds {
            return invalid(format!("module {module} has none"));
        }
        if replicas.len() != self.modules[module].microbatches {
            let (found, expected) = (replicas.len(), self.modules[module].microbatches);
            return Err(Error::Length { field: "route", found, expected });
        }
        let count = self.modules[module].count;
        if let Some(microbatch) = replicas.iter().position(|&replica| replica as usize >= count) {
            let replica = replicas[microbatch];
            return invalid(format!("microbatch {microbatch} goes to replica {replica} of {count}"));
        }
        self.modules[module].route = replicas;
        Ok(self)
    }

    /// Returns the number of ranks, at least 1.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the number of stages, over all chunks or modules.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// Returns the number of microbatches in the step, in the module with the most; times come in rows with
    /// this length.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns the number of microbatches that pass through a stage.
    ///
    /// # Panics
    /// If the stage does not exist.
    #[must_use]
    pub fn stage_microbatches(&self, stage: usize) -> usize {
        self.modules[self.stages[stage].module].microbatches
    }

    /// Returns a stage's module; a chain has only module 0.
    ///
    /// # Panics
    /// If the stage does not exist.
    #[must_use]
    pub fn module(&self, stage: usize) -> usize {
        self.stages[stage].module
    }

    /// Returns the rank that runs a microbatch in a stage.
    ///
    /// # Panics
    /// If the part does not exist.
    #[must_use]
    pub fn rank(&self, part: Part) -> usize {
        let stage = &self.stages[part.stage as usize];
        stage.first_rank + self.replica(part) * self.modules[stage.module].ranks_apart
    }

    /// Returns the module replica that runs a microbatch.
    pub(crate) fn replica(&self, part: Part) -> usize {
        let replicas = &self.modules[self.stages[part.stage as usize].module];
        let by_number = || part.microbatch as usize % replicas.count;
        replicas.route.get(part.microbatch as usize).map_or_else(by_number, |&to| to as usize)
    }

    /// Returns the ranks that hold a stage, one for each replica.
    ///
    /// # Panics
    /// If the stage does not exist.
    pub fn holders(&self, stage: usize) -> impl Iterator<Item = usize> {
        let Stage { module, first_rank, .. } = self.stages[stage];
        let Replicas { count, ranks_apart, .. } = self.modules[module];
        (0..count).map(move |replica| first_rank + replica * ranks_apart)
    }

    /// Lists the parts that receive a part's activations.
    ///
    /// # Panics
    /// If the part does not exist.
    pub fn consumers(&self, part: Part) -> impl Iterator<Item = Part> {
        let next = self.stages[part.stage as usize].next;
        next.into_iter().flat_map(move |stage| self.linked(part, stage))
    }

    /// Lists the parts whose activations a part receives.
    ///
    /// # Panics
    /// If the part does not exist.
    pub fn producers(&self, part: Part) -> impl Iterator<Item = Part> {
        let before = &self.stages[part.stage as usize].before;
        before.iter().flat_map(move |&stage| self.linked(part, stage))
    }

    /// Lists the parts in an adjacent stage that a part exchanges messages with.
    fn linked(&self, part: Part, stage: u16) -> impl Iterator<Item = Part> + use<> {
        let [own, other] = [part.stage, stage].map(|stage| self.stages[stage as usize].module);
        let (own, other, is_inside) = (&self.modules[own], &self.modules[other], own == other);
        let microbatches = if is_inside || !(own.shares_rounds || other.shares_rounds) {
            part.microbatch..part.microbatch + 1
        } else {
            // A shared round corresponds to the adjacent module's whole round, not to single microbatches.
            let round = part.microbatch as usize / own.round * other.round;
            round as u32..(round + other.round) as u32
        };
        microbatches.map(move |microbatch| Part { microbatch, stage })
    }

    /// Returns the number of stages between this stage and the loss.
    pub(super) fn stages_after(&self, stage: usize) -> usize {
        self.stages[stage].after
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns the microbatches per round in a stage.
    pub(super) fn round(&self, stage: usize) -> usize {
        self.modules[self.stages[stage].module].round
    }

    /// Whether a part exists.
    pub(crate) fn has(&self, part: Part) -> bool {
        let stage = part.stage as usize;
        stage < self.stages.len() && (part.microbatch as usize) < self.stage_microbatches(stage)
    }
}
