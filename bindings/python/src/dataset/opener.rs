//! Opens a dataset index on demand, once per text counter.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::shard::Shard;
use dflop_loader::{Dataset, Splits};

use crate::error::DflopError;

/// Shards, and the settings for opening the index. Clones share the opened datasets.
#[derive(Debug, Clone)]
pub(super) struct Opener {
    pub(super) shards: Vec<Shard>,
    pub(super) options: IndexOptions,
    pub(super) split: Option<String>,
    pub(super) splits: Option<PathBuf>,
    pub(super) repeat: Option<u64>,
    pub(super) opened: Arc<Mutex<Opened>>,
}

/// Opened datasets.
#[derive(Debug, Default)]
pub(super) struct Opened {
    /// Datasets by token counter digest.
    datasets: Vec<(Option<String>, Dataset)>,
    /// Whether the index was rebuilt, so that it is not rebuilt again.
    is_made: bool,
}

impl Opener {
    /// Opens the index, or builds the index; `counts` applies if the options do not name a tokenizer.
    pub(super) fn open(mut self, counts: TokenCounts) -> Result<Dataset, DflopError> {
        if matches!(self.options.token_counts, TokenCounts::Estimated) {
            self.options.token_counts = counts;
        }
        let digest = match &self.options.token_counts {
            TokenCounts::Estimated => None,
            TokenCounts::Of(counter) | TokenCounts::IfPresent(counter) => Some(counter.digest()),
        };
        let opened = self.opened.clone();
        // Held while the index is built, so that two loaders do not build it twice.
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, dataset)) = opened.datasets.iter().find(|(of, _)| *of == digest) {
            return Ok(dataset.clone());
        }
        // A requested rebuild happens once, no matter how often the dataset is opened.
        self.options.is_rebuilt &= !opened.is_made;
        self.options.is_verified &= !opened.is_made;
        let dataset = self.dataset()?;
        opened.is_made = true;
        opened.datasets.push((digest, dataset.clone()));
        Ok(dataset)
    }

    /// Records that the index was rebuilt.
    pub(super) fn mark_rebuilt(&self) {
        let made = Opened { is_made: true, ..Opened::default() };
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = made;
    }

    fn dataset(self) -> Result<Dataset, DflopError> {
        let index = Arc::new(Index::open_or_build(self.shards, &self.options)?);
        let mut dataset = Dataset::from(index.clone());
        if let Some(split) = self.split {
            let splits = self.splits.as_deref().map_or_else(|| Splits::beside(&index), Splits::read)?;
            dataset = dataset.split(&splits, &split)?;
        }
        Ok(match self.repeat {
            Some(epochs) => dataset.repeat(epochs),
            None => dataset,
        })
    }
}
