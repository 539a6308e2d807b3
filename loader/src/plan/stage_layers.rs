//! Stages that hold layers from multiple modules, and the sample time in each.

use dflop_costmodel::{MicrobatchConstants, Module, SampleCost};

use crate::error::{Error, Result};

/// Layers per module in the stages of a chain.
///
/// Neighbors with the same layers per module are a stage kind, which replaces a module in the partition
/// problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StageLayers {
    /// Layers per module in each stage kind, and the number of such stages.
    kinds: Vec<(Vec<usize>, usize)>,
    /// Total layers per module.
    totals: Vec<usize>,
}

impl StageLayers {
    /// - `layers`: `[modules, stages]`; a module without any layer takes no time
    pub(super) fn new(layers: &[Vec<usize>], modules: &[Module], stages_max: usize) -> Result<Self> {
        let invalid = |reason: String| Err(Error::Config { setting: "stage_layers", reason });
        let stages = layers.first().map_or(0, Vec::len);
        let is_even = layers.iter().all(|layers| layers.len() == stages);
        if layers.len() != modules.len() || !is_even || !(1..=stages_max).contains(&stages) {
            let names: Vec<_> = modules.iter().map(|module| module.name()).collect();
            return invalid(format!(
                "give the layers in each of 1 to {stages_max} stages, for each of {}",
                names.join(", ")
            ));
        }
        let columns = (0..stages).map(|stage| layers.iter().map(|layers| layers[stage]).collect::<Vec<_>>());
        let columns: Vec<Vec<usize>> = columns.collect();
        if let Some(stage) = columns.iter().position(|column| column.iter().all(|layers| *layers == 0)) {
            return invalid(format!("stage {stage} has no layer"));
        }
        let totals: Vec<usize> = layers.iter().map(|layers| layers.iter().sum()).collect();
        if totals.last() == Some(&0) {
            return invalid("the LLM has no layer".to_owned());
        }
        let kinds = columns.chunk_by(|one, other| one == other).map(|run| (run[0].clone(), run.len()));
        Ok(Self { kinds: kinds.collect(), totals })
    }

    /// Returns the number of stages per kind.
    pub(super) fn stages(&self) -> Vec<usize> {
        self.kinds.iter().map(|(_, stages)| *stages).collect()
    }

    /// Returns the microbatch constants in one stage per kind.
    pub(super) fn constants(&self, of_modules: &[MicrobatchConstants]) -> Vec<MicrobatchConstants> {
        let of_kind = |(layers, _): &(Vec<usize>, usize)| {
            let layers = layers.iter().zip(&self.totals).map(|(part, all)| [*part as u64, *all as u64]);
            let shares = of_modules.iter().zip(layers).map(|(constants, share)| constants.share(share));
            shares.fold(MicrobatchConstants::default(), MicrobatchConstants::plus)
        };
        self.kinds.iter().map(of_kind).collect()
    }

    /// Returns the sample time in one stage per kind, in nanoseconds, rounded up.
    pub(super) fn stage_ns(&self, cost: &SampleCost) -> impl Iterator<Item = u64> {
        let module_ns = cost.module_ns;
        self.kinds.iter().map(move |(layers, _)| {
            let of_module = |(ns, (layers, total)): (&u64, (&usize, &usize))| {
                // Nanoseconds times layers may exceed 64 bits.
                (u128::from(*ns) * *layers as u128).div_ceil((*total).max(1) as u128) as u64
            };
            module_ns.as_slice().iter().zip(layers.iter().zip(&self.totals)).map(of_module).sum()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULES: [Module; 2] = [Module::Vision, Module::Llm];

    #[test]
    fn neighbors_with_the_same_layers_are_one_kind() {
        let layers = StageLayers::new(&[vec![4, 2, 0, 0], vec![0, 1, 3, 3]], &MODULES, 8).unwrap();
        assert_eq!(layers.stages(), [1, 1, 2]);
        let colocated = StageLayers::new(&[vec![0, 0], vec![5, 5]], &MODULES, 8).unwrap();
        assert_eq!(colocated.stages(), [2]);
    }

    #[test]
    fn wrong_layers_are_refused_by_name() {
        for (layers, reason) in [
            (vec![vec![1, 0]], "give the layers in each of 1 to 8 stages, for each of vision, llm"),
            (vec![vec![1], vec![1, 1]], "give the layers"),
            (vec![vec![], vec![]], "give the layers"),
            (vec![vec![1, 0, 0], vec![0, 0, 1]], "stage 1 has no layer"),
            (vec![vec![1], vec![0]], "the LLM has no layer"),
        ] {
            let error = StageLayers::new(&layers, &MODULES, 8).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
