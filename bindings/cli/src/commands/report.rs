//! `dflop report`: renders run reports as a page.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Output, write_json};
use crate::report::{read_run, write_page};

/// Render run reports as an HTML page.
///
/// RUN is a document that a command with `--report FILE.json` wrote, a page, the `--trace` or `--json` output
/// from `dflop train`, or a directory with such files, whose reports appear in name order.
#[derive(Debug, Args)]
pub(crate) struct ReportCommandArgs {
    /// File or directory to read.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Page to write [default: `report.html` in the directory, or next to the file under the same name].
    #[arg(short, long, value_name = "FILE.html")]
    out: Option<PathBuf>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct WrittenReport {
    report: String,
    /// Number of reports on the page.
    reports: usize,
    bytes: usize,
}

pub(crate) fn run(args: &ReportCommandArgs, out: &mut Output) -> Result<(), Failure> {
    let reports = read_run(&args.run)?;
    let page = args.out.clone().unwrap_or_else(|| {
        if args.run.is_dir() { args.run.join("report.html") } else { args.run.with_extension("html") }
    });
    let number = reports.len();
    let bytes = write_page(&page, reports)?;
    let written = WrittenReport { report: page.display().to_string(), reports: number, bytes };
    if args.json {
        return write_json(out, &written);
    }
    writeln!(out, "report    {}", written.report)?;
    Ok(())
}
