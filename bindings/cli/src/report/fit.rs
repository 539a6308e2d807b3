//! Shortens documents until the page is small enough.

use std::collections::HashMap;

use super::document::{RunReport, Study};

/// Number of samples that stay when samples are left out: the most expensive.
const SAMPLES_KEPT: usize = 1_500;
/// Number of scatter plot points that stay.
const POINTS_KEPT: usize = 1_500;

/// Leaves out report details; returns whether there were any.
type Cut = fn(&mut RunReport) -> bool;

/// Leaves out details until the documents are at most `bytes_max` long as JSON: further steps first, then
/// cheap samples, then ranks that end early, then timelines. A note names the omissions.
pub(super) fn fit(reports: &mut [RunReport], bytes_max: usize) {
    let cuts: [(Cut, &str); 6] = [
        (keep_points, "Of the predictions beside measurements, some points are not drawn."),
        (drop_steps, "Of the steps, only the first is shown."),
        (keep_dearest, "Of the samples, only the most expensive are listed."),
        (keep_slowest_ranks, "Of the ranks, only those that end last are drawn."),
        (drop_previews, "Samples have no previews."),
        (drop_timelines, "Timelines and samples are left out."),
    ];
    for (cut, note) in cuts {
        if length(reports) <= bytes_max {
            return;
        }
        for report in reports.iter_mut() {
            if cut(report) {
                report.notes.push(format!("{note} The page would be too large."));
            }
        }
    }
}

fn length(reports: &[RunReport]) -> usize {
    serde_json::to_string(reports).map_or(0, |text| text.len())
}

fn keep_points(report: &mut RunReport) -> bool {
    let Some(accuracy) = report.accuracy.as_mut().filter(|all| all.points.len() > POINTS_KEPT) else {
        return false;
    };
    // At even distances, so that all sizes stay.
    let every = accuracy.points.len().div_ceil(POINTS_KEPT);
    let mut place = 0;
    accuracy.points.retain(|_| {
        place += 1;
        (place - 1) % every == 0
    });
    true
}

fn drop_steps(report: &mut RunReport) -> bool {
    let mut is_cut = false;
    for study in &mut report.studies {
        is_cut |= study.steps.len() > 1;
        study.steps.truncate(1);
        keep_samples(study, |_| true);
    }
    is_cut
}

fn keep_dearest(report: &mut RunReport) -> bool {
    let mut is_cut = false;
    for study in &mut report.studies {
        if study.samples.len() > SAMPLES_KEPT {
            let mut totals: Vec<u64> = study.samples.iter().map(super::document::Sample::total_ns).collect();
            totals.sort_unstable_by(|a, b| b.cmp(a));
            let least = totals[SAMPLES_KEPT];
            let dearest: Vec<bool> = study.samples.iter().map(|sample| sample.total_ns() > least).collect();
            keep_samples(study, |sample| dearest[sample as usize]);
            is_cut = true;
        }
    }
    is_cut
}

/// Keeps the samples that the shown steps have and `is_kept` selects.
fn keep_samples(study: &mut Study, is_kept: impl Fn(u32) -> bool) {
    let (mut kept, mut samples): (HashMap<u32, u32>, _) = (HashMap::new(), Vec::new());
    for timeline in study.steps.iter_mut().flat_map(|step| &mut step.timelines) {
        timeline.unlisted.resize(timeline.groups.len(), 0);
        for (group, unlisted) in timeline.groups.iter_mut().zip(&mut timeline.unlisted) {
            let before = group.len();
            group.retain(|sample| is_kept(*sample));
            *unlisted += (before - group.len()) as u32;
            for sample in group {
                let next = samples.len() as u32;
                let index = *kept.entry(*sample).or_insert(next);
                if index == next {
                    samples.push(study.samples[*sample as usize].clone());
                }
                *sample = index;
            }
        }
        if timeline.unlisted.iter().all(|unlisted| *unlisted == 0) {
            timeline.unlisted.clear();
        }
    }
    study.samples = samples;
}

