//! Converts the slices in a microbatch to `dflop.batches.Context`.

use dflop_loader::{MicrobatchContext, SliceGroup, SliceMedium};
use pyo3::prelude::*;

use crate::arrays::framework::Framework;
use crate::arrays::storage::Owner;
use crate::convert::class;

/// Returns a `dflop.batches.Context`.
pub(super) fn context<'py>(
    py: Python<'py>,
    context: MicrobatchContext,
    framework: Framework,
) -> PyResult<Bound<'py, PyAny>> {
    let groups: Vec<_> =
        context.groups.into_iter().map(|own| group(py, own, framework)).collect::<PyResult<_>>()?;
    class(py, "Context")?.call1((groups,))
}

fn group<'py>(py: Python<'py>, own: SliceGroup, framework: Framework) -> PyResult<Bound<'py, PyAny>> {
    let media = own.media.into_iter().map(|own| medium(py, own)).collect::<PyResult<Vec<_>>>()?;
    let array = |owner: Owner, length: usize| framework.array(py, owner, &[length]);
    let lengths = [own.cu_seqlens.len(), own.positions.len(), own.order.len(), own.features.len()];
    class(py, "ContextGroup")?.call1((
        own.ranks.collect::<Vec<_>>(),
        own.samples.collect::<Vec<_>>(),
        (own.rows.start, own.rows.end),
        array(Owner::I32(own.cu_seqlens), lengths[0])?,
        own.lengths,
        array(Owner::I64(own.positions), lengths[1])?,
        array(Owner::I64(own.order), lengths[2])?,
        array(Owner::I64(own.features), lengths[3])?,
        media,
    ))
}

fn medium(py: Python<'_>, own: SliceMedium) -> PyResult<Bound<'_, PyAny>> {
    let SliceMedium { sample, part, tokens } = own;
    let parts = (part.parts.start, part.parts.end);
    let kind = part.modality.name();
    class(py, "ContextMedium")?.call1((
        sample,
        kind,
        part.index,
        part.rank,
        parts,
        part.parts_in_medium,
        tokens,
    ))
}
