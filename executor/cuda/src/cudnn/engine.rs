//! cuDNN engines that serve a graph, and engine settings.

use std::sync::Arc;

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as DescriptorType,
    cudnnBackendHeurMode_t as Heuristic,
};

use super::descriptor::{Descriptor, Knob};
use super::library::Result;

/// Engine with settings under which it adds in a fixed order.
pub(super) struct Order {
    engine: i64,
    settings: &'static [(Knob, i64)],
}

/// Hopper order: blocks add the query gradient sequentially.
pub(super) const HOPPER: Order = Order {
    engine: 6,
    settings: &[(TILE_M, 2), (TILE_N, 1), (KERNEL_CFG, 2), (STREAM_K, 0), (TILE_CGA_M, 0), (STAGES, 4)],
};
/// Blackwell order.
pub(super) const BLACKWELL: Order = Order {
    engine: 5,
    settings: &[(TILE_M, 3), (TILE_N, 2), (KERNEL_CFG, 2), (STREAM_K, 0), (TILE_CGA_M, 0), (STAGES, 2)],
};
/// Blackwell order before cuDNN 9.23, which chose tiles by kernel number.
pub(super) const BLACKWELL_BY_KERNEL: Order = Order { engine: 5, settings: &[(KERNEL_CFG, 31), (STAGES, 2)] };

/// Engine settings, `cudnnBackendKnobType_t`.
const STAGES: Knob = Knob(14);
const KERNEL_CFG: Knob = Knob(24);
const TILE_CGA_M: Knob = Knob(27);
const STREAM_K: Knob = Knob(38);
const TILE_M: Knob = Knob(40);
const TILE_N: Knob = Knob(41);

/// Lists the engines that serve a graph, with settings, best first.
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

/// Creates an engine that adds in a fixed order.
pub(super) fn ordered(
    device: &Arc<Descriptor>,
    graph: &Arc<Descriptor>,
    order: &Order,
) -> Result<Arc<Descriptor>> {
    let library = graph.library();
    let mut engine = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
    engine.link(Attribute::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, &[graph])?;
    engine.set(Attribute::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, &[order.engine])?;
    engine.link(Attribute::CUDNN_ATTR_ENGINE_DEVICEPROP, &[device])?;
    let engine = engine.finalize()?;
    let mut settings = Vec::new();
    for &(knob, value) in order.settings {
        let mut setting = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR)?;
        setting.set(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, &[knob])?;
        setting.set(Attribute::CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, &[value])?;
        settings.push(setting.finalize()?);
    }
    let settings: Vec<&Arc<Descriptor>> = settings.iter().collect();
    let mut chosen = Descriptor::new(library, DescriptorType::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR)?;
    chosen.link(Attribute::CUDNN_ATTR_ENGINECFG_ENGINE, &[&engine])?;
    chosen.link(Attribute::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, &settings)?;
    chosen.finalize()
}