fn keep_slowest_ranks(report: &mut RunReport) -> bool {
    const RANKS: usize = 4;
    let mut is_cut = false;
    for timeline in
        report.studies.iter_mut().flat_map(|study| &mut study.steps).flat_map(|step| &mut step.timelines)
    {
        let mut ends: HashMap<usize, u64> = HashMap::new();
        for row in &timeline.rows {
            let end = row.bars.iter().map(|bar| bar.start_ns + bar.length_ns).max().unwrap_or(0);
            let known = ends.entry(row.rank).or_insert(0);
            *known = end.max(*known);
        }
        let mut ranks: Vec<(u64, usize)> = ends.into_iter().map(|(rank, end)| (end, rank)).collect();
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        ranks.truncate(RANKS);
        let before = timeline.rows.len();
        timeline.rows.retain(|row| ranks.iter().any(|(_, rank)| *rank == row.rank));
        is_cut |= timeline.rows.len() < before;
    }
    is_cut
}

fn drop_previews(report: &mut RunReport) -> bool {
    let dearest = report.profile.iter_mut().flat_map(|profile| &mut profile.dearest);
    let samples = report.studies.iter_mut().flat_map(|study| &mut study.samples).chain(dearest);
    let mut is_cut = false;
    for sample in samples {
        is_cut |= !sample.previews.is_empty();
        sample.previews.clear();
    }
    is_cut
}

fn drop_timelines(report: &mut RunReport) -> bool {
    let is_cut = report.studies.iter().any(|study| !study.steps.is_empty());
    for study in &mut report.studies {
        study.steps.clear();
        study.samples.clear();
    }
    is_cut
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::document::{Bar, Origin, PassCode, Row, Sample, StudyStep, Timeline};

    fn report(samples: u32, steps: u64, ranks: usize) -> RunReport {
        let sample = |number: u32| Sample {
            key: format!("sample-{number}"),
            module_ns: vec![u64::from(number)],
            ..Sample::default()
        };
        let bar = Bar { start_ns: 0, length_ns: 9, pass: PassCode::Forward, microbatch: 0, group: 0 };
        let row = |rank: usize| Row {
            label: format!("rank {rank}"),
            rank,
            module: 0,
            bars: vec![Bar { length_ns: rank as u64, ..bar }],
        };
        let timeline = Timeline {
            strategy: 0,
            makespan_ns: 9,
            loads_ns: Vec::new(),
            rows: (0..ranks).map(row).collect(),
            groups: vec![(0..samples / 2).collect(), (samples / 2..samples).collect()],
            unlisted: Vec::new(),
        };
        let steps = (0..steps).map(|step| StudyStep { step, timelines: vec![timeline.clone()] });
        let mut report = RunReport::new("simulate", "t", Origin::default());
        report.studies.push(Study {
            name: String::new(),
            about: String::new(),
            modules: vec!["llm".to_owned()],
            strategies: Vec::new(),
            samples: (0..samples).map(sample).collect(),
            steps: steps.collect(),
        });
        report
    }

    #[test]
    fn what_fits_stays_as_it_is() {
        let before = report(10, 2, 2);
        let mut after = [before.clone()];
        fit(&mut after, 1 << 20);
        assert_eq!(after[0], before);
    }

    #[test]
    fn cheap_samples_go_before_dear_ones_and_are_counted() {
        let mut reports = [report(4_000, 3, 2)];
        fit(&mut reports, 150_000);
        let study = &reports[0].studies[0];
        assert_eq!((study.steps.len(), study.samples.len()), (1, SAMPLES_KEPT));
        assert!(study.samples.iter().all(|sample| sample.module_ns[0] >= 2_500));
        let timeline = &study.steps[0].timelines[0];
        assert_eq!(timeline.unlisted, [2_000, 500]);
        assert_eq!(study.samples[timeline.groups[1][0] as usize].key, "sample-2500");
        assert_eq!(reports[0].notes.len(), 2);
    }

    #[test]
    fn the_slowest_ranks_stay_and_in_the_end_nothing_is_too_large() {
        let mut reports = [report(2_000, 1, 300)];
        fit(&mut reports, 95_000);
        let timeline = &reports[0].studies[0].steps[0].timelines[0];
        let ranks: Vec<usize> = timeline.rows.iter().map(|row| row.rank).collect();
        assert_eq!(ranks, [296, 297, 298, 299]);
        fit(&mut reports, 2_000);
        assert!(reports[0].studies[0].steps.is_empty() && length(&reports) < 2_000);
    }
}
