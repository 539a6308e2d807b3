//! Who holds which stage, who runs which microbatch there, and what feeds what.

use super::action::Part;
use crate::error::{Error, Result};

/// Most ranks, and most stages; actions count them in 16 bits.
const COUNT_MAX: usize = u16::MAX as usize;

/// Stages, ranks and microbatches of a step: what a schedule is made for.
///
/// Ranks here are pipeline ranks: the devices that share a stage by tensor parallelism count as one.
/// A [`Layout::chain`] is one pipeline. A [`Layout::of_modules`] is a whole job, with modules that differ
/// in stages and in DP size; its stages, its ranks and its microbatches are numbered through:
///
/// - stages: module by module
/// - ranks: module by module, in a module replica by replica, in a replica stage by stage
/// - microbatches: `u = k * D + d` is microbatch `k` of DP rank `d` of the last module, `D` its DP size;
///   the microbatches of one `k` are a *round*
///
/// **Route.** Replica `u mod E` of a module with DP size `E` runs microbatch `u`, unless [`Layout::route`]
/// says otherwise. So each replica gets as many microbatches as any other, or one more, whatever the two
/// sizes: with fewer replicas than `D` each fans out to several LLM ranks, with more each LLM rank is fed
/// by several in turn. Where items go to replicas without regard to their microbatch, a module
/// [shares rounds](ModuleStages::share_rounds): its microbatch `k * E + e` is what replica `e` computes in
/// round `k`, and it feeds all microbatches of the round. Gradients go back the same way.
///
/// A module that shares its ranks with another (an encoder *colocated* with an LLM stage) is no module
/// here: the times of both add up in that stage's row of [`StageTimes`](crate::StageTimes).
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{Layout, ModuleStages, ScheduleKind};
///
/// // two encoder ranks feed four LLM pipelines of three stages, two microbatches each
/// let modules = [ModuleStages::new(1, 2), ModuleStages::new(3, 4)];
/// let layout = Layout::of_modules(&modules, 2)?;
/// let lists = layout.schedule(ScheduleKind::OneForwardOneBackward)?;
/// assert_eq!((lists.len(), layout.microbatches()), (2 + 3 * 4, 8));
/// assert_eq!(lists[0][1].to_string(), "send 0 in stage 0 to 2");
/// assert_eq!(lists[2][0].to_string(), "recv 0 in stage 1 from 0");
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    ranks: usize,
    /// Of the module that has the most.
    microbatches: usize,
    /// Stages that a rank holds.
    chunks: usize,
    stages: Vec<Stage>,
    modules: Vec<Replicas>,
}

