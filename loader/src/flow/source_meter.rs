//! Counts delivered and skipped samples for every dataset in a mixture.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

/// Counters for a dataset.
#[derive(Debug)]
pub(crate) struct SourceMeter {
    name: Arc<str>,
    samples: AtomicU64,
    tokens: AtomicU64,
    skipped: AtomicU64,
}

/// Counters for a dataset in a mixture so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceSnapshot {
    /// Dataset name.
    pub source: String,
    /// Delivered samples.
    pub samples: u64,
    /// Number of LLM positions in the delivered samples, as in the microbatches.
    pub tokens: u64,
    /// Number of samples that were planned and not delivered; samples that indexing found bad are never
    /// planned.
    pub skipped_samples: u64,
}

impl SourceMeter {
    pub(crate) fn new(name: Arc<str>) -> Self {
        Self { name, samples: AtomicU64::new(0), tokens: AtomicU64::new(0), skipped: AtomicU64::new(0) }
    }

    pub(crate) fn deliver(&self, samples: u64, tokens: u64) {
        self.samples.fetch_add(samples, Relaxed);
        self.tokens.fetch_add(tokens, Relaxed);
    }

    pub(crate) fn skip(&self, samples: u64) {
        self.skipped.fetch_add(samples, Relaxed);
    }

    pub(super) fn snapshot(&self) -> SourceSnapshot {
        SourceSnapshot {
            source: self.name.to_string(),
            samples: self.samples.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
            skipped_samples: self.skipped.load(Relaxed),
        }
    }
}
