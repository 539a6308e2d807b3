//! Plan keys: properties that a plan is built for, rounded up so that few plans serve all microbatches.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};

/// Minimum numbers that a plan is built for: segments, rows in the longest segment.
const SEGMENTS_MIN: u32 = 8;
const LONGEST_MIN: u32 = 64;
/// Factor between consecutive numbers of segments that plans are built for.
const SEGMENTS_FACTOR: u32 = 4;
/// Maximum head width for which cuDNN has a backward pass on all devices.
const HEAD_DIM_MAX: u32 = 128;
/// Number of elements in 16 bytes: heads start at addresses that are multiples of it.
const HEAD_DIM_MULTIPLE: u32 = 8;

/// Properties that a plan is built for.
///
/// A plan serves every microbatch with at most these numbers: missing segments are empty, shorter segments
/// are padded. The score factor is not part of the key, because it is a call argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PlanKey {
    /// Whether the plan computes gradients.
    pub is_backward: bool,
    /// Whether a token attends only to itself and earlier tokens in the same segment.
    pub is_causal: bool,
    /// Whether a backward pass computes the same bits in every run.
    pub is_deterministic: bool,
    /// Head width.
    pub head_dim: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Maximum number of segments.
    pub segments: u32,
    /// Maximum number of rows in a segment.
    pub longest: u32,
    /// Maximum number of rows in all segments; 0 in forward plans, which do not depend on it.
    pub tokens: u32,
}

/// Attention sizes and mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Head width.
    pub head_dim: u32,
    /// Whether a token attends only to itself and earlier tokens in the same segment.
    pub is_causal: bool,
}

impl PlanKey {
    /// Returns the key for the forward plan that serves segments.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    #[must_use]
    pub fn forward(heads: Heads, starts: &[u32]) -> Self {
        let lengths = starts.windows(2).map(|pair| pair[1] - pair[0]);
        let Heads { heads, kv_heads, head_dim, is_causal } = heads;
        Self {
            is_backward: false,
            is_causal,
            is_deterministic: false,
            head_dim,
            heads,
            kv_heads,
            segments: segments_bucket(starts.len().saturating_sub(1) as u32),
            longest: lengths.max().unwrap_or(0).max(LONGEST_MIN).next_power_of_two(),
            tokens: 0,
        }
    }

    /// Returns the key for the backward plan that serves segments.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    /// - `is_deterministic`: whether every run must compute the same bits; costs time, and on Hopper before
    ///   cuDNN 9.25 [memory](super::Form::Direct)
    #[must_use]
    pub fn backward(heads: Heads, starts: &[u32], is_deterministic: bool) -> Self {
        let forward = Self::forward(heads, starts);
        let tokens = starts.last().map_or(0, |&rows| rows).max(forward.longest).next_power_of_two();
        Self { is_backward: true, is_deterministic, tokens, ..forward }
    }

    /// Returns the number of elements in a query-key-value row.
    #[must_use]
    pub const fn row(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Checks that a graph can be created.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self) -> Result<()> {
        let invalid = |setting, reason: String| Err(Error::Shape { setting, reason });
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return invalid("kv_heads", format!("{} do not divide {} heads", self.kv_heads, self.heads));
        }
        if !(1..=HEAD_DIM_MAX).contains(&self.head_dim) || !self.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            let reason = format!(
                "expected a multiple of {HEAD_DIM_MULTIPLE} up to {HEAD_DIM_MAX}, found {}",
                self.head_dim
            );
            return invalid("head_dim", reason);
        }
        if self.segments == 0 || self.longest == 0 {
            return invalid("segments", "a plan needs a segment and a row".to_owned());
        }
        if self.is_backward && self.tokens < self.longest {
            return invalid("tokens", format!("{} rows hold no segment of {}", self.tokens, self.longest));
        }
        Ok(())
    }
}

/// Returns the number of segments that a plan for `segments` segments is built for.
fn segments_bucket(segments: u32) -> u32 {
    let mut bucket = SEGMENTS_MIN;
    while bucket < segments {
        bucket *= SEGMENTS_FACTOR;
    }
    bucket
}

impl fmt::Display for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.is_backward { "backward" } else { "forward" };
        let order = if self.is_deterministic { "-deterministic" } else { "" };
        let mask = if self.is_causal { "causal" } else { "full" };
        let Self { heads, kv_heads, head_dim, segments, longest, tokens, .. } = self;
        write!(
            f,
            "{direction}{order}-{mask}-h{heads}-kv{kv_heads}-d{head_dim}-b{segments}-s{longest}-t{tokens}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { heads: 28, kv_heads: 4, head_dim: 128, is_causal: true };

    #[test]
    fn buckets_hold_what_they_are_made_for() {
        for segments in [1, 8, 9, 32, 33, 512, 513] {
            let starts: Vec<u32> = (0..=segments).map(|segment| segment * 70).collect();
            let key = PlanKey::backward(HEADS, &starts, false);
            assert!(key.segments >= segments && key.segments <= (segments * 4).max(8), "{key}");
            assert_eq!(key.longest, 128);
            assert!(key.tokens >= segments * 70 && key.tokens.is_power_of_two());
            key.check().unwrap();
        }
    }

    #[test]
    fn few_buckets_cover_many_microbatches() {
        let keys: std::collections::BTreeSet<PlanKey> =
            (1..4096).map(|first| PlanKey::backward(HEADS, &[0, first, 4096], false)).collect();
        assert_eq!(keys.len(), 2);
    }

    #[test]
    fn forward_keys_do_not_depend_on_the_tokens() {
        let short = PlanKey::forward(HEADS, &[0, 500, 1000]);
        assert_eq!(short, PlanKey::forward(HEADS, &[0, 500, 1000, 1500, 2000]));
        assert_eq!(short.to_string(), "forward-causal-h28-kv4-d128-b8-s512-t0");
    }

    #[test]
    fn no_segments_have_the_smallest_key() {
        let key = PlanKey::backward(HEADS, &[], false);
        assert_eq!((key.segments, key.longest, key.tokens), (8, 64, 64));
    }

    #[test]
    fn shapes_without_a_graph_are_refused() {
        let key = PlanKey::forward(HEADS, &[0, 10]);
        assert!(PlanKey { kv_heads: 5, ..key }.check().is_err());
        assert!(PlanKey { head_dim: 100, ..key }.check().is_err());
        assert!(PlanKey { head_dim: 256, ..key }.check().is_err());
        assert!(PlanKey { is_backward: true, ..key }.check().is_err());
    }
}
