//! Stages in a step: modules with replicas, and parallel chains of encoder stages that feed the last module's
//! stages.
//!
//! Stages are numbered encoder by encoder, then last-module stages. All chains end where the last module
//! begins, so a stage's *depth*, the place on the longest path, is counted from there.

use super::lagged::{Lags, StagePlace};
use super::{ScheduleKind, kind};
use crate::error::{Error, Result};

/// Maximum number of parallel encoders.
pub(crate) const ENCODERS_MAX: usize = 8;

/// Stages in an encoder, or in several sequential encoders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncoderChain {
    /// Number of stages.
    pub stages: u16,
    /// Whether the stages run backward; without trained parameters they do not.
    pub has_backward: bool,
}

/// Parallel encoders in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncoderChains {
    chains: [EncoderChain; ENCODERS_MAX],
    count: u8,
}

/// Stages and schedule for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Schedule kind.
    pub kind: ScheduleKind,
    /// Encoders, whose stages come first.
    pub encoders: EncoderChains,
    /// Total number of stages.
    pub stages: usize,
    /// Number of microbatches on each rank.
    pub slots: usize,
}

impl EncoderChains {
    /// Creates parallel encoders; encoders without a stage are left out. There are at most `ENCODERS_MAX`.
    #[must_use]
    pub fn new(chains: impl IntoIterator<Item = EncoderChain>) -> Self {
        let mut all = Self::default();
        for (own, chain) in all.chains.iter_mut().zip(chains.into_iter().filter(|chain| chain.stages > 0)) {
            *own = chain;
            all.count += 1;
        }
        all
    }

    /// Creates a single trained encoder; none if it has no stage.
    #[must_use]
    pub fn one(stages: usize) -> Self {
        Self::new([EncoderChain { stages: stages as u16, has_backward: true }])
    }

    /// Lists each encoder with the first stage.
    pub fn each(&self) -> impl Iterator<Item = (usize, EncoderChain)> + '_ {
        let mut next = 0;
        self.chains[..usize::from(self.count)].iter().map(move |chain| {
            let first = next;
            next += usize::from(chain.stages);
            (first, *chain)
        })
    }

    /// Lists each encoder's last stage.
    pub fn ends(&self) -> impl Iterator<Item = usize> + '_ {
        self.each().map(|(first, chain)| first + usize::from(chain.stages) - 1)
    }

    /// Returns the number of stages.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.each().map(|(_, chain)| usize::from(chain.stages)).sum()
    }

    /// Returns the longest encoder's number of stages.
    fn longest(&self) -> usize {
        self.each().map(|(_, chain)| usize::from(chain.stages)).max().unwrap_or(0)
    }

    /// Returns a stage's encoder and the encoder's first stage; `None` for a last-module stage.
    fn stage_chain(&self, stage: usize) -> Option<(usize, EncoderChain)> {
        self.each().find(|(first, chain)| (*first..first + usize::from(chain.stages)).contains(&stage))
    }
}

