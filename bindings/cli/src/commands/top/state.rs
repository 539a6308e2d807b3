//! Run state, computed from the record lines.

use std::collections::VecDeque;

use serde::Serialize;

use dflop_executor::step_record::{EndLine, EvaluationLine, Heading, Line, Outcome, StepLine};

/// Steps that are kept for graphs.
const KEPT_STEPS: usize = 4_096;
/// Number of last steps averaged for rates, the time left and the step fractions.
const RECENT_STEPS: usize = 50;
/// A run is overdue when the last line is older than this many usual steps, and at least [`QUIET_SECONDS`].
const OVERDUE_STEPS: f64 = 10.0;
const QUIET_SECONDS: f64 = 30.0;
/// Below this share of a step spent waiting for data, data is not the bottleneck.
const DATA_SHARE_NOTICED: f64 = 0.05;
/// Below this share without a pass, computing is the bottleneck.
const WAIT_SHARE_NOTICED: f64 = 0.25;

/// Record lines, as far as they are needed.
#[derive(Debug, Default)]
pub(super) struct RunLines {
    pub(super) heading: Option<Heading>,
    pub(super) end: Option<EndLine>,
    /// The last steps.
    pub(super) steps: VecDeque<StepLine>,
    skipped_samples: u64,
    /// The last step with an evaluation, and the evaluation.
    evaluation: Option<(u64, EvaluationLine)>,
}

/// Whether a run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    /// Before the first step.
    Starting,
    Running,
    /// The last line is much older than a usual step: the run hangs, writes a large state, or was killed.
    Overdue,
    Completed,
    Stopped,
    Failed,
}

/// Step part that limits the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bottleneck {
    /// Ranks wait for samples.
    Data,
    /// Ranks wait for messages, and for the passes on other ranks that create the messages.
    Communication,
    /// Pipeline stages have no pass to compute.
    Bubbles,
    /// Devices wait for inputs that are packed and copied to them.
    Inputs,
    /// The weight update.
    Update,
    /// Devices wait between steps for the host: plans, transfer of results, reports.
    Host,
    /// Devices wait while checkpoints are copied.
    Checkpoints,
    /// Devices have gaps between passes that nothing above explains.
    Gaps,
    /// Passes take as long as the host needs to launch the kernels.
    Launches,
    Compute,
}

/// Fractions of the step time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Shares {
    /// Passes; for a loader, everything but the wait for data.
    pub(super) compute: f64,
    pub(super) update: f64,
    pub(super) data: f64,
    /// Packing and copying inputs.
    pub(super) inputs: f64,
    /// Planning on the host, results on the way to the host, and reports.
    pub(super) host: f64,
    pub(super) checkpoints: f64,
    pub(super) communication: f64,
    /// Pipeline stages only.
    pub(super) bubbles: f64,
    /// What is left.
    pub(super) other: f64,
}

/// Run state at a point in time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RunState {
    pub(super) phase: Phase,
    pub(super) title: String,
    pub(super) about: Vec<String>,
    /// Signal or error that ended the run.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) reason: String,
    /// Steps that were taken.
    pub(super) steps_taken: u64,
    /// Number of steps in the run, if the run has an end.
    pub(super) steps: Option<u64>,
    /// Time since the run or the last resumption began, up to the run's end.
    pub(super) elapsed_seconds: Option<f64>,
    /// Predicted time to the last step.
    pub(super) left_seconds: Option<f64>,
    /// Age of the last line in seconds.
    pub(super) quiet_seconds: Option<f64>,
    pub(super) loss: Option<f64>,
    /// Mean over the last 50 steps, as for the following fields.
    pub(super) loss_mean: Option<f64>,
    /// Loss in the last evaluation, and the step before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) evaluation_loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) evaluation_step: Option<u64>,
    pub(super) step_seconds: Option<f64>,
    pub(super) samples_per_second: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) mfu: Option<f64>,
    pub(super) shares: Option<Shares>,
    pub(super) bottleneck: Option<Bottleneck>,
    /// Microbatch tokens below which launches limit a module, if launches limit most recent steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) launch_limit_tokens: Option<u64>,
    /// Number of skipped samples in the recorded steps.
    pub(super) skipped_samples: u64,
}

