//! Text lines that show the run state.
//!
//! Graphs in a single text line.

use super::state::{Bottleneck, Phase, RunLines, RunState, Shares};
use crate::failure::escape_controls;
use dflop_executor::step_record::StepLine;

/// Number of columns before a value.
const LABEL: usize = 9;
/// Number of columns for values next to a graph.
const BESIDE: usize = 52;
/// Smallest step fraction that is shown, besides computing and data.
const SHARE_SHOWN: f64 = 5e-4;
/// Separator between the parts in a value.
const GAP: &str = "   ";

/// Returns the lines for a state, none wider than `width` columns.
///
/// - `saved`: name and age in seconds of the last checkpoint
pub(super) fn lines(
    run: &RunLines,
    state: &RunState,
    saved: Option<(String, f64)>,
    width: usize,
) -> Vec<String> {
    let mut shown = vec![heading(state)];
    shown.push(line("step", &steps(state, width)));
    let graph = width.saturating_sub(LABEL + BESIDE).min(60);
    let beside = |text: String, of: fn(&StepLine) -> Option<f64>| {
        let values: Vec<f64> = run.steps.iter().filter_map(of).collect();
        format!("{text:<BESIDE$}{}", sparkline(&values, graph))
    };
    if let Some((loss, mean)) = state.loss.zip(state.loss_mean) {
        let text = format!("{loss:.4}   mean {mean:.4}");
        shown.push(line("loss", &beside(text, |step| step.loss)));
    }
    if let Some(step) = state.evaluation_step {
        let loss = state.evaluation_loss.map_or_else(|| "not finite".to_owned(), |loss| format!("{loss:.4}"));
        let text = format!("{loss}   after step {step}");
        shown.push(line("eval", &beside(text, |step| step.evaluation?.loss)));
    }
    if let Some(seconds) = state.step_seconds {
        let rate = |value: Option<f64>, unit| value.map(|value| format!("{} {unit}", short(value)));
        let mut rates = vec![format!("{} a step", duration(seconds))];
        rates.extend(rate(state.samples_per_second, "samples/s"));
        rates.extend(rate(state.tokens_per_second, "tokens/s"));
        shown.push(line("speed", &beside(rates.join(GAP), |step| Some(1.0 / step.seconds.max(1e-9)))));
    }
    if let Some((shares, bottleneck)) = state.shares.zip(state.bottleneck) {
        shown.push(line("time", &parts(shares, state.mfu)));
        let launches = state.launch_limit_tokens.filter(|_| bottleneck == Bottleneck::Launches);
        shown.push(line("limit", &launches.map_or_else(|| advice(bottleneck).to_owned(), launch_advice)));
    }
    if state.skipped_samples > 0 {
        shown.push(line("skipped", &format!("{} bad samples", state.skipped_samples)));
    }
    if let Some((name, age)) = saved {
        shown.push(line("saved", &format!("{name}, {} ago", clock(age))));
    }
    if !state.reason.is_empty() {
        shown.push(line("reason", &state.reason));
    }
    shown.iter().map(|line| fit(&escape_controls(line), width)).collect()
}

fn heading(state: &RunState) -> String {
    let phase = match state.phase {
        Phase::Starting => "starting".to_owned(),
        Phase::Running => "running".to_owned(),
        Phase::Overdue => format!("no step for {}", clock(state.quiet_seconds.unwrap_or(0.0))),
        Phase::Completed => "completed".to_owned(),
        Phase::Stopped => "stopped".to_owned(),
        Phase::Failed => "failed".to_owned(),
    };
    let title = if state.title.is_empty() { "run" } else { &state.title };
    [&[format!("{title}: {phase}")], state.about.as_slice()].concat().join(" · ")
}

fn steps(state: &RunState, width: usize) -> String {
    let mut parts = vec![state.steps_taken.to_string()];
    if let Some(steps) = state.steps.filter(|steps| *steps > 0) {
        let share = state.steps_taken as f64 / steps as f64;
        let columns = width.saturating_sub(LABEL + 60).clamp(10, 40);
        parts[0] =
            format!("{} of {steps}  {} {:.1} %", state.steps_taken, bar(share, columns), 100.0 * share);
    }
    parts.extend(state.elapsed_seconds.map(|seconds| format!("{} elapsed", clock(seconds))));
    parts.extend(state.left_seconds.map(|seconds| format!("{} left", clock(seconds))));
    parts.join(GAP)
}

