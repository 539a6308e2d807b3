//! Predicts microbatch times for a step, by module.
//!
//! Counts tokens in the samples of a step and sums the counts over ranks before the step starts.

use super::step_media::StepMedia;
use crate::error::Result;
use crate::pipeline::{Job, JobLayout, PipelineStepPlan, RankRole};
use dflop_comm::StepContext;
use dflop_costmodel::correction::Observation;
use dflop_costmodel::{Module, SampleShape};
use dflop_loader::inputs::PreparedSample;
use dflop_loader::media::Modality;
use dflop_loader::{StepPlan, StepPlanner};
use dflop_models::ModuleKind;
use std::collections::BTreeMap;

/// Predicted times for complete modules over the microbatches in a step, numbered as in the job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PredictedTimes {
    rounds: usize,
    /// Sample indices, by module and microbatch.
    samples: Vec<Vec<Vec<u32>>>,
    /// Forward and backward time on one device, by module and microbatch, in nanoseconds.
    module_ns: Vec<Vec<u64>>,
}

impl PredictedTimes {
    /// Sums planned sample costs, including skipped samples, with the constants for each microbatch.
    pub(super) fn new(
        job: &Job,
        planner: &StepPlanner,
        media: &StepMedia,
        plan: &PipelineStepPlan,
        costs: &StepPlan,
    ) -> Result<Self> {
        let mut times = Self { rounds: plan.rounds(), ..Self::default() };
        for layout in job.modules() {
            let samples = match layout.module {
                ModuleKind::Llm => {
                    media.microbatches.iter().map(|microbatch| microbatch.samples.clone()).collect()
                }
                encoder => media.encoded(job, encoder)?,
            };
            let index = planner.model().modules().iter().position(|own| *own == costed(layout.module));
            let cost_ns = |sample: &u32| {
                let all = costs.costs[*sample as usize].module_ns;
                index.and_then(|index| all.as_slice().get(index).copied()).unwrap_or(0)
            };
            let constants =
                index.and_then(|index| costs.constants.modules.get(index)).copied().unwrap_or_default();
            let microbatch_ns =
                |samples: &Vec<u32>| constants.microbatch_ns(samples.iter().map(cost_ns).sum());
            times.module_ns.push(samples.iter().map(microbatch_ns).collect());
            times.samples.push(samples);
        }
        Ok(times)
    }

    /// Returns the number of microbatches per LLM DP rank.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Returns the time of a module over a microbatch, in nanoseconds.
    ///
    /// # Panics
    /// If the job has no such module or microbatch.
    #[must_use]
    pub fn module_ns(&self, module: usize, microbatch: u32) -> u64 {
        self.module_ns[module][microbatch as usize]
    }

    /// Returns sample indices in the step plan, by module and microbatch.
    pub(crate) fn samples(&self) -> &[Vec<Vec<u32>>] {
        &self.samples
    }

    /// Returns observations for the correction, one per microbatch; microbatches without work are left out.
    ///
    /// - `measured_ns`: module forward and backward time over a microbatch, summed over stages
    pub(crate) fn observations(
        &self,
        job: &Job,
        planner: &StepPlanner,
        plan: &StepPlan,
        measured_ns: impl Fn(usize, usize) -> u64,
    ) -> Vec<Observation> {
        let (mut shape, mut all) = (SampleShape::default(), Vec::new());
        for (index, layout) in job.modules().iter().enumerate() {
            for (microbatch, indices) in self.samples[index].iter().enumerate() {
                let (module, measured_ns) = (costed(layout.module), measured_ns(index, microbatch));
                let mut samples = Vec::with_capacity(indices.len());
                for &sample in indices {
                    planner.row(plan.samples[sample as usize]).read_shape(&mut shape);
                    samples.extend(planner.model().sample_times(Some(module), &shape));
                }
                if measured_ns > 0 && !samples.is_empty() {
                    let constants = planner.model().sample_constants(Some(module), &samples);
                    let (module, rank) = (Some(module), (microbatch % layout.dp_size) as u32);
                    all.push(Observation { module, rank, measured_ns, constants, samples });
                }
            }
        }
        all
    }
}

/// Returns the corresponding module in the cost model.
pub(crate) fn costed(module: ModuleKind) -> Module {
    match module {
        ModuleKind::Vision => Module::Vision,
        ModuleKind::Audio => Module::Audio,
        ModuleKind::Llm => Module::Llm,
    }
}

/// Table columns.
const TOKENS: usize = 0;
const TARGETS: usize = 1;
/// Tokens reserved by the text, and tokens produced by the encoder, for each encoder.
const ROOM: [usize; 2] = [2, 3];
const MADE: [usize; 2] = [4, 5];
pub(super) const COLUMNS: usize = 6;

/// Sample that all ranks leave out of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SkippedSample {
    /// Index in the step plan.
    pub index: u32,
    /// Reason, as far as counts show it; the rank that could not decode the sample logs the cause.
    pub reason: String,
}

