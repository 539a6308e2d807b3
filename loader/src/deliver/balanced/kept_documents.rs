//! Keeps prepared documents, so that a document that is cut into rows is tokenized once.
//!
//! A rank's rows hold pieces of the same document: a book fills many rows. The processor of a loader of rows
//! remembers the last documents without media, and rows that are prepared at the same time wait for the one
//! that tokenizes their document.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use dflop_costmodel::{Module, SampleShape};
use dflop_samples::inputs::{Filler, ModelInputs, PrepareError, PreparedSample, SampleProcessor};
use dflop_samples::sample::{BatchLayout, Sample};

use dflop_samples::Result;

/// Maximum number of tokens in kept documents, 8 bytes each; the last document is always kept.
const KEPT_TOKENS_MAX: usize = 8 << 20;

/// Shard, offset and epoch of a sample.
type DocumentId = (Arc<str>, u64, u64);
/// A document, once it is prepared.
type Slot = Arc<Mutex<Option<Arc<PreparedSample>>>>;

/// Processor that keeps the last documents.
#[derive(Debug)]
pub(super) struct KeptDocuments {
    processor: Arc<dyn SampleProcessor>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    slots: HashMap<DocumentId, Slot>,
    /// Prepared documents with their tokens, the earliest first.
    order: VecDeque<(DocumentId, usize)>,
    tokens: usize,
}

impl KeptDocuments {
    pub(super) fn new(processor: Arc<dyn SampleProcessor>) -> Self {
        Self { processor, kept: Mutex::default() }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Keeps a prepared document, and drops the earliest beyond the limit.
    fn keep(&mut self, id: DocumentId, tokens: usize) {
        self.order.push_back((id, tokens));
        self.tokens += tokens;
        while self.tokens > KEPT_TOKENS_MAX && self.order.len() > 1 {
            let Some((earliest, tokens)) = self.order.pop_front() else { return };
            self.slots.remove(&earliest);
            self.tokens -= tokens;
        }
    }
}

impl SampleProcessor for KeptDocuments {
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        let id = (sample.shard.clone(), sample.offset, sample.epoch);
        let slot = self.kept().slots.entry(id.clone()).or_default().clone();
        // Another row that needs the document waits here.
        let mut document = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(document) = &*document {
            return Ok(PreparedSample::clone(document));
        }
        let prepared = self.processor.prepare(sample);
        match &prepared {
            Ok(prepared) if prepared.runs.is_empty() => {
                *document = Some(Arc::new(prepared.clone()));
                self.kept().keep(id, prepared.tokens());
            }
            _ => drop(self.kept().slots.remove(&id)),
        }
        prepared
    }

    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        self.processor.pack(samples, filler)
    }

    fn filler(&self, encoders: &[Module]) -> Result<Filler> {
        self.processor.filler(encoders)
    }

    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor> {
        Arc::new(Self::new(self.processor.limited(tokens_max, pad_to_tokens)))
    }

    fn layout(&self) -> BatchLayout {
        self.processor.layout()
    }

    fn has_buckets(&self) -> bool {
        self.processor.has_buckets()
    }

    fn requires_targets(&self) -> bool {
        self.processor.requires_targets()
    }

    fn reads_pixels(&self) -> bool {
        self.processor.reads_pixels()
    }

    fn tensor_bytes(&self, shape: &SampleShape) -> u64 {
        self.processor.tensor_bytes(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Makes as many tokens as a sample's offset has, and counts its calls.
    #[derive(Debug, Default)]
    struct Counted(AtomicUsize);

    impl SampleProcessor for Counted {
        fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            let tokens = sample.offset as usize;
            if tokens == 0 {
                return Err(PrepareError::conversation(None, "no text"));
            }
            Ok(PreparedSample {
                input_ids: vec![1; tokens],
                labels: vec![1; tokens],
                ..PreparedSample::default()
            })
        }

        fn pack(&self, _: Vec<PreparedSample>, _: &Filler) -> ModelInputs {
            ModelInputs::default()
        }

        fn filler(&self, _: &[Module]) -> Result<Filler> {
            Ok(Filler::new(None, Vec::new()))
        }

        fn limited(&self, _: Option<u64>, _: Option<usize>) -> Arc<dyn SampleProcessor> {
            Arc::new(Self::default())
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

        fn tensor_bytes(&self, _: &SampleShape) -> u64 {
            0
        }
    }

    fn sample(tokens: u64, epoch: u64) -> Sample {
        let (key, shard) = (String::new(), "a.tar".into());
        Sample { key, shard, offset: tokens, epoch, bytes: 0, fields: Vec::new() }
    }

    #[test]
    fn a_document_is_prepared_once_until_others_need_the_memory() {
        let counted = Arc::new(Counted::default());
        let kept = KeptDocuments::new(counted.clone());
        let calls = |samples: &[Sample]| {
            for sample in samples {
                drop(kept.prepare(sample));
            }
            counted.0.swap(0, Ordering::Relaxed)
        };
        assert_eq!(calls(&[sample(5, 0), sample(5, 0), sample(5, 1), sample(6, 0), sample(5, 0)]), 3);
        assert_eq!(kept.prepare(&sample(5, 0)).unwrap().tokens(), 5);
        assert_eq!(calls(&[sample(KEPT_TOKENS_MAX as u64, 0), sample(5, 0)]), 2);
        assert!(kept.kept().tokens <= KEPT_TOKENS_MAX && kept.kept().slots.len() == 1);
        assert_eq!(calls(&[sample(0, 0), sample(0, 0)]), 2);
        assert_eq!(kept.kept().slots.len(), 1);
    }
}
