//! Plans: compiled kernels of a graph for a device.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Heuristic;

use super::descriptor::Descriptor;
use super::device_properties::DeviceProperties;
use super::error::{Error, Result};
use super::graph::{self, Form};
use super::library::Library;
use super::plan_key::PlanKey;

/// A plan that can run.
pub struct Plan {
    key: PlanKey,
    form: Form,
    own_workspace_bytes: u64,
    descriptor: Arc<Descriptor>,
}

impl Plan {
    /// Builds the plan of a key, in half a second to 4 s.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoPlan`] if no engine serves the key.
    pub fn build(library: &Arc<Library>, device: &DeviceProperties, key: &PlanKey) -> Result<Self> {
        key.check()?;
        let device = device.descriptor(library)?;
        let mut reasons = Vec::new();
        for &form in graph::forms(library.version(), key) {
            match Self::of_form(library, &device, key, form) {
                Ok(plan) => return Ok(plan),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(Error::NoPlan { version: library.version(), key: *key, reason: reasons.join("; ") })
    }

    /// Reads a plan from its JSON representation, in 30 to 50 ms.
    ///
    /// # Errors
    /// [`Error::Refused`] if another version of cuDNN wrote it, or it is damaged.
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
        Self::of_descriptor(plan, key, form)
    }

    /// Writes the plan with its kernels, 100 to 150 KB.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub(super) fn to_json(&self) -> Result<String> {
        self.descriptor.text(Attribute::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// What the plan is built for.
    #[must_use]
    pub const fn key(&self) -> &PlanKey {
        &self.key
    }

    /// Bytes of device memory that a call needs beside its arguments.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        let scratch: u64 = graph::scratch(&self.key, self.form).iter().map(|&(_, bytes)| bytes).sum();
        self.own_workspace_bytes + scratch
    }

    /// Bytes at the start of the workspace that the engine asks for, a multiple of 256.
    pub(super) const fn own_workspace_bytes(&self) -> u64 {
        self.own_workspace_bytes
    }

    pub(super) const fn form(&self) -> Form {
        self.form
    }

    pub(super) const fn descriptor(&self) -> &Arc<Descriptor> {
        &self.descriptor
    }

    /// Builds the plan of the best engine that can be had.
    fn of_form(library: &Arc<Library>, device: &Arc<Descriptor>, key: &PlanKey, form: Form) -> Result<Self> {
        let graph = graph::of_key(library, key, form)?;
        let mut reason = Error::NoEngine;
        for heuristic in [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK] {
            match engines(library, device, &graph, heuristic) {
                Ok(engines) => {
                    for engine in engines {
                        match Self::of_engine(library, device, &engine, key, form) {
                            Ok(plan) => return Ok(plan),
                            Err(error) => reason = error,
                        }
                    }
                }
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn of_engine(
        library: &Arc<Library>,
        device: &Arc<Descriptor>,
        engine: &Arc<Descriptor>,
        key: &PlanKey,
        form: Form,
    ) -> Result<Self> {
        let mut plan = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[engine])?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[device])?;
        Self::of_descriptor(plan, key, form)
    }

    fn of_descriptor(plan: Descriptor, key: &PlanKey, form: Form) -> Result<Self> {
        let descriptor = plan.finalize()?;
        let bytes = descriptor.integer(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)? as u64;
        let own_workspace_bytes = bytes.next_multiple_of(graph::SCRATCH_ALIGNMENT_BYTES);
        Ok(Self { key: *key, form, own_workspace_bytes, descriptor })
    }
}

/// Lists the engines that serve a graph, best first.
fn engines(
    library: &Arc<Library>,
    device: &Arc<Descriptor>,
    graph: &Arc<Descriptor>,
    heuristic: Heuristic,
) -> Result<Vec<Arc<Descriptor>>> {
    let mut list = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    list.link(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?;
    list.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[heuristic])?;
    list.link(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[device])?;
    let list = list.finalize()?;
    list.list(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, DescriptorType::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)
}
