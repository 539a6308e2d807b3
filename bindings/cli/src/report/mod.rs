//! Collects a command's results and renders them as a self-contained HTML page.
//!
//! Describes the program and the machine that a report comes from.
//!
//! Writes a report: the document if the file ends in `.json`, else the page.
//!
//! A [`RunReport`] is a JSON document: `collect` fills the sections from plans, datasets and training runs,
//! `page` embeds documents in a page with script and style, `read` reads them back. The page has no network,
//! and escapes everything that comes from data.

pub(crate) mod collect;
mod document;
mod fit;
mod page;
mod read;
mod verdict;

use super::failure::Failure;
use super::output::write_file;
use dflop_loader::store::redact_name;
use page::render;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) use document::{
    Accuracy, Basis, DataProfile, Origin, Plan, PlannedModule, PlannedParallelism, Quantity, RunReport,
    StrategyResult, Study, StudyStep, Timeline, TrainedStep, Training, Verdict,
};
pub(crate) use page::{PAGE_DOM, PAGE_FORMAT, PAGE_STYLE};
pub(crate) use read::read_run;
pub(crate) use verdict::{compare_steps, seconds, verdict};

impl Origin {
    /// Describes this process: the command line without credentials, and the machine.
    pub(crate) fn for_this_process() -> Self {
        let arguments: Vec<String> = std::env::args_os()
            .enumerate()
            .map(|(place, argument)| match place {
                // The directory of the program is nobody's business.
                0 => file_name(&argument.to_string_lossy()),
                _ => quote(&redact_name(&argument.to_string_lossy())),
            })
            .collect();
        let written = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arguments: arguments.join(" "),
            written_unix_seconds: written.as_secs(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            processor: first_value("/proc/cpuinfo", "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_bytes().unwrap_or(0),
        }
    }
}

fn file_name(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// Quotes an argument for a shell, if it has to be.
fn quote(argument: &str) -> String {
    let is_plain = |character: char| character.is_alphanumeric() || "-_./=,:+@%{}".contains(character);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        argument.to_owned()
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    }
}

/// Returns the value in the first `NAME : VALUE` line of a system file.
fn first_value(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(found, _)| found.trim() == name).map(|(_, value)| value.trim().to_owned())
}

fn memory_bytes() -> Option<u64> {
    let total = first_value("/proc/meminfo", "MemTotal")?;
    total.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Writes a command's report.
///
/// # Errors
/// [`Failure::Failed`] if the file cannot be written.
pub(crate) fn write_report(path: &Path, report: &RunReport) -> Result<(), Failure> {
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
        let text = serde_json::to_string(report).map_err(|error| Failure::Failed(error.to_string()))?;
        return write_file(path, text + "\n");
    }
    write_page(path, vec![report.clone()]).map(drop)
}

/// Writes several reports as a page, and returns the page length in bytes.
///
/// # Errors
/// [`Failure::Failed`] if the file cannot be written.
pub(crate) fn write_page(path: &Path, reports: Vec<RunReport>) -> Result<usize, Failure> {
    let page = render(reports)?;
    let bytes = page.len();
    write_file(path, page)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_can_be_pasted_into_a_shell() {
        let quoted = ["--steps", "a b", "it's", "", "shards/{000..019}.tar", "$HOME"].map(quote);
        assert_eq!(quoted, ["--steps", "'a b'", r"'it'\''s'", "''", "shards/{000..019}.tar", "'$HOME'"]);
    }

    #[test]
    fn this_process_has_a_version_and_cores() {
        let origin = Origin::for_this_process();
        assert!(origin.cores > 0 && !origin.version.is_empty() && !origin.arguments.starts_with('/'));
    }
}
