//! Graph forms: engine support by version and device, and requirements.

use serde::{Deserialize, Serialize};

use super::super::engine::{self, Order};
use super::super::library::Version;
use super::super::plan_key::PlanKey;
use super::tensor::Id;

/// Alignment of workspace locations in bytes.
pub(in super::super) const SCRATCH_ALIGNMENT_BYTES: u64 = 256;
/// Element sizes in bytes.
const F32_BYTES: u64 = 4;
const BF16_BYTES: u64 = 2;
/// First version with a causal mask operation.
const MASK_OPERATION: Version = Version(92_100);
/// First version with engines for a single-operation backward pass.
const BACKWARD_OPERATION: Version = Version(92_800);
/// First versions whose engines can add in a fixed order, and that choose tiles by separate settings.
const HOPPER_ORDER: Version = Version(92_500);
const BLACKWELL_ORDER: Version = Version(91_800);
const BLACKWELL_TILES: Version = Version(92_300);
/// Major compute capabilities.
const HOPPER: u32 = 9;
const BLACKWELL: u32 = 10;
/// Head width multiple for which a bound on the rows in all segments works; engines have a fault with other
/// widths.
const BOUNDED_HEAD_DIM_MULTIPLE: u32 = 16;

/// Graph form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// A single operation.
    Single,
    /// Products, sums and element functions, which an engine recognizes as attention.
    Composite,
    /// A composite backward graph whose query gradient is one product, not a sum of f32 parts. On Hopper the
    /// engine keeps the gradients of all scores: 2 bytes times segments, heads, longest and longest.
    Direct,
    /// A composite backward graph that reads the log-sum-exp as `[segments, heads, longest]` from the
    /// workspace, which grows with segments times longest; see [`super::super::Plan::padded_log_sums`].
    Padded,
}

