//! Explains why no plan fits, and names the smallest change that would make a plan fit.

use super::cluster::Cluster;
use super::problem::PlanProblem;
use super::score;
use super::space::memory;
use super::space::shape::StageShape;
use super::space::{Candidate, SearchSpace, SearchSpaceOptions};
use super::workload::ItemSize;

const BYTES_PER_GIB: f64 = 1_073_741_824.0;
/// Number of cluster doublings to try.
const DOUBLINGS: u32 = 8;

/// Describes the minimum memory over all plans, and changes that would make a plan fit.
pub(super) fn suggestion(problem: &PlanProblem<'_>, space: &SearchSpace<'_>) -> String {
    let Some((mean_bytes, candidate)) = least_requirement(space) else {
        return no_plan(problem, space);
    };
    let (have, family) = (space.budget_bytes, candidate.family);
    // Plans whose mean microbatches fit fail on microbatches above the mean.
    let (least_bytes, of) = if mean_bytes > have {
        (mean_bytes, "")
    } else {
        (
            largest_requirement(space, &candidate).max(have + 1.0),
            " for the largest microbatch of the sampled batches",
        )
    };
    let plan = {
        let text = |name: &str, shape: &StageShape, dp: u32| {
            format!("{name} tp {} pp {} dp {dp}", shape.tp, shape.pp)
        };
        let modules = space.encoders.iter().zip(space.encoder_shapes(&family)).zip(family.encoders.iter());
        let encoders = modules.map(|((module, shape), part)| text(module.name, shape, part.dp));
        let llm = text("llm", space.llm_shape(&family), family.llm_dp);
        encoders.chain([llm]).collect::<Vec<String>>().join(", ")
    };
    let gib = |bytes: f64| (bytes / BYTES_PER_GIB * 10.0).ceil() / 10.0;
    let more_bytes = (least_bytes - have) * problem.memory_margin;
    let mut changes = vec![format!("{:.1} GiB more memory per GPU", gib(more_bytes))];
    if !problem.options.has_recomputation {
        let options = SearchSpaceOptions { has_recomputation: true, ..problem.options };
        if would_fit(problem, problem.cluster, options) {
            changes.push("recomputation of activations".to_owned());
        }
    }
    if let Some(gpus) = gpus_that_fit(problem) {
        changes.push(format!("{gpus} GPUs"));
    }
    let refused = refused_degrees(problem, space);
    format!(
        "a plan needs at least {:.1} GiB per GPU ({plan}){of}, but of {:.1} GiB only {:.1} are usable with the \
         memory margin; to fit, use {}{refused}",
        gib(least_bytes),
        problem.cluster.memory_bytes as f64 / BYTES_PER_GIB,
        (have / BYTES_PER_GIB * 10.0).floor() / 10.0,
        changes.join(", or ")
    )
}

/// Explains why there is no plan at all, for any memory.
fn no_plan(problem: &PlanProblem<'_>, space: &SearchSpace<'_>) -> String {
    let Cluster { gpus, gpus_per_node, .. } = problem.cluster;
    let modules = space.encoders.iter().zip(problem.encoders.iter().copied());
    for (module, costs) in modules.chain([(&space.llm, problem.llm)]) {
        if module.shapes.is_empty() {
            let (name, degrees) = (module.name, costs.tp_degrees());
            return format!(
                "no tensor-parallel degree of the {name} divides a node of {gpus_per_node} GPUs and is at most \
                 {gpus}; its heads and the profile allow {degrees:?}"
            );
        }
    }
    let least = space.encoders.len() + 1;
    format!("{gpus} GPUs are too few for separate modules; use at least {least} GPUs, or colocated placement")
}

fn would_fit(problem: &PlanProblem<'_>, cluster: Cluster, options: SearchSpaceOptions) -> bool {
    let other = PlanProblem { cluster, options, ..problem.clone() };
    let least = other.space().ok().and_then(|space| least_requirement(&space));
    least.is_some_and(|(bytes, _)| bytes <= cluster.memory_bytes as f64 / problem.memory_margin)
}

/// Finds the smallest doubled cluster with a plan, refined by whole nodes.
fn gpus_that_fit(problem: &PlanProblem<'_>) -> Option<u32> {
    let fits = |gpus: u32| would_fit(problem, Cluster { gpus, ..problem.cluster }, problem.options);
    let mut few = problem.cluster.gpus;
    let mut many = None;
    for doubling in 1..=DOUBLINGS {
        let gpus = problem.cluster.gpus.checked_mul(1 << doubling)?;
        if fits(gpus) {
            many = Some(gpus);
            break;
        }
        few = gpus;
    }
    let (mut many, node) = (many?, problem.cluster.gpus_per_node);
    while many - few > node {
        let middle = few + (many - few) / 2 / node * node;
        // Rounded down to whole nodes, the middle may not move.
        if middle <= few {
            break;
        }
        if fits(middle) { many = middle } else { few = middle }
    }
    Some(many)
}

/// Names degrees that would fit a node but have no costs: measuring them may help.
fn refused_degrees(problem: &PlanProblem<'_>, space: &SearchSpace<'_>) -> String {
    let largest = space.llm.times.iter().map(|times| times.tp).max().unwrap_or(1);
    if largest < problem.cluster.gpus_per_node {
        return format!(
            "; the largest tensor-parallel degree that the heads and costs of the llm allow is {largest} of {}",
            problem.cluster.gpus_per_node
        );
    }
    String::new()
}

/// Returns the memory of a plan on the sampled batches, balanced greedily, in bytes.
fn largest_requirement(space: &SearchSpace<'_>, candidate: &Candidate) -> f64 {
    let batches = space.workload.batches().iter();
    let need = |batch: &Vec<ItemSize>| {
        score::balance_greedily(space, candidate, batch).requirement(space, candidate).most()
    };
    batches.map(need).fold(0.0, f64::max)
}

/// Finds the plan with the minimum memory for mean microbatches, in bytes; `None` if there is no plan.
pub(super) fn least_requirement(space: &SearchSpace<'_>) -> Option<(f64, Candidate)> {
    let mut least: Option<(f64, Candidate)> = None;
    space.visit_llms(|llm, llm_dp| {
        // Memory hardly changes between powers of two, so these and the largest DP size are enough.
        let is_most = (llm_dp + 1) * space.llm.shapes[llm].gpus() >= space.cluster.gpus;
        if !llm_dp.is_power_of_two() && !is_most {
            return;
        }
        space.visit_encoders(llm, llm_dp, &mut |family| {
            for microbatches in [1, space.microbatches_max(family)] {
                let need = memory::requirement(space, family, microbatches, microbatches).most();
                if least.is_none_or(|(bytes, _)| need < bytes) {
                    least = Some((need, Candidate { family: *family, microbatches }));
                }
            }
        });
    });
    for family in space.joint_families() {
        for microbatches in [1, space.microbatches_max(&family)] {
            let need = memory::requirement(space, &family, microbatches, microbatches).most();
            if least.is_none_or(|(bytes, _)| need < bytes) {
                least = Some((need, Candidate { family, microbatches }));
            }
        }
    }
    least
}