impl RunLines {
    /// Takes further lines.
    pub(super) fn add(&mut self, lines: Vec<Line>) {
        for line in lines {
            match line {
                Line::Heading(heading) => (self.heading, self.end) = (Some(heading), None),
                Line::End(end) => self.end = Some(end),
                Line::Step(step) => {
                    if self.steps.len() == KEPT_STEPS {
                        self.steps.pop_front();
                    }
                    self.skipped_samples += step.skipped_samples;
                    self.evaluation = step.evaluation.map(|own| (step.step, own)).or(self.evaluation);
                    self.steps.push_back(step);
                }
            }
        }
    }

    /// Returns the time without a line that is usual: several steps, and an evaluation.
    fn patience(&self, step_seconds: Option<f64>) -> f64 {
        let evaluation = self.evaluation.map_or(0.0, |(_, evaluation)| 2.0 * evaluation.seconds);
        QUIET_SECONDS.max(OVERDUE_STEPS * step_seconds.unwrap_or(0.0)) + evaluation
    }

    /// Returns the state at a time, in seconds since 1970.
    pub(super) fn state(&self, now: f64) -> RunState {
        let heading = self.heading.clone().unwrap_or_default();
        let recent = Recent(self.steps.iter().rev().take(RECENT_STEPS).copied().collect());
        let last = self.steps.back();
        let steps_taken = last.map_or(heading.first_step, |last| last.step + 1);
        let step_seconds = recent.mean(|step| Some(step.seconds));
        let evaluation = |step: &StepLine| step.evaluation.map_or(0.0, |evaluation| evaluation.seconds);
        let evaluation_seconds = recent.mean(|step| Some(evaluation(step))).unwrap_or(0.0);
        let own = |time: f64| (time > 0.0).then_some(time);
        let times = [own(heading.time), last.and_then(|last| last.time)];
        let last_time = times.into_iter().flatten().reduce(f64::max);
        let quiet_seconds = last_time.map(|time| (now - time).max(0.0));
        let ended = self.end.as_ref().map(|end| end.time);
        let left = |steps: u64| steps.saturating_sub(steps_taken) as f64;
        let has_begun = last.is_some_and(|last| last.step >= heading.first_step);
        let phase = match &self.end {
            Some(EndLine { end: Outcome::Completed, .. }) => Phase::Completed,
            Some(EndLine { end: Outcome::Stopped, .. }) => Phase::Stopped,
            Some(EndLine { end: Outcome::Failed, .. }) => Phase::Failed,
            None if !has_begun => Phase::Starting,
            None if quiet_seconds.is_some_and(|quiet| quiet > self.patience(step_seconds)) => Phase::Overdue,
            None => Phase::Running,
        };
        let goes_on = matches!(phase, Phase::Running | Phase::Overdue);
        let shares = recent.shares();
        RunState {
            phase,
            title: heading.title,
            about: heading.about,
            reason: self.end.as_ref().map_or_else(String::new, |end| end.reason.clone()),
            steps_taken,
            steps: heading.end_step,
            elapsed_seconds: own(heading.time).map(|began| (ended.unwrap_or(now) - began).max(0.0)),
            left_seconds: heading
                .end_step
                .zip(step_seconds)
                .filter(|_| goes_on)
                .map(|(steps, seconds)| left(steps) * (seconds + evaluation_seconds)),
            quiet_seconds,
            loss: last.and_then(|last| last.loss),
            loss_mean: recent.mean(|step| step.loss),
            evaluation_loss: self.evaluation.and_then(|(_, evaluation)| evaluation.loss),
            evaluation_step: self.evaluation.map(|(step, _)| step),
            step_seconds,
            samples_per_second: recent.rate(|step| step.samples),
            tokens_per_second: recent.rate(|step| step.tokens),
            mfu: recent.mean(|step| step.mfu),
            shares,
            bottleneck: shares.map(|shares| shares.bottleneck(recent.launch_limit_tokens().is_some())),
            launch_limit_tokens: recent.launch_limit_tokens(),
            skipped_samples: self.skipped_samples,
        }
    }
}

/// The last steps.
struct Recent(Vec<StepLine>);

impl Recent {
    fn seconds(&self) -> f64 {
        self.0.iter().map(|step| step.seconds).sum()
    }

