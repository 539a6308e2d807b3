//! Lists the planner settings, to compare them across ranks.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64;

use super::config::PlanConfig;
use super::planner::StepPlanner;
use crate::dataset::Dataset;
use crate::order::SampleSource;

impl StepPlanner {
    /// Returns all settings that plans depend on, each as text: planners with the same settings compute the
    /// same plans. A dataset is described by the fingerprint, a cost model by name and digest; a cost
    /// function is not described.
    #[must_use]
    pub fn settings(&self) -> BTreeMap<String, String> {
        let SampleSource { datasets, rules, seed, shuffle, tail, first_epoch, first_step, rows, row_cursors } =
            &*self.run.source;
        let PlanConfig {
            dp_size,
            microbatches,
            stages,
            module_dp_sizes,
            stage_layers,
            synchronization,
            strategy,
            schedule,
            caps,
            pad_to,
            required_encoders,
            context,
            work,
        } = &self.config;
        let datasets: Vec<String> = datasets.iter().map(described).collect();
        let model = format!("{:?}", self.model);
        let model = format!("{} ({:016x})", self.model.spec().name, xxh3_64(model.as_bytes()));
        let settings: [(&str, &dyn std::fmt::Debug); 23] = [
            ("seed", seed),
            ("shuffle", shuffle),
            ("tail", tail),
            ("first_epoch", first_epoch),
            ("first_step", first_step),
            ("global_batch", &self.run.steps.global_batch()),
            ("mixture", rules),
            ("rows", rows),
            ("first_rows", row_cursors),
            ("dp_size", dp_size),
            ("microbatches", microbatches),
            ("stages", stages),
            ("module_dp_sizes", module_dp_sizes),
            ("stage_layers", stage_layers),
            ("synchronization", synchronization),
            ("strategy", strategy),
            ("schedule", schedule),
            ("caps", caps),
            ("pad_to", pad_to),
            ("required_encoders", required_encoders),
            ("context", context),
            ("work", work),
            ("cost_function", &self.cost_function.is_some()),
        ];
        let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), format!("{value:?}")));
        let described = [("model".to_owned(), model), ("datasets".to_owned(), datasets.join("; "))];
        settings.chain(described).collect()
    }
}

/// Describes a dataset by its samples, not by the location.
fn described(dataset: &Dataset) -> String {
    let index = dataset.index();
    let mut text = format!("{} of {} samples", index.fingerprint(), dataset.len());
    let frames = index.video_sampling().map(|sampling| format!("{sampling:?}"));
    let split = dataset.split_name().zip(dataset.split_digest());
    let split = split.map(|(name, digest)| format!("split {name} ({digest:016x})"));
    let counts = index.token_counts().map(|digest| format!("texts counted by {digest}"));
    for part in [split, counts, frames].into_iter().flatten() {
        text += ", ";
        text += &part;
    }
    text
}
