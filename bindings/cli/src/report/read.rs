//! Reads reports back: documents, pages, and training run outputs.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::collect::read_traces;
use super::document::{Accuracy, Basis, FORMAT, Origin, RunReport, TrainedStep, Training, VERSION};
use super::page::documents_of_page;
use super::verdict::{compare_steps, verdict};
use crate::failure::Failure;
use dflop_executor::step_record::read_line;
use dflop_loader::store::file;

/// File content.
enum Content {
    Reports(Vec<RunReport>),
    Trace,
    Steps(Vec<TrainedStep>),
    Other,
}

/// Reads all reports in a file, or in a directory's files: documents (`--report FILE.json`) and pages, and
/// the traces (`--trace`) and step lines (`--json`) from `dflop train`.
///
/// # Errors
/// [`Failure::Failed`] if a file cannot be read, has a different version, or nothing is a report.
pub(crate) fn read_run(path: &Path) -> Result<Vec<RunReport>, Failure> {
    let files = if path.is_dir() { directory_files(path)? } else { vec![path.to_owned()] };
    let (mut reports, mut traces, mut steps) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        match read_file(&file)? {
            Content::Reports(mut found) => reports.append(&mut found),
            Content::Trace => traces.push(file),
            Content::Steps(mut found) => steps.append(&mut found),
            Content::Other => {}
        }
    }
    if let Some(report) = run_report(&traces, &steps)? {
        reports.push(report);
    }
    if reports.is_empty() {
        return Err(Failure::Failed(
            "expected a report: a document that `--report FILE.json` wrote, a page, or the `--trace` or `--json` output \
             of `dflop train`, or a directory of them; found none"
                .to_owned(),
        )
        .in_file(path));
    }
    Ok(reports)
}

/// Returns the files in a directory by name; pages are left out, because a page may be the output file.
fn directory_files(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error: std::io::Error| Failure::from(error).in_file(directory);
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_read = path.extension().is_some_and(|extension| extension == "json" || extension == "jsonl");
        if is_read && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Maximum length of a document or page in bytes; a page with previews has a few mebibytes.
const DOCUMENT_BYTES_MAX: u64 = 128 << 20;
/// Number of leading lines in which an event identifies a trace.
const SEARCHED_LINES: usize = 100;

/// What tells documents from other JSON.
#[derive(serde::Deserialize)]
struct Head {
    format: String,
    version: u32,
}

fn read_file(path: &Path) -> Result<Content, Failure> {
    let failed = |error: std::io::Error| Failure::from(error).in_file(path);
    // Only line files may be this long; a pipe has no length.
    if std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() > DOCUMENT_BYTES_MAX) {
        return read_lines(path).map_err(failed);
    }
    let bytes = file::read_named(path).map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes);
    if let Some(documents) = documents_of_page(&text) {
        let heads: Vec<Head> = serde_json::from_str(documents).map_err(|error| {
            Failure::Failed(format!("expected the page of a report: {error}")).in_file(path)
        })?;
        heads.iter().try_for_each(|head| check_version(head, path))?;
        return read_typed(documents, path).map(Content::Reports);
    }
    if let Ok(head) = serde_json::from_str::<Head>(&text)
        && head.format == FORMAT
    {
        check_version(&head, path)?;
        return Ok(Content::Reports(vec![read_typed(&text, path)?]));
    }
    if text.starts_with('[') && text.lines().take(SEARCHED_LINES).any(is_event) {
        return Ok(Content::Trace);
    }
    let steps: Vec<TrainedStep> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    Ok(if steps.is_empty() { Content::Other } else { Content::Steps(steps) })
}

fn is_event(line: &str) -> bool {
    line.contains("\"ph\":") && line.contains("\"ts\":")
}

/// Reads a file that is too long for a document: events of a trace, or steps.
fn read_lines(path: &Path) -> std::io::Result<Content> {
    let mut reader = BufReader::new(file::open(path)?);
    let (mut line, mut steps, mut number) = (Vec::new(), Vec::new(), 0);
    while read_line(&mut reader, &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if number < SEARCHED_LINES && is_event(&text) {
            return Ok(Content::Trace);
        }
        steps.extend(serde_json::from_str::<TrainedStep>(&text).ok());
        number += 1;
    }
    Ok(if steps.is_empty() { Content::Other } else { Content::Steps(steps) })
}

