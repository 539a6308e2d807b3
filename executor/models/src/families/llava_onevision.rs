//! LLaVA-OneVision: SigLIP or CLIP on tiles, an MLP, newlines at line ends.

use dflop_costmodel::FamilyId;
use dflop_costmodel::tokens::VisionRule;

use super::fixed_resolution::square_tower;
use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks, activation};
use crate::encoder::{EncoderConfig, ProjectorMap, ProjectorSpec, TailSpec, TileRule};
use crate::error::Result;
use crate::llm::LlmConfig;
use dflop_device::ops::activation::Activation;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&LlavaOneVision];

/// LLaVA-OneVision.
#[derive(Debug)]
struct LlavaOneVision;

impl FamilyBlocks for LlavaOneVision {
    fn id(&self) -> FamilyId {
        FamilyId::new("llava_onevision")
    }

    fn model_types(&self) -> &[&str] {
        &["llava_onevision"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let (vision, top) = (source.vision()?, source.fields());
        let VisionRule::AnyRes(rule) = vision.rule else {
            return Err(top.invalid("model_type", "has no tiling rule").into());
        };
        let spec = vision.encoder;
        if spec.projector.input != spec.hidden {
            let problem = "must name one layer, several are not supported";
            return Err(top.invalid("vision_feature_layer", problem).into());
        }
        let fields = top.child_or_empty("vision_config")?;
        let mut tower = square_tower(&fields, &vision, "vision_tower.", TileRule::AnyRes(rule))?;
        // LLaVA-OneVision uses the rows before the last norm
        tower.ignored.push("vision_tower.post_layernorm.".to_owned());
        let outputs = source.spec.llm.map_or(0, |llm| llm.hidden as usize);
        let names = ["multi_modal_projector.linear_1", "multi_modal_projector.linear_2"].map(str::to_owned);
        let act = activation(&top, "projector_hidden_act", Activation::GeluExact)?;
        let projector = ProjectorSpec {
            merged: 1,
            hidden: spec.hidden as usize,
            norm: None,
            map: ProjectorMap::Mlp(names, outputs, act, top.flag("multimodal_projector_bias", true)?),
            outputs,
            newline: Some("image_newline".to_owned()),
        };
        Ok(tower.joined(Some(TailSpec::default()), Some(projector)))
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        decoder(source, &DecoderDefaults::NESTED)
    }
}
