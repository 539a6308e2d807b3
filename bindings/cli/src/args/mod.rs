//! Argument groups that several commands share, and conversions to library types.
//!
//! Arguments for a command's report.

pub(crate) mod dataset;
pub(crate) mod mixture;
pub(crate) mod model;
pub(crate) mod set;
pub(crate) mod step_plan;

use clap::Args;
use std::path::{Path, PathBuf};

/// Report file.
#[derive(Debug, Default, Args)]
pub(crate) struct ReportArgs {
    /// Write a report to this file: an HTML page that needs no network, with timelines, loads and the samples
    /// in every microbatch where there are any; a name that ends in `.json` gets the document that `dflop
    /// report` renders.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// Number of most expensive samples that a report shows: about 100 kB.
pub(crate) const PREVIEWS: usize = 24;

impl ReportArgs {
    /// Returns the file, if a report is requested.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.report.as_deref()
    }
}
