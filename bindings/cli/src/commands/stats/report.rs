//! Fills the `dflop stats` report.

use dflop_costmodel::{CostModel, Outlier, SampleShape};
use dflop_loader::Dataset;

use super::{StatsArgs, StatsReport};
use crate::args::report::PREVIEWS;
use crate::failure::Failure;
use crate::report::collect::SampleTable;
use crate::report::{Basis, DataProfile, Origin, Quantity, RunReport, verdict};

/// Returns the report on a data profile.
///
/// - `most_expensive`: samples by dataset index, the most expensive first
pub(super) fn page(
    args: &StatsArgs,
    dataset: &Dataset,
    model: &CostModel,
    stats: &StatsReport,
    most_expensive: &[Outlier],
) -> Result<RunReport, Failure> {
    let mut table = SampleTable::default();
    let mut shape = SampleShape::default();
    for outlier in most_expensive {
        let number = dataset.sample_number(outlier.number);
        dataset.index().sample(number).read_shape(&mut shape);
        table.sample_index(std::slice::from_ref(dataset), 0, number, &model.predict(&shape)?);
    }
    let (dearest, note) = table.finish(std::slice::from_ref(dataset), PREVIEWS);
    let title = format!("Data profile for {}", stats.model);
    let mut report = RunReport::new("stats", title, Origin::for_this_process());
    report.verdict.push(verdict(Basis::Counted, describe(stats, most_expensive)));
    report.fact("Samples", stats.samples.to_string());
    if stats.sampling.samples < stats.sampling.of {
        report.fact("Profiled", format!("{} drawn at random", stats.sampling.samples));
    }
    report.fact("Costs", format!("{} on {}", stats.model, args.model.times_from(&args.set.settings()?)));
    report.fact("Encoder seconds per LLM second", format!("{:.3}", stats.encoder_to_llm_ratio));
    report.fact("Refused by the model", stats.refused.len().to_string());
    if let Some(certainty) = &stats.certainty {
        let width = certainty.mean_uncertainty * 100.0;
        report.fact("90 % interval of a prediction", format!("within {width:.1} % on average"));
    }
    report.notes.extend(note);
    report.profile = Some(DataProfile {
        samples: stats.samples,
        profiled: stats.sampling.samples,
        modules: stats.modules.iter().map(ToString::to_string).collect(),
        quantities: stats.names.iter().filter_map(|name| quantity(stats, name)).collect(),
        times_median: most_expensive.iter().map(|outlier| outlier.times_median).collect(),
        dearest,
    });
    Ok(report)
}

/// Describes the cost spread in a sentence.
fn describe(stats: &StatsReport, most_expensive: &[Outlier]) -> String {
    let Some(costs) = stats.quantiles.get("cost_seconds").filter(|costs| costs.n > 0) else {
        return "The dataset has no sample that the model takes.".to_owned();
    };
    let dearest = most_expensive.first().map_or(0.0, |outlier| outlier.times_median);
    format!(
        "The dearest of {} samples costs {dearest:.1} times the median one, and 1 of 20 costs more than {:.1} times \
         the median: a batch that is cut without regard to cost waits for them. {} samples are outliers.",
        stats.sampling.samples,
        if costs.p50 > 0.0 { costs.p95 / costs.p50 } else { 0.0 },
        stats.outlier_count,
    )
}

fn quantity(stats: &StatsReport, name: &str) -> Option<Quantity> {
    let (quantiles, histogram) = (stats.quantiles.get(name)?, stats.histograms.get(name)?);
    (quantiles.n > 0).then(|| Quantity {
        name: name.to_owned(),
        count: quantiles.n as u64,
        mean: quantiles.mean,
        quantiles: [
            quantiles.min,
            quantiles.p5,
            quantiles.p25,
            quantiles.p50,
            quantiles.p75,
            quantiles.p95,
            quantiles.p99,
            quantiles.max,
        ],
        range: [histogram.min, histogram.max],
        counts: histogram.counts.clone(),
    })
}
