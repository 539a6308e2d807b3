//! Arguments for a command's report.

use std::path::{Path, PathBuf};

use clap::Args;

/// Report file.
#[derive(Debug, Default, Args)]
pub(crate) struct ReportArgs {
    /// Write a report to this file: an HTML page that needs no network, with timelines, loads and the samples
    /// in every microbatch where there are any; a name that ends in `.json` gets the document that `dflop
    /// report` renders.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// Report file with samples, and the number of sample previews.
#[derive(Debug, Default, Args)]
pub(crate) struct SampleReportArgs {
    #[command(flatten)]
    report: ReportArgs,
    /// Number of most expensive samples to preview in the report; 0 shows none.
    #[arg(long, value_name = "N", default_value_t = PREVIEWS, requires = "report")]
    report_previews: usize,
}

/// Default number of previews: about 100 kB.
const PREVIEWS: usize = 24;

impl ReportArgs {
    /// Returns the file, if a report is requested.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.report.as_deref()
    }
}

impl SampleReportArgs {
    /// Returns the file, if a report is requested.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.report.path()
    }

    /// Returns the number of samples with previews.
    pub(crate) fn previews(&self) -> usize {
        self.report_previews
    }
}
