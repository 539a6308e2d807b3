//! Checks on synthetic profiles with known noise that uncertainties are half widths of 90 % intervals.

use std::fmt::Write;

use super::super::curve_query::CurveQuery;
use super::super::*;
use crate::Module;
use crate::profile::{ModuleWidths, Part, Phase, Profile};

const HEADER: &str = "# dflop-profile: 1\nmodule,part,phase,tp,layers,batch,tokens,microseconds\n";
const PHASES: [(Phase, f64); 2] = [(Phase::Forward, 1.0), (Phase::Backward, 2.0)];
const REPEATS: usize = 5;
/// Number of profiles on which each claim is checked.
const SEEDS: u64 = 60;

/// Splitmix64 random numbers, so that profiles are the same on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number that is close to normal: mean 0, standard deviation 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// Machine noise.
#[derive(Clone, Copy)]
struct Noise {
    /// Standard deviation of a run, as a fraction of the time.
    run: f64,
    /// Share of runs that take 30 % longer.
    stragglers: f64,
    /// Maximum difference for a part in a different session, as a fraction of the time.
    session: f64,
}

/// Returns the true microseconds for linear work in a layer, or for attention.
fn truth(part: Part, tokens: f64) -> f64 {
    match part {
        Part::Attention => 5.0 + 2e-5 * tokens * tokens + 0.002 * tokens,
        // Rates fall where weights leave the cache, so the curve bends between measured points.
        _ => 30.0 + 0.05 * tokens * (1.0 + 0.4 * tokens / (tokens + 1500.0)),
    }
}

/// Writes one LLM measurement session at these lengths.
fn session(random: &mut Random, noise: Noise, lengths: &[u32]) -> String {
    let mut text = HEADER.to_owned();
    for part in [Part::Linear, Part::Attention] {
        let drift = 1.0 + noise.session * (2.0 * random.uniform() - 1.0);
        for (phase, factor) in PHASES {
            for &tokens in lengths {
                for _ in 0..REPEATS {
                    let straggles = if random.uniform() < noise.stragglers { 1.3 } else { 1.0 };
                    let run = (1.0 + noise.run * random.normal()) * straggles;
                    let time = factor * drift * run * truth(part, tokens.into());
                    writeln!(text, "llm,{part},{phase},1,1,1,{tokens},{time}").unwrap();
                }
            }
        }
    }
    text
}

fn parse(text: &str) -> Profile {
    Profile::parse([("p.csv", text)]).unwrap()
}

fn measured_lengths() -> Vec<u32> {
    (0..14).map(|at| 64 << (at / 2)).zip(0..14).map(|(low, at)| low + (at % 2) * low / 2).collect()
}

/// Returns lengths between the measured lengths.
fn held_out_lengths() -> Vec<u32> {
    measured_lengths().windows(2).map(|pair| pair[0].midpoint(pair[1]) + 3).collect()
}

/// Counts the same session's held-out points within their intervals, and all held-out points.
fn covered_in_session(seed: u64, noise: Noise) -> [usize; 2] {
    let lengths: Vec<u32> = measured_lengths().into_iter().chain(held_out_lengths()).collect();
    let both = parse(&session(&mut Random(seed), noise, &lengths));
    let all = both.select(Module::Llm, &ModuleWidths::default()).unwrap();
    let is_held_out = |tokens: u32| held_out_lengths().contains(&tokens);
    let mut known = all.clone();
    known.points.retain(|point| !is_held_out(point.setting.tokens));
    let (mut covered, mut count) = (0, 0);
    let queries = PHASES.map(|(phase, _)| CurveQuery::new(&known, Module::Llm, phase, 1, 1).same_session());
    for point in all.points.iter().filter(|point| is_held_out(point.setting.tokens)) {
        let query = &queries[usize::from(point.setting.phase == Phase::Backward)];
        let tokens = f64::from(point.setting.tokens);
        let predicted = match point.setting.part {
            Part::Attention => query.attention(&mut Vec::new()).unwrap().estimate(1.0, tokens),
            part => query.curve(part, &mut Vec::new()).unwrap().estimate(tokens),
        };
        count += 1;
        covered +=
            usize::from((predicted.ns - point.microseconds * 1000.0).abs() <= predicted.uncertainty_ns);
    }
    [covered, count]
}

