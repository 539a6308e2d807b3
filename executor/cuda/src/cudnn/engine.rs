//! Engines of cuDNN that serve a graph, and their settings.

use std::sync::Arc;

use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as DescriptorType;
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Heuristic;

use super::descriptor::{Descriptor, Knob};
use super::error::Result;

/// Setting by which a backward engine orders its sums: `CUDNN_KNOB_TYPE_STAGES`.
const STAGES: Knob = Knob(14);

/// Lists the engines that serve a graph, with their settings, best first.
pub(super) fn list(
    device: &Arc<Descriptor>,
    graph: &Arc<Descriptor>,
    heuristic: Heuristic,
) -> Result<Vec<Arc<Descriptor>>> {
    let mut list = Descriptor::new(graph.library(), DescriptorType::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
    list.link(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?;
    list.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[heuristic])?;
    list.link(Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, &[device])?;
    let kind = DescriptorType::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    list.finalize()?.list(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, kind)
}

/// Returns an engine with its settings, except that of the stages.
pub(super) fn with_stages(engine: &Descriptor, stages: i64) -> Result<Arc<Descriptor>> {
    let library = engine.library();
    let kind = DescriptorType::CUDNN_BACKEND_ENGINE_DESCRIPTOR;
    let engines = engine.list(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, kind)?;
    let kind = DescriptorType::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR;
    let mut settings = Vec::new();
    for setting in engine.list(Attribute::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, kind)? {
        let knob: Knob = setting.value(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE)?;
        let value: i64 = setting.value(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE)?;
        let mut changed = Descriptor::new(library, kind)?;
        changed.set(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, &[knob])?;
        let value = if knob == STAGES { stages } else { value };
        changed.set(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, &[value])?;
        settings.push(changed.finalize()?);
    }
    let mut changed = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;
    let engines: Vec<&Arc<Descriptor>> = engines.iter().collect();
    changed.link(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, &engines)?;
    let settings: Vec<&Arc<Descriptor>> = settings.iter().collect();
    changed.link(Attribute::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, &settings)?;
    changed.finalize()
}
