//! Reads the reference implementation's profile files, recognized by name.
//!
//! `thr_{mllm}_{model}_{size}.csv` holds forward and backward times in ms, with the suffix `_skip_attn` times
//! for the same run without attention; `mem_{mllm}_{model}_{size}.csv` holds memory in GiB. An encoder's rows
//! have a batch of tiles, an LLM's rows a single sequence. Repeated rows are an error: the reference appends
//! to the file when it is run again, and does not compute with means over two runs.
//!
//! The files in a directory name the model: the family (`llavaov`, `internvl`), the encoder and the LLM with
//! their sizes; layers, heads and widths follow. Sizes that were never published (`siglip_1b`, `siglip_6b`,
//! `internvit_1b`, and `internvit_6b` with its 30 layers) come from the reference.

use std::collections::BTreeSet;

use super::measurement::{Measurement, Part, Phase, Setting};
use super::rows::{Row, Table};
use super::{ModuleWidths, Profile, ProfileFile};
use crate::Module;
use crate::error::{Error, Result};
use crate::model::families::clip_siglip::siglip_encoder;
use crate::model::families::fixed_resolution::{PATCH_INPUTS, SquareInput, TowerSize};
use crate::model::families::intern_vit::{self, InternVitOptions};
use crate::model::families::llava_onevision;
use crate::model::{EncoderSpec, LlmSpec, ModelSpec, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::any_res::AnyRes;
use crate::tokens::dynamic_tiles::DynamicTiles;

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

/// Encoder name and size, then layers, hidden width, heads and MLP width.
type EncoderRow = (&'static str, &'static str, [u32; 4]);

const ENCODERS: [EncoderRow; 6] = [
    ("siglip", "400m", [27, 1152, 16, 4304]),
    ("siglip", "1b", [27, 1728, 32, 6912]),
    ("siglip", "6b", [40, 2304, 48, 8608]),
    ("internvit", "300m", [24, 1024, 16, 4096]),
    ("internvit", "1b", [28, 1792, 28, 7168]),
    ("internvit", "6b", [30, 3200, 16, 12_800]),
];

/// LLM name and size, and the preset that contains it.
const LLMS: [(&str, &str, &str); 5] = [
    ("qwen2.5", "7b", "llava-ov-qwen2.5-7b"),
    ("qwen2.5", "32b", "llava-ov-qwen2.5-32b"),
    ("qwen2.5", "72b", "llava-ov-qwen2.5-72b"),
    ("llama3", "8b", "llava-ov-llama3-8b"),
    ("llama3", "70b", "llava-ov-llama3-70b"),
];

/// Returns the model for a directory with reference files; `None` if there is no reference file.
///
/// # Errors
/// [`Error::ProfileMixed`] if the files name two families, two encoders or two LLMs, or no encoder or LLM.
#[must_use]
pub fn reference_model(profile: &Profile) -> Option<Result<ModelSpec>> {
    let (mut families, mut encoders, mut llms) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for file in profile.files() {
        let Some((family, model, size)) = names(&file.name) else { continue };
        families.insert(family);
        let is_encoder = ENCODERS.iter().any(|(name, known, _)| (*name, *known) == (model, size));
        if is_encoder {
            encoders.insert((model, size))
        } else {
            llms.insert((model, size))
        };
    }
    if families.is_empty() {
        return None;
    }
    Some(compose(&families, &encoders, &llms))
}

type Names<'a> = BTreeSet<(&'a str, &'a str)>;

fn compose(families: &BTreeSet<&str>, encoders: &Names<'_>, llms: &Names<'_>) -> Result<ModelSpec> {
    let family = only("family", &families.iter().map(|name| (*name, "")).collect())?.0;
    let (encoder_name, encoder_size) = only("encoder", encoders)?;
    let (llm_name, llm_size) = only("LLM", llms)?;
    let llm = llm_spec(llm_name, llm_size)?;
    let encoder = encoder_spec(encoder_name, encoder_size, family, &llm)?;
    let (of_encoder, rule) = if encoder_name == "siglip" {
        (llava_onevision::FAMILY, VisionRule::AnyRes(AnyRes::LLAVA_ONEVISION))
    } else {
        (intern_vit::FAMILY, VisionRule::DynamicTiles(DynamicTiles::INTERN_VL))
    };
    Ok(ModelSpec {
        name: format!("{family}-{encoder_name}-{encoder_size}-{llm_name}-{llm_size}"),
        family: of_encoder,
        vision: Some(VisionSpec { family: of_encoder, encoder, rule }),
        audio: None,
        llm,
    })
}

fn only<'a>(kind: &str, found: &Names<'a>) -> Result<(&'a str, &'a str)> {
    let mut names = found.iter();
    match (names.next(), names.next()) {
        (Some(name), None) => Ok(*name),
        (None, _) => Err(Error::ProfileMixed { reason: format!("no file names the {kind}") }),
        (Some(one), Some(other)) => {
            let reason =
                format!("expected one {kind}, files name {} {} and {} {}", one.0, one.1, other.0, other.1);
            Err(Error::ProfileMixed { reason })
        }
    }
}