fn check_version(head: &Head, path: &Path) -> Result<(), Failure> {
    let version = head.version;
    if version == VERSION {
        return Ok(());
    }
    let reason = format!("expected a report of version {VERSION}, found version {version}; write it again");
    Err(Failure::Failed(reason).in_file(path))
}

fn read_typed<T: serde::de::DeserializeOwned>(text: &str, path: &Path) -> Result<T, Failure> {
    serde_json::from_str(text)
        .map_err(|error| Failure::Failed(format!("expected a report: {error}")).in_file(path))
}

/// Returns the report for a run that left traces or step lines.
fn run_report(traces: &[PathBuf], steps: &[TrainedStep]) -> Result<Option<RunReport>, Failure> {
    if traces.is_empty() && steps.is_empty() {
        return Ok(None);
    }
    let mut report = RunReport::new("train", "Training run", Origin::for_this_process());
    if let Some(training) = Training::new("", steps) {
        let mean = super::verdict::seconds(training.mean_seconds());
        let text = format!("{} steps of {mean} on average{}.", training.taken, training.loss_change());
        report.verdict.push(verdict(Basis::Measured, text));
        report.verdict.extend(training.idle().map(|text| verdict(Basis::Measured, text)));
        report.training = Some(training);
    }
    let measured = read_traces(traces, &[])?;
    if !measured.steps.is_empty() {
        let study = measured.study("this run");
        if report.verdict.is_empty() {
            report.verdict = compare_steps(&study);
        }
        report.accuracy = Accuracy::from_passes(&measured, false);
        report.studies.push(study);
        report.notes.push("A trace does not name samples; `dflop train --report` does.".to_owned());
    }
    Ok(Some(report))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, text: &str) {
        std::fs::write(directory.join(name), text).unwrap();
    }

    fn line(step: u64) -> String {
        format!(
            r#"{{"step":{step},"loss":2.0,"gradient_norm":1.0,"seconds":{},"pipeline_seconds":0.1,"predicted_seconds":0.1,"replayed_seconds":0.1,"data_wait_seconds":0.0,"exposed_communication_seconds":0.0,"tokens_per_second":10.0,"bubble_fraction":0.5}}"#,
            step + 1
        )
    }

    #[test]
    fn a_directory_gives_all_of_its_reports_and_a_run() {
        let directory = tempfile::tempdir().unwrap();
        let document = RunReport::new("stats", "Stats", Origin::default());
        write(directory.path(), "a.json", &serde_json::to_string(&document).unwrap());
        write(directory.path(), "steps.jsonl", &[line(0), line(1), line(2)].join("\n"));
        write(directory.path(), "other.json", "{\"a\": 1}");
        write(directory.path(), "page.html", "<html>");
        let reports = read_run(directory.path()).unwrap();
        assert_eq!(reports.len(), 2);
        assert_eq!(reports[0], document);
        let training = reports[1].training.as_ref().unwrap();
        assert_eq!((training.taken, training.mean_seconds()), (3, 2.5));
        let page = super::super::page::render(reports.clone()).unwrap();
        write(directory.path(), "page.html", &page);
        assert_eq!(read_run(&directory.path().join("page.html")).unwrap(), reports);
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refusal = |path: &Path| read_run(path).unwrap_err().into_refusal().message;
        assert!(refusal(directory.path()).contains("expected a report"));
        write(directory.path(), "old.json", r#"{"format": "dflop-report", "version": 7}"#);
        assert!(refusal(&directory.path().join("old.json")).contains("found version 7"));
        write(directory.path(), "old.json", r#"{"format": "dflop-report", "version": 1}"#);
        assert!(refusal(directory.path()).contains("old.json"));
        assert!(refusal(&directory.path().join("none")).contains("none"));
    }
}
