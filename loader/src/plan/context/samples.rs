//! Predicts media and slices of a sample, whole and split.

use dflop_balancer::{ContextItem, ContextPlace, ContextSlice};
use dflop_costmodel::tokens::{MediaRule, VisionRule};
use dflop_costmodel::{CostModel, Module, SampleShape};
use dflop_samples::media::Modality;

use crate::error::{Error, Result};
use crate::plan::config::ContextGroups;
use crate::plan::media_shares::single_media;
use crate::plan::planner::StepPlanner;
use crate::plan::step_context::{MediumPart, cuts, match_sum, share, slice_tokens};
use crate::plan::step_plan::StepPlan;

/// A sample as the balancer sees it.
pub(super) struct Sample {
    pub(super) item: ContextItem,
    /// Parts of media as the balancer places them, `[encoders][parts]`; ranks are not known yet.
    pub(super) parts: Vec<Vec<MediumPart>>,
    /// Encoder tokens of these parts.
    pub(super) part_tokens: Vec<Vec<u64>>,
}

impl StepPlanner {
    /// Predicts media and slices of every sample. A medium with parts that the encoder processes apart is
    /// cut into as many parts as the largest group has ranks, nearly equal.
    pub(super) fn context_samples(
        &self,
        whole: &StepPlan,
        model: &CostModel,
        groups: &ContextGroups,
    ) -> Result<Vec<Sample>> {
        let mut shape = SampleShape::default();
        let mut samples = Vec::with_capacity(whole.samples.len());
        for (place, (sample, cost)) in whole.samples.iter().zip(&whole.costs).enumerate() {
            let row = self.row(*sample);
            let bytes = row.bytes();
            let encoders = cost.module_ns.as_slice().len() - 1;
            let mut own = Sample {
                item: ContextItem { media_ns: vec![Vec::new(); encoders], slices: Vec::new() },
                parts: vec![Vec::new(); encoders],
                part_tokens: vec![Vec::new(); encoders],
            };
            let is_refused = whole.is_refused(place as u32);
            if !is_refused {
                row.read_shape(&mut shape);
                add_media(&mut own, &shape, model, groups.ranks[1]);
            }
            // Media are rounded one by one, the sample once.
            let module_ns = cost.module_ns.as_slice();
            own.item.media_ns.iter_mut().zip(module_ns).for_each(|(media, sum)| match_sum(media, *sum));
            let logs = groups.ranks.map(|ranks| ranks.max(1).ilog2());
            own.item.slices = if is_refused {
                vec![ContextSlice { bytes, ..ContextSlice::default() }; logs[0] as usize + 1]
            } else {
                let slice = |log| slice(model, [cost.tokens, cost.target_tokens], 1_u32 << log, groups);
                let slices = (0..=logs[1]).map(|log| Ok(ContextSlice { bytes, ..slice(log)? }));
                slices.collect::<Result<_>>()?
            };
            samples.push(own);
        }
        Ok(samples)
    }
}

impl Sample {
    /// Returns the parts of all media with the ranks that encode them; neighboring parts on the same rank are
    /// one.
    pub(super) fn placed_parts(&mut self, place: &ContextPlace) -> Vec<MediumPart> {
        let mut placed: Vec<MediumPart> = Vec::new();
        for (parts, ranks) in std::mem::take(&mut self.parts).into_iter().zip(&place.media) {
            for (part, &rank) in parts.into_iter().zip(ranks) {
                let part = MediumPart { rank, ..part };
                match placed.last_mut() {
                    Some(last) if last.is_followed_by(&part) => last.parts.end = part.parts.end,
                    _ => placed.push(part),
                }
            }
        }
        placed
    }
}

/// Predicts the largest slice of a sample.
fn slice(
    model: &CostModel,
    [tokens, targets]: [u32; 2],
    ranks: u32,
    groups: &ContextGroups,
) -> Result<ContextSlice> {
    let own = model.predict_slice_share(tokens, targets, ranks, &groups.exchange).map_err(Error::Model)?;
    let tokens = slice_tokens(tokens.into(), ranks.into());
    // A rank may read all media of the sample, so bytes are those of the whole.
    Ok(ContextSlice { ns: own.ns, message_ns: own.message_ns, tokens, bytes: 0 })
}

/// Adds the parts of all media that the model encodes.
fn add_media(own: &mut Sample, shape: &SampleShape, model: &CostModel, ranks: usize) {
    for (modality, index, alone) in single_media(shape) {
        let module = if modality == Modality::Audio { Module::Audio } else { Module::Vision };
        let Some(at) = model.modules().iter().position(|own| *own == module) else { continue };
        // The sample was predicted with all media, so each medium can be predicted.
        let Ok(cost) = model.predict(&alone) else { continue };
        let rule = model.spec().encoders().find(|(encoder, ..)| *encoder == module);
        let parts_in_medium = match rule {
            // One of several images is a single tile.
            Some((_, _, MediaRule::Vision(VisionRule::AnyRes(_))))
                if modality == Modality::Image && shape.images.len() > 1 =>
            {
                1
            }
            Some((_, _, rule)) => rule.parts(&alone),
            None => 1,
        };
        let (ns, tokens) = (cost.module_ns.as_slice()[at], u64::from(cost.encoder_tokens));
        for parts in cuts(parts_in_medium, ranks as u64) {
            own.item.media_ns[at].push(share(ns, &parts, parts_in_medium));
            own.part_tokens[at].push(share(tokens, &parts, parts_in_medium));
            own.parts[at].push(MediumPart { modality, index, parts, parts_in_medium, rank: 0 });
        }
    }
}