impl StepShape {
    /// Checks that the schedule runs these stages and that the passes can be ordered: each microbatch has one
    /// backward pass, and several stages per rank require a single chain.
    ///
    /// # Errors
    /// [`Error::Config`] otherwise.
    pub fn check(&self) -> Result<()> {
        let refuse = |reason| Err(Error::Config { setting: "schedule", reason });
        let (kind, stages) = (self.kind, self.stages);
        match kind {
            ScheduleKind::ZeroBubble => {
                refuse(format!("plans are made for schedules with whole backward passes, not for {kind}"))
            }
            ScheduleKind::Interleaved { chunks }
                if chunks == 0 || !stages.is_multiple_of(usize::from(chunks)) =>
            {
                refuse(format!("{kind} needs a multiple of {chunks} stages, got {stages}"))
            }
            ScheduleKind::Interleaved { .. } if self.encoder_stages() > 0 => {
                refuse(format!("{kind} is for one chain of stages, not for encoders beside each other"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the first stage on the rank that holds a stage: the stage itself, unless ranks hold several.
    #[must_use]
    pub fn first_of_rank(&self, stage: usize) -> usize {
        match self.kind {
            ScheduleKind::Interleaved { chunks } => stage % (self.stages / usize::from(chunks)),
            _ => stage,
        }
    }

    /// Returns the number of encoder stages, which come first.
    #[must_use]
    pub fn encoder_stages(&self) -> usize {
        self.encoders.stages()
    }

    /// Returns a stage's place on the longest path.
    #[must_use]
    pub fn depth(&self, stage: usize) -> usize {
        let longest = self.encoders.longest();
        match self.encoders.stage_chain(stage) {
            Some((first, chain)) => longest - usize::from(chain.stages) + stage - first,
            None => longest + stage - self.encoder_stages(),
        }
    }

    /// Returns the stage that receives the output; `None` for the last stage.
    #[must_use]
    pub fn receiver(&self, stage: usize) -> Option<usize> {
        let first = self.encoder_stages();
        if self.encoders.ends().any(|end| end == stage) {
            return Some(first);
        }
        (stage + 1 < self.stages).then_some(stage + 1)
    }

    /// Lists the stages that send the input: for the last module's first stage, each encoder's last stage.
    pub fn senders(&self, stage: usize) -> impl Iterator<Item = usize> + '_ {
        let is_first = self.encoders.each().any(|(first, _)| first == stage);
        let is_border = stage == self.encoder_stages();
        let before = stage.checked_sub(1).filter(|_| !is_first && !is_border);
        let ends = self.encoders.ends().filter(move |_| is_border);
        before.into_iter().chain(ends)
    }

    pub(super) fn lags(&self, stage: usize) -> Lags {
        let longest = self.encoders.longest();
        let encoder = self.encoders.stage_chain(stage);
        // The last module's stages follow all chains.
        let llm_stages = self.stages - self.encoder_stages();
        let stages_after = match encoder {
            Some((first, chain)) => llm_stages + first + usize::from(chain.stages) - stage - 1,
            None => self.stages - stage - 1,
        };
        let place = StagePlace {
            stages_after,
            stages_in_all: longest + llm_stages,
            rounds: self.slots,
            is_encoder: encoder.is_some(),
        };
        let lags = self.kind.lags(&place);
        if encoder.is_some_and(|(_, chain)| !chain.has_backward) { lags.forward_only() } else { lags }
    }

    /// Returns the maximum number of microbatches whose activations a stage holds at once.
    #[must_use]
    pub fn in_flight(&self, stage: usize) -> usize {
        if let ScheduleKind::Interleaved { chunks } = self.kind {
            let (ranks, rank) = (self.stages / usize::from(chunks), self.first_of_rank(stage));
            let passes = kind::passes(rank, ranks, usize::from(chunks), self.slots);
            return kind::held_max(&passes, stage).max(1);
        }
        let last = self.lags(stage).last().map_or(0, |(_, lag)| *lag);
        (last + 1).min(self.slots).max(1)
    }
}

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
    /// Number of stages per rank, which divides the stages: rank `r` of `n` in a replica holds the stages
    /// `r`, `r + n`, …
    pub chunks: usize,
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
        Self { stages, dp_size, feeds: None, shares_rounds: false, chunks: 1 }
    }

    /// Sets the number of stages per rank. Default: 1.
    #[must_use]
    pub fn chunks(mut self, chunks: usize) -> Self {
        self.chunks = chunks;
        self
    }

    /// Returns the number of ranks in a replica.
    pub(super) fn replica_ranks(&self) -> usize {
        self.stages / self.chunks.max(1)
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
            ranks_apart: own.replica_ranks(),
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
        if own.chunks == 0 || !own.stages.is_multiple_of(own.chunks) {
            let reason = format!("{} stages do not divide into {} chunks per rank", own.stages, own.chunks);
            return Err(Error::Config { setting: "chunks", reason });
        }
        starts.push(Start { stage, rank });
        stage += own.stages;
        rank += own.replica_ranks() * own.dp_size;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoders_of_any_length_end_where_the_last_module_begins() {
        let chain = |stages| EncoderChain { stages, has_backward: true };
        let encoders = EncoderChains::new([chain(1), chain(0), chain(3)]);
        let kind = ScheduleKind::OneForwardOneBackward;
        let shape = StepShape { kind, encoders, stages: 6, slots: 9 };
        assert_eq!((encoders.each().count(), shape.encoder_stages()), (2, 4));
        assert_eq!((0..6).map(|stage| shape.depth(stage)).collect::<Vec<_>>(), [2, 0, 1, 2, 3, 4]);
        let receivers: Vec<_> = (0..6).map(|stage| shape.receiver(stage)).collect();
        assert_eq!(receivers, [Some(4), Some(2), Some(3), Some(4), Some(5), None]);
        let senders = |stage| shape.senders(stage).collect::<Vec<_>>();
        assert_eq!([0, 1, 4, 5].map(senders), [vec![], vec![], vec![0, 3], vec![4]]);
        assert_eq!((0..6).map(|stage| shape.in_flight(stage)).collect::<Vec<_>>(), [3, 5, 4, 3, 2, 1]);
    }
}
