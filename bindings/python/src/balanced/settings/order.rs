//! Run settings: global batches, which are loader keywords, and the sample order, `dflop.Order`.

use dflop_loader::{Shuffle, StepPlannerBuilder, Tail};
use pyo3::prelude::*;

use crate::error::DflopError;
use crate::settings::Group;

/// Default block shuffle sizes: samples per run of neighbors, and below, runs per window.
const BLOCK_SAMPLES: u64 = 1024;
const OPEN_BLOCKS: u64 = 64;

/// Global batch size, ranks, and the resulting run.
pub(in crate::balanced) struct RunSettings {
    pub(in crate::balanced) global_batch_size: u64,
    pub(in crate::balanced) microbatches: usize,
    pub(in crate::balanced) dp_rank: usize,
    pub(in crate::balanced) dp_size: usize,
    pub(in crate::balanced) seed: u64,
    pub(in crate::balanced) epochs: Option<u64>,
    /// Number of steps after which an iteration ends.
    pub(in crate::balanced) steps: Option<u64>,
}

impl RunSettings {
    /// Applies the settings to a planner builder.
    pub(super) fn apply(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let builder = builder
            .global_batch(self.global_batch_size)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .seed(self.seed);
        match self.epochs {
            Some(epochs) => builder.epochs(epochs),
            None => builder,
        }
    }
}

/// Sample order settings.
pub(in crate::balanced) struct OrderSettings {
    shuffle: Shuffle,
    tail: Tail,
    repeats_samples: bool,
    first_epoch: u64,
    is_validation: bool,
    pub(super) accepts_changed_data: bool,
}

impl OrderSettings {
    /// Reads the fields in a `dflop.Order`.
    pub(in crate::balanced) fn new(group: &Group<'_>) -> PyResult<Self> {
        Ok(Self {
            shuffle: shuffle(group)?,
            tail: tail(&group.get::<String>("tail")?)?,
            repeats_samples: group.get("repeat_samples")?,
            first_epoch: group.get("first_epoch")?,
            is_validation: group.get("validation")?,
            accepts_changed_data: group.get("accept_changed_data")?,
        })
    }

    /// Applies the settings to a planner builder, after the epochs: epochs are fixed for validation.
    pub(super) fn apply(&self, builder: StepPlannerBuilder) -> StepPlannerBuilder {
        let mut builder = builder.first_epoch(self.first_epoch).tail(self.tail).shuffle(self.shuffle);
        if self.repeats_samples {
            builder = builder.repeat_samples();
        }
        if self.is_validation { builder.validation() } else { builder }
    }
}

fn shuffle(group: &Group<'_>) -> PyResult<Shuffle> {
    let name: String = group.get("shuffle")?;
    let block_samples: Option<u64> = group.get("block_samples")?;
    let open_blocks: Option<u64> = group.get("open_blocks")?;
    let refused = |reason: String| Err(DflopError::config("shuffle", reason).into());
    match name.as_str() {
        "blocks" => Ok(Shuffle::Blocks {
            block_samples: block_samples.unwrap_or(BLOCK_SAMPLES),
            open_blocks: open_blocks.unwrap_or(OPEN_BLOCKS),
        }),
        _ if block_samples.or(open_blocks).is_some() => {
            refused("`block_samples` and `open_blocks` need `shuffle=\"blocks\"`".to_owned())
        }
        "global" => Ok(Shuffle::Global),
        "none" => Ok(Shuffle::None),
        name => refused(format!("expected global, blocks or none, found `{name}`")),
    }
}

fn tail(name: &str) -> Result<Tail, DflopError> {
    match name {
        "carry" => Ok(Tail::Carry),
        "drop" => Ok(Tail::Drop),
        "short" => Ok(Tail::Short),
        _ => Err(DflopError::config("tail", format!("expected carry, drop or short, found `{name}`"))),
    }
}
