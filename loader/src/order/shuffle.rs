//! Defines the epoch shuffles.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Shuffle of the samples in an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shuffle {
    /// All samples together, where every shard is read by range. A compressed shard is read completely, so
    /// where there is one, each shard is a block: shards are permuted, then the samples inside each.
    #[default]
    Global,
    /// For storage that is slow to seek: samples are cut into runs that never cross a shard, the runs are
    /// permuted, and positions are permuted inside windows of consecutive runs. At most `open_blocks` shards
    /// are open at the same time, twice as many where a batch spans two windows. A compressed shard is a
    /// single run, whatever the length.
    Blocks {
        /// Maximum number of samples per run.
        block_samples: u64,
        /// Number of runs in a window.
        open_blocks: u64,
    },
    /// Index order.
    None,
}

impl fmt::Display for Shuffle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Global => formatter.write_str("of the whole epoch"),
            Self::Blocks { block_samples, open_blocks } => {
                write!(formatter, "of blocks of {block_samples} samples, {open_blocks} open at once")
            }
            Self::None => formatter.write_str("of nothing"),
        }
    }
}

impl Shuffle {
    /// Checks the sizes.
    pub(crate) fn check(self) -> Result<()> {
        let Self::Blocks { block_samples, open_blocks } = self else { return Ok(()) };
        if block_samples == 0 || open_blocks == 0 {
            let reason = "`block_samples` and `open_blocks` must be at least 1".into();
            return Err(Error::Config { setting: "shuffle", reason });
        }
        Ok(())
    }
}
