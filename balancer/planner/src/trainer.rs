//! Lists the plans that a trainer runs.
//!
//! The search is restricted to them, and plans from elsewhere are rejected with the first part that the
//! trainer lacks. `dflop.torch.Pipeline` has stages on one rank each, under every schedule and in every
//! placement; the executor has tensor parallelism as well.

use crate::problem::{ModulePlan, ParallelismPlan};
use dflop_balancer::{Error, Result};
use dflop_costmodel::memory::Trainer;

/// Maximum TP degree.
pub(crate) const fn tp_max(trainer: Trainer) -> u32 {
    match trainer {
        Trainer::Dflop => u32::MAX,
        Trainer::Torch => 1,
    }
}

/// Maximum expert-parallel degree. The executor's plans are marked instead, see
/// [`ParallelismPlan::expert_parallel`].
pub(crate) const fn expert_parallel_max(trainer: Trainer) -> u32 {
    match trainer {
        Trainer::Dflop => u32::MAX,
        Trainer::Torch => 1,
    }
}

/// Whether ranks can share the tiles of a sample; otherwise they share whole media.
pub(crate) const fn divides_media(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Dflop)
}

/// Whether gradient sums and weight gathers of a stage run beside the passes of the same stage; otherwise
/// after the last pass and before the first.
pub(crate) const fn overlaps_sums(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Dflop)
}

/// Whether a split backward pass computes the gradients of rows a second time for those of weights.
pub(crate) const fn repeats_split_passes(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Torch)
}

/// Checks that a trainer runs a plan.
///
/// - `names`: encoder names, in plan order
///
/// # Errors
/// [`Error::Config`] with the part of the plan that the trainer lacks.
pub(crate) fn check(trainer: Trainer, plan: &ParallelismPlan, names: &[&str]) -> Result<()> {
    let invalid = |reason: String| Err(Error::Config { setting: "plan", reason });
    let name = trainer.name();
    let modules = plan.encoders.iter().zip(names.iter().copied()).chain([(&plan.llm, "llm")]);
    for (ModulePlan { degrees, .. }, module) in modules {
        if degrees.tp > tp_max(trainer) {
            return invalid(format!(
                "`{module}` has a TP degree of {}; trainer `{name}` runs stages on one rank each: plan with \
                 `--trainer {name}`, or shard over `mesh[\"tp\"]` in stages of your own",
                degrees.tp
            ));
        }
    }
    if plan.expert_parallel > expert_parallel_max(trainer) {
        return invalid(format!(
            "`llm` divides experts over {} ranks; trainer `{name}` keeps all experts of a layer on a rank: plan \
             with `--trainer {name}`",
            plan.expert_parallel
        ));
    }
    Ok(())
}