/// Pipeline stages and replicas of one module of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleStages {
    /// Pipeline stages of a replica, at least 1.
    pub stages: usize,
    /// Replicas, at least 1.
    pub dp_size: usize,
    /// Index of the module that takes the activations; by default the one after. The last module's is
    /// ignored.
    pub feeds: Option<usize>,
    /// Whether each replica computes a share of every round's items.
    pub shares_rounds: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stage {
    module: usize,
    next: Option<u16>,
    before: Vec<u16>,
    /// Rank of the first replica.
    first_rank: usize,
    /// Stages between this one and the loss.
    after: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Replicas {
    count: usize,
    /// Microbatches of a round.
    round: usize,
    microbatches: usize,
    shares_rounds: bool,
    /// Ranks from one replica to the next.
    ranks_apart: usize,
    /// The replica of every microbatch; empty if it is `u mod count`.
    route: Vec<u16>,
}

impl ModuleStages {
    /// Describes a module that feeds the one after it.
    #[must_use]
    pub fn new(stages: usize, dp_size: usize) -> Self {
        Self { stages, dp_size, feeds: None, shares_rounds: false }
    }

    /// Names the module that takes this one's activations, past those between: a parallel branch.
    #[must_use]
    pub fn feeds(mut self, module: usize) -> Self {
        self.feeds = Some(module);
        self
    }

    /// Lets each replica compute a share of every round's items, whichever microbatches these are in. The
    /// last module's items stay in their microbatches. Modules between a sharing one and the last share too.
    #[must_use]
    pub fn share_rounds(mut self) -> Self {
        self.shares_rounds = true;
        self
    }
}

impl Layout {
    /// Describes one pipeline; rank `r` holds the stages `r`, `r + ranks`, …, one for each chunk.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no rank or no chunk, or there are too many of anything.
    pub fn chain(ranks: usize, chunks: usize, microbatches: usize) -> Result<Self> {
        let count = ranks.saturating_mul(chunks);
        check("stages", count, 1)?;
        check_parts(count, microbatches)?;
        let stages = (0..count).map(|stage| Stage {
            module: 0,
            next: (stage + 1 < count).then_some(stage as u16 + 1),
            before: stage.checked_sub(1).map(|before| before as u16).into_iter().collect(),
            first_rank: stage % ranks,
            after: count - stage - 1,
        });
        let only = Replicas {
            count: 1,
            round: 1,
            microbatches,
            shares_rounds: false,
            ranks_apart: 0,
            route: Vec::new(),
        };
        Ok(Self { ranks, microbatches, chunks, stages: stages.collect(), modules: vec![only] })
    }

    /// Describes a job of several modules, the one with the loss last.
    ///
    /// - `microbatches`: of each DP rank of the last module
    ///
    /// # Errors
    /// [`Error::Config`] if a number is 0 or too large, or a module feeds one that is not after it.
    pub fn of_modules(modules: &[ModuleStages], microbatches: usize) -> Result<Self> {
        let Some(last) = modules.last() else {
            return Err(Error::Config { setting: "modules", reason: "there is none".to_owned() });
        };
        let starts = check_modules(modules)?;
        let replicas: Vec<Replicas> =
            modules.iter().enumerate().map(|(at, _)| replicas(modules, at, microbatches)).collect();
        let most = replicas.iter().map(|own| own.microbatches).max().unwrap_or(0);
        check_parts(starts.iter().map(|start| start.stage).max().unwrap_or(0) + last.stages, most)?;

        let mut stages: Vec<Stage> = Vec::new();
        for (module, (own, start)) in modules.iter().zip(&starts).enumerate() {
            let fed = (module + 1 < modules.len()).then(|| starts[own.feeds.unwrap_or(module + 1)].stage);
            stages.extend((0..own.stages).map(|stage| {
                let inside = (stage + 1 < own.stages).then_some(start.stage + stage + 1);
                let next = inside.or(fed).map(|next| next as u16);
                Stage { module, next, before: Vec::new(), first_rank: start.rank + stage, after: 0 }
            }));
        }
        for stage in (0..stages.len()).rev() {
            if let Some(next) = stages[stage].next {
                stages[stage].after = stages[next as usize].after + 1;
                stages[next as usize].before.insert(0, stage as u16);
            }
        }
        Ok(Self {
            ranks: starts.last().map_or(0, |start| start.rank) + last.stages * last.dp_size,
            microbatches: most,
            chunks: 1,
            stages,
            modules: replicas,
        })
    }

    /// Says which replica of a module runs each microbatch, for example to even the replicas' work.
    ///
    /// - `replicas`: `[microbatches]` of the last module, each below this module's DP size
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if there is no such module, it is the last or shares rounds (its
    /// microbatches are numbered by rank), or has no such replica.
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

    /// Returns the number of stages, those of all chunks or modules.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// Returns the number of microbatches of the step, of the module that has the most; times come in rows
    /// of this length.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns how many microbatches pass through a stage.
    ///
    /// # Panics
    /// If there is no such stage.
    #[must_use]
    pub fn microbatches_of(&self, stage: usize) -> usize {
        self.modules[self.stages[stage].module].microbatches
    }

    /// Returns the module of a stage; the only one of a chain is 0.
    ///
    /// # Panics
    /// If there is no such stage.
    #[must_use]
    pub fn module(&self, stage: usize) -> usize {
        self.stages[stage].module
    }

    /// Returns the rank that runs a microbatch in a stage.
    ///
    /// # Panics
    /// If there is no such part.
    #[must_use]
    pub fn rank(&self, part: Part) -> usize {
        let stage = &self.stages[part.stage as usize];
        let replicas = &self.modules[stage.module];
        let by_number = || part.microbatch as usize % replicas.count;
        let replica = replicas.route.get(part.microbatch as usize).map_or_else(by_number, |&to| to as usize);
        stage.first_rank + replica * replicas.ranks_apart
    }

    /// Returns the ranks that hold a stage, one for each replica.
    ///
    /// # Panics
    /// If there is no such stage.
    pub fn holders(&self, stage: usize) -> impl Iterator<Item = usize> {
        let Stage { module, first_rank, .. } = self.stages[stage];
        let Replicas { count, ranks_apart, .. } = self.modules[module];
        (0..count).map(move |replica| first_rank + replica * ranks_apart)
    }

    /// Returns the parts that take the activations of a part.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn takers(&self, part: Part) -> impl Iterator<Item = Part> {
        let next = self.stages[part.stage as usize].next;
        next.into_iter().flat_map(move |stage| self.linked(part, stage))
    }

    /// Returns the parts whose activations a part takes.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn givers(&self, part: Part) -> impl Iterator<Item = Part> {
        let before = &self.stages[part.stage as usize].before;
        before.iter().flat_map(move |&stage| self.linked(part, stage))
    }

    /// The parts of a stage beside it that a part exchanges messages with.
    fn linked(&self, part: Part, stage: u16) -> impl Iterator<Item = Part> + use<> {
        let [own, other] = [part.stage, stage].map(|stage| self.stages[stage as usize].module);
        let (own, other, is_inside) = (&self.modules[own], &self.modules[other], own == other);
        let microbatches = if is_inside || !(own.shares_rounds || other.shares_rounds) {
            part.microbatch..part.microbatch + 1
        } else {
            let round = part.microbatch as usize / own.round * other.round;
            round as u32..(round + other.round) as u32
        };
        microbatches.map(move |microbatch| Part { microbatch, stage })
    }

    /// Stages between this one and the loss.
    pub(super) fn stages_after(&self, stage: usize) -> usize {
        self.stages[stage].after
    }

    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Microbatches of a round in a stage.
    pub(super) fn round(&self, stage: usize) -> usize {
        self.modules[self.stages[stage].module].round
    }

    /// Whether a part exists.
    pub(crate) fn has(&self, part: Part) -> bool {
        let stage = part.stage as usize;
        stage < self.stages.len() && (part.microbatch as usize) < self.microbatches_of(stage)
    }
}

