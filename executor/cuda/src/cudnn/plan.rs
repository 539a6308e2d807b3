//! Plans: compiled graph kernels for a device.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnBackendHeurMode_t as Heuristic,
};

use super::descriptor::Descriptor;
use super::device_properties::DeviceProperties;
use super::engine;
use super::graph::{self, Form};
use super::library::{Error, Library, PlanKey, Result};

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
