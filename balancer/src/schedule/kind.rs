//! Schedules by name.
//!
//! Interleaved 1F1B: every rank holds several chunks of layers, so the pipeline fills faster.

use super::action::PassKind::{Backward, Forward};
use super::action::{Part, Pass, PassKind};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Chunks per rank when only `interleaved` is given.
const CHUNKS: u16 = 2;
/// Rounds ahead when only `1f1b-ahead` is given.
const AHEAD: u16 = 2;

/// Schedule kind; written and read as `gpipe`, `1f1b`, `1f1b-ahead:2`, `interleaved:2` and `zb-h1`.
///
/// A rank's bubble is the time added to the ideal `m (f + b)`, where `p` ranks run `m` equal microbatches,
/// with `f` forward and `b` backward time per pass on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes. Keeps every microbatch in memory; bubble
    /// `(p - 1)(f + b)`.
    GPipe,
    /// One forward, one backward. Keeps at most `p - r` microbatches on rank `r`; bubble `(p - 1)(f + b)`.
    OneForwardOneBackward,
    /// 1F1B whose encoders run some rounds ahead. An encoder stage keeps that many rounds more; LLM ranks
    /// that share it no longer run in lockstep.
    EncoderAhead {
        /// Rounds ahead of 1F1B.
        rounds: u16,
    },
    /// 1F1B with several chunks of layers per rank. If `p` divides `m`, it keeps at most
    /// `2 (p - r - 1) + (chunks - 1) p + 1` chunks' microbatches and the bubble is `(p - 1)(f + b) / chunks`.
    Interleaved {
        /// Chunks of layers, at least 1.
        chunks: u16,
    },
    /// ZB-H1: 1F1B with backward passes split into an input and a weight half. Keeps at most `p` microbatches
    /// on every rank, like 1F1B on the first rank. If `m` is at least `p`, the bubble is
    /// `(p - 1)(f + b - 2 w)`, `w` the weight half, not longer than `f` and `b / 2`.
    ZeroBubble,
}

impl ScheduleKind {
    /// All kinds, with two chunks per rank and two rounds ahead where a number applies.
    pub const ALL: [Self; 5] = [
        Self::GPipe,
        Self::OneForwardOneBackward,
        Self::EncoderAhead { rounds: AHEAD },
        Self::Interleaved { chunks: CHUNKS },
        Self::ZeroBubble,
    ];

    /// Returns the name, without the number of chunks or rounds.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::EncoderAhead { .. } => "1f1b-ahead",
            Self::Interleaved { .. } => "interleaved",
            Self::ZeroBubble => "zb-h1",
        }
    }

    /// Returns the number of stages per rank.
    #[must_use]
    pub fn chunks(self) -> usize {
        if let Self::Interleaved { chunks } = self { usize::from(chunks) } else { 1 }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interleaved { chunks } => f.pad(&format!("interleaved:{chunks}")),
            Self::EncoderAhead { rounds } => f.pad(&format!("1f1b-ahead:{rounds}")),
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubble => f.pad(self.name()),
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    /// Parses a name; `interleaved` has two chunks and `1f1b-ahead` two rounds unless `:` and a different
    /// number follow.
    fn from_str(name: &str) -> Result<Self> {
        let number = |text: &str| text.parse().ok().filter(|number| *number > 0).ok_or_else(|| unknown(name));
        if let Some(chunks) = name.strip_prefix("interleaved:") {
            return Ok(Self::Interleaved { chunks: number(chunks)? });
        }
        if let Some(rounds) = name.strip_prefix("1f1b-ahead:") {
            return Ok(Self::EncoderAhead { rounds: number(rounds)? });
        }
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| unknown(name))
    }
}

fn unknown(name: &str) -> Error {
    let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
    Error::Config { setting: "schedule", reason: format!("`{name}` is not in {names}") }
}

/// Lists a rank's passes; rank `r` of `ranks` holds the stages `r`, `r + ranks`, `r + 2 ranks`, …
///
/// Microbatches run in groups of `ranks`, and the last group also takes the remainder; a group runs through
/// the first chunk, then through the second, backward in reverse. As many forward passes come first as in
/// Megatron-LM, `2 (ranks - r - 1) + (chunks - 1) g` with `g` the largest group, then forward and backward
/// passes alternate.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.2.
pub(super) fn passes(rank: usize, ranks: usize, chunks: usize, microbatches: usize) -> Vec<Pass> {
    let groups = groups(ranks, microbatches);
    let largest = groups.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    let stages: Vec<usize> = (0..chunks).map(|chunk| chunk * ranks + rank).collect();
    let reversed: Vec<usize> = stages.iter().rev().copied().collect();
    let forward = in_groups(&groups, Forward, &stages);
    let backward = in_groups(&groups, Backward, &reversed);
    let warm_up = (2 * (ranks - rank - 1) + (chunks - 1) * largest).min(forward.len());

    let (first, steady) = forward.split_at(warm_up);
    let (turns, rest) = backward.split_at(steady.len());
    let mut passes = first.to_vec();
    passes.extend(steady.iter().zip(turns).flat_map(|(forward, backward)| [*forward, *backward]));
    passes.extend(rest);
    passes
}

/// Returns the maximum number of microbatches between forward and backward pass in a stage on the rank.
pub(super) fn held_max(passes: &[Pass], stage: usize) -> usize {
    let (mut held, mut most) = (0_usize, 0);
    for pass in passes.iter().filter(|pass| usize::from(pass.part.stage) == stage) {
        held = if pass.kind == Forward { held + 1 } else { held - 1 };
        most = most.max(held);
    }
    most
}

/// Groups microbatches by `ranks`, the remainder in the last group.
fn groups(ranks: usize, microbatches: usize) -> Vec<std::ops::Range<u32>> {
    let count = (microbatches / ranks).max(1);
    let end = |group: usize| if group == count { microbatches } else { group * ranks } as u32;
    (0..count).map(|group| end(group)..end(group + 1)).collect()
}

/// Lists passes group by group, each group through all stages.
fn in_groups(groups: &[std::ops::Range<u32>], kind: PassKind, stages: &[usize]) -> Vec<Pass> {
    let mut passes = Vec::new();
    for group in groups {
        for &stage in stages {
            let part = |microbatch| Part { microbatch, stage: stage as u16 };
            passes.extend(group.clone().map(|microbatch| Pass { kind, part: part(microbatch) }));
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        let numbered = [ScheduleKind::Interleaved { chunks: 7 }, ScheduleKind::EncoderAhead { rounds: 9 }];
        for kind in ScheduleKind::ALL.into_iter().chain(numbered) {
            assert_eq!(kind.to_string().parse::<ScheduleKind>().unwrap(), kind);
        }
        assert_eq!("interleaved".parse::<ScheduleKind>().unwrap().chunks(), 2);
        for name in ["zero", "interleaved:0", "interleaved:x", "interleaved:", "1f1b-ahead:0"] {
            assert!(name.parse::<ScheduleKind>().is_err());
        }
    }
}