/// First stage and first rank of a module.
struct Start {
    stage: usize,
    rank: usize,
}

/// Replicas and microbatches of a module; `microbatches` are those of one rank of the last module.
fn replicas(modules: &[ModuleStages], module: usize, microbatches: usize) -> Replicas {
    let own = &modules[module];
    let shares_rounds = own.shares_rounds && module + 1 < modules.len();
    let last = modules.last().map_or(1, |last| last.dp_size);
    let round = if shares_rounds { own.dp_size } else { last };
    Replicas {
        count: own.dp_size,
        round,
        microbatches: microbatches.saturating_mul(round),
        shares_rounds,
        ranks_apart: own.stages,
        route: Vec::new(),
    }
}

/// Returns where each module starts.
fn check_modules(modules: &[ModuleStages]) -> Result<Vec<Start>> {
    let (mut stage, mut rank) = (0_usize, 0_usize);
    let mut starts = Vec::with_capacity(modules.len());
    for (module, own) in modules.iter().enumerate() {
        let is_last = module + 1 == modules.len();
        if !is_last && own.feeds.is_some_and(|fed| fed <= module || fed >= modules.len()) {
            let reason = format!("module {module} feeds module {}, not one after it", own.feeds.unwrap_or(0));
            return Err(Error::Config { setting: "modules", reason });
        }
        check_sharing(modules, module)?;
        check("stages", own.stages, 1)?;
        check("dp_size", own.dp_size, 1)?;
        starts.push(Start { stage, rank });
        stage += own.stages;
        rank += own.stages * own.dp_size;
        check("stages", stage, 1)?;
        check("ranks", rank, 1)?;
    }
    Ok(starts)
}

/// What a shared round is exchanged with has one microbatch a rank and round, or messages could not be told
/// apart by their ends.
fn check_sharing(modules: &[ModuleStages], module: usize) -> Result<()> {
    let last = modules.len() - 1;
    let fed = modules[module].feeds.unwrap_or(module + 1);
    let has_one = |module: usize| module == last || modules[module].shares_rounds;
    let is_shared = |module: usize| module < last && modules[module].shares_rounds;
    if module == last || !(is_shared(module) || is_shared(fed)) || (has_one(module) && has_one(fed)) {
        return Ok(());
    }
    let reason = format!("modules {module} and {fed} must both share rounds, or neither");
    Err(Error::Config { setting: "modules", reason })
}

fn check(setting: &'static str, count: usize, least: usize) -> Result<()> {
    if (least..=COUNT_MAX).contains(&count) {
        return Ok(());
    }
    Err(Error::Config { setting, reason: format!("{count} is not in {least}..={COUNT_MAX}") })
}

/// Parts are numbered in 32 bits, up to three passes each.
fn check_parts(stages: usize, microbatches: usize) -> Result<()> {
    if stages.saturating_mul(microbatches) < u32::MAX as usize / 8 {
        return Ok(());
    }
    let reason = format!("{microbatches} in {stages} stages are too many");
    Err(Error::Config { setting: "microbatches", reason })
}
