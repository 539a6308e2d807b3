//! Writes a report: the document if the file ends in `.json`, else the page.

use std::path::Path;

use super::document::RunReport;
use super::page::render;
use crate::failure::Failure;
use crate::output::write_file;

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