/// Token counts for every sample in a step, equal on all ranks.
#[derive(Debug, Clone)]
pub(super) struct TokenCounts {
    /// Counts, `[samples, COLUMNS]`.
    table: Vec<u64>,
    encoders: Vec<usize>,
    /// Whether some media are prepared together with their text.
    has_joint_samples: bool,
}

impl TokenCounts {
    /// Builds the table on this rank, which is summed over ranks.
    ///
    /// Each sample is counted once: text by TP rank 0 in the first stage of the LLM replica, media by the
    /// same rank in the encoder replica.
    ///
    /// - `own`: samples that this rank prepared, by index, for each role
    pub(super) fn own<'a>(
        job: &JobLayout,
        samples: usize,
        own: impl Iterator<Item = (&'a RankRole, &'a BTreeMap<u32, PreparedSample>)>,
    ) -> Vec<u64> {
        let mut table = vec![0; samples * COLUMNS];
        for (role, samples) in own.filter(|(role, _)| is_counted(job, role)) {
            for (&at, sample) in samples {
                count(&mut table[at as usize * COLUMNS..][..COLUMNS], role.module, sample);
            }
        }
        table
    }

    /// Returns the step context for the sum over ranks.
    pub(super) fn at(step: u64) -> StepContext {
        StepContext::step(step, "sum token counts")
    }

    /// Reads the table summed over all ranks.
    pub(super) fn from_sum(job: &JobLayout, table: Vec<u64>) -> Self {
        let encoders = job.modules().iter().filter_map(|layout| encoder_index(layout.module)).collect();
        let mut modules = job.modules().iter().map(|own| own.module);
        let has_joint_samples = modules.any(|own| own != ModuleKind::Llm && job.reads_with_llm(own));
        Self { table, encoders, has_joint_samples }
    }

    fn row(&self, index: u32) -> &[u64] {
        &self.table[index as usize * COLUMNS..][..COLUMNS]
    }

    /// Returns the reason for skipping a sample, if it is skipped.
    fn problem(&self, index: u32) -> Option<String> {
        let row = self.row(index);
        // No rank counted its text.
        if row[TOKENS] == 0 {
            let what = if self.has_joint_samples { "its text or media" } else { "its text" };
            return Some(format!("{what} could not be prepared"));
        }
        let differs = |encoder: &&usize| row[ROOM[**encoder]] != row[MADE[**encoder]];
        self.encoders.iter().find(differs).map(|&encoder| {
            let (room, made) = (row[ROOM[encoder]], row[MADE[encoder]]);
            let name = ["images", "clips"][encoder];
            match made {
                0 => format!("its {name} could not be decoded"),
                _ => format!("its text reserves {room} tokens for {name}, which have {made}"),
            }
        })
    }

    pub(super) fn is_kept(&self, index: u32) -> bool {
        self.problem(index).is_none()
    }

    /// Returns the number of tokens in a sample, 0 if it is skipped.
    pub(super) fn tokens(&self, index: u32) -> usize {
        if self.is_kept(index) { self.row(index)[TOKENS] as usize } else { 0 }
    }

    /// Returns the number of tokens that an encoder produces for a sample, 0 if it is skipped.
    pub(super) fn medium_tokens(&self, index: u32, module: ModuleKind) -> usize {
        let made = encoder_index(module).map_or(0, |encoder| self.row(index)[MADE[encoder]]);
        if self.is_kept(index) { made as usize } else { 0 }
    }

    /// Returns the number of target tokens in all samples that are not skipped.
    pub(super) fn target_tokens(&self, media: &StepMedia) -> u64 {
        let samples = media.microbatches.iter().flat_map(|microbatch| &microbatch.samples);
        samples.filter(|&&index| self.is_kept(index)).map(|&index| self.row(index)[TARGETS]).sum()
    }

    /// Returns the skipped samples, by index.
    pub(super) fn skipped(&self, media: &StepMedia) -> Vec<SkippedSample> {
        let samples = media.microbatches.iter().flat_map(|microbatch| &microbatch.samples);
        let mut skipped: Vec<SkippedSample> = samples
            .filter_map(|&index| Some(SkippedSample { index, reason: self.problem(index)? }))
            .collect();
        skipped.sort_by_key(|sample| sample.index);
        skipped
    }
}

/// Returns whether a rank counts samples for a role. Later stages and other TP ranks prepare the same
/// samples; counting them again would multiply the sums.
fn is_counted(job: &JobLayout, role: &RankRole) -> bool {
    let is_own = |stage: &u16| job.modules()[job.stage_module(*stage)].module == role.module;
    let first = (0..job.stage_count() as u16).find(is_own);
    role.tp_rank == 0 && role.stages.first().copied() == first
}

fn encoder_index(module: ModuleKind) -> Option<usize> {
    match module {
        ModuleKind::Vision => Some(0),
        ModuleKind::Audio => Some(1),
        ModuleKind::Llm => None,
    }
}

/// Counts the tokens that the text of a prepared sample reserves, or that the tensors produce.
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
