//! The modules of a job: how many stages and replicas each has, and what it feeds.

use crate::error::{Error, Result};

/// Most ranks, and most stages; actions count them in 16 bits.
const COUNT_MAX: usize = u16::MAX as usize;

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

/// Who runs which microbatch of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replicas {
    pub(super) count: usize,
    /// Microbatches of a round.
    pub(super) round: usize,
    pub(super) microbatches: usize,
    pub(super) shares_rounds: bool,
    /// Ranks from one replica to the next.
    pub(super) ranks_apart: usize,
    /// The replica of every microbatch; empty if it is `u mod count`.
    pub(super) route: Vec<u16>,
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

impl Replicas {
    /// Those of a module; `microbatches` are those of one rank of the last module.
    pub(super) fn new(modules: &[ModuleStages], module: usize, microbatches: usize) -> Self {
        let own = &modules[module];
        let shares_rounds = own.shares_rounds && module + 1 < modules.len();
        let last = modules.last().map_or(1, |last| last.dp_size);
        let round = if shares_rounds { own.dp_size } else { last };
        Self {
            count: own.dp_size,
            round,
            microbatches: microbatches.saturating_mul(round),
            shares_rounds,
            ranks_apart: own.stages,
            route: Vec::new(),
        }
    }
}

/// First stage and first rank of a module.
pub(super) struct Start {
    pub(super) stage: usize,
    pub(super) rank: usize,
}

/// Returns where each module starts.
pub(super) fn check_modules(modules: &[ModuleStages]) -> Result<Vec<Start>> {
    let (mut stage, mut rank) = (0_usize, 0_usize);
    let mut starts = Vec::with_capacity(modules.len());
    for (module, own) in modules.iter().enumerate() {
        let is_last = module + 1 == modules.len();
        if !is_last && own.feeds.is_some_and(|fed| fed <= module || fed >= modules.len()) {
            let reason = format!("module {module} feeds module {}, not one after it", own.feeds.unwrap_or(0));
            return Err(Error::Config { setting: "modules", reason });
        }
        check_sharing(modules, module)?;
        check_count("stages", own.stages)?;
        check_count("dp_size", own.dp_size)?;
        starts.push(Start { stage, rank });
        stage += own.stages;
        rank += own.stages * own.dp_size;
        check_count("stages", stage)?;
        check_count("ranks", rank)?;
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

pub(super) fn check_count(setting: &'static str, count: usize) -> Result<()> {
    if (1..=COUNT_MAX).contains(&count) {
        return Ok(());
    }
    Err(Error::Config { setting, reason: format!("{count} is not in 1..={COUNT_MAX}") })
}

/// Parts are numbered in 32 bits, up to three passes each.
pub(super) fn check_parts(stages: usize, microbatches: usize) -> Result<()> {
    if stages.saturating_mul(microbatches) < u32::MAX as usize / 8 {
        return Ok(());
    }
    let reason = format!("{microbatches} in {stages} stages are too many");
    Err(Error::Config { setting: "microbatches", reason })
}
