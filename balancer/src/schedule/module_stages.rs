//! Modules in a job: stages, replicas and feeding order.

use crate::error::{Error, Result};

/// Maximum number of ranks, and of stages; actions count them in 16 bits.
const COUNT_MAX: usize = u16::MAX as usize;

/// Pipeline stages and replicas for one module in a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleStages {
    /// Pipeline stages per replica, at least 1.
    pub stages: usize,
    /// Number of replicas, at least 1.
    pub dp_size: usize,
    /// Index of the module that receives the activations. Default: the next module. Ignored for the last
    /// module.
    pub feeds: Option<usize>,
    /// Whether each replica computes a share of every round's items.
    pub shares_rounds: bool,
}

/// Assignment of microbatches to module replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Replicas {
    pub(super) count: usize,
    /// Microbatches per round.
    pub(super) round: usize,
    pub(super) microbatches: usize,
    pub(super) shares_rounds: bool,
    /// Distance in ranks between neighboring replicas.
    pub(super) ranks_apart: usize,
    /// Replica per microbatch; empty if it is `u mod count`.
    pub(super) route: Vec<u16>,
}

impl ModuleStages {
    /// Describes a module that feeds the next module.
    #[must_use]
    pub fn new(stages: usize, dp_size: usize) -> Self {
        Self { stages, dp_size, feeds: None, shares_rounds: false }
    }

    /// Sets the module that receives this module's activations, skipping the modules between: a parallel
    /// branch.
    #[must_use]
    pub fn feeds(mut self, module: usize) -> Self {
        self.feeds = Some(module);
        self
    }

    /// Lets each replica compute a share of every round's items, independently of the microbatches. The last
    /// module's items stay in their microbatches. Modules between a sharing module and the last must share
    /// too.
    #[must_use]
    pub fn share_rounds(mut self) -> Self {
        self.shares_rounds = true;
        self
    }
}

impl Replicas {
    /// Describes a module's replicas; `microbatches` counts per rank in the last module.
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

/// First stage and first rank in a module.
pub(super) struct Start {
    pub(super) stage: usize,
    pub(super) rank: usize,
}

/// Checks the modules and returns where each starts.
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

/// Rejects modules that exchange messages with a sharing module but have several microbatches per rank and
/// round: messages with the same ends would be ambiguous.
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

/// Rejects too many parts: they are numbered in 32 bits, with up to three passes each.
pub(super) fn check_parts(stages: usize, microbatches: usize) -> Result<()> {
    if stages.saturating_mul(microbatches) < u32::MAX as usize / 8 {
        return Ok(());
    }
    let reason = format!("{microbatches} microbatches in {stages} stages are too many");
    Err(Error::Config { setting: "microbatches", reason })
}
