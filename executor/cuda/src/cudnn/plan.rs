//! Plans: compiled graph kernels for a device.
//!
//! Microbatch tables that plans read: segment locations and lengths.

use super::descriptor::Descriptor;
use super::device_properties::DeviceProperties;
use super::graph::Form;
use super::library::{Error, Library, PlanKey, Result};
use super::{engine, graph};
use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnBackendHeurMode_t as Heuristic,
};
use std::sync::Arc;

/// A plan that can run.
pub struct Plan {
    key: PlanKey,
    form: Form,
    own_workspace_bytes: u64,
    descriptor: Arc<Descriptor>,
}

impl Plan {
    /// Builds the plan for a key, in a second or two.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoPlan`] if no engine serves the key.
    pub fn build(library: &Arc<Library>, device: &DeviceProperties, key: &PlanKey) -> Result<Self> {
        key.check()?;
        let mut reasons = Vec::new();
        for &form in Form::of(library.version(), device.major(), key) {
            match Self::build_form(library, device, key, form) {
                Ok(plan) => return Ok(plan),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        if reasons.is_empty() {
            reasons.push("no engine of the device adds in a fixed order".to_owned());
        }
        Err(Error::NoPlan { version: library.version(), key: *key, reason: reasons.join("; ") })
    }

    /// Builds the plan for a key from a single graph form, so that forms can be measured: the best available
    /// engine.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoEngine`] also if engines have a fault with the form, [`Error::Refused`].
    pub fn build_form(
        library: &Arc<Library>,
        device: &DeviceProperties,
        key: &PlanKey,
        form: Form,
    ) -> Result<Self> {
        key.check()?;
        if !Form::of(library.version(), device.major(), key).contains(&form) {
            return Err(Error::NoEngine);
        }
        let graph = graph::for_key(library, key, form)?;
        let order = Form::order(library.version(), device.major(), key);
        let device = device.descriptor(library)?;
        if let Some(order) = order {
            return Self::from_engine(&device, &engine::ordered(&device, &graph, order)?, key, form);
        }
        let mut reason = Error::NoEngine;
        for heuristic in [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK] {
            let engines = match engine::list(&device, &graph, heuristic) {
                Ok(engines) => engines,
                Err(error) => {
                    reason = error;
                    continue;
                }
            };
            for engine in engines {
                match Self::from_engine(&device, &engine, key, form) {
                    Ok(plan) => return Ok(plan),
                    Err(error) => reason = error,
                }
            }
        }
        Err(reason)
    }

    /// Reads a plan from the JSON representation; nothing is compiled.
    ///
    /// # Errors
    /// [`Error::Refused`] if a different cuDNN version wrote it, or it is damaged.
    pub(super) fn from_json(
        library: &Arc<Library>,
        device: &DeviceProperties,
        key: &PlanKey,
        form: Form,
        json: &str,
    ) -> Result<Self> {
        let device = device.descriptor(library)?;
        let mut plan = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, json.as_bytes())?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[&device])?;
        Self::from_descriptor(plan, key, form)
    }

    /// Writes the plan with all kernels, 70 to 600 KB.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub(super) fn to_json(&self) -> Result<String> {
        self.descriptor.text(Attribute::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// Returns the key that the plan is built for.
    #[must_use]
    pub const fn key(&self) -> &PlanKey {
        &self.key
    }

    /// Returns the number of device memory bytes that a call needs in addition to the arguments.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        let scratch: u64 = self.form.scratch(&self.key).iter().map(|&(_, bytes)| bytes).sum();
        self.own_workspace_bytes + scratch
    }

    /// Returns the number of bytes at the start of the workspace that the engine requires, a multiple of 256.
    pub(super) const fn own_workspace_bytes(&self) -> u64 {
        self.own_workspace_bytes
    }

    /// Returns the location in the workspace where a [`Form::Padded`] plan reads the log-sum-exp, in bytes
    /// from the start.
    ///
    /// The caller writes it before the call: for every segment `b`, head `h` and row `r` in the segment, the
    /// `f32` at `(b * heads + h) * longest + r` equals the `f32` at `(starts[b] + r) * heads + h` in
    /// [`super::Arguments::log_sums`], with `longest` from the key. The rest is never used.
    #[must_use]
    pub fn padded_log_sums(&self) -> Option<u64> {
        let mut start = self.own_workspace_bytes;
        for (id, bytes) in self.form.scratch(&self.key) {
            if id == graph::Id::LogSums {
                return Some(start);
            }
            start += bytes;
        }
        None
    }

    /// Returns the graph form that the plan was built from.
    #[must_use]
    pub const fn form(&self) -> Form {
        self.form
    }

    pub(super) const fn descriptor(&self) -> &Arc<Descriptor> {
        &self.descriptor
    }

    fn from_engine(
        device: &Arc<Descriptor>,
        engine: &Arc<Descriptor>,
        key: &PlanKey,
        form: Form,
    ) -> Result<Self> {
        let kind = DescriptorType::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
        let mut plan = Descriptor::new(device.library(), kind)?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[engine])?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[device])?;
        Self::from_descriptor(plan, key, form)
    }

    fn from_descriptor(plan: Descriptor, key: &PlanKey, form: Form) -> Result<Self> {
        let descriptor = plan.finalize()?;
        let bytes = descriptor.value::<i64>(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)? as u64;
        let own_workspace_bytes = bytes.next_multiple_of(graph::SCRATCH_ALIGNMENT_BYTES);
        Ok(Self { key: *key, form, own_workspace_bytes, descriptor })
    }
}

