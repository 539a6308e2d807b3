//! Graph forms: engine support by version and device, and requirements.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnDataType_t as DataType,
};
use serde::{Deserialize, Serialize};

use super::super::engine::{self, Order};
use super::super::library::Version;
use crate::cudnn::descriptor::Descriptor;
use crate::cudnn::library::{Library, PlanKey, Result};

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

/// Alignment of tensor addresses in bytes.
const ALIGNMENT_BYTES: i64 = 16;
/// Axes for segments, heads, rows and columns.
const SEGMENT: usize = 0;
const ROW: usize = 2;
const COLUMN: usize = 3;

/// Identifiers for tensors with an address in the call arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cudnn) enum Id {
    Queries = 1,
    Keys,
    Values,
    Output,
    LogSums,
    DOutput,
    DQueries,
    DKeys,
    DValues,
    QueryLengths,
    KeyLengths,
    RowOffsets,
    OutputOffsets,
    KeyOffsets,
    LogSumOffsets,
    /// Score factor.
    Scale,
    /// Scores for row pairs after a segment, and for a query and a later key.
    Padding,
    Later,
    One,
    /// Sum of the output times its gradient, for every row and head.
    RowSums,
    /// Query gradient in f32.
    DQuerySums,
    /// Key and value gradients for every query head.
    DKeysOfHeads,
    DValuesOfHeads,
    /// First tensor that exists only within a graph.
    Inner,
}

/// Creates the tensors in the graph for a key.
pub(super) struct Tensors<'a> {
    pub(super) library: &'a Arc<Library>,
    pub(super) key: &'a PlanKey,
    pub(super) form: Form,
    inner: i64,
}

/// Numbers of segments, heads, rows and columns, and strides in elements.
#[derive(Clone, Copy)]
struct Layout {
    dims: [i64; 4],
    strides: [i64; 4],
}

impl Layout {
    /// Packed rows, with `heads` heads of `columns` columns each.
    fn packed(key: &PlanKey, heads: u32, columns: u32, row: u32) -> Self {
        let [segments, heads, longest] = [key.segments, heads, key.longest].map(i64::from);
        let [columns, row] = [columns, row].map(i64::from);
        Self { dims: [segments, heads, longest, columns], strides: [longest * row, columns, row, 1] }
    }

    /// Heads in sequence, padded to the longest segment.
    fn dense(key: &PlanKey, columns: u32) -> Self {
        let [segments, heads, longest] = [key.segments, key.heads, key.longest].map(i64::from);
        let columns = i64::from(columns);
        let strides = [heads * longest * columns, longest * columns, columns, 1];
        Self { dims: [segments, heads, longest, columns], strides }
    }

    fn transposed(mut self) -> Self {
        self.dims.swap(ROW, COLUMN);
        self.strides.swap(ROW, COLUMN);
        self
    }
}

impl<'a> Tensors<'a> {
    pub(super) const fn new(library: &'a Arc<Library>, key: &'a PlanKey, form: Form) -> Self {
        Self { library, key, form, inner: Id::Inner as i64 }
    }

