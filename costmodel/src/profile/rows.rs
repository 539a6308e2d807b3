//! Parses and writes this project's profile files, which are plain CSV.

use super::measurement::{HELD_OUT_KEY, HeldOutRun, Measurement, Part, Phase, Setting};
use super::{ModuleWidths, ProfileFile, SCHEMA_KEY, SCHEMA_VERSION};
use crate::Module;
use crate::error::{Error, Result};
use std::fmt::Write;
use std::str::FromStr;

const REQUIRED: [&str; 8] = ["module", "part", "phase", "tp", "layers", "batch", "tokens", "microseconds"];
const OPTIONAL: [&str; 1] = ["bytes"];

/// Parses a file in the schema described in [`super`].
pub(super) fn parse(name: &str, text: &str) -> Result<ProfileFile> {
    let table = Table::parse(name, text, &REQUIRED, &OPTIONAL)?;
    check_version(&table)?;
    let mut file = ProfileFile { name: name.to_owned(), ..ProfileFile::default() };
    for &(line, key, value) in &table.metadata {
        if key == HELD_OUT_KEY {
            let run = HeldOutRun::parse(value).map_err(|reason| table.error(line, key, reason))?;
            file.held_out.push(run);
            continue;
        }
        match Module::ALL.into_iter().find(|module| module.name() == key) {
            Some(module) => {
                let parsed = ModuleWidths::parse(value).map_err(|reason| table.error(line, key, reason))?;
                file.widths.insert(module, parsed);
            }
            None => file.metadata.push((key.to_owned(), value.to_owned())),
        }
    }
    file.measurements = table.rows().map(measurement).collect::<Result<_>>()?;
    Ok(file)
}

fn check_version(table: &Table<'_>) -> Result<()> {
    match table.metadata.first() {
        Some((_, SCHEMA_KEY, SCHEMA_VERSION)) => Ok(()),
        Some((line, SCHEMA_KEY, version)) => {
            let reason = format!("expected version {SCHEMA_VERSION} of the schema, found `{version}`");
            Err(table.error(*line, SCHEMA_KEY, reason))
        }
        _ => Err(table.error(1, "", format!("not a profile: expected `# {SCHEMA_KEY}: {SCHEMA_VERSION}`"))),
    }
}

fn measurement(row: Row<'_>) -> Result<Measurement> {
    let module = word(&row, "module", &Module::ALL, Module::name)?;
    let part = word(&row, "part", &Part::ALL, Part::name)?;
    let phase = word(&row, "phase", &Phase::ALL, Phase::name)?;
    let layers = if part.is_outside_layers() { row.count("layers")? } else { row.positive("layers")? };
    let has_shape = phase != Phase::Optimizer;
    // An optimizer step has no shape, so 0 is valid.
    let side = |column| if has_shape { row.positive(column) } else { row.count(column) };
    let (batch, tokens) = (side("batch")?, side("tokens")?);
    let setting = Setting { module, part, phase, tp: row.positive("tp")?, layers, batch, tokens };
    let bytes = if row.text("bytes").is_empty() { None } else { Some(row.count("bytes")?) };
    Ok(Measurement { setting, microseconds: row.measure("microseconds")?, bytes })
}

/// Parses a column whose value is a name in `all`.
fn word<T: Copy>(row: &Row<'_>, column: &str, all: &[T], name: fn(T) -> &'static str) -> Result<T> {
    let text = row.text(column);
    let known = || all.iter().map(|value| name(*value)).collect::<Vec<_>>().join(", ");
    let found = all.iter().copied().find(|value| name(*value) == text);
    found.ok_or_else(|| row.error(column, format!("`{text}` is not one of {}", known())))
}

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

/// File split into metadata and rows.
#[derive(Debug)]
pub(super) struct Table<'a> {
    file: &'a str,
    /// Lines `# key: value` before the header, with line numbers.
    pub(super) metadata: Vec<(u64, &'a str, &'a str)>,
    columns: Vec<&'a str>,
    lines: Vec<(u64, Vec<&'a str>)>,
}

/// Table row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    table: &'a Table<'a>,
    fields: &'a [&'a str],
    /// Line number in the file, from 1.
    pub(super) line: u64,
}

