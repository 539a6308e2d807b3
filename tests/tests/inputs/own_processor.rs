//! Adds a processor from outside the crate: a byte-level model, without tokenizer or chat template.

use std::sync::Arc;

use dflop_costmodel::{Module, SampleShape};
use dflop_loader::error::ProcessorError;
use dflop_loader::inputs::{
    Filler, IGNORED, ModelInputs, NamedTensor, PrepareError, PreparedSample, SampleProcessor,
};
use dflop_loader::media::Media;
use dflop_loader::sample::{BatchLayout, Sample};
use dflop_loader::{BalancedLoader, Step, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::run;
use futures::TryStreamExt;

/// Assigns an id to every text byte; texts over the limit are dropped.
#[derive(Debug, Clone, Default)]
struct Bytes {
    tokens_max: Option<u64>,
}

impl SampleProcessor for Bytes {
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        let text = sample.fields.iter().find_map(|field| match &field.media {
            Media::Text(text) => Some(text),
            _ => None,
        });
        let Some(text) = text else {
            return Err(PrepareError::conversation(None, "there is no text"));
        };
        let input_ids: Vec<u32> = text.bytes().map(u32::from).collect();
        if let Some(tokens_max) = self.tokens_max.filter(|most| input_ids.len() as u64 > *most) {
            let (tokens, tokens_max) = (input_ids.len(), tokens_max as usize);
            return Err(PrepareError::TooLong { tokens, tokens_max, note: "", is_dropped: true });
        }
        let labels = input_ids.iter().map(|id| *id as i32).collect();
        Ok(PreparedSample { input_ids, labels, ..PreparedSample::default() })
    }

    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        let fillers: Vec<PreparedSample> = filler.of(&samples).cloned().collect();
        let (tokens, target_tokens) = (
            samples.iter().map(|sample| sample.tokens() as u64).sum(),
            samples.iter().map(|sample| sample.target_tokens() as u64).sum(),
        );
        let all: Vec<PreparedSample> = samples.into_iter().chain(fillers).collect();
        let ids: Vec<i64> =
            all.iter().flat_map(|sample| &sample.input_ids).map(|id| i64::from(*id)).collect();
        let mut cu_seqlens = vec![0];
        for sample in &all {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + sample.tokens() as i32);
        }
        let max_seqlen = all.iter().map(|sample| sample.tokens() as u32).max().unwrap_or(0);
        let tensors = vec![NamedTensor::ints("input_ids", vec![1, ids.len()], ids)];
        ModelInputs { tensors, cu_seqlens, max_seqlen, tokens, target_tokens }
    }

    fn filler(&self, _encoders: &[Module]) -> Result<Filler, ProcessorError> {
        let padding =
            PreparedSample { input_ids: vec![0], labels: vec![IGNORED], ..PreparedSample::default() };
        Ok(Filler::new(Some(padding), Vec::new()))
    }

    fn limited(&self, tokens_max: Option<u64>, _pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor> {
        Arc::new(Self { tokens_max: tokens_max.or(self.tokens_max) })
    }

    fn layout(&self) -> BatchLayout {
        BatchLayout::Packed
    }

    fn has_buckets(&self) -> bool {
        false
    }

    fn reads_pixels(&self) -> bool {
        false
    }

    fn tensor_bytes(&self, _shape: &SampleShape) -> u64 {
        0
    }
}

fn steps(data: &TempDataset, processor: Bytes) -> (Vec<Step>, u64) {
    let planner = planner(&data.index(), 8, 1, 2, Tail::Carry);
    let builder = BalancedLoader::builder(planner, 0).steps(3).preparer(Arc::new(processor));
    let budget = dflop_loader::flow::ErrorBudget::new(1.0).unwrap();
    let loader = builder.error_budget(budget).build().unwrap();
    let steps = run(loader.stream().try_collect()).unwrap();
    (steps, loader.prepare_report().dropped_samples)
}

#[test]
fn a_processor_of_ones_own_makes_the_inputs_of_every_microbatch() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let (steps, dropped) = steps(&data, Bytes::default());
    assert_eq!((steps.len(), dropped), (3, 0));
    for microbatch in steps.iter().flat_map(|step| &step.microbatches) {
        let inputs = microbatch.inputs.as_ref().unwrap();
        let ids = inputs.tensor("input_ids").unwrap();
        assert_eq!(ids.shape, [1, inputs.cu_seqlens[inputs.cu_seqlens.len() - 1] as usize]);
        assert_eq!(microbatch.tokens, inputs.tokens);
        let text = |sample: &Sample| {
            sample.fields.iter().any(|field| matches!(&field.media, Media::Text(text) if !text.is_empty()))
        };
        assert!(microbatch.samples.iter().all(text), "samples without a text are skipped");
    }
}

#[test]
fn what_it_drops_is_counted() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let (steps, dropped) = steps(&data, Bytes { tokens_max: Some(3) });
    assert!(dropped > 0);
    let filled =
        steps.iter().flat_map(|step| &step.microbatches).filter(|microbatch| microbatch.samples.is_empty());
    for microbatch in filled {
        assert_eq!(microbatch.inputs.as_ref().unwrap().cu_seqlens, [0, 1], "a token of padding");
    }
}
