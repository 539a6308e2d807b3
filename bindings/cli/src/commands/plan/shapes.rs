//! Reads the shapes of a dataset from the columns `tiles` and `seq_len` of a CSV file.

use std::path::Path;

use csv::{ReaderBuilder, Trim};
use dflop_balancer::planner::ItemSize;
use serde::Deserialize;

use crate::failure::Failure;

/// One sample.
#[derive(Debug, Deserialize)]
struct Row {
    tiles: u32,
    seq_len: u32,
}

/// Reads the shapes of all samples.
pub(crate) fn read(path: &Path) -> Result<Vec<ItemSize>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::from(error).in_file(path))?;
    parse(&text).map_err(|message| Failure::Failed(message).in_file(path))
}

fn parse(text: &str) -> Result<Vec<ItemSize>, String> {
    // Spreadsheets write a byte order mark, which would become part of the first column name.
    let text = text.trim_start_matches('\u{feff}');
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| error.to_string())?.clone();
    if let Some(name) = ["tiles", "seq_len"].iter().find(|name| !header.iter().any(|cell| cell == **name)) {
        let found = header.iter().collect::<Vec<_>>().join(",");
        return Err(format!("the header `{found}` has no column `{name}`"));
    }
    let mut sizes = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| error.to_string())?;
        let line = record.position().map_or(0, csv::Position::line);
        let row: Row = record.deserialize(Some(&header)).map_err(|error| error.to_string())?;
        if row.seq_len == 0 {
            return Err(format!("line {line}: `seq_len` must be at least 1"));
        }
        sizes.push(ItemSize::of_tiles(row.tiles, row.seq_len));
    }
    if sizes.is_empty() {
        return Err("there is no sample".to_owned());
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_go_by_name() {
        let found = parse("dataset, seq_len,tiles\ncoco,2146,5\n\ntext,30,0\n").unwrap();
        assert_eq!(found, [ItemSize::of_tiles(5, 2146), ItemSize::of_tiles(0, 30)]);
    }

    #[test]
    fn bad_lines_are_named() {
        let message = |text: &str| parse(text).unwrap_err();
        assert_eq!(message(""), "the header `` has no column `tiles`");
        assert_eq!(message("tiles,tokens\n"), "the header `tiles,tokens` has no column `seq_len`");
        assert_eq!(message("tiles,seq_len\n"), "there is no sample");
        assert!(message("tiles,seq_len\n1,2\n-1,3\n").contains("line: 3"));
        assert!(message("tiles,seq_len\n1\n").contains("line: 2"));
        assert_eq!(message("tiles,seq_len\n1,0\n"), "line 2: `seq_len` must be at least 1");
    }
}
