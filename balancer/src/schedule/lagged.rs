//! Schedules that order passes so that every kind runs a fixed number of rounds after the forward pass:
//! all but the interleaved schedule.

use super::action::PassKind::{Backward, BackwardInput, BackwardWeight, Forward};
use super::action::{Part, Pass, PassKind};
use super::kind::ScheduleKind;

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
    fn new(lags: &[(PassKind, usize)]) -> Self {
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

impl ScheduleKind {
    /// Returns the lags for a stage's passes, if each rank holds a single stage.
    pub(crate) fn lags(self, place: &StagePlace) -> Lags {
        match self {
            Self::GPipe => gpipe_lags(place),
            Self::ZeroBubble => zero_bubble_lags(place),
            Self::EncoderAhead { rounds } => encoder_ahead_lags(place, usize::from(rounds)),
            Self::OneForwardOneBackward | Self::Interleaved { .. } => one_forward_one_backward_lags(place),
        }
    }
}

/// `GPipe`: all forward passes, then all backward passes.
///
/// Returns the lags for a stage's passes: backward passes follow when all forward passes are done.
///
/// # Source
/// Huang et al., "`GPipe`: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
/// arXiv:1811.06965, section 2.2. Backward passes run in the order of the forward passes, because a stage
/// frees the same memory either way and the first gradients arrive earlier at the first stage.
fn gpipe_lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (Backward, place.rounds + place.stages_after)])
}

/// 1F1B: forward passes fill the pipeline, then one forward and one backward pass alternate.
///
/// Returns the lags for a stage's passes: a backward pass runs as many rounds after its forward pass as there
/// are stages after this stage.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
fn one_forward_one_backward_lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (Backward, place.stages_after)])
}

/// 1F1B whose encoders run some rounds ahead, so that LLM ranks wait less for each other.
///
/// Under 1F1B an encoder that serves all LLM ranks computes the next round when every rank has returned its
/// gradient, so all ranks run in lockstep. With rounds in reserve, a rank that is late in a round makes up
/// for it in the next. The encoder holds that many microbatches more.
///
/// Returns the lags for a stage's passes: the 1F1B lags, plus `ahead` rounds in an encoder stage.
fn encoder_ahead_lags(place: &StagePlace, ahead: usize) -> Lags {
    let ahead = if place.is_encoder { ahead } else { 0 };
    Lags::new(&[(Forward, 0), (Backward, place.stages_after + ahead)])
}

/// ZB-H1: 1F1B with weight gradients delayed to where a stage would wait.
///
/// Returns the lags for a stage's passes. Other stages depend only on the input gradient. It runs where 1F1B
/// has its backward pass; the weight gradient follows on every rank `p - 1` rounds after the forward pass,
/// with `p` stages in total. So every rank keeps at most `p` microbatches, like the first rank under 1F1B.
/// With forward, input and weight parts of `f`, `b` and `w`, where `w` is at most `f` and `b`, and `p`
/// microbatches or more, the bubble is `(p - 1)(f + b - w)` where 1F1B has `(p - 1)(f + b + w)`.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 2.1 and table 2.
fn zero_bubble_lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (BackwardInput, place.stages_after), (BackwardWeight, place.stages_in_all - 1)])
}
