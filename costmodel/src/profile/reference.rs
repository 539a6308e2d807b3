//! Reads the reference implementation's profile files, recognized by name.
//!
//! `thr_{mllm}_{model}_{size}.csv` holds forward and backward times in ms, with the suffix `_skip_attn` times
//! for the same run without attention; `mem_{mllm}_{model}_{size}.csv` holds memory in GiB. An encoder's rows
//! have a batch of tiles, an LLM's rows a single sequence. Repeated rows are an error: the reference appends
//! to the file when it is run again, and does not compute with means over two runs.

use super::measurement::{Measurement, Part, Phase, Setting};
use super::rows::{Row, Table};
use super::{ModuleWidths, ProfileFile};
use crate::Module;
use crate::error::Result;

const MICROSECONDS_PER_MS: f64 = 1000.0;
const BYTES_PER_GIB: f64 = 1_073_741_824.0;

/// Memory for a module with few layers, as the reference measures it in training steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepMemory {
    /// Measured module.
    pub module: Module,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Number of transformer layers that ran.
    pub layers: u32,
    /// Number of encoder tiles; 1 for an LLM.
    pub batch: u32,
    /// Tokens per sequence, inside the module.
    pub tokens: u32,
    /// Rise in the allocator's peak during the forward pass, in bytes.
    pub activation_bytes: u64,
    /// Bytes allocated after the optimizer step: weights, gradients, optimizer state.
    pub state_bytes: u64,
    /// Peak over the whole step, in bytes; includes activations as well as state.
    pub step_peak_bytes: u64,
}

/// Model named in reference files.
struct ReferenceModel {
    name: &'static str,
    size: &'static str,
    module: Module,
    /// Tokens per tile; 0 for an LLM, whose rows state them.
    tile_tokens: u32,
    /// Width and MLP width.
    widths: [u32; 2],
}

const fn encoder(
    name: &'static str,
    size: &'static str,
    tile_tokens: u32,
    widths: [u32; 2],
) -> ReferenceModel {
    ReferenceModel { name, size, module: Module::Vision, tile_tokens, widths }
}

const fn llm(name: &'static str, size: &'static str, widths: [u32; 2]) -> ReferenceModel {
    ReferenceModel { name, size, module: Module::Llm, tile_tokens: 0, widths }
}

const MODELS: [ReferenceModel; 11] = [
    encoder("siglip", "400m", 729, [1152, 4304]),
    encoder("siglip", "1b", 729, [1728, 6912]),
    encoder("siglip", "6b", 729, [2304, 8608]),
    encoder("internvit", "300m", 1024, [1024, 4096]),
    encoder("internvit", "1b", 1024, [1792, 7168]),
    encoder("internvit", "6b", 1024, [3200, 12_800]),
    llm("qwen2.5", "7b", [3584, 18_944]),
    llm("qwen2.5", "32b", [5120, 27_648]),
    llm("qwen2.5", "72b", [8192, 29_568]),
    llm("llama3", "8b", [4096, 14_336]),
    llm("llama3", "70b", [8192, 28_672]),
];

/// Model and kind of measurement stated in a file name.
#[derive(Clone, Copy)]
struct FileName {
    model: &'static ReferenceModel,
    is_memory: bool,
    part: Part,
}

/// Parses a file with a reference file name; returns `None` for any other name.
pub(super) fn parse(path: &str, text: &str) -> Option<Result<ProfileFile>> {
    let base = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let name = file_name(base)?;
    Some(if name.is_memory { memory(path, text, name) } else { times(path, text, name) })
}

fn file_name(base: &str) -> Option<FileName> {
    let stem = base.strip_suffix(".csv")?;
    let (kind, rest) = stem.split_once('_')?;
    let is_memory = match kind {
        "mem" => true,
        "thr" => false,
        _ => return None,
    };
    let (rest, part) = match rest.strip_suffix("_skip_attn") {
        Some(rest) => (rest, Part::Linear),
        None => (rest, Part::Whole),
    };
    let (_mllm, name_and_size) = rest.split_once('_')?;
    let (name, size) = name_and_size.rsplit_once('_')?;
    let model = MODELS.iter().find(|model| model.name == name && model.size == size)?;
    Some(FileName { model, is_memory, part })
}

impl FileName {
    /// Returns the shape column.
    const fn shape(self) -> &'static str {
        if self.model.tile_tokens == 0 { "seq_len" } else { "batch_size" }
    }

    fn file(self, path: &str) -> ProfileFile {
        let [hidden, ffn] = self.model.widths;
        let name = Some(format!("{}-{}", self.model.name, self.model.size));
        let widths = ModuleWidths { name, hidden: Some(hidden), ffn: Some(ffn), ..ModuleWidths::default() };
        let mut file = ProfileFile { name: path.to_owned(), ..ProfileFile::default() };
        file.widths.insert(self.model.module, widths);
        file
    }

    /// Returns a row's tensor-parallel degree, layers, batch and tokens.
    fn setting(self, row: Row<'_>) -> Result<[u32; 4]> {
        let side = row.positive(self.shape())?;
        let tile_tokens = self.model.tile_tokens;
        let [batch, tokens] = if tile_tokens == 0 { [1, side] } else { [side, tile_tokens] };
        Ok([row.positive("tp_size")?, row.positive("num_layers")?, batch, tokens])
    }
}

