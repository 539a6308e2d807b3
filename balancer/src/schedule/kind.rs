//! Schedules by name.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Chunks per rank when only `interleaved` is given.
const CHUNKS: u16 = 2;

/// Kind of schedule; written and read as `gpipe`, `1f1b`, `interleaved:2` and `zb-h1`.
///
/// The bubble of a rank is the time added to the ideal `m (f + b)`, where `p` ranks run `m` microbatches, all
/// alike, with passes of `f` forward and `b` backward on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes. Keeps every microbatch in memory; bubble
    /// `(p - 1)(f + b)`.
    GPipe,
    /// One forward, one backward. Keeps at most `p - r` microbatches on rank `r`; bubble `(p - 1)(f + b)`.
    OneForwardOneBackward,
    /// 1F1B with several chunks of layers per rank. If `p` divides `m`, it keeps at most
    /// `2 (p - r - 1) + (chunks - 1) p + 1` chunks' microbatches and its bubble is `(p - 1)(f + b) / chunks`.
    Interleaved {
        /// Chunks of layers, at least 1.
        chunks: u16,
    },
    /// ZB-H1: 1F1B with backward passes split into an input and a weight half. Keeps at most `p` microbatches
    /// on every rank, like 1F1B on its first. If `m` is at least `p`, its bubble is
    /// `(p - 1)(f + b - 2 w)`, `w` the weight half, not longer than `f` and `b / 2`.
    ZeroBubble,
}

impl ScheduleKind {
    /// All kinds, one with two chunks per rank.
    pub const ALL: [Self; 4] =
        [Self::GPipe, Self::OneForwardOneBackward, Self::Interleaved { chunks: CHUNKS }, Self::ZeroBubble];

    /// Returns the name, without the number of chunks.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved { .. } => "interleaved",
            Self::ZeroBubble => "zb-h1",
        }
    }

    /// Returns how many stages a rank holds.
    #[must_use]
    pub fn chunks(self) -> usize {
        if let Self::Interleaved { chunks } = self { usize::from(chunks) } else { 1 }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interleaved { chunks } => f.pad(&format!("interleaved:{chunks}")),
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubble => f.pad(self.name()),
        }
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    /// Parses a name; `interleaved` has two chunks unless `:` and another number follow.
    fn from_str(name: &str) -> Result<Self> {
        if let Some(chunks) = name.strip_prefix("interleaved:") {
            let chunks = chunks.parse().ok().filter(|chunks| *chunks > 0);
            return chunks.map(|chunks| Self::Interleaved { chunks }).ok_or_else(|| unknown(name));
        }
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| unknown(name))
    }
}

fn unknown(name: &str) -> Error {
    let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
    Error::Config { setting: "schedule", reason: format!("`{name}` is not in {names}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for kind in ScheduleKind::ALL.into_iter().chain([ScheduleKind::Interleaved { chunks: 7 }]) {
            assert_eq!(kind.to_string().parse::<ScheduleKind>().unwrap(), kind);
        }
        assert_eq!("interleaved".parse::<ScheduleKind>().unwrap().chunks(), 2);
        for name in ["zero", "interleaved:0", "interleaved:x", "interleaved:"] {
            assert!(name.parse::<ScheduleKind>().is_err());
        }
    }
}