    /// Returns columns in the query-key-value matrix: `heads` heads in the packed rows.
    pub(super) fn row_columns(
        &self,
        id: Id,
        heads: u32,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, self.row(heads), offsets)
    }

    /// Returns keys or values in the matrix, with rows and columns exchanged.
    pub(super) fn transposed_of_row(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = self.row(self.key.kv_heads).transposed();
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns the keys in the matrix, as a tensor within a graph.
    pub(super) fn inner_of_row(&mut self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = self.row(self.key.kv_heads);
        let (_, mut tensor) = self.inner(DataType::CUDNN_DATA_BFLOAT16, layout)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    /// Returns the query gradient in f32, in the workspace.
    pub(super) fn query_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_FLOAT;
        if self.form.is_bounded(self.key) {
            return self.ragged(Id::DQuerySums, kind, self.row(self.key.heads), offsets);
        }
        self.tensor(Id::DQuerySums as i64, kind, Layout::dense(self.key, self.key.head_dim))?.finalize()
    }

    /// Returns the segment offsets in the key and value gradients.
    pub(super) fn gradient_offsets(&self, rows: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let is_apart = self.form.has_gradients_apart(self.key);
        if is_apart { self.offsets(Id::KeyOffsets) } else { Ok(Arc::clone(rows)) }
    }

    /// Returns the key or value gradient: columns in the matrix, or a separate matrix in the workspace.
    pub(super) fn gradient(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let layout = if self.form.has_gradients_apart(self.key) {
            self.keys(self.key.kv_heads)
        } else {
            self.row(self.key.kv_heads)
        };
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns the key or value gradient for every query head: in the workspace, with row length scaled by
    /// the same factor as the number of heads, by which the engine multiplies the gradient offsets; or within
    /// the graph.
    pub(super) fn query_head_gradient(
        &mut self,
        id: Id,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_BFLOAT16;
        if !self.form.has_gradients_apart(self.key) {
            let layout = Layout::dense(self.key, self.key.head_dim);
            return self.inner(kind, layout)?.1.finalize();
        }
        let mut layout = self.keys(self.key.heads);
        for axis in [SEGMENT, ROW] {
            layout.strides[axis] *= i64::from(self.key.heads / self.key.kv_heads);
        }
        self.ragged(id, kind, layout, offsets)
    }

    /// Returns the packed output rows.
    pub(super) fn output_rows(&self, id: Id, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let row = self.key.heads * self.key.head_dim;
        let layout = Layout::packed(self.key, self.key.heads, self.key.head_dim, row);
        self.ragged(id, DataType::CUDNN_DATA_BFLOAT16, layout, offsets)
    }

    /// Returns a number for every output element, within a graph.
    pub(super) fn output_numbers(&mut self) -> Result<Arc<Descriptor>> {
        let layout = Layout::dense(self.key, self.key.head_dim);
        self.inner(DataType::CUDNN_DATA_FLOAT, layout)?.1.finalize()
    }

    /// Returns the log-sum-exp for every row and head: packed, `[tokens, heads]`, or padded,
    /// `[segments, heads, longest]`.
    pub(super) fn log_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.numbers(Id::LogSums, self.form != Form::Padded, offsets)
    }

    /// Returns a number for every row and head, in the workspace.
    pub(super) fn row_sums(&self, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        self.numbers(Id::RowSums, self.form.is_bounded(self.key), offsets)
    }

    fn numbers(&self, id: Id, is_packed: bool, offsets: &Arc<Descriptor>) -> Result<Arc<Descriptor>> {
        let kind = DataType::CUDNN_DATA_FLOAT;
        if is_packed {
            return self.ragged(
                id,
                kind,
                Layout::packed(self.key, self.key.heads, 1, self.key.heads),
                offsets,
            );
        }
        self.tensor(id as i64, kind, Layout::dense(self.key, 1))?.finalize()
    }

    /// Returns a number for every row and head, within a graph.
    pub(super) fn row_numbers(&mut self) -> Result<Arc<Descriptor>> {
        self.inner(DataType::CUDNN_DATA_FLOAT, Layout::dense(self.key, 1))?.1.finalize()
    }

    /// Returns scores with an identifier, within a graph.
    pub(super) fn scores(&mut self, kind: DataType) -> Result<(i64, Arc<Descriptor>)> {
        let (id, tensor) = self.inner(kind, Layout::dense(self.key, self.key.longest))?;
        Ok((id, tensor.finalize()?))
    }

    /// Returns scores with keys as rows and queries as columns, within a graph.
    pub(super) fn transposed_scores(&mut self, kind: DataType) -> Result<Arc<Descriptor>> {
        let layout = Layout::dense(self.key, self.key.longest).transposed();
        self.inner(kind, layout)?.1.finalize()
    }

    /// Returns the number of rows in every segment.
    pub(super) fn lengths(&self, id: Id) -> Result<Arc<Descriptor>> {
        self.list(id, DataType::CUDNN_DATA_INT32, i64::from(self.key.segments))
    }

    /// Returns the first element in every segment, and the end of the last segment.
    pub(super) fn offsets(&self, id: Id) -> Result<Arc<Descriptor>> {
        self.list(id, DataType::CUDNN_DATA_INT64, i64::from(self.key.segments) + 1)
    }

    /// Returns a host value in the call arguments.
    pub(super) fn host_value(&self, id: Id) -> Result<Arc<Descriptor>> {
        let layout = Layout { dims: [1; 4], strides: [1; 4] };
        let mut tensor = self.tensor(id as i64, DataType::CUDNN_DATA_FLOAT, layout)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?;
        tensor.finalize()
    }

    fn row(&self, heads: u32) -> Layout {
        Layout::packed(self.key, heads, self.key.head_dim, self.key.row())
    }

    fn keys(&self, heads: u32) -> Layout {
        Layout::packed(self.key, heads, self.key.head_dim, self.key.kv_heads * self.key.head_dim)
    }

    fn list(&self, id: Id, kind: DataType, len: i64) -> Result<Arc<Descriptor>> {
        self.tensor(id as i64, kind, Layout { dims: [len, 1, 1, 1], strides: [1; 4] })?.finalize()
    }

    fn ragged(
        &self,
        id: Id,
        kind: DataType,
        layout: Layout,
        offsets: &Arc<Descriptor>,
    ) -> Result<Arc<Descriptor>> {
        let mut tensor = self.tensor(id as i64, kind, layout)?;
        tensor.link(Attribute::CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, &[offsets])?;
        tensor.finalize()
    }

    fn inner(&mut self, kind: DataType, layout: Layout) -> Result<(i64, Descriptor)> {
        let id = self.inner;
        self.inner += 1;
        let mut tensor = self.tensor(id, kind, layout)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?;
        Ok((id, tensor))
    }

    fn tensor(&self, id: i64, kind: DataType, layout: Layout) -> Result<Descriptor> {
        let mut tensor = Descriptor::new(self.library, DescriptorType::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[kind])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.dims)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES])?;
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::library::Heads;

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