    /// Mean over the steps that have the value.
    fn mean(&self, of: impl Fn(&StepLine) -> Option<f64>) -> Option<f64> {
        let values: Vec<f64> = self.0.iter().filter_map(of).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Sum divided by the step time.
    fn rate(&self, of: impl Fn(&StepLine) -> Option<u64>) -> Option<f64> {
        let sum: u64 = self.0.iter().map(of).sum::<Option<u64>>()?;
        (self.seconds() > 0.0).then(|| sum as f64 / self.seconds())
    }

    /// Launch limit in the last step, if most steps have a limit.
    fn launch_limit_tokens(&self) -> Option<u64> {
        let limited = self.0.iter().filter(|step| step.launch_limit_tokens.is_some()).count();
        self.0.first().filter(|_| 2 * limited > self.0.len())?.launch_limit_tokens
    }

    fn shares(&self) -> Option<Shares> {
        let seconds = self.seconds();
        if seconds <= 0.0 {
            return None;
        }
        // Weighted by time.
        let share = |of: fn(&StepLine) -> f64| self.0.iter().map(of).sum::<f64>() / seconds;
        let known = |of: fn(&StepLine) -> Option<f64>| {
            self.0.iter().map(of).sum::<Option<f64>>().map(|sum| sum / seconds)
        };
        let waiting = known(|step| Some(step.bubble_fraction? * step.seconds));
        let communication = share(|step| step.exposed_communication_seconds.unwrap_or(0.0));
        if let Some(compute) = known(|step| step.pass_seconds) {
            let parts = Shares {
                compute,
                update: share(|step| step.update_seconds),
                data: share(|step| step.data_wait_seconds),
                inputs: share(|step| step.input_seconds),
                host: share(|step| step.plan_seconds + step.result_seconds + step.report_seconds),
                checkpoints: share(|step| step.checkpoint_seconds),
                communication,
                bubbles: waiting.map_or(0.0, |waiting| (waiting - communication).max(0.0)),
                other: 0.0,
            };
            return Some(parts.completed());
        }
        let data = share(|step| step.data_wait_seconds).clamp(0.0, 1.0);
        let Some(idle) = waiting else {
            return Some(Shares { compute: 1.0 - data, data, ..Shares::default() });
        };
        let idle = idle.clamp(data, 1.0);
        let communication = communication.clamp(0.0, idle - data);
        let bubbles = idle - data - communication;
        Some(Shares { compute: 1.0 - idle, data, communication, bubbles, ..Shares::default() })
    }
}

impl Shares {
    /// Adds the rest of a step, or scales parts down that were measured as more than a step.
    fn completed(self) -> Self {
        let Self { compute, update, data, inputs, host, checkpoints, communication, bubbles, .. } = self;
        let sum = compute + update + data + inputs + host + checkpoints + communication + bubbles;
        let scale = sum.max(1.0).recip();
        Self {
            compute: compute * scale,
            update: update * scale,
            data: data * scale,
            inputs: inputs * scale,
            host: host * scale,
            checkpoints: checkpoints * scale,
            communication: communication * scale,
            bubbles: bubbles * scale,
            other: (1.0 - sum).max(0.0),
        }
    }

