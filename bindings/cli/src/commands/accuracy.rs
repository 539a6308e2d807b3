//! `dflop accuracy`: compares profile predictions with other measurements.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use dflop_costmodel::{AccuracyReport, ErrorSummary};
use serde::Serialize;

use crate::args::ReportArgs;
use crate::failure::Failure;
use crate::output::{Output, write_json};
use crate::report::{Accuracy, Basis, Origin, RunReport, verdict, write_report};
use dflop_loader::model::read_profile;

/// Compare the predictions of a measured profile with other measurements: errors by module, part and size.
#[derive(Debug, Args)]
pub(crate) struct AccuracyArgs {
    /// Measured profile that predicts: a CSV file, or a directory with CSV files.
    #[arg(long, value_name = "DIR_OR_FILE")]
    profile: PathBuf,
    /// Measurements to predict, in the profile schema: a CSV file, or a directory with CSV files.
    #[arg(long, value_name = "DIR_OR_FILE")]
    observed: PathBuf,
    #[command(flatten)]
    report: ReportArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct AccuracyJson<'a> {
    profile: String,
    observed: String,
    profile_device: Option<&'a str>,
    observed_device: Option<&'a str>,
    #[serde(flatten)]
    accuracy: &'a AccuracyReport,
}

pub(crate) fn run(args: &AccuracyArgs, out: &mut Output) -> Result<(), Failure> {
    let (profile, observed) = (read_profile(&args.profile)?, read_profile(&args.observed)?);
    let accuracy = AccuracyReport::compare(&profile, &observed)?;
    let json = AccuracyJson {
        profile: args.profile.display().to_string(),
        observed: args.observed.display().to_string(),
        profile_device: profile.device(),
        observed_device: observed.device(),
        accuracy: &accuracy,
    };
    if let Some(path) = args.report.path() {
        write_report(path, &report(&json))?;
    }
    if args.json { write_json(out, &json) } else { print(out, &json) }
}

/// Returns the report: each point with the prediction interval.
fn report(json: &AccuracyJson<'_>) -> RunReport {
    let accuracy = json.accuracy;
    let mut report = RunReport::new("accuracy", "Accuracy of a profile", Origin::for_this_process());
    report.verdict.push(verdict(
        Basis::Measured,
        format!(
            "Predictions are {} off in the median and at most {} for 19 of 20 points; {} of the measurements are within \
             the stated 90 % intervals.",
            format_percent(accuracy.errors.p50),
            format_percent(accuracy.errors.p95),
            format_percent(accuracy.within_uncertainty)
        ),
    ));
    report.fact("Profile", &json.profile);
    report.fact("Measured on", json.profile_device.unwrap_or("not stated"));
    report.fact("Observations", &json.observed);
    report.fact("Observed on", json.observed_device.unwrap_or("not stated"));
    report.fact("Points", accuracy.points.len().to_string());
    for unpredicted in &accuracy.unpredicted {
        report.notes.push(format!("{} points not compared: {}", unpredicted.count, unpredicted.reason));
    }
    report.accuracy = Some(Accuracy::from_profile(accuracy));
    report
}

fn print(out: &mut impl Write, json: &AccuracyJson<'_>) -> Result<(), Failure> {
    let accuracy = json.accuracy;
    writeln!(out, "{} predicts {}:", json.profile, json.observed)?;
    writeln!(
        out,
        "{:<28} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "", "points", "bias", "mean", "p50", "p95", "max"
    )?;
    for module in &accuracy.modules {
        for part in &module.parts {
            print_errors(out, &format!("{} {} {}", module.module, part.part, part.phase), &part.errors)?;
        }
        for bin in &module.bins {
            let name = format!("  {} {}..{} tokens", module.module, bin.tokens_min, bin.tokens_end);
            print_errors(out, &name, &bin.errors)?;
        }
    }
    print_errors(out, "all", &accuracy.errors)?;
    writeln!(
        out,
        "{} of the points are within the stated 90 % intervals, which are {} wide on each side; {} are extrapolated \
         beyond the measured shapes",
        format_percent(accuracy.within_uncertainty),
        format_percent(accuracy.mean_uncertainty),
        accuracy.extrapolated
    )?;
    for unpredicted in &accuracy.unpredicted {
        writeln!(out, "{} points not compared: {}", unpredicted.count, unpredicted.reason)?;
    }
    Ok(())
}

fn print_errors(out: &mut impl Write, name: &str, errors: &ErrorSummary) -> Result<(), Failure> {
    let [bias, mape, p50, p95, max] =
        [errors.bias, errors.mape, errors.p50, errors.p95, errors.max].map(format_percent);
    writeln!(out, "{name:<28} {:>7} {bias:>8} {mape:>8} {p50:>8} {p95:>8} {max:>8}", errors.count)?;
    Ok(())
}

fn format_percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}
