//! Implements the balanced loader's processor interface for the preparer.

use std::sync::Arc;

use dflop_costmodel::{Module, SampleShape};
use dflop_samples::Result;
use dflop_samples::inputs::{Filler, ModelInputs, PrepareError, PreparedSample, SampleProcessor};
use dflop_samples::sample::{BatchLayout, Sample};

use super::Preparer;

impl SampleProcessor for Preparer {
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        Self::prepare(self, sample)
    }

    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        self.pack_filled(samples, filler)
    }

    fn filler(&self, encoders: &[Module]) -> Result<Filler> {
        self.make_filler(encoders)
    }

    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor> {
        let mut limited = self.clone();
        if let Some(tokens) = tokens_max {
            limited = limited.tokens_at_most(tokens);
        }
        if let Some(tokens) = pad_to_tokens {
            limited = limited.pad_to_tokens(tokens);
        }
        Arc::new(limited)
    }

    fn layout(&self) -> BatchLayout {
        Self::layout(self)
    }

    fn has_buckets(&self) -> bool {
        self.packer.length_buckets.is_some()
            || self.media_buckets.is_some()
            || self.packer.sample_multiple > 1
    }

    fn requires_targets(&self) -> bool {
        self.requires_targets
    }

    fn reads_pixels(&self) -> bool {
        Self::reads_pixels(self)
    }

    fn tensor_bytes(&self, shape: &SampleShape) -> u64 {
        Self::tensor_bytes(self, shape)
    }
}