fn times(path: &str, text: &str, name: FileName) -> Result<ProfileFile> {
    let required = [name.shape(), "model_time", "fwd_times", "bwd_times", "num_layers", "tp_size"];
    let table = Table::parse(path, text, &required, &["batch_size"])?;
    let mut file = name.file(path);
    let mut seen = Vec::new();
    for row in table.rows() {
        let [tp, layers, batch, tokens] = name.setting(row)?;
        check_repeated(&mut seen, [tp, layers, batch, tokens], row, name)?;
        // The whole time is only checked; the pass times are used.
        row.measure("model_time")?;
        for (phase, column) in [(Phase::Forward, "fwd_times"), (Phase::Backward, "bwd_times")] {
            let setting =
                Setting { module: name.model.module, part: name.part, phase, tp, layers, batch, tokens };
            let microseconds = row.measure(column)? * MICROSECONDS_PER_MS;
            file.measurements.push(Measurement { setting, microseconds, bytes: None });
        }
    }
    Ok(file)
}

fn memory(path: &str, text: &str, name: FileName) -> Result<ProfileFile> {
    let required = [name.shape(), "model_mem", "fwd_peak", "model_state_peak", "num_layers", "tp_size"];
    let table = Table::parse(path, text, &required, &["batch_size"])?;
    let mut file = name.file(path);
    let mut seen = Vec::new();
    for row in table.rows() {
        let [tp, layers, batch, tokens] = name.setting(row)?;
        check_repeated(&mut seen, [tp, layers, batch, tokens], row, name)?;
        let bytes = |column| Ok((row.measure(column)? * BYTES_PER_GIB).round() as u64);
        file.step_memory.push(StepMemory {
            module: name.model.module,
            tp,
            layers,
            batch,
            tokens,
            activation_bytes: bytes("fwd_peak")?,
            state_bytes: bytes("model_mem")?,
            step_peak_bytes: bytes("model_state_peak")?,
        });
    }
    Ok(file)
}

fn check_repeated(
    seen: &mut Vec<([u32; 4], u64)>,
    key: [u32; 4],
    row: Row<'_>,
    name: FileName,
) -> Result<()> {
    if let Some((_, line)) = seen.iter().find(|(other, _)| *other == key) {
        let reason = format!(
            "same shape, layers and TP degree as in line {line}: a run was appended to an older file; remove one of them"
        );
        return Err(row.error(name.shape(), reason));
    }
    seen.push((key, row.line));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: &str = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n1024,3.0,1.0,2.0,4,1\n";

    #[test]
    fn names_state_module_part_and_widths() {
        for (name, module, part) in [
            ("thr_llavaov_qwen2.5_7b.csv", Module::Llm, Part::Whole),
            ("dir/thr_llavaov_qwen2.5_7b_skip_attn.csv", Module::Llm, Part::Linear),
        ] {
            let file = parse(name, TIMES).unwrap().unwrap();
            let setting = file.measurements[1].setting;
            assert_eq!((setting.module, setting.part, setting.phase), (module, part, Phase::Backward));
            assert_eq!((setting.tp, setting.layers, setting.batch, setting.tokens), (1, 4, 1, 1024));
            assert!((file.measurements[1].microseconds - 2000.0).abs() < 1e-9);
            assert_eq!(file.widths[&module].hidden, Some(3584));
        }
        for other in ["thr_llavaov_gpt_7b.csv", "profile.csv", "thr.csv", "thr_llavaov_qwen2.5_7b.txt"] {
            assert!(parse(other, TIMES).is_none(), "{other}");
        }
    }

    #[test]
    fn encoders_have_batches_of_tiles() {
        let text = "batch_size,model_time,fwd_times,bwd_times,num_layers,tp_size\n8,3.0,1.0,2.0,16,2\n";
        let file = parse("thr_internvl_internvit_6b.csv", text).unwrap().unwrap();
        let setting = file.measurements[0].setting;
        assert_eq!((setting.module, setting.batch, setting.tokens), (Module::Vision, 8, 1024));
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let text =
            "batch_size,model_mem,fwd_peak,model_state_peak,num_layers,tp_size\n2,0.4389,0.0751,0.5852,4,1\n";
        let file = parse("mem_llavaov_siglip_400m.csv", text).unwrap().unwrap();
        let [memory] = file.step_memory[..] else { panic!("one row") };
        assert_eq!((memory.layers, memory.batch, memory.tokens), (4, 2, 729));
        assert_eq!(memory.activation_bytes, (0.0751 * BYTES_PER_GIB).round() as u64);
        assert!(file.measurements.is_empty());
    }

    /// A second reference run appends to the files, from which it then computes NaN.
    #[test]
    fn repeated_rows_are_an_error() {
        let text = format!("{TIMES}1024,3.1,1.1,2.0,4,1\n");
        let error = parse("thr_llavaov_qwen2.5_7b.csv", &text).unwrap().unwrap_err().to_string();
        assert!(error.starts_with("thr_llavaov_qwen2.5_7b.csv:3: column `seq_len`: same shape"), "{error}");
    }

    #[test]
    fn a_time_that_is_not_a_number_is_an_error() {
        let text = TIMES.replace("2.0", "nan");
        let error = parse("thr_llavaov_llama3_8b.csv", &text).unwrap().unwrap_err().to_string();
        assert!(error.starts_with("thr_llavaov_llama3_8b.csv:2: column `bwd_times`"), "{error}");
    }
}
