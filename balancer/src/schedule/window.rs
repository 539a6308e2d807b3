//! Schedules in which every kind of pass runs a fixed number of rounds behind the forward pass.

use super::action::{Part, Pass, PassKind};

/// What one rank has to do in a schedule with one stage a rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share<'a> {
    pub(super) stage: u16,
    /// Ascending.
    pub(super) microbatches: &'a [u32],
    /// Microbatches of a round: one for each replica of the last module.
    pub(super) round: usize,
    /// Stages between this one and the loss.
    pub(super) stages_after: usize,
    /// Stages on the longest way to the loss.
    pub(super) stages_in_all: usize,
}

impl Share<'_> {
    pub(super) fn pass(&self, kind: PassKind, microbatch: u32) -> Pass {
        Pass { kind, part: Part { microbatch, stage: self.stage } }
    }

    /// The microbatches of a round; none before the first and after the last.
    fn of_round(&self, round: Option<usize>) -> &[u32] {
        let Some(round) = round else { return &[] };
        let start = self.microbatches.partition_point(|&microbatch| microbatch as usize / self.round < round);
        let rest = &self.microbatches[start..];
        &rest[..rest.partition_point(|&microbatch| microbatch as usize / self.round == round)]
    }
}

/// Lists passes round by round: in round `i` the passes of each kind for the microbatches of round
/// `i - lag`, one of each kind in turn.
///
/// Such lists never wait for one another if the forward pass has lag 0 and the backward pass the number
/// of stages after: a backward pass then waits for an earlier round only, a forward pass for its round
/// in a stage before.
pub(super) fn windowed(share: &Share<'_>, lags: &[(PassKind, usize)]) -> Vec<Pass> {
    let last = share.microbatches.last().map_or(0, |&last| last as usize / share.round + 1);
    let longest = lags.iter().map(|(_, lag)| *lag).max().unwrap_or(0);
    let mut passes = Vec::with_capacity(share.microbatches.len() * lags.len());
    for round in 0..last + longest {
        let turns = |&(kind, lag): &(PassKind, usize)| (kind, share.of_round(round.checked_sub(lag)));
        let count = lags.iter().map(|lag| turns(lag).1.len()).max().unwrap_or(0);
        for turn in 0..count {
            let of_turn = lags.iter().map(turns).filter_map(|(kind, these)| Some((kind, *these.get(turn)?)));
            passes.extend(of_turn.map(|(kind, microbatch)| share.pass(kind, microbatch)));
        }
    }
    passes
}