fn parts(shares: Shares, mfu: Option<f64>) -> String {
    let percent = |(name, share): (&str, f64)| format!("{name} {:.1} %", 100.0 * share);
    let Shares { compute, update, data, inputs, host, checkpoints, communication, bubbles, other } = shares;
    let mut parts = vec![percent(("compute", compute)), percent(("data", data))];
    let others = [
        ("inputs", inputs),
        ("update", update),
        ("host", host),
        ("checkpoints", checkpoints),
        ("communication", communication),
        ("bubbles", bubbles),
        ("other", other),
    ];
    parts.extend(others.into_iter().filter(|(_, share)| *share >= SHARE_SHOWN).map(percent));
    parts.extend(mfu.map(|mfu| percent(("MFU", mfu))));
    parts.join(GAP)
}

/// Names the bottleneck and a remedy.
fn advice(bottleneck: Bottleneck) -> &'static str {
    match bottleneck {
        Bottleneck::Data => "data: more workers, or a faster store",
        Bottleneck::Communication => "waits for other ranks: fewer stages, more microbatches, a faster link",
        Bottleneck::Bubbles => "pipeline bubbles: more microbatches, another schedule",
        Bottleneck::Inputs => "inputs, packed and copied too late: more cores for each rank",
        Bottleneck::Update => "update of the weights: a larger global batch, shared optimizer state",
        Bottleneck::Host => "plans, results and reports of the host: a larger global batch",
        Bottleneck::Checkpoints => "checkpoints: more steps between them",
        Bottleneck::Gaps => "gaps between passes: fewer, larger microbatches",
        Bottleneck::Launches => "launches: fewer, larger microbatches",
        Bottleneck::Compute => "compute",
    }
}

fn launch_advice(tokens: u64) -> String {
    format!("launches below {tokens} tokens a microbatch: fewer, larger microbatches")
}

fn line(label: &str, value: &str) -> String {
    format!("{label:<LABEL$}{value}")
}

fn fit(line: &str, width: usize) -> String {
    // Graphs and texts have one column per character.
    line.chars().take(width).collect::<String>().trim_end().to_owned()
}

/// Formats hours, minutes and seconds.
fn clock(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn duration(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", 1e3 * seconds) } else { format!("{seconds:.2} s") }
}

/// Formats a number with three digits, and `k` or `M`.
fn short(value: f64) -> String {
    let (value, unit) = match value {
        1e6.. => (value / 1e6, " M"),
        1e3.. => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let decimals = match value {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.decimals$}{unit}")
}

/// Blocks from the lowest to the highest.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws values as blocks, at most `width` blocks, each the mean of consecutive values; the lowest and the
/// highest mean have the lowest and the highest block.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    if values.is_empty() || width == 0 {
        return String::new();
    }
    let columns = width.min(values.len());
    let mean = |column: usize| {
        let [from, to] = [column, column + 1].map(|edge| edge * values.len() / columns);
        values[from..to].iter().sum::<f64>() / (to - from) as f64
    };
    let means: Vec<f64> = (0..columns).map(mean).collect();
    let [low, high] = [
        means.iter().copied().fold(f64::INFINITY, f64::min),
        means.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    ];
    let block = |mean: &f64| {
        let height = if high > low { (mean - low) / (high - low) } else { 0.5 };
        BLOCKS[((height * 7.0).round() as usize).min(7)]
    };
    means.iter().map(block).collect()
}

