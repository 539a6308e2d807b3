//! Reads dataset shapes from a CSV file, whose columns follow the model's modules.
//!
//! | encoder | columns |
//! | --- | --- |
//! | tiles or windows of one size | `tiles`, optionally `media` |
//! | images in their own resolution | `patches`, optionally `patch_squares`, `window_squares`, `media` |
//!
//! Every sample has a column `seq_len` as well. `media` is the number of images, videos or clips, between
//! which ranks can divide the encoder's work; without it `patch_squares` tells, or each tile is an image
//! where the model takes them so, or there is one. With several encoders, each column name starts with the
//! encoder name, such as `vision_patches` and `audio_tiles`. Further columns are ignored. `patch_squares` is
//! the sum of squared patch counts over a sample's media, and `window_squares` the same inside attention
//! windows.

use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Trim};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::{MediaUnits, ModelSpec, Module};
use dflop_planner::ItemSize;
use std::str::FromStr;

use crate::failure::Failure;
use dflop_loader::store::file;

/// Table columns for a model.
struct Columns<'a> {
    spec: &'a ModelSpec,
    header: StringRecord,
    tokens: usize,
    encoders: Vec<EncoderColumns>,
}

/// Columns for an encoder.
struct EncoderColumns {
    module: Module,
    /// Column name prefix: empty for a single encoder.
    prefix: String,
    is_native: bool,
    units: usize,
    squares: Option<usize>,
    window_squares: Option<usize>,
    media: Option<usize>,
}

/// Reads all sample sizes, in the columns that the model needs.
pub(crate) fn read(path: &Path, spec: &ModelSpec) -> Result<Vec<ItemSize>, Failure> {
    let text = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
    parse(&text, spec).map_err(|message| Failure::Failed(message).in_file(path))
}

fn parse(text: &str, spec: &ModelSpec) -> Result<Vec<ItemSize>, String> {
    // Spreadsheets write a byte order mark, which would become part of the first column name.
    let text = text.trim_start_matches('\u{feff}');
    let mut reader = ReaderBuilder::new().trim(Trim::All).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| error.to_string())?.clone();
    let columns = Columns::new(spec, header)?;
    let mut sizes = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| error.to_string())?;
        let line = record.position().map_or(0, csv::Position::line);
        sizes.push(columns.size(&record).map_err(|problem| format!("line {line}: {problem}"))?);
    }
    if sizes.is_empty() {
        return Err("there is no sample".to_owned());
    }
    Ok(sizes)
}

impl<'a> Columns<'a> {
    fn new(spec: &'a ModelSpec, header: StringRecord) -> Result<Self, String> {
        let find = |name: &str| header.iter().position(|cell| cell == name);
        let modules: Vec<Module> = spec.encoders().map(|(module, ..)| module).collect();
        let require = |name: &str| {
            find(name).ok_or_else(|| {
                let found = header.iter().collect::<Vec<_>>().join(",");
                format!("the header `{found}` has no column `{name}`; {}", needs(spec, &modules))
            })
        };
        let mut encoders = Vec::with_capacity(modules.len());
        for module in &modules {
            let is_native = spec.is_native(*module);
            let prefix = prefix(*module, modules.len());
            let optional = |name: &str| find(&format!("{prefix}{name}")).filter(|_| is_native);
            encoders.push(EncoderColumns {
                module: *module,
                is_native,
                units: require(&format!("{prefix}{}", unit(spec, *module)))?,
                squares: optional("patch_squares"),
                window_squares: optional("window_squares"),
                media: find(&format!("{prefix}media")),
                prefix,
            });
        }
        let tokens = require("seq_len")?;
        Ok(Self { spec, header, tokens, encoders })
    }

    /// Reads the sample size.
    fn size(&self, record: &StringRecord) -> Result<ItemSize, String> {
        let mut media = Vec::with_capacity(self.encoders.len());
        for encoder in &self.encoders {
            media.push(self.media(record, encoder)?);
        }
        let tokens = self.number(record, self.tokens)?;
        if tokens == 0 {
            return Err("`seq_len` must be at least 1".to_owned());
        }
        ItemSize::from_media(&media, tokens).map_err(|error| error.to_string())
    }

    fn media(&self, record: &StringRecord, encoder: &EncoderColumns) -> Result<MediaUnits, String> {
        let mut units = self.units(record, encoder)?;
        let filled = encoder.media.filter(|column| record.get(*column).is_some_and(|cell| !cell.is_empty()));
        if let Some(column) = filled {
            let media: u32 = self.number(record, column)?;
            let (name, most) = (&self.header[column], units.units);
            if media > most || (media == 0) != (most == 0) {
                return Err(format!("`{name}` must be {} to {most}, got {media}", most.min(1)));
            }
            units.media = media;
        }
        Ok(units)
    }