/// Table alignment in bytes.
const ALIGNMENT_BYTES: usize = 16;

/// Segment tables for a microbatch, to be copied to the device as a single block.
///
/// Forward and backward plans for the same heads and segments read the same tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentTables {
    bytes: Vec<u8>,
}

/// Table locations in the block, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    /// `i64`, first element in every segment in queries, keys and values.
    pub(super) rows: usize,
    /// `i64`, first element in every segment in the output.
    pub(super) outputs: usize,
    /// `i64`, first element in every segment in separate key or value gradients.
    pub(super) keys: usize,
    /// `i64`, first element in every segment in the log-sum-exp.
    pub(super) log_sums: usize,
    /// `i32`, number of rows in every segment.
    pub(super) lengths: usize,
    /// Block size in bytes.
    pub(super) end: usize,
}

impl Places {
    pub(super) const fn of(key: &PlanKey) -> Self {
        let segments = key.segments as usize;
        let offsets = ((segments + 1) * size_of::<i64>()).next_multiple_of(ALIGNMENT_BYTES);
        let lengths = (segments * size_of::<i32>()).next_multiple_of(ALIGNMENT_BYTES);
        Self {
            rows: 0,
            outputs: offsets,
            keys: 2 * offsets,
            log_sums: 3 * offsets,
            lengths: 4 * offsets,
            end: 4 * offsets + lengths,
        }
    }
}

impl SegmentTables {
    /// Creates the tables that plans for a key read; missing segments are empty segments at the end.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    ///
    /// # Errors
    /// [`Error::Shape`] if the key has fewer or shorter segments.
    pub fn new(key: &PlanKey, starts: &[u32]) -> Result<Self> {
        let lengths: Vec<u32> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if lengths.len() > key.segments as usize || longest > key.longest {
            let reason = format!("{key} does not serve {} segments of up to {longest} rows", lengths.len());
            return Err(Error::Shape { setting: "segments", reason });
        }
        let places = Places::of(key);
        let mut bytes = vec![0; places.end];
        let rows = starts.last().map_or(0, |&rows| rows);
        for (place, width) in [
            (places.rows, key.row()),
            (places.outputs, key.heads * key.head_dim),
            (places.keys, key.kv_heads * key.head_dim),
            (places.log_sums, key.heads),
        ] {
            let starts = starts.iter().copied().chain(std::iter::repeat(rows));
            let offsets = starts.take(key.segments as usize + 1).map(|row| i64::from(row) * i64::from(width));
            put(&mut bytes[place..], offsets.map(i64::to_ne_bytes));
        }
        put(&mut bytes[places.lengths..], lengths.iter().map(|&rows| rows.to_ne_bytes()));
        Ok(Self { bytes })
    }

    /// Returns the block, to be copied to a device address that is a multiple of 16.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn put<const BYTES: usize>(table: &mut [u8], numbers: impl Iterator<Item = [u8; BYTES]>) {
    for (place, number) in table.chunks_exact_mut(BYTES).zip(numbers) {
        place.copy_from_slice(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cudnn::library::Heads;

    const HEADS: Heads = Heads { heads: 12, kv_heads: 2, head_dim: 128, is_causal: true };

    #[test]
    fn missing_segments_are_empty_ones_at_the_end() {
        let starts = [0, 3, 10];
        let key = PlanKey::forward(HEADS, &starts);
        let tables = SegmentTables::new(&key, &starts).unwrap();
        let places = Places::of(&key);
        let offsets = |place: usize| -> Vec<i64> {
            let bytes = tables.bytes()[place..].chunks_exact(8).take(9);
            bytes.map(|bytes| i64::from_ne_bytes(bytes.try_into().unwrap())).collect()
        };
        let row = 16 * 128;
        assert_eq!(offsets(places.rows)[..4], [0, 3 * row, 10 * row, 10 * row]);
        assert_eq!(offsets(places.rows)[8], 10 * row);
        assert_eq!(offsets(places.outputs)[..3], [0, 3 * 12 * 128, 10 * 12 * 128]);
        assert_eq!(offsets(places.keys)[..3], [0, 3 * 2 * 128, 10 * 2 * 128]);
        assert_eq!(offsets(places.log_sums)[..3], [0, 36, 120]);
        let lengths: Vec<i32> = tables.bytes()[places.lengths..]
            .chunks_exact(4)
            .map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(lengths, [3, 7, 0, 0, 0, 0, 0, 0]);
        assert!(
            [places.outputs, places.keys, places.log_sums, places.lengths]
                .iter()
                .all(|place| place % 16 == 0)
        );
    }

    #[test]
    fn a_key_of_other_segments_is_refused() {
        let key = PlanKey::forward(HEADS, &[0, 64]);
        assert!(SegmentTables::new(&key, &[0, 65]).is_err());
        let starts: Vec<u32> = (0..10).collect();
        assert!(SegmentTables::new(&key, &starts).is_err());
        assert!(SegmentTables::new(&key, &[]).is_ok());
    }

    #[test]
    fn forward_and_backward_read_the_same_tables() {
        let starts = [0, 100, 300];
        let forward = SegmentTables::new(&PlanKey::forward(HEADS, &starts), &starts);
        let backward = SegmentTables::new(&PlanKey::backward(HEADS, &starts, false), &starts);
        assert_eq!(forward.unwrap(), backward.unwrap());
    }
}
