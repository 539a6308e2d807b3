//! `dflop order --shuffle-quality`: measures how well an epoch is shuffled.

use std::io::Write;

use dflop_loader::settings::OrderSettings;
use dflop_loader::{ShuffleQuality, StepPlanner};
use serde::Serialize;

use crate::args::step_plan::StepPlanArgs;
use crate::failure::Failure;
use crate::output::{Output, write_json};

#[derive(Debug, Serialize)]
struct QualityReport {
    epoch: u64,
    /// Order quality for each dataset, by dataset number.
    #[serde(rename = "data_sets")]
    datasets: Vec<ShuffleQuality>,
}

/// Measures an epoch's order in every dataset and prints the results.
pub(crate) fn print_shuffle_quality(
    planner: &StepPlanner,
    plan: &StepPlanArgs,
    order: &OrderSettings,
    is_json: bool,
    out: &mut Output,
) -> Result<(), Failure> {
    let OrderSettings { shuffle, first_epoch: epoch, .. } = *order;
    let batch = plan.global_batch_size;
    let quality = |dataset| ShuffleQuality::of(dataset, shuffle, plan.seed, epoch, batch);
    let datasets: Vec<ShuffleQuality> = planner.datasets().iter().map(quality).collect::<Result<_, _>>()?;
    if is_json {
        return write_json(out, &QualityReport { epoch, datasets });
    }
    for (number, quality) in datasets.iter().enumerate() {
        let ShuffleQuality { samples, batch, displacement, .. } = quality;
        let ShuffleQuality { batch_shards, batch_shards_uniform, index_neighbors, .. } = quality;
        writeln!(out, "dataset {number}, epoch {epoch}: {samples} samples in batches of {batch}")?;
        writeln!(out, "{:<38} {:>10} {:>14}", "", "this order", "uniform random")?;
        let uniform_neighbors = 2.0 / *samples as f64;
        let rows = [
            ("mean displacement, relative to 1/3", *displacement, 1.0),
            ("distinct shards in a batch", *batch_shards, *batch_shards_uniform),
            ("neighbors that are adjacent in the index", *index_neighbors, uniform_neighbors),
        ];
        for (name, value, uniform) in rows {
            writeln!(out, "{name:<38} {value:>10.4} {uniform:>14.4}")?;
        }
    }
    Ok(())
}
