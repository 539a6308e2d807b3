//! Serves a page to look at the samples of a dataset: on this machine only, under a random address.
//!
//! `table` holds the numbers that samples are sorted and filtered by, `query` and `selection` sort and
//! filter; `describe`, `content` and `media` answer for single samples; `http` rejects requests before
//! anything else. The page builds everything from JSON as text nodes; the server never puts data into a
//! document.

mod answer;
mod content;
mod describe;
mod histogram;
mod http;
mod media;
mod page;
mod query;
mod readers;
mod selection;
mod table;

use dflop_costmodel::CostModel;
use dflop_loader::Dataset;

use crate::failure::Failure;
use readers::Readers;
use selection::Selections;
use table::SampleTable;

pub(crate) use http::Server;

/// Dataset with predicted sample costs.
#[derive(Debug)]
pub(crate) struct View {
    dataset: Dataset,
    model: CostModel,
    /// Model name and time source, for people.
    costs: String,
    table: SampleTable,
    selections: Selections,
    readers: Readers,
}

impl View {
    /// Predicts the costs for all samples.
    ///
    /// - `costs`: model name and time source, for people
    ///
    /// # Errors
    /// [`Failure::Misuse`] if the dataset has more than 2^32 samples.
    pub(crate) fn new(dataset: Dataset, model: CostModel, costs: String) -> Result<Self, Failure> {
        let table = SampleTable::new(&dataset, &model)?;
        let readers = Readers::new(dataset.index());
        Ok(Self { dataset, model, costs, table, selections: Selections::default(), readers })
    }
}
