//! Fills the `dflop stats` report.
//!
//! Prints the data profile as a table with histograms for a terminal.

use super::collect::{DealtBatches, Divisible, Refused};
use super::{NamedOutlier, StatsArgs, StatsReport};
use crate::args::PREVIEWS;
use crate::commands::simulate::print_launch_limits;
use crate::failure::Failure;
use crate::report::collect::SampleTable;
use crate::report::{Basis, DataProfile, Origin, Quantity, RunReport, verdict};
use dflop_costmodel::{CostModel, Histogram, Outlier, Quantiles, SampleShape};
use dflop_loader::Dataset;
use std::io::Write;

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
    if let Some(DealtBatches { gpus, slowest_over_mean, idle_fraction, .. }) = stats.data_parallel {
        let idle = idle_fraction * 100.0;
        let text =
            format!("slowest GPU {slowest_over_mean:.2} times the mean, {idle:.0} % of the time waiting");
        report.fact(&format!("Random microbatches on {gpus} GPUs, FSDP"), text);
    }
    if !stats.context.is_empty() {
        report.fact("Samples that GPUs of a node can share", divisible(&stats.context));
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
        "The most expensive of {} samples costs {dearest:.1} times the median one, and 1 of 20 costs more than {:.1} \
         times the median: a batch that is cut without regard to cost waits for them. {} samples are outliers.",
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

/// Histogram bar heights, an eighth of a line each.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Number of outliers to print.
const OUTLIERS_SHOWN: usize = 5;

/// Prints the report.
pub(super) fn print(out: &mut impl Write, report: &StatsReport, times_from: &str) -> Result<(), Failure> {
    let StatsReport { samples, model, sampling, encoder_to_llm_ratio, .. } = report;
    let source = if report.is_measured { " (measured)" } else { "" };
    writeln!(out, "{samples} samples, costs predicted for {model} on {times_from}{source}")?;
    if sampling.samples < sampling.of {
        writeln!(
            out,
            "{} of them drawn at random (seed {}): ranks are within {:.2} points with a probability of 95 %",
            sampling.samples,
            sampling.seed,
            sampling.rank_error * 100.0
        )?;
    }
    writeln!(out, "encoder seconds per LLM second: {encoder_to_llm_ratio:.3}")?;
    if let Some(certainty) = &report.certainty {
        writeln!(
            out,
            "90 % interval of a prediction: within {:.1} % on average; {:.1} % of samples are outside the measured shapes",
            certainty.mean_uncertainty * 100.0,
            certainty.beyond_profile * 100.0
        )?;
    }
    print_launch_limits(out, &report.launch_limits)?;
    if report.samples_without_target > 0 {
        writeln!(out, "samples without a training target: {}", report.samples_without_target)?;
    }
    for part in &report.unused {
        writeln!(out, "not used: {}", part.described())?;
    }
    for Refused { key, reason } in &report.refused {
        writeln!(out, "refused: {key}: {reason}")?;
    }
    print_quantiles(out, report)?;
    print_outliers(out, report)?;
    if !report.context.is_empty() {
        writeln!(out, "samples that GPUs of a node can share: {}", divisible(&report.context))?;
    }
    report.data_parallel.map_or(Ok(()), |dealt| print_dealt(out, dealt))
}

/// Describes the samples that divide over several GPUs.
fn divisible(context: &[Divisible]) -> String {
    let count = |Divisible { gpus, samples_fraction, tokens_min }: &Divisible| {
        format!("{:.1} % over {gpus} GPUs, from {tokens_min} tokens", 100.0 * samples_fraction)
    };
    context.iter().map(count).collect::<Vec<_>>().join("; ")
}

/// Prints what data-blind batches cost in data-parallel training, and the command with the whole answer.
fn print_dealt(out: &mut impl Write, dealt: DealtBatches) -> Result<(), Failure> {
    let DealtBatches { gpus, microbatch_samples, slowest_over_mean, idle_fraction } = dealt;
    writeln!(
        out,
        "data-parallel training: {microbatch_samples} random samples per microbatch on {gpus} GPUs, FSDP: the slowest \
         GPU takes {slowest_over_mean:.2} times the mean, and GPUs wait {:.0} % of the time",
        idle_fraction * 100.0
    )?;
    writeln!(
        out,
        "`dflop simulate` with the same dataset and `--gpus {gpus}` compares data-blind and balanced batches under \
         DDP, ZeRO, FSDP and HSDP"
    )?;
    Ok(())
}

fn print_quantiles(out: &mut impl Write, report: &StatsReport) -> Result<(), Failure> {
    let columns = ["n", "mean", "min", "p50", "p95", "p99", "max"];
    write!(out, "{:<20}", "")?;
    columns.iter().try_for_each(|column| write!(out, " {column:>9}"))?;
    writeln!(out, "  from min to max")?;
    for name in &report.names {
        let (Some(quantiles), Some(histogram)) = (report.quantiles.get(name), report.histograms.get(name))
        else {
            continue;
        };
        write!(out, "{name:<20} {:>9}", quantiles.n)?;
        let Quantiles { mean, min, p50, p95, p99, max, .. } = quantiles;
        for value in [mean, min, p50, p95, p99, max] {
            write!(out, " {:>9}", format_value(*value))?;
        }
        writeln!(out, "  {}", format_histogram(histogram))?;
    }
    Ok(())
}

fn print_outliers(out: &mut impl Write, report: &StatsReport) -> Result<(), Failure> {
    if report.outliers.is_empty() {
        return Ok(());
    }
    writeln!(out, "{} outliers, the most expensive:", report.outlier_count)?;
    for outlier in report.outliers.iter().take(OUTLIERS_SHOWN) {
        let NamedOutlier { key, shard, cost_seconds, times_median, .. } = outlier;
        writeln!(
            out,
            "  {:>9} s, {times_median:>5.1} x median: {key} in {shard}",
            format_value(*cost_seconds)
        )?;
    }
    Ok(())
}

/// Formats a value with four significant digits, or as a whole number if it has more.
fn format_value(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 1e-3 => format!("{value:.5}"),
        _ => format!("{value:.2e}"),
    }
}

fn format_histogram(histogram: &Histogram) -> String {
    let most = histogram.counts.iter().copied().max().unwrap_or(0).max(1);
    let bar = |count: &u64| BARS[(count * 8).div_ceil(most) as usize];
    histogram.counts.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_with_any_value_is_seen() {
        let histogram = Histogram { min: 0.0, max: 1.0, counts: vec![0, 1, 1000] };
        assert_eq!(format_histogram(&histogram), " ▁█");
    }

    #[test]
    fn values_keep_their_size() {
        let shown = [0.0, 12.0, 12345.6, 3.14444, 0.012_345, 2e-7].map(format_value);
        assert_eq!(shown, ["0", "12", "12346", "3.14", "0.01235", "2.00e-7"]);
    }
}
