//! Optimizer state per bucket, and the ranks that own it.
//!
//! Stage replicas may share the state (ZeRO stage 1): each replica has the state for a range in every bucket,
//! updates the weights in that range, and receives the remaining weights from the replicas while operations
//! continue. An update is computed element by element, so the weights have the same bits as without sharing.
//!
//! # Source
//! Rajbhandari et al.: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019,
//! arXiv:1910.02054, section 5.1. Gradients may be complete on all replicas, or divided like the state.
//!
//! A parameter can be on several ranks: on every data-parallel replica, and a tied embedding on the first and
//! the last stage. The lowest such rank owns it. The ranks agree on owners once, by exchanging parameter
//! names, so that no rank has to know the layout.

use crate::error::Result;
use dflop_comm::{Comm, StepContext, even_parts};
use dflop_device::ops::adamw::{AdamW, AdamWState, UpdateRange};
use dflop_device::ops::elementwise::CopyRange;
use dflop_device::{Device, DeviceComm, Dtype, Lane, Tensor};
use dflop_models::weights::ParameterSpec;
use dflop_models::{ParameterBucket, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Number format for stored weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The device's native format; weights are updated directly.
    #[default]
    F32,
    /// bf16; master weights in f32 are updated, and the weights are rounded from them.
    Bf16,
}

/// Optimizer state for a parameter.
pub(crate) struct ParameterState<T> {
    pub(crate) mean: T,
    pub(crate) square: T,
    pub(crate) master: Option<T>,
}

/// State for the bucket elements that this rank updates.
pub(super) struct BucketState<D: Device> {
    /// Number of bucket elements that every replica updates; a single part if they do not share the state.
    parts: Vec<usize>,
    /// Elements that this rank updates.
    own: Range<usize>,
    mean: Tensor<D>,
    square: Tensor<D>,
    master: Option<Tensor<D>>,
}

impl<D: Device> BucketState<D> {
    /// Allocates the state for this rank's part of a bucket.
    pub(super) fn new(
        device: &D,
        bucket: &ParameterBucket<D>,
        precision: Precision,
        replicas: Option<&dyn DeviceComm<D>>,
    ) -> dflop_device::Result<Self> {
        let (rank, size) = replicas.map_or((0, 1), |comm| (comm.host().rank(), comm.host().size()));
        let parts = even_parts(bucket.len(), size);
        let first = parts[..rank].iter().sum();
        let own = first..first + parts[rank];
        let zeros = || device.zeros_as(Dtype::F32, own.len());
        let master = match precision {
            Precision::F32 => None,
            Precision::Bf16 => Some(masters(device, bucket, &own)?),
        };
        Ok(Self { mean: zeros()?, square: zeros()?, master, parts, own })
    }

    /// Updates this rank's part of the weights.
    pub(super) fn step(
        &mut self,
        device: &D,
        adamw: &AdamW,
        ranges: &[UpdateRange],
        clip: &Tensor<D>,
        bucket: &mut ParameterBucket<D>,
    ) -> Result<()> {
        // A bucket that no pass has used since the last update may still be gathered.
        bucket.wait_values()?;
        assert!(
            bucket.summed.start <= self.own.start && self.own.end <= bucket.summed.end,
            "gradients of {:?} are complete, the state is of {:?}",
            bucket.summed,
            self.own
        );
        let ranges: Vec<UpdateRange> = ranges.iter().filter_map(|range| within(range, &self.own)).collect();
        let cut = [self.own.start, self.own.len(), bucket.len() - self.own.end];
        let (weights, lens) = bucket.values_mut().open();
        let (gradients, _) = bucket.gradients.open();
        let (mut weights, gradients) = (weights.split(&cut), gradients.split(&cut));
        let (mean, square) = (&mut self.mean, &mut self.square);
        let state = AdamWState { master: self.master.as_mut(), mean, square };
        let updated = device.adamw(adamw, &ranges, clip, &mut weights[1], &gradients[1], state);
        bucket.values_mut().close(Tensor::join(weights), &lens);
        bucket.gradients.close(Tensor::join(gradients), &lens);
        Ok(updated?)
    }