    /// Reads the units, without the number of media.
    fn units(&self, record: &StringRecord, encoder: &EncoderColumns) -> Result<MediaUnits, String> {
        let units: u32 = self.number(record, encoder.units)?;
        if !encoder.is_native {
            let is_a_tile_an_image = encoder.module != Module::Audio
                && self.spec.vision.is_some_and(|vision| matches!(vision.rule, VisionRule::Fixed(_)));
            return Ok(MediaUnits::from_tiles(units, if is_a_tile_an_image { units } else { units.min(1) }));
        }
        if encoder.module == Module::Audio {
            return Ok(MediaUnits::from_audio_tokens(self.spec, units));
        }
        let optional = |column: Option<usize>| -> Result<Option<u64>, String> {
            let filled = column.filter(|column| record.get(*column).is_some_and(|cell| !cell.is_empty()));
            filled.map(|column| self.number(record, column)).transpose()
        };
        let prefix = &encoder.prefix;
        let one_medium = u64::from(units).pow(2);
        let squares = optional(encoder.squares)?.unwrap_or(one_medium);
        if squares > one_medium || squares < u64::from(units) {
            return Err(format!(
                "`{prefix}patch_squares` of {units} patches must be {units} to {one_medium}"
            ));
        }
        let window_squares = optional(encoder.window_squares)?;
        if window_squares.is_some_and(|windows| windows > squares) {
            return Err(format!(
                "`{prefix}window_squares` must be at most `{prefix}patch_squares`, {squares}"
            ));
        }
        Ok(MediaUnits::from_patches(self.spec, units, squares, window_squares))
    }

    fn number<T: FromStr>(&self, record: &StringRecord, column: usize) -> Result<T, String> {
        // All records are as long as the header.
        let (name, cell) = (&self.header[column], &record[column]);
        cell.parse().map_err(|_| format!("`{name}` must be a whole number of at least 0, got `{cell}`"))
    }
}

/// Returns the column name prefix for an encoder.
fn prefix(module: Module, encoders: usize) -> String {
    if encoders == 1 { String::new() } else { format!("{module}_") }
}

/// Returns the column that counts an encoder's media.
fn unit(spec: &ModelSpec, module: Module) -> &'static str {
    match (module, spec.is_native(module)) {
        (Module::Audio, true) => "tokens",
        (_, true) => "patches",
        (_, false) => "tiles",
    }
}

/// Names the columns that a model needs.
fn needs(spec: &ModelSpec, modules: &[Module]) -> String {
    let of = |module: &Module| {
        let prefix = prefix(*module, modules.len());
        let unit = unit(spec, *module);
        let squares = format!("[,{prefix}patch_squares[,{prefix}window_squares]]");
        let has_squares = unit == "patches";
        (format!("{prefix}{unit}"), if has_squares { squares } else { String::new() })
    };
    let (units, squares): (Vec<String>, Vec<String>) = modules.iter().map(of).unzip();
    let columns = format!("columns `{},seq_len{}`", units.join(","), squares.concat());
    let takes = match modules {
        [Module::Audio] if spec.is_native(Module::Audio) => "takes audio of its own length",
        [module] if spec.is_native(*module) => "sees images in their own resolution",
        [_] => "takes tiles or windows of one size",
        _ => "has several encoders",
    };
    format!("`{}` {takes}: {columns}", spec.name)
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
        assert_eq!(found, [ItemSize::from_tiles(5, 2146), ItemSize::from_tiles(0, 30)]);
        let native = spec("qwen2-vl-7b");
        let text = "seq_len,patches,patch_squares\n500,1564,\n500,2588,3494672\n30,0,0\n";
        let pairs = [1564 * 1564, 3_494_672, 0];
        let found = parse(text, &native).unwrap();
        assert_eq!(found.iter().map(|size| size.media(0).pairs).collect::<Vec<_>>(), pairs);
        assert_eq!(found.iter().map(|size| size.media(0).units).collect::<Vec<_>>(), [1564, 2588, 0]);
    }

    /// 28 of 32 layers attend inside windows with 64 patches.
    #[test]
    fn windows_are_taken_as_full_where_no_column_has_them() {
        let native = spec("qwen2.5-vl-7b");
        let text = "patches,seq_len,patch_squares,window_squares\n1564,500,,92560\n1564,500,,\n16,9,,\n";
        let found: Vec<u64> = parse(text, &native).unwrap().iter().map(|size| size.media(0).pairs).collect();
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
        let whole = "must be a whole number of at least 0";
        assert_eq!(message("tiles,seq_len\n1,2\n-1,3\n"), format!("line 3: `tiles` {whole}, got `-1`"));
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

    #[test]
    fn columns_of_several_encoders_have_their_names() {
        let vision = spec("qwen2-vl-7b").vision;
        let omni = ModelSpec { vision, ..spec("omni-7b") };
        let text = "audio_tiles,vision_patches,seq_len,vision_patch_squares\n2,64,300,2048\n0,0,9,\n";
        let found = parse(text, &omni).unwrap();
        assert_eq!(found[0].media(0), MediaUnits::from_patches(&omni, 64, 2048, None));
        assert_eq!(found[0].media(1), MediaUnits::from_tiles(2, 1));
        assert_eq!(found[1], ItemSize::from_text(9));
        let needs = "`omni-7b` has several encoders: columns `vision_patches,audio_tiles,seq_len\
                     [,vision_patch_squares[,vision_window_squares]]`";
        let header = "patches,seq_len";
        let expected = format!("the header `{header}` has no column `vision_patches`; {needs}");
        assert_eq!(parse(&format!("{header}\n1,2\n"), &omni).unwrap_err(), expected);
        let text = "audio_tiles,vision_patches,seq_len,vision_patch_squares\n2,8,300,7\n";
        let expected = "line 2: `vision_patch_squares` of 8 patches must be 8 to 64";
        assert_eq!(parse(text, &omni).unwrap_err(), expected);
    }
}