/// Draws a fraction from 0 to 1 as a bar with `width` characters.
pub(super) fn bar(share: f64, width: usize) -> String {
    let full = ((share.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
    "█".repeat(full) + &"░".repeat(width - full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_executor::step_record::Line;

    const RUN: [&str; 4] = [
        r#"{"format":"dflop-steps","version":1,"title":"qwen2","end_step":8,"about":["2 ranks","1f1b"],"time":1000.0}"#,
        r#"{"step":0,"seconds":2.0,"time":1002,"loss":3.5,"samples":8,"tokens":60000,"mfu":0.25,"bubble_fraction":0.3,"data_wait_seconds":0.02,"exposed_communication_seconds":0.4}"#,
        r#"{"step":1,"seconds":2.0,"time":1004,"loss":2.5,"samples":8,"tokens":60000,"mfu":0.25,"bubble_fraction":0.3,"data_wait_seconds":0.02,"exposed_communication_seconds":0.4,"dropped_samples":1}"#,
        r#"{"end":"failed","reason":"\u001b[2Jrank 1 died","time":1004.5}"#,
    ];

    fn shown(texts: &[&str], now: f64, width: usize) -> Vec<String> {
        let mut run = RunLines::default();
        run.add(texts.iter().filter_map(|text| Line::parse(text).unwrap()).collect());
        lines(&run, &run.state(now), Some(("step-00000002".to_owned(), 61.0)), width)
    }

    #[test]
    fn a_running_job_shows_what_limits_it() {
        let lines = shown(&RUN[..3], 1005.0, 100);
        let expected = [
            "qwen2: running · 2 ranks · 1f1b",
            "step     2 of 8  ████████░░░░░░░░░░░░░░░░░░░░░░░ 25.0 %   0:00:05 elapsed   0:00:12 left",
            "loss     2.5000   mean 3.0000                                █▁",
            "speed    2.00 s a step   4.00 samples/s   30.0 k tokens/s    ▅▅",
            "time     compute 70.0 %   data 1.0 %   communication 20.0 %   bubbles 9.0 %   MFU 25.0 %",
            "limit    waits for other ranks: fewer stages, more microbatches, a faster link",
            "skipped  1 bad samples",
            "saved    step-00000002, 0:01:01 ago",
        ];
        assert_eq!(lines, expected);
        assert!(shown(&RUN[..3], 2000.0, 100)[0].contains("no step for 0:16:36"));
    }

    #[test]
    fn evaluations_have_a_line() {
        let step = |step: u64, loss: &str| {
            format!(r#"{{"step":{step},"seconds":2.0,"evaluation":{{"loss":{loss},"seconds":1.0}}}}"#)
        };
        let evaluations = |steps: &[String]| {
            let texts: Vec<&str> = steps.iter().map(String::as_str).collect();
            let lines = shown(&texts, 0.0, 100);
            lines.into_iter().find(|line| line.starts_with("eval")).unwrap()
        };
        let expected = "eval     3.2500   after step 7                               █▁";
        assert_eq!(evaluations(&[step(3, "3.5"), step(7, "3.25")]), expected);
        assert_eq!(evaluations(&[step(3, "null")]), "eval     not finite   after step 3");
        assert!(shown(&RUN, 1005.0, 100).iter().all(|line| !line.starts_with("eval")));
    }

    #[test]
    fn a_rank_without_a_pipeline_shows_what_its_device_waits_for() {
        let step = r#"{"step":0,"seconds":2.0,"mfu":0.25,"pass_seconds":1.3,"update_seconds":0.1,"data_wait_seconds":0.04,"input_seconds":0.4,"plan_seconds":0.02,"result_seconds":0.02,"report_seconds":0.02}"#;
        let lines = shown(&[RUN[0], step], 1005.0, 100);
        let starting = |label: &str| lines.iter().find(|line| line.starts_with(label)).cloned().unwrap();
        assert_eq!(
            starting("time"),
            "time     compute 65.0 %   data 2.0 %   inputs 20.0 %   update 5.0 %   host 3.0 %   other 5.0 %   MFU"
        );
        assert_eq!(
            starting("limit"),
            "limit    inputs, packed and copied too late: more cores for each rank"
        );
    }

    #[test]
    fn narrow_terminals_and_hostile_texts_are_no_harm() {
        for width in [0, 1, 20, 53, 80, 300] {
            assert!(shown(&RUN, 1005.0, width).iter().all(|line| line.chars().count() <= width), "{width}");
        }
        let lines = shown(&RUN, 1005.0, 100);
        assert!(lines[0].starts_with("qwen2: failed"));
        assert_eq!(lines.last().unwrap(), "reason   \\u{1b}[2Jrank 1 died");
        assert_eq!(shown(&[], 0.0, 80)[0], "run: starting");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.5, 12.34, 999.0, 41_300.0, 2.5e6].map(short),
            ["0.50", "12.3", "999", "41.3 k", "2.50 M"]
        );
        assert_eq!(
            (duration(0.0123), duration(3.4), clock(9_667.2)),
            ("12 ms".into(), "3.40 s".into(), "2:41:07".into())
        );
    }

    #[test]
    fn values_become_blocks_between_their_extremes() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 20), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[4.0, 4.0, f64::NAN, 1.0, 3.0], 2), "█▁");
        assert_eq!(sparkline(&[2.0; 9], 3), "▅▅▅");
        assert_eq!((sparkline(&[], 5), sparkline(&[1.0], 0)), (String::new(), String::new()));
        let many: Vec<f64> = (0..1_000).map(f64::from).collect();
        assert_eq!(sparkline(&many, 30).chars().count(), 30);
    }

    #[test]
    fn bars_have_their_width() {
        assert_eq!([bar(0.0, 4), bar(0.5, 4), bar(1.0, 4), bar(7.0, 4)], ["░░░░", "██░░", "████", "████"]);
    }
}
