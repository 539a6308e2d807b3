//! Compares this program's results with the PyTorch results, from JSON lines files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::report::median;
use crate::Result;
use crate::arguments::Arguments;
use crate::report::{self, Outcome};

/// Number of steps whose losses are averaged before curves are compared.
const WINDOW: usize = 10;
/// Maximum relative difference between average losses.
const CURVE_BOUND: f64 = 0.02;

/// Results from both sides under the same name.
#[derive(Default)]
struct Pair {
    /// Values by the way in which they were computed.
    ours: BTreeMap<String, Vec<f64>>,
    theirs: BTreeMap<String, Vec<f64>>,
}

/// Comparison kind.
struct Kind {
    /// Fields that are compared.
    fields: &'static [&'static str],
    /// Whether larger figures are better.
    is_rate: bool,
    /// Minimum required rate relative to PyTorch.
    ratio_min: f64,
    asked: &'static str,
}

fn kind(set: &str) -> Option<Kind> {
    let of = |fields, is_rate, ratio_min, asked| Some(Kind { fields, is_rate, ratio_min, asked });
    match set {
        "gemm" => of(&["seconds"], false, 1.0 / 1.05, "within 5 % of torch.matmul"),
        "attention" => of(
            &["forward_seconds", "backward_seconds"],
            false,
            1.0,
            "at least the fastest way of PyTorch in every bucket",
        ),
        "throughput" => of(&["tokens_per_second"], true, 1.0, "at least PyTorch's tokens per second"),
        _ => None,
    }
}

/// Compares the `--set` results in the files.
pub(crate) fn run(arguments: &Arguments) -> Result<Outcome> {
    let lines = lines(&arguments.files)?;
    let part = format!("{} beside PyTorch", arguments.set);
    if arguments.set == "curve" {
        return Ok(curves(&part, &lines));
    }
    let Some(kind) = kind(&arguments.set) else {
        return Err(format!("there is nothing to compare for `{}`", arguments.set).into());
    };
    Ok(compare(&part, &kind, &lines, arguments.is_tiny))
}

/// Reads all JSON objects; other lines are left out.
fn lines(files: &[PathBuf]) -> Result<Vec<Value>> {
    let mut lines = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file)?;
        lines.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
    }
    Ok(lines)
}

fn compare(part: &str, kind: &Kind, lines: &[Value], is_tiny: bool) -> Outcome {
    let pairs = pairs(kind, lines);
    let mut ratios = Vec::new();
    for (name, pair) in &pairs {
        let (Some((own, ours)), Some((way, theirs))) = (best(kind, &pair.ours), best(kind, &pair.theirs))
        else {
            continue;
        };
        let ratio = if kind.is_rate { ours / theirs } else { theirs / ours };
        eprintln!("{name:>46}: {ratio:5.2} of the speed of PyTorch ({own}, {way})");
        report::result(
            part,
            json!({"name": name, "ours": ours, "theirs": theirs, "own_way": own, "way": way, "ratio": ratio,
                "asked": kind.ratio_min}),
        );
        ratios.push((ratio, name));
    }
    let reached = ratios.iter().filter(|(ratio, _)| *ratio >= kind.ratio_min).count();
    let Some((least, name)) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0)) else {
        return report::summary(part, Outcome::Skipped, "no figures of both sides", kind.asked);
    };
    let is_reached = reached == ratios.len() || is_tiny;
    let figure = format!("{reached} of {} reach it, least {least:.2} ({name})", ratios.len());
    report::summary(part, if is_reached { Outcome::Passed } else { Outcome::Missed }, &figure, kind.asked)
}

/// Returns the best way by median.
fn best<'a>(kind: &Kind, ways: &'a BTreeMap<String, Vec<f64>>) -> Option<(&'a str, f64)> {
    let medians = ways.iter().map(|(way, values)| (way.as_str(), median(values.clone())));
    medians.min_by(|a, b| if kind.is_rate { b.1.total_cmp(&a.1) } else { a.1.total_cmp(&b.1) })
}

