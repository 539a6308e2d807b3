//! Adds the shapes of a given plan to a space without shapes, whether or not a search would list them.

use super::joint::ChainLayers;
use super::shape::StageShape;
use super::{ModuleSpace, SearchSpace};
use crate::costs::ModuleCosts;

impl ModuleSpace {
    /// Lists the tensor-parallel degrees that heads, costs and nodes allow.
    pub(crate) fn tp_degrees(&self) -> impl Iterator<Item = u32> + '_ {
        self.times.iter().map(|times| times.tp)
    }

    /// Adds the shape with these layers as the module's only shape; none if the module has no times at the
    /// degree.
    fn set_only_shape(&mut self, costs: &dyn ModuleCosts, tp: u32, module: ChainLayers) {
        let times = self.times.iter().position(|times| times.tp == tp);
        let ChainLayers { layers, is_recomputed } = module;
        let shape = times.map(|times| StageShape::separate(costs, (times, tp), is_recomputed, layers));
        self.set_shapes(costs, shape.into_iter().collect());
    }
}

impl SearchSpace<'_> {
    /// Adds the shapes for modules on separate GPUs, or for encoders on the LLM's GPUs.
    ///
    /// - `modules`: tensor-parallel degree and layers for each encoder and the LLM, which is last
    pub(crate) fn add_separate(
        &mut self,
        encoders: &[&dyn ModuleCosts],
        llm: &dyn ModuleCosts,
        modules: Vec<(u32, ChainLayers)>,
    ) {
        let spaces = self.encoders.iter_mut().chain([&mut self.llm]);
        let costs = encoders.iter().copied().chain([llm]);
        for ((space, costs), (tp, module)) in spaces.zip(costs).zip(modules) {
            space.set_only_shape(costs, tp, module);
        }
    }

    /// Adds the shape for joint stages; none if an encoder has no times on a single GPU, or the LLM has none
    /// at the degree.
    ///
    /// - `modules`: layers of each encoder and the LLM, which is last
    pub(crate) fn add_joint(
        &mut self,
        encoders: &[&dyn ModuleCosts],
        llm: &dyn ModuleCosts,
        llm_tp: u32,
        modules: Vec<ChainLayers>,
    ) {
        let shape = self.joint_modules(encoders, llm).given(llm_tp, modules);
        self.joint.extend(shape);
    }
}