    /// Starts to gather the weights that other replicas have updated, after the update on this rank.
    pub(super) fn gather_weights(
        &self,
        device: &D,
        replicas: &dyn DeviceComm<D>,
        at: StepContext,
        bucket: &mut ParameterBucket<D>,
    ) -> Result<()> {
        let updated = device.mark(Lane::Compute)?;
        let start = |weights| replicas.start_all_gather(at, weights, &self.parts, &updated);
        Ok(bucket.gather_values(device, start)?)
    }

    /// Copies the complete bucket state to the host, on the ranks that need it; all replicas that share the
    /// state call it.
    ///
    /// - `(len, is_needed)`: number of elements in the bucket, and whether this rank needs the state
    pub(super) fn whole(
        &self,
        device: &D,
        replicas: Option<&dyn DeviceComm<D>>,
        at: StepContext,
        (len, is_needed): (usize, bool),
    ) -> Result<Option<ParameterState<Vec<f32>>>> {
        let whole = |part: &Tensor<D>| -> Result<Vec<f32>> {
            let Some(replicas) = replicas else { return Ok(device.download(part)?) };
            let mut all = device.zeros_as(Dtype::F32, len)?;
            let place = CopyRange { from: 0, to: self.own.start, len: self.own.len() };
            device.copy_ranges(&[place], part, &mut all)?;
            replicas.all_gather(at, &mut all, &self.parts)?;
            // Also without a use for the values: device work may start only when it is waited for.
            Ok(device.download(&all)?)
        };
        if !is_needed && replicas.is_none() {
            return Ok(None);
        }
        let (mean, square) = (whole(&self.mean)?, whole(&self.square)?);
        let master = self.master.as_ref().map(whole).transpose()?;
        Ok(is_needed.then_some(ParameterState { mean, square, master }))
    }

    /// Replaces the state by this rank's part of the parameter states, in bucket order.
    pub(super) fn restore(
        &mut self,
        device: &D,
        states: &[&ParameterState<Vec<f32>>],
    ) -> dflop_device::Result<()> {
        let part = |of: &dyn Fn(&ParameterState<Vec<f32>>) -> Vec<f32>| {
            let all = states.iter().flat_map(|state| of(state));
            all.skip(self.own.start).take(self.own.len()).collect::<Vec<f32>>()
        };
        device.write(&part(&|state| state.mean.clone()), &mut self.mean)?;
        device.write(&part(&|state| state.square.clone()), &mut self.square)?;
        let masters = part(&|state| state.master.clone().unwrap_or_default());
        match &mut self.master {
            Some(master) if masters.len() == master.len() => device.write(&masters, master),
            _ => Ok(()),
        }
    }

    /// Returns the state size in bytes.
    pub(super) fn bytes(&self) -> u64 {
        [Some(&self.mean), Some(&self.square), self.master.as_ref()]
            .into_iter()
            .flatten()
            .map(Tensor::bytes)
            .sum()
    }
}

/// Copies a range of bucket weights to `f32`.
fn masters<D: Device>(
    device: &D,
    bucket: &ParameterBucket<D>,
    own: &Range<usize>,
) -> dflop_device::Result<Tensor<D>> {
    let mut whole = device.zeros_as(Dtype::F32, own.len())?;
    let mut first = 0;
    for weights in bucket.values().parts() {
        let inside = own.start.max(first)..own.end.min(first + weights.len());
        if !inside.is_empty() {
            let mut piece = device.alloc_as(weights.dtype(), inside.len())?;
            let place = CopyRange { from: inside.start - first, to: 0, len: inside.len() };
            device.copy_ranges(&[place], weights, &mut piece)?;
            // Adding to zeros copies the weights in f32.
            let mut exact = device.zeros_as(Dtype::F32, inside.len())?;
            device.add(&piece, &mut exact)?;
            let place = CopyRange { from: 0, to: inside.start - own.start, len: inside.len() };
            device.copy_ranges(&[place], &exact, &mut whole)?;
        }
        first += weights.len();
    }
    Ok(whole)
}

/// Returns the part of a range inside the elements of this rank, counted from the first of these elements.
fn within(range: &UpdateRange, own: &Range<usize>) -> Option<UpdateRange> {
    let inside = own.start.max(range.elements.start)..own.end.min(range.elements.end);
    let elements = inside.start.saturating_sub(own.start)..inside.end.saturating_sub(own.start);
    (!inside.is_empty()).then_some(UpdateRange { elements, ..range.clone() })
}