fn sum(counts: impl Iterator<Item = [usize; 2]>) -> f64 {
    let [covered, count] = counts.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
    covered as f64 / count as f64
}

#[test]
fn intervals_cover_ninety_percent_of_the_same_session_whatever_its_noise() {
    for (run, stragglers) in [(0.002, 0.0), (0.01, 0.0), (0.03, 0.0), (0.02, 0.05), (0.01, 0.3)] {
        let noise = Noise { run, stragglers, session: 0.0 };
        let covered = sum((0..SEEDS).map(|seed| covered_in_session(seed, noise)));
        // 3,120 points: 2.5 standard deviations of a binomial share are 1.3 points, and as much again is left
        // for factors that are quantiles over some 40 scores.
        assert!((0.875..=0.935).contains(&covered), "run {run}, stragglers {stragglers}: {covered}");
    }
}

#[test]
fn intervals_of_one_and_of_two_sessions_cover_another() {
    let noise = Noise { run: 0.02, stragglers: 0.02, session: 0.05 };
    for sessions in [1, 2] {
        let mut widths = Vec::new();
        let covered = sum((0..SEEDS).map(|seed| {
            let mut random = Random(seed);
            let files: Vec<(String, String)> = (0..sessions)
                .map(|file| (format!("{file}.csv"), session(&mut random, noise, &measured_lengths())))
                .collect();
            let files = files.iter().map(|(name, text)| (&name[..], &text[..]));
            let known = Profile::parse(files).unwrap();
            let observed = parse(&session(&mut random, noise, &held_out_lengths()));
            let report = AccuracyReport::compare(&known, &observed).unwrap();
            widths.push(report.mean_uncertainty);
            [(report.within_uncertainty * report.points.len() as f64).round() as usize, report.points.len()]
        }));
        let width = widths.iter().sum::<f64>() / widths.len() as f64;
        assert!(
            covered >= 0.85 && width < 0.15,
            "{sessions} sessions: {covered} covered, half width {width}"
        );
    }
}

/// Returns half width divided by time for the LLM's linear work at 700 tokens.
fn share_at_700(profile: &Profile) -> f64 {
    let selected = profile.select(Module::Llm, &ModuleWidths::default()).unwrap();
    let query = CurveQuery::new(&selected, Module::Llm, Phase::Forward, 1, 1);
    let estimate = query.curve(Part::Linear, &mut Vec::new()).unwrap().estimate(700.0);
    estimate.uncertainty_ns / estimate.ns
}

#[test]
fn a_second_session_replaces_the_assumed_difference_between_sessions() {
    let rows = |difference: f64| {
        let mut text = HEADER.to_owned();
        for (tokens, run) in
            measured_lengths().iter().flat_map(|tokens| [0.0, 1.0, 2.0].map(|run| (tokens, run)))
        {
            for (part, sign) in [(Part::Linear, 1.0), (Part::Attention, -1.0)] {
                for (phase, factor) in PHASES {
                    let time =
                        truth(part, f64::from(*tokens)) * factor * (1.0 + 0.001 * run + sign * difference);
                    writeln!(text, "llm,{part},{phase},1,1,1,{tokens},{time}").unwrap();
                }
            }
        }
        text
    };
    let (first, second) = (rows(0.0), rows(0.01));
    let one = share_at_700(&parse(&first));
    let both = share_at_700(&Profile::parse([("a.csv", &first[..]), ("b.csv", &second[..])]).unwrap());
    assert!((0.05..0.06).contains(&one), "one session: {one}");
    // The spread between repeats now covers both sessions.
    assert!((0.021..0.035).contains(&both), "two sessions, 1 % apart: {both}");
}