fn pairs(kind: &Kind, lines: &[Value]) -> BTreeMap<String, Pair> {
    let mut pairs: BTreeMap<String, Pair> = BTreeMap::new();
    for line in lines {
        let (Some(name), Some(side)) = (line["name"].as_str(), line["side"].as_str()) else { continue };
        for &field in kind.fields {
            let Some(value) = line[field].as_f64().filter(|value| *value > 0.0) else { continue };
            let key = match kind.fields {
                [_] => name.to_owned(),
                _ => format!("{name} {}", field.trim_end_matches("_seconds")),
            };
            let pair = pairs.entry(key).or_default();
            let way = line["way"].as_str().unwrap_or_default().to_owned();
            let values = if side == "dflop" { &mut pair.ours } else { &mut pair.theirs };
            values.entry(way).or_default().push(value);
        }
    }
    pairs
}

/// Compares averages over several steps from two loss curves.
fn curves(part: &str, lines: &[Value]) -> Outcome {
    let asked = "means of 10 steps within 2 %";
    let of = |side: &str| -> Vec<f64> {
        let own = lines.iter().filter(|line| line["side"] == side);
        own.filter_map(|line| line["step"].as_u64().and(line["loss"].as_f64())).collect()
    };
    let (ours, theirs) = (of("dflop"), of("torch"));
    if ours.is_empty() || theirs.is_empty() {
        return report::summary(part, Outcome::Skipped, "no losses of both sides", asked);
    }
    if ours.len() != theirs.len() {
        let figure = format!("{} steps against {} of PyTorch", ours.len(), theirs.len());
        return report::summary(part, Outcome::Failed, &figure, asked);
    }
    let mean = |some: &[f64]| some.iter().sum::<f64>() / some.len() as f64;
    let means = ours.chunks(WINDOW).zip(theirs.chunks(WINDOW)).map(|(a, b)| (mean(a), mean(b)));
    let worst = means.map(|(ours, theirs)| (ours - theirs).abs() / theirs).fold(0.0, f64::max);
    let outcome = if worst <= CURVE_BOUND { Outcome::Passed } else { Outcome::Failed };
    let figure = format!(
        "{} steps, means within {:.2} %, last losses {:.3} and {:.3}",
        ours.len(),
        100.0 * worst,
        ours[ours.len() - 1],
        theirs[theirs.len() - 1]
    );
    report::summary(part, outcome, &figure, asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(side: &str, way: &str, seconds: f64) -> Value {
        json!({"name": "a", "side": side, "way": way, "forward_seconds": seconds})
    }

    #[test]
    fn the_fastest_way_of_the_other_side_counts_by_its_median() {
        let kind = kind("attention").unwrap();
        let mut lines = vec![timed("dflop", "", 1.0), timed("dflop", "", 1.2), timed("dflop", "", 9.0)];
        assert_eq!(compare("", &kind, &lines, false), Outcome::Skipped);
        lines.extend([timed("torch", "slow", 2.0), timed("torch", "fast", 1.3), timed("torch", "fast", 0.1)]);
        // 0.7 s against 1.2 s
        assert_eq!(compare("", &kind, &lines, false), Outcome::Missed);
        assert_eq!(compare("", &kind, &lines, true), Outcome::Passed);
        lines.extend([timed("torch", "fast", 1.25), timed("torch", "fast", 1.25)]);
        assert_eq!(compare("", &kind, &lines, false), Outcome::Passed);
    }

    #[test]
    fn products_may_be_5_percent_slower() {
        let kind = kind("gemm").unwrap();
        let of = |side, seconds| json!({"name": "a", "side": side, "seconds": seconds});
        assert_eq!(compare("", &kind, &[of("dflop", 1.04), of("torch", 1.0)], false), Outcome::Passed);
        assert_eq!(compare("", &kind, &[of("dflop", 1.06), of("torch", 1.0)], false), Outcome::Missed);
    }

    #[test]
    fn curves_agree_within_two_percent_of_means() {
        let of = |side, step, loss| json!({"side": side, "step": step, "loss": loss});
        let both = |factor: f64| -> Vec<Value> {
            (0..20).flat_map(|step| [of("dflop", step, 3.0), of("torch", step, 3.0 * factor)]).collect()
        };
        assert_eq!(curves("", &both(1.01)), Outcome::Passed);
        assert_eq!(curves("", &both(1.05)), Outcome::Failed);
        assert_eq!(curves("", &both(1.0)[..39]), Outcome::Failed);
        assert_eq!(curves("", &[of("dflop", 0, 1.0)]), Outcome::Skipped);
    }
}
