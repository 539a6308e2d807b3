//! Memory that queued work fills.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Deferred;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ops::elementwise::CopyRange;
use crate::runtime::Tensor;

/// Allocation contents, on the inner device.
pub(super) struct Slot<D: Device> {
    contents: Mutex<Option<Tensor<D>>>,
    is_freed: AtomicBool,
}

impl<D: Device> Slot<D> {
    pub(super) fn new(contents: Tensor<D>) -> Self {
        Self { contents: Mutex::new(Some(contents)), is_freed: AtomicBool::new(false) }
    }

    /// Poisons the contents; later work that touches them fails.
    pub(super) fn free(&self) {
        self.is_freed.store(true, Ordering::Relaxed);
        *self.contents.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Slot range that work reads or writes.
pub(super) struct Place<D: Device> {
    slot: Arc<Slot<D>>,
    range: Range<usize>,
}

impl<D: Device> Place<D> {
    pub(super) fn of(tensor: &Tensor<Deferred<D>>) -> Self {
        Self { slot: Arc::clone(&tensor.memory().slot), range: tensor.range() }
    }

    /// Calls a closure with the elements.
    pub(super) fn with<R>(&self, inner: &D, run: impl FnOnce(&D, &Tensor<D>) -> Result<R>) -> Result<R> {
        let mut result = None;
        let run = |inner: &D, reads: &[&Tensor<D>], _: &mut [&mut Tensor<D>]| {
            result = Some(run(inner, reads[0])?);
            Ok(())
        };
        with_all(inner, std::slice::from_ref(self), &[], run)?;
        Ok(result.expect("the closure has run"))
    }

    /// Calls a closure with the elements, mutable.
    pub(super) fn with_mut(
        &self,
        inner: &D,
        run: impl FnOnce(&D, &mut Tensor<D>) -> Result<()>,
    ) -> Result<()> {
        with_all(inner, &[], std::slice::from_ref(self), |inner, _, writes| run(inner, writes[0]))
    }
}

/// Slot elements, cut at the ranges that work needs.
struct Cut<'a, D: Device> {
    slot: &'a Arc<Slot<D>>,
    ranges: Vec<Range<usize>>,
    pieces: Vec<Tensor<D>>,
}

/// Calls work with the operand elements. Ranges in the same allocation are either equal or disjoint.
pub(super) fn with_all<D: Device>(
    inner: &D,
    reads: &[Place<D>],
    writes: &[Place<D>],
    run: impl FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()>,
) -> Result<()> {
    let mut cuts: Vec<Cut<'_, D>> = Vec::new();
    for place in reads.iter().chain(writes) {
        let index = cuts.iter().position(|cut| Arc::ptr_eq(cut.slot, &place.slot)).unwrap_or_else(|| {
            cuts.push(Cut { slot: &place.slot, ranges: Vec::new(), pieces: Vec::new() });
            cuts.len() - 1
        });
        if !cuts[index].ranges.contains(&place.range) {
            cuts[index].ranges.push(place.range.clone());
        }
    }
    for cut in &mut cuts {
        if cut.slot.is_freed.load(Ordering::Relaxed) {
            let reason = "freed before work of another lane was done with it".to_owned();
            return Err(Error::InvalidSetting { setting: "memory", reason });
        }
        let whole = cut.slot.contents.lock().unwrap_or_else(PoisonError::into_inner).take();
        let whole = whole.expect("work runs one at a time");
        // An empty range comes first among ranges with the same start.
        cut.ranges.sort_by_key(|range| (range.start, range.end));
        let mut lens = Vec::new();
        let mut next = 0;
        for range in &cut.ranges {
            lens.extend([range.start - next, range.len()]);
            next = range.end;
        }
        lens.push(whole.len() - next);
        cut.pieces = whole.split(&lens);
    }
    let piece = |place: &Place<D>| {
        let cut = cuts.iter().position(|cut| Arc::ptr_eq(cut.slot, &place.slot)).expect("it was cut above");
        let range =
            cuts[cut].ranges.iter().position(|range| *range == place.range).expect("it was cut above");
        // before each range is the piece that no operand needs
        (cut, 2 * range + 1)
    };
    let read: Vec<(usize, usize)> = reads.iter().map(piece).collect();
    let written: Vec<(usize, usize)> = writes.iter().map(piece).collect();
    let mut pieces: Vec<Vec<Option<&mut Tensor<D>>>> =
        cuts.iter_mut().map(|cut| cut.pieces.iter_mut().map(Some).collect()).collect();
    let mut exclusive: Vec<&mut Tensor<D>> =
        written.iter().map(|&(cut, piece)| pieces[cut][piece].take().expect("it is written once")).collect();
    let shared: Vec<&Tensor<D>> =
        read.iter().map(|&(cut, piece)| pieces[cut][piece].as_deref().expect("it is not written")).collect();
    let result = run(inner, &shared, &mut exclusive);
    drop(shared);
    drop(exclusive);
    drop(pieces);
    for cut in cuts {
        *cut.slot.contents.lock().unwrap_or_else(PoisonError::into_inner) = Some(Tensor::join(cut.pieces));
    }
    result
}

/// Copies a tensor over a second tensor with the same type and length.
pub(super) fn overwrite<D: Device>(inner: &D, from: &Tensor<D>, to: &mut Tensor<D>) -> Result<()> {
    inner.copy_ranges(&[CopyRange { from: 0, to: 0, len: from.len() }], from, to)
}
