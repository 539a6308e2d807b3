//! What ranks count of the samples of a step, added up before it begins.

use dflop_loader::prepare::PreparedSample;
use dflop_loader::sample::text::Modality;

use super::dealt::Dealt;
use crate::comm::{Comm, StepContext};
use crate::error::Result;
use crate::model::model_config::ModuleKind;
use crate::pipeline::{Job, Place};

/// Columns of the table.
const TOKENS: usize = 0;
const TARGETS: usize = 1;
/// Tokens that text has room for, and tokens that an encoder makes, by encoder.
const ROOM: [usize; 2] = [2, 3];
const MADE: [usize; 2] = [4, 5];
const COLUMNS: usize = 6;

/// A sample that all ranks leave out of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Its place in the step's plan.
    pub place: u32,
    /// What is wrong, as far as it shows here; the rank that could not decode it says why.
    pub reason: String,
}

/// Counted tokens of every sample of a step; equal on all ranks.
#[derive(Debug, Clone)]
pub(super) struct Figures {
    /// `[samples, COLUMNS]`.
    table: Vec<u64>,
    encoders: Vec<usize>,
}

impl Figures {
    /// Adds up what ranks counted.
    ///
    /// One rank counts each sample: TP rank 0 of the first stage of its LLM replica its text, that of the encoder's replica
    /// its media.
    ///
    /// - `own`: samples that this rank prepared, by place
    pub(super) fn exchange<'a>(
        comm: &dyn Comm,
        job: &Job,
        place: &Place,
        dealt: &Dealt,
        samples: usize,
        own: impl Iterator<Item = (u32, &'a PreparedSample)>,
    ) -> Result<Self> {
        let mut table = vec![0; samples * COLUMNS];
        let is_first = place.stages.first().is_some_and(|&stage| {
            let stages = job.stages();
            let module = stages[usize::from(stage)].range.module;
            stages.iter().position(|own| own.range.module == module) == Some(usize::from(stage))
        });
        if is_first && place.tp_rank == 0 {
            own.for_each(|(at, sample)| {
                count(&mut table[at as usize * COLUMNS..][..COLUMNS], place.module, sample);
            });
        }
        comm.all_reduce(StepContext::step(dealt.step, "add up figures"), table.as_mut_slice().into())?;
        let encoders = job.modules().iter().filter_map(|layout| encoder_index(layout.module)).collect();
        Ok(Self { table, encoders })
    }

    fn row(&self, place: u32) -> &[u64] {
        &self.table[place as usize * COLUMNS..][..COLUMNS]
    }

    /// Why a sample is dropped, if it is.
    fn problem(&self, place: u32) -> Option<String> {
        let row = self.row(place);
        if row[TOKENS] == 0 {
            return Some("its text could not be prepared".to_owned());
        }
        let differs = |encoder: &&usize| row[ROOM[**encoder]] != row[MADE[**encoder]];
        self.encoders.iter().find(differs).map(|&encoder| {
            let (room, made) = (row[ROOM[encoder]], row[MADE[encoder]]);
            let name = ["images", "clips"][encoder];
            match made {
                0 => format!("its {name} could not be decoded"),
                _ => format!("its text has room for {room} tokens of {name}, which are {made}"),
            }
        })
    }

    pub(super) fn is_kept(&self, place: u32) -> bool {
        self.problem(place).is_none()
    }

    /// Tokens of a sample, 0 of a dropped one.
    pub(super) fn tokens(&self, place: u32) -> usize {
        if self.is_kept(place) { self.row(place)[TOKENS] as usize } else { 0 }
    }

    /// Tokens of what one encoder encodes of a sample, 0 of a dropped one.
    pub(super) fn medium_tokens(&self, place: u32, module: ModuleKind) -> usize {
        let made = encoder_index(module).map_or(0, |encoder| self.row(place)[MADE[encoder]]);
        if self.is_kept(place) { made as usize } else { 0 }
    }

    /// Target tokens of all samples that are kept.
    pub(super) fn target_tokens(&self, dealt: &Dealt) -> u64 {
        let places = dealt.microbatches.iter().flat_map(|microbatch| &microbatch.places);
        places.filter(|&&place| self.is_kept(place)).map(|&place| self.row(place)[TARGETS]).sum()
    }

    /// The samples that are left out, by place.
    pub(super) fn dropped(&self, dealt: &Dealt) -> Vec<Dropped> {
        let places = dealt.microbatches.iter().flat_map(|microbatch| &microbatch.places);
        let mut dropped: Vec<Dropped> =
            places.filter_map(|&place| Some(Dropped { place, reason: self.problem(place)? })).collect();
        dropped.sort_by_key(|sample| sample.place);
        dropped
    }
}

fn encoder_index(module: ModuleKind) -> Option<usize> {
    match module {
        ModuleKind::Vision => Some(0),
        ModuleKind::Audio => Some(1),
        ModuleKind::Llm => None,
    }
}

/// Tokens that a prepared sample's text has room for, or its tensors make.
fn count(row: &mut [u64], module: ModuleKind, sample: &PreparedSample) {
    match module {
        ModuleKind::Llm => {
            row[TOKENS] = sample.tokens() as u64;
            row[TARGETS] = sample.target_tokens() as u64;
            for run in &sample.runs {
                let encoder = usize::from(run.modality == Modality::Audio);
                row[ROOM[encoder]] += run.tokens as u64;
            }
        }
        ModuleKind::Vision => row[MADE[0]] = vision_tokens(sample),
        ModuleKind::Audio => {
            row[MADE[1]] = sample.clips.iter().map(|clip| u64::from(clip.tokens)).sum();
        }
    }
}

fn vision_tokens(sample: &PreparedSample) -> u64 {
    let images = sample.images.iter().map(|image| u64::from(image.tokens));
    images.chain(sample.videos.iter().map(|video| u64::from(video.pixels.tokens))).sum()
}