/// Separates names in a message; no tensor name contains it.
const SEPARATOR: u8 = b'\n';
/// Separates a name from a part number.
const PART: char = '\t';

/// Owner of every parameter in a job, by name.
///
/// Parameters are in name order, so the indices do not depend on the stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Maps names, or names with part numbers, to index and owner.
    owners: BTreeMap<String, (usize, usize)>,
    rank: usize,
}

impl Ownership {
    /// Agrees on an owner for every parameter; all ranks in `comm` call it.
    ///
    /// Each part of a tensor that a tensor-parallel group shares has an owner.
    ///
    /// # Errors
    /// [`crate::Error::Comm`].
    pub fn agree<'a, D: Device, S: Stage<D> + ?Sized + 'a>(
        comm: &dyn Comm,
        stages: impl IntoIterator<Item = &'a S>,
    ) -> Result<Self> {
        let mut own = BTreeSet::new();
        for stage in stages {
            own.extend(stage.parameters().owned().map(|(spec, _)| key(spec)));
        }
        let mut bytes = Vec::new();
        for key in &own {
            bytes.extend_from_slice(key.as_bytes());
            bytes.push(SEPARATOR);
        }
        let mut owners = BTreeMap::new();
        for (rank, names) in
            gather_bytes(comm, StepContext::step(0, "agree on parameters"), &bytes)?.iter().enumerate()
        {
            for name in names.split(|&byte| byte == SEPARATOR).filter(|name| !name.is_empty()) {
                // Ranks come in ascending order, so the lowest rank stays.
                owners.entry(String::from_utf8_lossy(name).into_owned()).or_insert((0, rank));
            }
        }
        for (index, (place, _)) in owners.values_mut().enumerate() {
            *place = index;
        }
        Ok(Self { owners, rank: comm.rank() })
    }

    /// Returns the number of parameters in the job.
    #[must_use]
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Returns whether there are no parameters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the index of a parameter, or of this rank's part, if this rank owns it.
    #[must_use]
    pub fn own(&self, spec: &ParameterSpec) -> Option<usize> {
        let (index, owner) = self.place(spec)?;
        (owner == self.rank).then_some(index)
    }

    /// Returns the index of a parameter, or of this rank's part, and the owner rank.
    pub(super) fn place(&self, spec: &ParameterSpec) -> Option<(usize, usize)> {
        self.owners.get(&key(spec)).copied()
    }

    /// Returns tensor names, ascending, with the ranks that write them: the owners of the first parts.
    pub fn writers(&self) -> impl Iterator<Item = (&str, usize)> {
        self.owners.iter().filter_map(|(key, &(_, owner))| match key.split_once(PART) {
            Some((name, part)) => (part == "0").then_some((name, owner)),
            None => Some((key.as_str(), owner)),
        })
    }
}

/// Returns the map key for a parameter: the name, with the part number if it is sharded.
fn key(spec: &ParameterSpec) -> String {
    if spec.shard.is_whole() {
        return spec.name.clone();
    }
    format!("{}{PART}{}", spec.name, spec.shard.original(spec.shard.tp_rank().rank))
}

/// Gathers bytes from all ranks on all ranks; lengths may differ.
pub(crate) fn gather_bytes(comm: &dyn Comm, at: StepContext, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut lengths = vec![0_u64; comm.size()];
    lengths[comm.rank()] = own.len() as u64;
    // Lengths first: every rank needs the sizes of all parts to receive them.
    comm.all_gather(at, lengths.as_mut_slice().into(), &vec![1; comm.size()])?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let mut all = vec![0_u8; lengths.iter().sum()];
    let start: usize = lengths[..comm.rank()].iter().sum();
    all[start..start + own.len()].copy_from_slice(own);
    comm.all_gather(at, all.as_mut_slice().into(), &lengths)?;
    let mut rest = all.as_slice();
    Ok(lengths
        .into_iter()
        .map(|length| {
            let (bytes, behind) = rest.split_at(length);
            rest = behind;
            bytes.to_vec()
        })
        .collect())
}
