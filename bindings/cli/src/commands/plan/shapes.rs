//! Reads the shapes of a dataset from a CSV file, whose columns follow the modules of the model.
//!
//! | encoder | columns |
//! | --- | --- |
//! | tiles or windows of one size | `tiles,seq_len` |
//! | images in their own resolution | `patches,seq_len`, optionally `patch_squares`, `window_squares` |
//!
//! Further columns are ignored. `patch_squares` is the sum of squared patches over the media of a sample, and
//! `window_squares` the same inside attention windows.

use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use dflop_balancer::planner::ItemSize;
use dflop_costmodel::{ModelSpec, Module};
use serde::Deserialize;

use crate::failure::Failure;

/// One sample of a model whose tiles have one size.
#[derive(Debug, Deserialize)]
struct TileRow {
    tiles: u32,
    seq_len: u32,
}

/// One sample of a model that sees images in their own resolution.
#[derive(Debug, Deserialize)]
struct PatchRow {
    patches: u32,
    seq_len: u32,
    #[serde(default)]
    patch_squares: Option<u64>,
    #[serde(default)]
    window_squares: Option<u64>,
}

/// Reads the sizes of all samples, in the columns that the model needs.
pub(crate) fn read(path: &Path, spec: &ModelSpec) -> Result<Vec<ItemSize>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::from(error).in_file(path))?;
    parse(&text, spec).map_err(|message| Failure::Failed(message).in_file(path))
}

fn parse(text: &str, spec: &ModelSpec) -> Result<Vec<ItemSize>, String> {
    // Spreadsheets write a byte order mark, which would become part of the first column name.
    let text = text.trim_start_matches('\u{feff}');
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| error.to_string())?.clone();
    let is_native = spec.is_native(Module::Vision);
    let required = if is_native { ["patches", "seq_len"] } else { ["tiles", "seq_len"] };
    if let Some(name) = required.iter().find(|name| !header.iter().any(|cell| cell == **name)) {
        let found = header.iter().collect::<Vec<_>>().join(",");
        let needs = if is_native {
            "sees images in their own resolution: columns `patches,seq_len[,patch_squares[,window_squares]]`"
        } else {
            "takes tiles or windows of one size: columns `tiles,seq_len`"
        };
        return Err(format!("the header `{found}` has no column `{name}`; `{}` {needs}", spec.name));
    }
    let mut sizes = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| error.to_string())?;
        let line = record.position().map_or(0, csv::Position::line);
        let size = if is_native { patch_size(&record, &header, spec) } else { tile_size(&record, &header) }?;
        if size.tokens == 0 {
            return Err(format!("line {line}: `seq_len` must be at least 1"));
        }
        sizes.push(size);
    }
    if sizes.is_empty() {
        return Err("there is no sample".to_owned());
    }
    Ok(sizes)
}

fn tile_size(record: &StringRecord, header: &StringRecord) -> Result<ItemSize, String> {
    let row: TileRow = record.deserialize(Some(header)).map_err(|error| error.to_string())?;
    Ok(ItemSize::of_tiles(row.tiles, row.seq_len))
}

