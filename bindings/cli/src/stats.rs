//! `dflop stats`: the data profile of a data set.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use dflop_costmodel::{DataProfile, Histogram, Quantiles, SampleShape};
use serde::Serialize;

use crate::data_set::IndexedArgs;
use crate::model::ModelArgs;
use crate::output::{Failure, Output, write_json};
use crate::text_counts::TokenizerArgs;

/// Classes of each histogram.
const CLASSES: usize = 24;
/// Heights of a histogram bar in a terminal.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Show how shapes, tokens and predicted costs are spread over the data set.
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    data_set: IndexedArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct StatsReport {
    samples: u64,
    model: String,
    device: String,
    encoder_to_llm_ratio: f64,
    /// Samples that the model cannot take, and why.
    refused: Vec<Refused>,
    quantiles: BTreeMap<String, Quantiles>,
    histograms: BTreeMap<String, Histogram>,
}

#[derive(Debug, Serialize)]
struct Refused {
    key: String,
    reason: String,
}

pub(crate) fn run(args: &StatsArgs, out: &mut Output) -> Result<(), Failure> {
    let model = args.model.cost_model()?;
    let text_counts = args.tokenizer.text_counts(Some(model.spec()))?;
    let data_set = args.data_set.open(text_counts)?;
    let index = data_set.index();
    let mut profile = DataProfile::new(&model);
    let (mut shape, mut refused) = (SampleShape::default(), Vec::new());
    for place in 0..data_set.len() {
        let row = index.sample(data_set.sample_number(place));
        row.read_shape(&mut shape);
        match model.annotate(&shape) {
            Ok(cost) => profile.add(&shape, &cost),
            Err(error) => refused.push(Refused { key: row.key().to_owned(), reason: error.to_string() }),
        }
    }
    let summary = profile.summarize(CLASSES);
    let (model, device) = (args.model.name(), args.model.device.clone());
    if args.json {
        let quantiles =
            summary.iter().map(|(name, quantiles, _)| (name.clone(), quantiles.clone())).collect();
        let histograms = summary.into_iter().map(|(name, _, histogram)| (name, histogram)).collect();
        let (samples, encoder_to_llm_ratio) = (data_set.len(), profile.encoder_to_llm_ratio());
        let report =
            StatsReport { samples, model, device, encoder_to_llm_ratio, refused, quantiles, histograms };
        return write_json(out, &report);
    }
    writeln!(out, "{} samples, costs predicted for {model} on {device} (a stated rate)", data_set.len())?;
    writeln!(out, "encoder seconds per LLM second: {:.3}", profile.encoder_to_llm_ratio())?;
    for Refused { key, reason } in &refused {
        writeln!(out, "refused: {key}: {reason}")?;
    }
    print_table(out, &summary)
}

fn print_table(out: &mut impl Write, summary: &[(String, Quantiles, Histogram)]) -> Result<(), Failure> {
    let columns = ["n", "mean", "min", "p50", "p95", "p99", "max"];
    write!(out, "{:<20}", "")?;
    columns.iter().try_for_each(|column| write!(out, " {column:>9}"))?;
    writeln!(out, "  from min to max")?;
    for (name, quantiles, histogram) in summary {
        write!(out, "{name:<20} {:>9}", quantiles.n)?;
        let Quantiles { mean, min, p50, p95, p99, max, .. } = quantiles;
        for value in [mean, min, p50, p95, p99, max] {
            write!(out, " {:>9}", shown_value(*value))?;
        }
        writeln!(out, "  {}", shown_histogram(histogram))?;
    }
    Ok(())
}

/// Four significant digits, or whole numbers where there are more.
fn shown_value(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 1e-3 => format!("{value:.5}"),
        _ => format!("{value:.2e}"),
    }
}

fn shown_histogram(histogram: &Histogram) -> String {
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
        assert_eq!(shown_histogram(&histogram), " ▁█");
    }

    #[test]
    fn values_keep_their_size() {
        let shown = [0.0, 12.0, 12345.6, 3.14444, 0.012_345, 2e-7].map(shown_value);
        assert_eq!(shown, ["0", "12", "12346", "3.14", "0.01235", "2.00e-7"]);
    }
}
