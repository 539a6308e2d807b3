//! Plans: compiled kernels of a graph for a device.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Heuristic;

use super::descriptor::Descriptor;
use super::device_properties::DeviceProperties;
use super::error::{Error, Result};
use super::graph;
use super::library::Library;
use super::plan_key::PlanKey;

/// A plan that can run.
pub struct Plan {
    key: PlanKey,
    workspace_bytes: u64,
    descriptor: Arc<Descriptor>,
}

impl Plan {
    /// Builds the plan of a key, in 2 to 4 s.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoPlan`] if no engine serves the key, [`Error::Refused`].
    pub fn build(library: &Arc<Library>, device: &DeviceProperties, key: &PlanKey) -> Result<Self> {
        key.check()?;
        let device = device.descriptor(library)?;
        let graph = graph::of_key(library, key)?;
        let mut reason = "no engine".to_owned();
        for heuristic in [Heuristic::CUDNN_HEUR_MODE_A, Heuristic::CUDNN_HEUR_MODE_FALLBACK] {
            let engines = match engines(library, &device, &graph, heuristic) {
                Ok(engines) => engines,
                Err(error) => {
                    reason = error.to_string();
                    continue;
                }
            };
            for engine in engines {
                match Self::of_engine(library, &device, &engine, key) {
                    Ok(plan) => return Ok(plan),
                    Err(error) => reason = error.to_string(),
                }
            }
        }
        Err(Error::NoPlan { version: library.version(), key: *key, reason })
    }

    /// Reads a plan from its JSON representation, in 30 to 50 ms.
    ///
    /// # Errors
    /// [`Error::Refused`] if another version of cuDNN wrote it, or it is damaged.
    pub fn from_json(
        library: &Arc<Library>,
        device: &DeviceProperties,
        key: &PlanKey,
        json: &str,
    ) -> Result<Self> {
        let device = device.descriptor(library)?;
        let mut plan = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, json.as_bytes())?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[&device])?;
        Self::of_descriptor(plan, key)
    }

    /// Writes the plan with its kernels, 100 to 150 KB.
    ///
    /// # Errors
    /// [`Error::Refused`].
    pub fn to_json(&self) -> Result<String> {
        self.descriptor.text(Attribute::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION)
    }

    /// What the plan is built for.
    #[must_use]
    pub const fn key(&self) -> &PlanKey {
        &self.key
    }

    /// Bytes of device memory that a call needs beside its arguments.
    #[must_use]
    pub const fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    fn of_engine(
        library: &Arc<Library>,
        device: &Arc<Descriptor>,
        engine: &Arc<Descriptor>,
        key: &PlanKey,
    ) -> Result<Self> {
        let mut plan = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[engine])?;
        plan.link(Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, &[device])?;
        Self::of_descriptor(plan, key)
    }

    fn of_descriptor(plan: Descriptor, key: &PlanKey) -> Result<Self> {
        let descriptor = plan.finalize()?;
        let workspace = descriptor.integer(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        Ok(Self { key: *key, workspace_bytes: workspace as u64, descriptor })
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