fn patch_size(record: &StringRecord, header: &StringRecord, spec: &ModelSpec) -> Result<ItemSize, String> {
    let row: PatchRow = record.deserialize(Some(header)).map_err(|error| error.to_string())?;
    let line = record.position().map_or(0, csv::Position::line);
    let one_medium = u64::from(row.patches).pow(2);
    let squares = row.patch_squares.unwrap_or(one_medium);
    let refuse = |problem: String| Err(format!("line {line}: {problem}"));
    if squares > one_medium || squares < u64::from(row.patches) {
        let patches = row.patches;
        return refuse(format!("`patch_squares` of {patches} patches must be {patches} to {one_medium}"));
    }
    if row.window_squares.is_some_and(|windows| windows > squares) {
        return refuse(format!("`window_squares` must be at most `patch_squares`, {squares}"));
    }
    Ok(ItemSize::of_patches(spec, row.patches, row.seq_len, squares, row.window_squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str) -> ModelSpec {
        ModelSpec::preset(name).unwrap()
    }

    #[test]
    fn columns_go_by_name() {
        let tiles = spec("llava-ov-qwen2.5-7b");
        let found = parse("dataset, seq_len,tiles\ncoco,2146,5\n\ntext,30,0\n", &tiles).unwrap();
        assert_eq!(found, [ItemSize::of_tiles(5, 2146), ItemSize::of_tiles(0, 30)]);
        let native = spec("qwen2-vl-7b");
        let text = "seq_len,patches,patch_squares\n500,1564,\n500,2588,3494672\n30,0,0\n";
        let pairs = [1564 * 1564, 3_494_672, 0];
        let found = parse(text, &native).unwrap();
        assert_eq!(found.iter().map(|size| size.pairs).collect::<Vec<_>>(), pairs);
        assert_eq!(found.iter().map(|size| size.tiles).collect::<Vec<_>>(), [1564, 2588, 0]);
    }

    /// 28 of 32 layers attend inside windows of 64 patches.
    #[test]
    fn windows_are_taken_as_full_where_no_column_has_them() {
        let native = spec("qwen2.5-vl-7b");
        let text = "patches,seq_len,patch_squares,window_squares\n1564,500,,92560\n1564,500,,\n16,9,,\n";
        let found: Vec<u64> = parse(text, &native).unwrap().iter().map(|size| size.pairs).collect();
        let mean = |full: u64, windows: u64| (4 * full + 28 * windows + 16) / 32;
        assert_eq!(found, [mean(2_446_096, 92_560), mean(2_446_096, 100_096), 256]);
    }

    #[test]
    fn bad_lines_are_named() {
        let tiles = spec("llava-ov-qwen2.5-7b");
        let message = |text: &str| parse(text, &tiles).unwrap_err();
        let needs = "`llava-ov-qwen2.5-7b` takes tiles or windows of one size: columns `tiles,seq_len`";
        assert_eq!(message(""), format!("the header `` has no column `tiles`; {needs}"));
        let header = "patches,seq_len";
        let expected = format!("the header `{header}` has no column `tiles`; {needs}");
        assert_eq!(message(&format!("{header}\n1,2\n")), expected);
        assert!(message("tiles,tokens\n").starts_with("the header `tiles,tokens` has no column `seq_len`; "));
        assert_eq!(message("tiles,seq_len\n"), "there is no sample");
        assert!(message("tiles,seq_len\n1,2\n-1,3\n").contains("line: 3"));
        assert!(message("tiles,seq_len\n1\n").contains("line: 2"));
        assert_eq!(message("tiles,seq_len\n1,0\n"), "line 2: `seq_len` must be at least 1");

        let native = spec("qwen2-vl-7b");
        let message = |text: &str| parse(text, &native).unwrap_err();
        let needs = "`qwen2-vl-7b` sees images in their own resolution: \
                     columns `patches,seq_len[,patch_squares[,window_squares]]`";
        let header = "tiles,seq_len";
        let expected = format!("the header `{header}` has no column `patches`; {needs}");
        assert_eq!(message(&format!("{header}\n1,2\n")), expected);
        let header = "patches,seq_len,patch_squares,window_squares";
        let row = |row: &str| message(&format!("{header}\n8,9,64,64\n{row}\n"));
        assert_eq!(row("8,9,65,"), "line 3: `patch_squares` of 8 patches must be 8 to 64");
        assert_eq!(row("8,9,7,"), "line 3: `patch_squares` of 8 patches must be 8 to 64");
        assert_eq!(row("8,9,32,33"), "line 3: `window_squares` must be at most `patch_squares`, 32");
        assert_eq!(row("8,0,64,"), "line 3: `seq_len` must be at least 1");
    }
}
