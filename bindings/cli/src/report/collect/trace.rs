//! Reads the timelines from a training run: measurements, predictions, and the samples in each microbatch.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::failure::Failure;
use crate::report::document::{AccuracyPoint, Bar, PassCode, Row, StudyStep, Timeline};
use dflop_executor::step_record::read_line;
use dflop_loader::store::file;

/// Number of last steps whose passes are compared with predictions.
const STEPS_COMPARED: u64 = 16;
/// Last steps that are shown.
const STEPS_SHOWN: u64 = 3;
/// Rank threads in a trace.
const MEASURED: u32 = 0;
const PREDICTED: u32 = 1;

/// Measured steps from a training run.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// Module names, the LLM last.
    pub(crate) modules: Vec<String>,
    /// The last steps, each with a measured and a predicted timeline: strategies 0 and 1.
    pub(crate) steps: Vec<StudyStep>,
    /// Plan index of each sample in a step group, by timeline as in `steps`.
    pub(crate) places: Vec<Vec<Vec<u32>>>,
    /// Forward and backward passes with predictions, without intervals.
    pub(crate) passes: Vec<AccuracyPoint>,
}

#[derive(Debug, Clone, Deserialize)]
struct TraceEvent {
    ph: String,
    name: String,
    pid: usize,
    #[serde(default)]
    tid: u32,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: TraceArguments,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct TraceArguments {
    /// Process name.
    #[serde(default)]
    name: String,
    step: Option<u64>,
    microbatch: Option<u32>,
    stage: Option<u16>,
    predicted_ns: Option<u64>,
    cpu_ns: Option<u64>,
    #[serde(default)]
    samples: Vec<u32>,
}

/// Reads rank traces, or a joint trace for all ranks. A trace whose end is missing is read up to there.
///
/// - `module_of_stage`: module name for each stage; if it is empty, modules come from rank names
///
/// # Errors
/// [`Failure::Failed`] if a file cannot be read.
pub(crate) fn read_traces(paths: &[PathBuf], module_of_stage: &[String]) -> Result<Measured, Failure> {
    let mut last_step = None;
    for path in paths {
        each_event(path, |event| last_step = last_step.max(event.args.step))?;
    }
    let Some(last_step) = last_step else { return Ok(Measured::default()) };
    let first = (last_step + 1).saturating_sub(STEPS_COMPARED);
    let (mut events, mut names) = (Vec::new(), BTreeMap::new());
    for path in paths {
        each_event(path, |event| match event.ph.as_str() {
            "M" if event.name == "process_name" => drop(names.insert(event.pid, event.args.name)),
            "X" if event.tid <= PREDICTED && event.args.step.is_some_and(|step| step >= first) => {
                events.push(event);
            }
            _ => {}
        })?;
    }
    let modules = Modules::new(module_of_stage, &names, &events);
    let mut measured = Measured { modules: modules.names.clone(), ..Measured::default() };
    for step in (last_step + 1).saturating_sub(STEPS_SHOWN)..=last_step {
        let mut timelines = Vec::new();
        for (strategy, thread) in [(0, MEASURED), (1, PREDICTED)] {
            let of_step = |event: &&TraceEvent| event.tid <= PREDICTED && event.args.step == Some(step);
            let own: Vec<&TraceEvent> = events.iter().filter(of_step).collect();
            let (timeline, places) = timeline(&own, thread, strategy, &modules);
            if !timeline.rows.is_empty() {
                timelines.push(timeline);
                measured.places.push(places);
            }
        }
        if !timelines.is_empty() {
            measured.steps.push(StudyStep { step, timelines });
        }
    }
    measured.passes = events.iter().filter_map(|event| pass_point(event, &modules)).collect();
    Ok(measured)
}

/// Reads trace events, one per line.
fn each_event(path: &Path, mut read: impl FnMut(TraceEvent)) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::from(error).in_file(path);
    let mut reader = BufReader::new(file::open(path).map_err(failed)?);
    let mut line = Vec::new();
    while read_line(&mut reader, &mut line).map_err(failed)? > 0 {
        let line = line.trim_ascii();
        let line = line.strip_suffix(b",").or_else(|| line.strip_suffix(b"]")).unwrap_or(line);
        let line = line.strip_prefix(b"[").unwrap_or(line);
        // Other lines are brackets, events from other programs, or the cut end from a killed run.
        if let Ok(event) = serde_json::from_slice(line) {
            read(event);
        }
    }
    Ok(())
}

