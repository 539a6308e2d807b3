//! Selects the points for a module with given widths from a profile's files.

use super::measurement::{points, pool_spreads};
use super::{Measurement, ModuleWidths, Point, Profile};
use crate::error::{Error, Result};
use crate::module::Module;

/// Points for a module, and what the remaining profile shows about point errors.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SelectedPoints {
    /// Module points, sorted by setting; measurements with the same setting in several files are repeats.
    pub(crate) points: Vec<Point>,
    /// Module points, file by file.
    pub(crate) sessions: Vec<Vec<Point>>,
    /// Points for all modules, file by file.
    pub(crate) profile: Vec<Point>,
    /// Names of files that do not state the module widths.
    pub(crate) unknown_files: Vec<String>,
}

impl Profile {
    /// Returns the points for a module with these widths.
    ///
    /// # Errors
    /// [`Error::ProfileLacks`] if there are no points for this module, or all have other widths.
    pub(crate) fn select(&self, module: Module, wanted: &ModuleWidths) -> Result<SelectedPoints> {
        let (mut chosen, mut others, mut unknown_files): (Vec<Measurement>, _, _) =
            (Vec::new(), Vec::new(), Vec::new());
        let mut sessions = Vec::new();
        for file in &self.files {
            let rows = file.measurements.iter().filter(|row| row.setting.module == module);
            let rows: Vec<Measurement> = rows.copied().collect();
            if rows.is_empty() {
                continue;
            }
            match file.widths.get(&module).filter(|widths| widths.is_known()) {
                Some(widths) if !widths.fits(wanted) => {
                    others.push(format!("`{}` has {widths}", file.name));
                    continue;
                }
                Some(_) => {}
                None => unknown_files.push(file.name.clone()),
            }
            sessions.push(points(&rows));
            chosen.extend(rows);
        }
        if chosen.is_empty() {
            let found = if others.is_empty() { "no rows of it".to_owned() } else { others.join(", ") };
            let needed = format!("module {module} of {wanted}; found: {found}");
            return Err(Error::ProfileLacks { needed });
        }
        let mut points = points(&chosen);
        pool_spreads(&mut points);
        let mut profile = self.points();
        // Points in a file are sorted by module, so points for the same module and file are adjacent.
        let modules = profile.chunk_by_mut(|a, b| a.setting.module == b.setting.module);
        modules.for_each(pool_spreads);
        Ok(SelectedPoints { points, sessions, profile, unknown_files })
    }
}