impl<'a> Table<'a> {
    /// Splits a file.
    ///
    /// # Errors
    /// [`Error::ProfileFormat`] without a header, for a missing, repeated or unknown column, and for a row
    /// with more or fewer fields than the header.
    pub(super) fn parse(file: &'a str, text: &'a str, required: &[&str], optional: &[&str]) -> Result<Self> {
        let mut table = Self { file, metadata: Vec::new(), columns: Vec::new(), lines: Vec::new() };
        // Spreadsheets write a byte order mark.
        for (line, content) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
            let content = content.trim();
            if let Some(comment) = content.strip_prefix('#') {
                // Comments after the header are not metadata.
                let pair = comment.split_once(':').filter(|_| table.columns.is_empty());
                table.metadata.extend(pair.map(|(key, value)| (line, key.trim(), value.trim())));
            } else if content.is_empty() {
            } else if table.columns.is_empty() {
                table.columns = fields(content);
                table.check_header(line, required, optional)?;
            } else {
                let row = fields(content);
                if row.len() != table.columns.len() {
                    let reason = format!(
                        "expected {} fields as in the header, found {}",
                        table.columns.len(),
                        row.len()
                    );
                    return Err(table.error(line, "", reason));
                }
                table.lines.push((line, row));
            }
        }
        if table.columns.is_empty() {
            return Err(table.error(1, "", format!("no header, expected {}", required.join(","))));
        }
        Ok(table)
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.lines.iter().map(|(line, fields)| Row { table: self, fields, line: *line })
    }

    pub(super) fn error(&self, line: u64, column: &str, reason: String) -> Error {
        let column = if column.is_empty() { String::new() } else { format!(" column `{column}`:") };
        Error::ProfileFormat { file: self.file.to_owned(), line, column, reason }
    }

    fn check_header(&self, line: u64, required: &[&str], optional: &[&str]) -> Result<()> {
        for column in required {
            if !self.columns.contains(column) {
                return Err(self.error(line, column, "missing in the header".into()));
            }
        }
        for (at, column) in self.columns.iter().enumerate() {
            if !required.contains(column) && !optional.contains(column) {
                return Err(self.error(line, column, "unknown".into()));
            }
            if self.columns[..at].contains(column) {
                return Err(self.error(line, column, "twice in the header".into()));
            }
        }
        Ok(())
    }
}

fn fields(line: &str) -> Vec<&str> {
    line.split(',').map(unquoted).collect()
}

fn unquoted(field: &str) -> &str {
    let field = field.trim();
    field.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(field)
}

