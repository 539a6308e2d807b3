//! Splits plain CSV into rows: a header, columns by name in any order, values without commas.

use std::str::FromStr;

use crate::error::{Error, Result};

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
