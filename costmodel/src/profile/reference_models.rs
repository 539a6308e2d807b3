//! Derives the model from reference file names.
//!
//! `mem_` and `thr_` files in a directory name the family (`llavaov`, `internvl`), the encoder and the LLM
//! with their sizes; layers, heads and widths follow. Sizes that were never published (`siglip_1b`,
//! `siglip_6b`, `internvit_1b`, and `internvit_6b` with its 30 layers) come from the reference.

use std::collections::BTreeSet;

use super::Profile;
use crate::error::{Error, Result};
use crate::model::families::clip_siglip::siglip_encoder;
use crate::model::families::fixed_resolution::{PATCH_INPUTS, SquareInput, TowerSize};
use crate::model::families::intern_vit::{self, InternVitOptions};
use crate::model::families::llava_onevision;
use crate::model::{EncoderSpec, LlmSpec, ModelSpec, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::any_res::AnyRes;
use crate::tokens::dynamic_tiles::DynamicTiles;

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
    let llm = llm(llm_name, llm_size)?;
    let encoder = encoder(encoder_name, encoder_size, family, &llm)?;
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

fn llm(name: &str, size: &str) -> Result<LlmSpec> {
    let row = LLMS.iter().find(|row| (row.0, row.1) == (name, size));
    let preset = row.map_or(name, |row| row.2);
    Ok(ModelSpec::preset(preset)?.llm)
}

fn encoder(name: &str, size: &str, family: &str, llm: &LlmSpec) -> Result<EncoderSpec> {
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