impl Form {
    /// Returns the forms to try for a key, best first.
    ///
    /// The composite backward graph comes before the single form, because other programs run its kernels.
    pub(in super::super) fn of(version: Version, major: u32, key: &PlanKey) -> &'static [Self] {
        if !key.is_backward {
            let is_single = version >= MASK_OPERATION || !key.is_causal;
            return if is_single { &[Self::Single, Self::Composite] } else { &[Self::Composite] };
        }
        match (major, key.is_deterministic) {
            (HOPPER, true) if version >= HOPPER_ORDER => &[Self::Composite],
            (HOPPER, true) => &[Self::Direct],
            (BLACKWELL, true) if version >= BLACKWELL_ORDER => &[Self::Direct],
            (HOPPER | BLACKWELL, false) if version >= BACKWARD_OPERATION => &[Self::Composite, Self::Single],
            (HOPPER | BLACKWELL, false) => &[Self::Composite],
            (_, false) => &[Self::Padded],
            (_, true) => &[],
        }
    }

    /// Returns the engine that a key needs so that sums have a fixed order; otherwise the heuristics choose.
    pub(in super::super) fn order(version: Version, major: u32, key: &PlanKey) -> Option<&'static Order> {
        match (key.is_deterministic, major) {
            (true, HOPPER) if version >= HOPPER_ORDER => Some(&engine::HOPPER),
            (true, BLACKWELL) if version >= BLACKWELL_TILES => Some(&engine::BLACKWELL),
            (true, BLACKWELL) => Some(&engine::BLACKWELL_BY_KERNEL),
            _ => None,
        }
    }

    /// Returns whether a graph uses the fact that all segments together have at most `tokens` rows.
    pub(in super::super) const fn is_bounded(self, key: &PlanKey) -> bool {
        !matches!(self, Self::Padded) && key.head_dim.is_multiple_of(BOUNDED_HEAD_DIM_MULTIPLE)
    }

    /// Returns whether key and value gradients are separate matrices, `[tokens, kv_heads * head_dim]`.
    ///
    /// An engine gives the gradient of every query head a row stride that is a multiple of the row length;
    /// the rows would be mostly holes if they were between the query gradients.
    pub(in super::super) const fn has_gradients_apart(self, key: &PlanKey) -> bool {
        key.is_backward && key.heads != key.kv_heads && self.is_bounded(key)
    }

    /// Returns the graph tensors in the workspace, with sizes in bytes.
    pub(in super::super) fn scratch(self, key: &PlanKey) -> Vec<(Id, u64)> {
        if !key.is_backward {
            return Vec::new();
        }
        let [heads, kv_heads, head_dim] = [key.heads, key.kv_heads, key.head_dim].map(u64::from);
        let padded = u64::from(key.segments) * u64::from(key.longest);
        let tokens = u64::from(key.tokens);
        let (rows, queries) = if self.is_bounded(key) {
            (tokens, tokens * u64::from(key.row()))
        } else {
            (padded, padded * heads * head_dim)
        };
        let mut scratch = Vec::new();
        if self != Self::Single {
            scratch.push((Id::RowSums, rows * heads * F32_BYTES));
        }
        if matches!(self, Self::Composite | Self::Padded) {
            scratch.push((Id::DQuerySums, queries * F32_BYTES));
        }
        if self == Self::Padded {
            scratch.push((Id::LogSums, padded * heads * F32_BYTES));
        }
        if self.has_gradients_apart(key) {
            let bytes = tokens * kv_heads * head_dim * BF16_BYTES;
            scratch.extend([(Id::DKeys, bytes), (Id::DValues, bytes)]);
        }
        if self.has_gradients_apart(key) && self != Self::Single {
            let bytes = tokens * heads * head_dim * BF16_BYTES;
            scratch.extend([(Id::DKeysOfHeads, bytes), (Id::DValuesOfHeads, bytes)]);
        }
        for (_, bytes) in &mut scratch {
            *bytes = bytes.next_multiple_of(SCRATCH_ALIGNMENT_BYTES);
        }
        scratch
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::plan_key::Heads;
    use super::*;

    fn key(head_dim: u32, is_deterministic: bool) -> PlanKey {
        let heads = Heads { heads: 28, kv_heads: 4, head_dim, is_causal: true };
        PlanKey::backward(heads, &[0, 100, 8192], is_deterministic)
    }

    #[test]
    fn old_versions_have_composite_graphs_only() {
        let forward = PlanKey { is_backward: false, ..key(128, false) };
        assert_eq!(Form::of(Version(91_900), 9, &forward), [Form::Composite]);
        assert_eq!(Form::of(Version(92_100), 9, &forward)[0], Form::Single);
        assert_eq!(Form::of(Version(91_900), 9, &key(128, false)), [Form::Composite]);
        assert!(Form::of(Version(92_800), 10, &key(128, false)).contains(&Form::Single));
    }

    #[test]
    fn the_order_is_fixed_by_an_engine_or_by_one_product() {
        let of = |version, major| {
            let (version, key) = (Version(version), key(128, true));
            (Form::of(version, major, &key), Form::order(version, major, &key).is_some())
        };
        assert_eq!(of(91_900, 9), (&[Form::Direct][..], false));
        assert_eq!(of(92_800, 9), (&[Form::Composite][..], true));
        assert_eq!(of(91_900, 10), (&[Form::Direct][..], true));
        assert_eq!(of(92_800, 10), (&[Form::Direct][..], true));
        assert_eq!(of(92_800, 8), (&[][..], false));
        assert!(Form::order(Version(92_800), 9, &key(128, false)).is_none());
    }

    #[test]
    fn ampere_reads_padded_numbers() {
        assert_eq!(Form::of(Version(92_800), 8, &key(128, false)), [Form::Padded]);
        assert_eq!(Form::of(Version(92_800), 8, &key(128, true)), []);
        assert!(!Form::Padded.is_bounded(&key(128, false)));
    }

    #[test]
    fn workspace_grows_with_tokens_unless_the_bound_is_unusable() {
        let bytes =
            |form: Form, key: &PlanKey| -> u64 { form.scratch(key).iter().map(|&(_, bytes)| bytes).sum() };
        let more = |key: PlanKey| PlanKey { segments: key.segments * 4, ..key };
        assert_eq!(bytes(Form::Composite, &key(128, false)), bytes(Form::Composite, &more(key(128, false))));
        assert!(bytes(Form::Composite, &key(72, false)) < bytes(Form::Composite, &more(key(72, false))));
        assert!(bytes(Form::Direct, &key(128, true)) < bytes(Form::Composite, &key(128, true)));
    }
}