/// Modules behind a run's stages.
struct Modules {
    names: Vec<String>,
    of_stage: BTreeMap<u16, usize>,
}

impl Modules {
    fn new(of_stage: &[String], ranks: &BTreeMap<usize, String>, events: &[TraceEvent]) -> Self {
        let mut by_stage: BTreeMap<u16, String> = BTreeMap::new();
        for (stage, name) in of_stage.iter().enumerate() {
            by_stage.insert(stage as u16, name.clone());
        }
        for event in events {
            let (Some(stage), Some(name)) = (event.args.stage, ranks.get(&event.pid)) else { continue };
            if of_stage.is_empty() && pass_code(&event.name).is_some() {
                by_stage.entry(stage).or_insert_with(|| module_of_rank(name));
            }
        }
        let mut names: Vec<String> = Vec::new();
        for name in by_stage.values() {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        let place = |name: &String| names.iter().position(|other| other == name).unwrap_or(0);
        let of_stage = by_stage.iter().map(|(stage, name)| (*stage, place(name))).collect();
        Self { names, of_stage }
    }

    fn stage_module(&self, stage: u16) -> usize {
        self.of_stage.get(&stage).copied().unwrap_or(0)
    }
}

/// Returns the module for a rank with a single module, such as `llm` for `rank 1: Llm 0`; `stages` for a rank
/// with several.
fn module_of_rank(name: &str) -> String {
    let roles = name.split_once(": ").map_or(name, |(_, roles)| roles);
    let modules: BTreeSet<&str> = roles.split(", ").filter_map(|role| role.split(' ').next()).collect();
    match (modules.len(), modules.first()) {
        (1, Some(module)) => module.to_lowercase(),
        _ => "stages".to_owned(),
    }
}

/// Returns the pass kind for an event.
fn pass_code(name: &str) -> Option<PassCode> {
    let kinds = [
        ("forward ", PassCode::Forward),
        ("backward input ", PassCode::BackwardInput),
        ("backward weight ", PassCode::BackwardWeight),
        ("backward ", PassCode::Backward),
    ];
    kinds.into_iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, pass)| pass)
}

/// Collects the passes on the same thread of all ranks in a step. Each rank starts at the first action: rank
/// clocks differ by the time between the starts.
fn timeline(
    events: &[&TraceEvent],
    thread: u32,
    strategy: usize,
    modules: &Modules,
) -> (Timeline, Vec<Vec<u32>>) {
    let mut starts: BTreeMap<usize, f64> = BTreeMap::new();
    for event in events.iter().filter(|event| event.tid == thread) {
        let start = starts.entry(event.pid).or_insert(event.ts);
        *start = start.min(event.ts);
    }
    let (mut rows, mut groups) = (BTreeMap::new(), Groups::default());
    let mut makespan_ns = 0;
    for event in events {
        let (Some(pass), Some(stage), Some(microbatch)) =
            (pass_code(&event.name), event.args.stage, event.args.microbatch)
        else {
            continue;
        };
        let module = modules.stage_module(stage);
        // Samples are listed with the measured events.
        let group = groups.of(module, microbatch, &event.args.samples);
        if event.tid != thread {
            continue;
        }
        let start_ns = to_ns(event.ts - starts[&event.pid]);
        let length_ns = to_ns(event.dur);
        makespan_ns = makespan_ns.max(start_ns + length_ns);
        let row = rows.entry((event.pid, stage)).or_insert_with(|| {
            let name = modules.names.get(module).map_or("stage", String::as_str);
            Row {
                label: format!("rank {} {name} {stage}", event.pid),
                rank: event.pid,
                module,
                bars: Vec::new(),
            }
        });
        row.bars.push(Bar { start_ns, length_ns, pass, microbatch, group });
    }
    let rows: Vec<Row> = rows.into_values().collect();
    let timeline = Timeline {
        strategy,
        makespan_ns,
        loads_ns: Vec::new(),
        rows,
        groups: Vec::new(),
        unlisted: Vec::new(),
    };
    (timeline, groups.places)
}

