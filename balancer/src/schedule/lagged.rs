//! Orders passes so that every kind runs a fixed number of rounds after the forward pass.

use super::action::{Part, Pass, PassKind};

/// Stage position in a step, which determines the lags of the stage's passes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagePlace {
    /// Number of stages between this stage and the loss.
    pub(crate) stages_after: usize,
    /// Number of stages on the longest path to the loss.
    pub(crate) stages_in_all: usize,
    /// Rounds in the step: microbatches per rank in the last module.
    pub(crate) rounds: usize,
    /// Whether the stage belongs to a module before the last, an encoder.
    pub(crate) is_encoder: bool,
}

/// Maximum number of pass kinds for a microbatch in a stage.
const KINDS_MAX: usize = 3;

/// Number of rounds by which each pass kind follows a microbatch's forward pass, in the order within a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lags {
    all: [(PassKind, usize); KINDS_MAX],
    count: usize,
}

impl Lags {
    /// Creates lags from pass kinds; the forward pass is first, with lag 0.
    pub(super) fn new(lags: &[(PassKind, usize)]) -> Self {
        let mut all = [(PassKind::Forward, 0); KINDS_MAX];
        all[..lags.len()].copy_from_slice(lags);
        Self { all, count: lags.len() }
    }

    /// Keeps only the forward pass.
    pub(super) fn forward_only(self) -> Self {
        Self { count: 1, ..self }
    }
}

impl std::ops::Deref for Lags {
    type Target = [(PassKind, usize)];

    fn deref(&self) -> &Self::Target {
        &self.all[..self.count]
    }
}

/// Work on a rank, in a schedule with one stage per rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankWork<'a> {
    pub(super) stage: u16,
    /// Microbatches on the rank, ascending.
    pub(super) microbatches: &'a [u32],
    /// Microbatches per round: one for each last-module replica.
    pub(super) round: usize,
}

impl RankWork<'_> {
    fn pass(&self, kind: PassKind, microbatch: u32) -> Pass {
        Pass { kind, part: Part { microbatch, stage: self.stage } }
    }

    /// Returns the microbatches in a round; none before the first and after the last.
    fn round_microbatches(&self, round: Option<usize>) -> &[u32] {
        let Some(round) = round else { return &[] };
        let start = self.microbatches.partition_point(|&microbatch| microbatch as usize / self.round < round);
        let rest = &self.microbatches[start..];
        &rest[..rest.partition_point(|&microbatch| microbatch as usize / self.round == round)]
    }
}

/// Lists passes round by round: in round `i`, each kind's passes for the microbatches in round `i - lag`,
/// alternating between kinds.
///
/// Such lists never deadlock if the forward pass has lag 0 and the backward pass the number of stages after:
/// a backward pass then waits only for an earlier round, a forward pass for its round in an earlier stage.
pub(super) fn lagged_passes(work: &RankWork<'_>, lags: &[(PassKind, usize)]) -> Vec<Pass> {
    let last = work.microbatches.last().map_or(0, |&last| last as usize / work.round + 1);
    let longest = lags.iter().map(|(_, lag)| *lag).max().unwrap_or(0);
    let mut passes = Vec::with_capacity(work.microbatches.len() * lags.len());
    for round in 0..last + longest {
        let turns =
            |&(kind, lag): &(PassKind, usize)| (kind, work.round_microbatches(round.checked_sub(lag)));
        let count = lags.iter().map(|lag| turns(lag).1.len()).max().unwrap_or(0);
        for turn in 0..count {
            let of_turn = lags.iter().map(turns).filter_map(|(kind, these)| Some((kind, *these.get(turn)?)));
            passes.extend(of_turn.map(|(kind, microbatch)| work.pass(kind, microbatch)));
        }
    }
    passes
}