impl<'a> Row<'a> {
    /// Returns the text of a column; empty if the file has no such column.
    pub(super) fn text(&self, column: &str) -> &'a str {
        let at = self.table.columns.iter().position(|name| *name == column);
        at.map_or("", |at| self.fields[at])
    }

    /// Parses a whole number.
    pub(super) fn count<T: FromStr>(&self, column: &str) -> Result<T> {
        let text = self.text(column);
        let reason = || format!("`{text}` is not a whole number, or out of range");
        text.parse().map_err(|_| self.error(column, reason()))
    }

    /// Parses a whole number above 0.
    pub(super) fn positive(&self, column: &str) -> Result<u32> {
        match self.count(column)? {
            0 => Err(self.error(column, "must be at least 1".into())),
            count => Ok(count),
        }
    }

    /// Parses a finite number above 0.
    pub(super) fn measure(&self, column: &str) -> Result<f64> {
        let text = self.text(column);
        let number: f64 =
            text.parse().map_err(|_| self.error(column, format!("`{text}` is not a number")))?;
        if number.is_finite() && number > 0.0 {
            return Ok(number);
        }
        Err(self.error(column, format!("`{text}` is not a measurement, which is finite and above 0")))
    }

    /// Creates an error for this row and column.
    pub(super) fn error(&self, column: &str, reason: String) -> Error {
        self.table.error(self.line, column, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Module;
    use crate::profile::{HeldOutRun, Measurement, ModuleWidths, Part, Phase, Profile, Setting};
    use proptest::prelude::*;

    const HEAD: &str = "# dflop-profile: 1\n# device: abacus\n# llm: hidden=256 heads=4 name=tiny\n";

    const COLUMNS: &str = "module,part,phase,tp,layers,batch,tokens,microseconds,bytes\n";

    fn file(rows: &str) -> Result<ProfileFile> {
        parse("p.csv", &format!("{HEAD}{COLUMNS}{rows}"))
    }

    #[test]
    fn rows_metadata_and_dimensions_are_read() {
        let file =
            file("llm,linear,forward,1,2,1,512,12.5,1024\n\nllm , linear,backward,1,2,1,512,25,\n").unwrap();
        assert_eq!(
            file.metadata,
            [("dflop-profile", "1"), ("device", "abacus")].map(|(a, b)| (a.into(), b.into()))
        );
        assert_eq!(file.widths[&Module::Llm].to_string(), "hidden=256 heads=4 name=tiny");
        let [forward, backward] = &file.measurements[..] else { panic!("two rows") };
        assert_eq!((forward.setting.tokens, forward.bytes, backward.bytes), (512, Some(1024), None));
        assert_eq!((forward.setting.phase, backward.setting.phase), (Phase::Forward, Phase::Backward));
    }

    #[test]
    fn columns_come_in_any_order() {
        let text = "# dflop-profile: 1\nmicroseconds,tokens,batch,layers,tp,phase,part,module\n3,2,1,0,1,forward,ends,llm\n";
        let file = parse("p.csv", text).unwrap();
        assert_eq!(file.measurements[0].setting.part, Part::OutsideLayers);
        assert!((file.measurements[0].microseconds - 3.0).abs() < 1e-12);
    }

    #[test]
    fn errors_name_file_line_and_column() {
        for (rows, message) in [
            (
                "llm,linear,forward,1,2,1,512,NaN,1\n",
                "p.csv:5: column `microseconds`: `NaN` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,-3,1\n",
                "p.csv:5: column `microseconds`: `-3` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,inf,1\n",
                "p.csv:5: column `microseconds`: `inf` is not a measurement",
            ),
            (
                "llm,linear,forward,1,2,1,512,0,1\n",
                "p.csv:5: column `microseconds`: `0` is not a measurement",
            ),
            ("\nllm,linear,forward,0,2,1,512,1,1\n", "p.csv:6: column `tp`: must be at least 1"),
            ("llm,linear,forward,1,2,1,5e2,1,1\n", "p.csv:5: column `tokens`: `5e2` is not a whole number"),
            ("llm,linear,forward,1,2,1,512,1,-1\n", "p.csv:5: column `bytes`: `-1` is not a whole number"),
            (
                "llm,matmul,forward,1,2,1,512,1,1\n",
                "p.csv:5: column `part`: `matmul` is not one of linear, attention",
            ),
            ("llm,linear,forward,1\n", "p.csv:5: expected 9 fields as in the header, found 4"),
        ] {
            let found = file(rows).unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}\n{message}");
        }
    }

    #[test]
    fn unknown_headers_and_versions_are_errors() {
        for (text, message) in [
            ("a,b\n1,2\n", "p.csv:1: column `module`: missing in the header"),
            ("# dflop-profile: 2\n", "p.csv:1: no header"),
            ("", "p.csv:1: no header"),
        ] {
            let found = parse("p.csv", text).unwrap_err().to_string();
            assert!(found.starts_with(message), "{found}\n{message}");
        }
        let other = parse("p.csv", &format!("# dflop-profile: 2\n{COLUMNS}")).unwrap_err().to_string();
        assert!(other.contains("expected version 1 of the schema, found `2`"), "{other}");
        let none = parse("p.csv", COLUMNS).unwrap_err().to_string();
        assert!(none.contains("not a profile"), "{none}");
        let twice = parse("p.csv", &format!("{HEAD}{},tp\n", COLUMNS.trim())).unwrap_err().to_string();
        assert!(twice.contains("column `tp`: twice in the header"), "{twice}");
        let unknown = parse("p.csv", &format!("{HEAD}{},hertz\n", COLUMNS.trim())).unwrap_err().to_string();
        assert!(unknown.contains("column `hertz`: unknown"), "{unknown}");
    }

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