fn llm_spec(name: &str, size: &str) -> Result<LlmSpec> {
    let row = LLMS.iter().find(|row| (row.0, row.1) == (name, size));
    let preset = row.map_or(name, |row| row.2);
    Ok(ModelSpec::preset(preset)?.llm)
}

fn encoder_spec(name: &str, size: &str, family: &str, llm: &LlmSpec) -> Result<EncoderSpec> {
    let Some((_, _, row)) = ENCODERS.iter().find(|row| (row.0, row.1) == (name, size)) else {
        return Err(Error::ProfileMixed { reason: format!("unknown encoder {name} {size}") });
    };
    let [layers, hidden, heads, ffn] = *row;
    let dimensions = TowerSize { layers, hidden, heads, ffn };
    let tower = if name == "siglip" {
        siglip_encoder(dimensions, SquareInput { patch_inputs: PATCH_INPUTS, patches: 729 }, false)
    } else {
        let parts = if size == "6b" { InternVitOptions::LARGE } else { InternVitOptions::SMALL };
        intern_vit::encoder(dimensions, SquareInput { patch_inputs: PATCH_INPUTS, patches: 1024 }, parts)
    };
    let projector = match family {
        "internvl" => intern_vit::projector(hidden, 4, llm.hidden),
        _ => llava_onevision::projector(hidden, llm.hidden, true),
    };
    Ok(EncoderSpec { projector, ..tower })
}

/// Returns the family, model and size stated in a reference file name; `None` for any other file.
fn names(path: &str) -> Option<(&str, &str, &str)> {
    let base = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let stem = base.strip_suffix(".csv")?;
    let rest = stem.strip_prefix("thr_").or_else(|| stem.strip_prefix("mem_"))?;
    let rest = rest.strip_suffix("_skip_attn").unwrap_or(rest);
    let (family, name_and_size) = rest.split_once('_')?;
    let (name, size) = name_and_size.rsplit_once('_')?;
    let is_known = ENCODERS.iter().any(|row| (row.0, row.1) == (name, size))
        || LLMS.iter().any(|row| (row.0, row.1) == (name, size));
    is_known.then_some((family, name, size))
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

    const ENCODER: &str = "batch_size,model_time,fwd_times,bwd_times,num_layers,tp_size\n1,3,1,2,16,1\n";
    const LLM: &str = "seq_len,model_time,fwd_times,bwd_times,num_layers,tp_size\n1024,3,1,2,4,1\n";

    fn model(files: &[(&str, &str)]) -> Option<Result<ModelSpec>> {
        reference_model(&Profile::parse(files.iter().copied()).unwrap())
    }

    #[test]
    fn names_of_files_state_the_model() {
        let found = model(&[
            ("a/thr_internvl_internvit_6b.csv", ENCODER),
            ("a/thr_internvl_qwen2.5_72b.csv", LLM),
            ("a/thr_internvl_qwen2.5_72b_skip_attn.csv", LLM),
        ]);
        let found = found.unwrap().unwrap();
        assert_eq!(found.name, "internvl-internvit-6b-qwen2.5-72b");
        let encoder = found.vision.unwrap().encoder;
        assert_eq!((encoder.layers, encoder.hidden, found.llm.layers), (30, 3200, 80));
        assert_eq!(encoder.projector.merged_tokens.get(), 4);
    }

    #[test]
    fn an_incomplete_or_ambiguous_directory_is_an_error() {
        let message = |files: &[(&str, &str)]| model(files).unwrap().unwrap_err().to_string();
        let lone = message(&[("thr_llavaov_siglip_1b.csv", ENCODER)]);
        assert!(lone.ends_with("no file names the LLM"), "{lone}");
        let two = message(&[
            ("thr_llavaov_siglip_1b.csv", ENCODER),
            ("thr_llavaov_siglip_6b.csv", ENCODER),
            ("thr_llavaov_qwen2.5_7b.csv", LLM),
        ]);
        assert!(two.contains("siglip 1b and siglip 6b"), "{two}");
        let own = "# dflop-profile: 1\n# device: abacus\n\
            module,part,phase,tp,layers,batch,tokens,microseconds\nllm,whole,forward,1,4,1,512,910.5\n";
        assert!(model(&[("own.csv", own)]).is_none());
    }
}