    /// Returns the bottleneck of the run: data if ranks wait for it noticeably, else the largest part without
    /// a pass if such parts are large.
    ///
    /// - `is_launch_limited`: whether launches limit the passes
    fn bottleneck(self, is_launch_limited: bool) -> Bottleneck {
        let others = [
            (self.bubbles, Bottleneck::Bubbles),
            (self.communication, Bottleneck::Communication),
            (self.inputs, Bottleneck::Inputs),
            (self.update, Bottleneck::Update),
            (self.host, Bottleneck::Host),
            (self.checkpoints, Bottleneck::Checkpoints),
            (self.other, Bottleneck::Gaps),
        ];
        let largest = others.into_iter().max_by(|(one, _), (other, _)| one.total_cmp(other));
        let (share, part) = largest.unwrap_or((0.0, Bottleneck::Compute));
        if self.data >= DATA_SHARE_NOTICED && self.data >= share {
            Bottleneck::Data
        } else if self.compute < 1.0 - WAIT_SHARE_NOTICED {
            part
        } else if is_launch_limited {
            Bottleneck::Launches
        } else {
            Bottleneck::Compute
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(texts: &[&str]) -> RunLines {
        let mut run = RunLines::default();
        run.add(texts.iter().filter_map(|text| Line::parse(text).unwrap()).collect());
        run
    }

    #[test]
    fn launches_limit_a_run_whose_ranks_compute_all_the_time() {
        let step = |step: u32, limit: &str| {
            format!(
                r#"{{"step":{step},"seconds":1.0,"bubble_fraction":0.01,"data_wait_seconds":0.0{limit}}}"#
            )
        };
        let limited = r#","launch_limit_tokens":1140"#;
        let steps = [step(0, limited), step(1, ""), step(2, limited)];
        let run = lines(&steps.each_ref().map(String::as_str));
        let state = run.state(0.0);
        assert_eq!((state.bottleneck, state.launch_limit_tokens), (Some(Bottleneck::Launches), Some(1140)));
        let steps = [step(0, limited), step(1, "")];
        let state = lines(&steps.each_ref().map(String::as_str)).state(0.0);
        assert_eq!((state.bottleneck, state.launch_limit_tokens), (Some(Bottleneck::Compute), None));
    }

    const HEADING: &str =
        r#"{"format":"dflop-steps","version":1,"title":"qwen2","end_step":10,"time":1000.0}"#;

    #[test]
    fn rates_are_of_the_steps_and_the_end_is_predicted() {
        let run = lines(&[
            HEADING,
            r#"{"step":0,"seconds":3.0,"time":1004,"loss":3.0,"samples":8,"tokens":600,"data_wait_seconds":0.3}"#,
            r#"{"step":1,"seconds":1.0,"time":1005,"loss":2.0,"samples":8,"tokens":600,"dropped_samples":2}"#,
        ]);
        let state = run.state(1007.0);
        assert_eq!((state.phase, state.steps_taken, state.steps), (Phase::Running, 2, Some(10)));
        assert_eq!((state.elapsed_seconds, state.quiet_seconds), (Some(7.0), Some(2.0)));
        assert_eq!((state.left_seconds, state.step_seconds), (Some(16.0), Some(2.0)));
        assert_eq!((state.loss, state.loss_mean), (Some(2.0), Some(2.5)));
        assert_eq!((state.samples_per_second, state.tokens_per_second), (Some(4.0), Some(300.0)));
        assert_eq!((state.skipped_samples, state.mfu), (2, None));
        let shares = state.shares.unwrap();
        assert!((shares.data - 0.075).abs() < 1e-12 && shares.communication == 0.0);
        assert_eq!(state.bottleneck, Some(Bottleneck::Data));
        assert_eq!(run.state(1034.9).phase, Phase::Running);
        assert_eq!(run.state(1035.1).phase, Phase::Overdue);
    }

    #[test]
    fn the_last_evaluation_is_kept_and_its_time_is_no_time_of_a_step() {
        let run = lines(&[
            HEADING,
            r#"{"step":0,"seconds":1.0,"time":1001,"loss":3.0,"evaluation":{"loss":3.5,"seconds":20.0}}"#,
            r#"{"step":1,"seconds":1.0,"time":1022,"loss":2.0}"#,
        ]);
        let state = run.state(1023.0);
        assert_eq!((state.evaluation_loss, state.evaluation_step), (Some(3.5), Some(0)));
        assert_eq!((state.step_seconds, state.left_seconds), (Some(1.0), Some(8.0 * 11.0)));
        assert_eq!(run.state(1091.9).phase, Phase::Running);
        assert_eq!(run.state(1092.1).phase, Phase::Overdue);
        let none = lines(&[r#"{"step":0,"seconds":1.0,"evaluation":{"loss":null,"seconds":1.0}}"#]);
        let state = none.state(0.0);
        assert_eq!((state.evaluation_loss, state.evaluation_step), (None, Some(0)));
    }

    #[test]
    fn parts_of_a_step_add_up_and_the_largest_limits_it() {
        let step = |bubble: f64, data: f64, exposed: f64| {
            let text = format!(
                r#"{{"step":0,"seconds":2.0,"bubble_fraction":{bubble},"data_wait_seconds":{data},"exposed_communication_seconds":{exposed}}}"#
            );
            lines(&[&text]).state(0.0)
        };
        for (state, expected) in [
            (step(0.1, 0.02, 0.1), Bottleneck::Compute),
            (step(0.6, 0.02, 1.0), Bottleneck::Communication),
            (step(0.6, 0.02, 0.2), Bottleneck::Bubbles),
            (step(0.6, 0.9, 0.2), Bottleneck::Data),
            (step(0.1, 0.8, 5.0), Bottleneck::Data),
        ] {
            let shares = state.shares.unwrap();
            let sum = sum(shares);
            assert!((sum - 1.0).abs() < 1e-12 && shares.bubbles >= -1e-12, "{shares:?}");
            assert_eq!(state.bottleneck, Some(expected), "{shares:?}");
        }
    }

    fn sum(shares: Shares) -> f64 {
        let Shares { compute, update, data, inputs, host, checkpoints, communication, bubbles, other } =
            shares;
        compute + update + data + inputs + host + checkpoints + communication + bubbles + other
    }

    #[test]
    fn idle_time_has_its_own_name_and_bubbles_are_said_of_pipelines_alone() {
        let step = |compute: f64, parts: &str| {
            let text = format!(r#"{{"step":0,"seconds":2.0,"pass_seconds":{compute}{parts}}}"#);
            lines(&[&text]).state(0.0)
        };
        for (state, expected) in [
            (step(1.2, r#","input_seconds":0.5,"report_seconds":0.1"#), Bottleneck::Inputs),
            (step(1.2, r#","plan_seconds":0.2,"result_seconds":0.1,"report_seconds":0.2"#), Bottleneck::Host),
            (step(1.2, r#","update_seconds":0.6"#), Bottleneck::Update),
            (step(1.2, r#","checkpoint_seconds":0.7"#), Bottleneck::Checkpoints),
            (step(1.2, r#","data_wait_seconds":0.4,"input_seconds":0.3"#), Bottleneck::Data),
            (step(1.2, r#","exposed_communication_seconds":0.5"#), Bottleneck::Communication),
            (step(1.2, ""), Bottleneck::Gaps),
            (step(1.6, r#","report_seconds":0.3"#), Bottleneck::Compute),
            (
                step(
                    1.2,
                    r#","bubble_fraction":0.35,"exposed_communication_seconds":0.2,"update_seconds":0.1"#,
                ),
                Bottleneck::Bubbles,
            ),
            // More than the step: clocks of several ranks.
            (step(2.0, r#","data_wait_seconds":0.5"#), Bottleneck::Data),
        ] {
            let shares = state.shares.unwrap();
            assert!((sum(shares) - 1.0).abs() < 1e-12, "{shares:?}");
            assert_eq!(state.bottleneck, Some(expected), "{shares:?}");
            assert_eq!(shares.bubbles > 0.0, expected == Bottleneck::Bubbles, "{shares:?}");
        }
        // A resumed run whose first steps were recorded without parts.
        let earlier = r#"{"step":0,"seconds":1.0,"bubble_fraction":0.3}"#;
        let shares = lines(&[earlier, r#"{"step":1,"seconds":1.0,"pass_seconds":0.9}"#]).state(0.0).shares;
        assert!((sum(shares.unwrap()) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_run_that_ended_says_how_until_it_is_resumed() {
        let step = r#"{"step":0,"seconds":1.0,"time":1001}"#;
        let failed = r#"{"end":"failed","reason":"no space left","time":1002}"#;
        let state = lines(&[HEADING, step, failed]).state(9999.0);
        assert_eq!((state.phase, state.reason.as_str()), (Phase::Failed, "no space left"));
        assert_eq!((state.elapsed_seconds, state.left_seconds), (Some(2.0), None));
        let again = HEADING.replace("\"time\"", "\"first_step\":1,\"time\"").replace("1000.0", "2000.0");
        let state = lines(&[HEADING, step, failed, &again]).state(2001.0);
        assert_eq!((state.phase, state.steps_taken, state.elapsed_seconds), (Phase::Starting, 1, Some(1.0)));
        let empty = lines(&[]).state(1.0);
        assert_eq!((empty.phase, empty.steps, empty.shares), (Phase::Starting, None, None));
    }

    #[test]
    fn a_long_run_keeps_its_last_steps() {
        let mut run = RunLines::default();
        let step = |step| StepLine { step, seconds: 1.0, skipped_samples: 1, ..StepLine::default() };
        run.add((0..10_000).map(|number| Line::Step(step(number))).collect());
        assert_eq!((run.steps.len(), run.steps[0].step), (KEPT_STEPS, 10_000 - KEPT_STEPS as u64));
        assert_eq!(run.state(0.0).skipped_samples, 10_000);
    }
}
