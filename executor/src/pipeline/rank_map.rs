//! Maps module pipeline ranks to world ranks, which are separate or shared.

use dflop_planner::Placement;

use super::module_parallelism::ModuleParallelism;
use crate::error::{Error, Result};

/// World ranks of all pipeline ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankMap {
    pub(super) world_size: usize,
    /// World ranks for every pipeline rank, by TP rank.
    pub(super) members: Vec<Vec<usize>>,
    /// Number of pipeline ranks in a replica of each module.
    pub(super) per_replica: Vec<usize>,
}

impl RankMap {
    /// Maps pipeline ranks for checked modules; in joint placement it sets the encoder replicas.
    pub(super) fn new(
        placement: Placement,
        modules: &mut [ModuleParallelism],
        chunks: usize,
    ) -> Result<Self> {
        if placement == Placement::Joint {
            check_joint(modules)?;
        }
        let Some((llm, encoders)) = modules.split_last_mut() else {
            return refuse("modules", "expected the LLM".to_owned());
        };
        let ranks_of = |module: &ModuleParallelism| module.stages.len() * module.dp_size * module.tp_size;
        let llm_ranks = ranks_of(llm) / chunks;
        if placement == Placement::Colocated
            && let Some(other) = encoders.iter().find(|encoder| ranks_of(encoder) != llm_ranks)
        {
            let (module, ranks) = (other.module, ranks_of(other));
            return refuse(
                "modules",
                format!(
                    "{module:?} takes {ranks} ranks, expected the LLM's {llm_ranks} in colocated placement"
                ),
            );
        }
        let chain = llm.stages.len();
        let (llm_dp, llm_tp) = (llm.dp_size, llm.tp_size);
        for encoder in encoders.iter_mut().filter(|_| placement == Placement::Joint) {
            encoder.dp_size = llm_dp * llm_tp;
        }
        let (mut members, mut per_replica, mut next) = (Vec::new(), Vec::new(), 0);
        for module in encoders.iter().chain([&*llm]) {
            let is_held = |stage: &usize| !module.stages[*stage].is_empty();
            let held: Vec<usize> = (0..module.stages.len() / chunks).filter(is_held).collect();
            let start = if placement == Placement::Disaggregated { next } else { 0 };
            for replica in 0..module.dp_size {
                for (index, &stage) in held.iter().enumerate() {
                    let first = if placement == Placement::Joint {
                        // An encoder replica is one rank in each chain stage.
                        let (of_llm, inside) =
                            (replica * module.tp_size / llm_tp, replica * module.tp_size % llm_tp);
                        (of_llm * chain + stage) * llm_tp + inside
                    } else {
                        start + (replica * held.len() + index) * module.tp_size
                    };
                    members.push((first..first + module.tp_size).collect());
                }
            }
            next = start + held.len() * module.dp_size * module.tp_size;
            per_replica.push(held.len());
        }
        let world_size = match placement {
            Placement::Disaggregated => next,
            Placement::Colocated | Placement::Joint => llm_ranks,
        };
        Ok(Self { world_size, members, per_replica })
    }
}

fn refuse<T>(setting: &'static str, reason: String) -> Result<T> {
    Err(Error::InvalidSetting { setting, reason })
}

/// Checks that the modules form a single chain of nonempty stages.
fn check_joint(modules: &[ModuleParallelism]) -> Result<()> {
    let Some((llm, encoders)) = modules.split_last() else { return Ok(()) };
    let chain = llm.stages.len();
    let first = llm.stages.iter().position(|layers| !layers.is_empty()).unwrap_or(0);
    for encoder in encoders {
        let (module, replicas) = (encoder.module, llm.dp_size * llm.tp_size);
        if encoder.stages.len() != chain {
            let found = encoder.stages.len();
            return refuse("stages", format!("{module:?} has {found} entries, the LLM {chain}"));
        }
        let last = encoder.stages.iter().rposition(|layers| !layers.is_empty()).unwrap_or(0);
        if last > first {
            return refuse(
                "stages",
                format!("{module:?} ends in stage {last}, after the LLM's first, {first}"),
            );
        }
        if encoder.tp_size != 1 || (encoder.dp_size != 1 && encoder.dp_size != replicas) {
            let (dp, tp) = (encoder.dp_size, encoder.tp_size);
            return refuse(
                "dp_size",
                format!("{module:?} has DP {dp} and TP {tp}, expected {replicas} and 1 in joint placement"),
            );
        }
    }
    let is_empty = |stage: &usize| modules.iter().all(|module| module.stages[*stage].is_empty());
    match (0..chain).find(is_empty) {
        Some(stage) => refuse("stages", format!("stage {stage} has no layer")),
        None => Ok(()),
    }
}