/// Module microbatches, with the sample places.
#[derive(Default)]
struct Groups {
    by_microbatch: BTreeMap<(usize, u32), u32>,
    places: Vec<Vec<u32>>,
}

impl Groups {
    fn of(&mut self, module: usize, microbatch: u32, samples: &[u32]) -> u32 {
        let next = self.places.len() as u32;
        let group = *self.by_microbatch.entry((module, microbatch)).or_insert(next);
        if group == next {
            self.places.push(Vec::new());
        }
        let places = &mut self.places[group as usize];
        if places.is_empty() {
            places.extend_from_slice(samples);
        }
        group
    }
}

/// Returns a measured pass with the prediction: CPU pass time, which does not depend on other load.
fn pass_point(event: &TraceEvent, modules: &Modules) -> Option<AccuracyPoint> {
    pass_code(&event.name)?;
    let predicted_ns = event.args.predicted_ns.filter(|ns| *ns > 0 && event.tid == MEASURED)?;
    let measured_ns = event.args.cpu_ns.filter(|ns| *ns > 0)?;
    Some(AccuracyPoint {
        module: modules.stage_module(event.args.stage?),
        label: format!("step {}, {}", event.args.step?, event.name),
        predicted_ns,
        interval_ns: 0,
        measured_ns,
        is_extrapolated: false,
    })
}

fn to_ns(microseconds: f64) -> u64 {
    (microseconds.max(0.0) * 1000.0).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn write(lines: &[&str]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        write!(file, "[\n{}", lines.join(",\n")).unwrap();
        file
    }

    const NAME: &str = r#"{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"rank 1: Llm 0"}}"#;
    const RECEIVE: &str = r#"{"ph":"X","name":"recv 2 in stage 1 from 0","cat":"message","pid":1,"tid":0,"ts":10.0,
"dur":1.0,"args":{"step":4,"microbatch":2,"stage":1,"measured_ns":1000,"predicted_ns":null,"cpu_ns":0}}"#;
    const FORWARD: &str = r#"{"ph":"X","name":"forward 2 in stage 1","cat":"forward","pid":1,"tid":0,"ts":12.5,"dur":2.0,"args":{"step":4,"microbatch":2,"stage":1,"measured_ns":2000,"predicted_ns":500,"cpu_ns":1900,"samples":[7,3]}}"#;
    const PREDICTED_FORWARD: &str = r#"{"ph":"X","name":"forward 2 in stage 1","cat":"forward","pid":1,"tid":1,"ts":20.0,"dur":0.5,"args":{"step":4,"microbatch":2,"stage":1,"measured_ns":2000,"predicted_ns":500,"cpu_ns":1900}}"#;

    #[test]
    fn measured_and_predicted_passes_are_kept_apart_and_have_their_samples() {
        let receive = RECEIVE.replace('\n', "");
        let file = write(&[NAME, &receive, FORWARD, PREDICTED_FORWARD, r#"{"ph":"X","name":"cut"#]);
        let read = read_traces(&[file.path().to_owned()], &[]).unwrap();
        assert_eq!(read.modules, ["llm"]);
        let [step] = &read.steps[..] else { panic!("one step") };
        assert_eq!((step.step, step.timelines.len()), (4, 2));
        let [measured, predicted] = [0, 1].map(|timeline| step.timelines[timeline].rows[0].bars[0]);
        // From the start of the first action, which is a message.
        assert_eq!((measured.start_ns, measured.length_ns, measured.microbatch), (2500, 2000, 2));
        assert_eq!((predicted.start_ns, predicted.length_ns), (0, 500));
        assert_eq!(read.places, [vec![vec![7, 3]], vec![vec![7, 3]]]);
        assert_eq!(
            (read.passes.len(), read.passes[0].measured_ns, read.passes[0].predicted_ns),
            (1, 1900, 500)
        );
    }

    #[test]
    fn a_file_without_events_gives_no_step() {
        let file = write(&["1", "{}"]);
        assert!(read_traces(&[file.path().to_owned()], &[]).unwrap().steps.is_empty());
        assert!(read_traces(&["/none".into()], &[]).is_err());
    }

    #[test]
    fn a_rank_with_several_modules_names_none() {
        assert_eq!(module_of_rank("rank 0: Vision 0, Vision 1"), "vision");
        assert_eq!(module_of_rank("rank 0: Vision 0, Llm 0"), "stages");
    }
}
