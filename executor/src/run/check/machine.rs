//! Checks limits and the clock on this machine.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::process::{Resource, getrlimit};

use super::Findings;
use super::launcher::Launch;

/// Maximum number of descriptors that a rank opens, without connections.
const DESCRIPTORS: u64 = 256;
/// Number of descriptors for the connections with another rank.
const DESCRIPTORS_PER_RANK: u64 = 5;
/// Maximum clock difference without a note.
const CLOCK_MAX: Duration = Duration::from_mins(1);

/// - `config`: configuration file, if there is one
pub(super) fn check(report: &mut Findings, config: Option<&Path>, launch: &Launch) {
    let needed = DESCRIPTORS + DESCRIPTORS_PER_RANK * launch.identity.size as u64;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => report.wrong(
            "open files",
            format!("the limit is {limit}, a rank may need {needed}"),
            format!("raise it with `ulimit -n {needed}`"),
        ),
        limit => {
            let limit = limit.map_or_else(|| "no limit".to_owned(), |limit| format!("at most {limit}"));
            report.ok("open files", format!("{limit}, a rank may need {needed}"));
        }
    }
    let written = config.and_then(|path| std::fs::metadata(path).and_then(|file| file.modified()).ok());
    let ahead = written.and_then(|written| written.duration_since(SystemTime::now()).ok());
    if let Some(ahead) = ahead.filter(|ahead| *ahead > CLOCK_MAX) {
        let seconds = ahead.as_secs();
        report.note(
            "clock",
            format!("the configuration was written {seconds} s in the future of this machine"),
        );
    }
}
