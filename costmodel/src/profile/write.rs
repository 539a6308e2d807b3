//! Writes this project's profile files.

use std::fmt::Write;

use super::held_out_run::HELD_OUT_KEY;
use super::{ProfileFile, SCHEMA_KEY, SCHEMA_VERSION};

/// Columns, in writing order.
const COLUMNS: &str = "module,part,phase,tp,layers,batch,tokens,microseconds,bytes";

impl ProfileFile {
    /// Formats the file in the schema of [`super`], so that [`super::Profile::parse`] reads it back.
    ///
    /// Metadata come first, then module widths, held-out microbatches and rows, each in their order. Line
    /// breaks in metadata become spaces.
    ///
    /// # Examples
    /// ```
    /// use dflop_costmodel::profile::{Profile, ProfileFile};
    ///
    /// # fn main() -> dflop_costmodel::Result<()> {
    /// let metadata = vec![("device".into(), "abacus".into())];
    /// let file = ProfileFile { metadata, ..ProfileFile::default() };
    /// let profile = Profile::parse([("abacus.csv", file.to_csv().as_str())])?;
    /// assert_eq!(profile.device(), Some("abacus"));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn to_csv(&self) -> String {
        let mut text = format!("# {SCHEMA_KEY}: {SCHEMA_VERSION}\n");
        let mut line = |key: &str, value: &str| {
            // A line break would end the metadata line.
            let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            writeln!(text, "# {}: {}", words(key), words(value)).expect("a string takes everything");
        };
        for (key, value) in self.metadata.iter().filter(|(key, _)| key != SCHEMA_KEY) {
            line(key, value);
        }
        for (module, widths) in &self.widths {
            line(module.name(), &widths.to_string());
        }
        for run in &self.held_out {
            line(HELD_OUT_KEY, &run.to_string());
        }
        text.push_str(COLUMNS);
        text.push('\n');
        for row in &self.measurements {
            let setting = row.setting;
            let bytes = row.bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
            let names = format!("{},{},{}", setting.module, setting.part, setting.phase);
            let counts = format!("{},{},{},{}", setting.tp, setting.layers, setting.batch, setting.tokens);
            writeln!(text, "{names},{counts},{},{bytes}", row.microseconds)
                .expect("a string takes everything");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HeldOutRun, Measurement, ModuleWidths, Part, Phase, Profile, Setting};
    use super::*;
    use crate::module::Module;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn written_files_are_read_back(
            rows in prop::collection::vec(
                (0usize..5, 0usize..3, 1u32..9, (1u32..64, 1u32..9000), 1e-9f64..1e12, any::<Option<u64>>()), 1..20),
        ) {
            let row = |&(part, phase, layers, (batch, tokens), microseconds, bytes): &(_, _, _, _, _, _)| {
                let (part, phase) = (Part::ALL[part], Phase::ALL[phase]);
                let setting = Setting { module: Module::Audio, part, phase, tp: 2, layers, batch, tokens };
                Measurement { setting, microseconds, bytes }
            };
            let mut file = ProfileFile {
                name: "p.csv".to_owned(),
                metadata: vec![(SCHEMA_KEY.to_owned(), SCHEMA_VERSION.to_owned()), ("device".into(), "an abacus".into())],
                measurements: rows.iter().map(row).collect(),
                ..ProfileFile::default()
            };
            let widths = ModuleWidths { hidden: Some(64), heads: Some(4), name: Some("m".into()), ..ModuleWidths::default() };
            file.widths.insert(Module::Audio, widths);
            let run = |(number, row): (usize, &Measurement)| HeldOutRun {
                microbatch: number as u32,
                module: Module::Audio,
                tokens: f64::from(row.setting.tokens) + 0.5,
                pairs: f64::from(row.setting.tokens).powi(2) + 1.0,
                microseconds: row.microseconds,
            };
            file.held_out = file.measurements.iter().enumerate().map(run).collect();
            let read = Profile::parse([("p.csv", file.to_csv().as_str())]).unwrap();
            prop_assert_eq!(read.files(), &[file]);
        }
    }
}
