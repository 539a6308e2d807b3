//! The compiled part of the Python package `dflop`: converts types between Python and the crates.
//!
//! Every class is in a file with the class name. Delivered samples and steps are instances of the plain
//! classes in `dflop.batches`, created in `convert.rs`. Every wait goes through `runtime.rs`, which releases
//! the interpreter and lets Ctrl-C interrupt it.

#![allow(
    clippy::doc_markdown,
    clippy::doc_link_with_quotes,
    reason = "docs of classes and functions are Python docstrings, with double backticks and examples in Python"
)]
#![allow(
    clippy::needless_pass_by_value,
    reason = "arguments are converted from Python and owned by the call"
)]

mod arrays;
mod balance;
mod balanced;
mod cli;
mod convert;
mod cost;
mod dataset;
mod error;
mod filter;
mod image;
mod loader;
mod logging;
mod measure;
mod model;
mod other_stores;
mod runtime;
mod schedule;
mod table;
mod tasks;
mod tokenizer;
mod train;
mod transform;

use pyo3::prelude::*;

/// The compiled part of the package `dflop`.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::arrays::array::Array;
    #[pymodule_export]
    use crate::balance::py_balance;
    #[pymodule_export]
    use crate::balanced::{
        MicrobatchIterator, PyBalancedLoader, PyStepPlan, RoleStep, StepIterator, StepMicrobatches,
    };
    #[pymodule_export]
    use crate::cli::{cli, command};
    #[pymodule_export]
    use crate::dataset::{PyDataset, PyMixture, mix};
    #[pymodule_export]
    use crate::image::{Image, PyAugment};
    #[pymodule_export]
    use crate::loader::{BatchIterator, PyLoader};
    #[pymodule_export]
    use crate::measure::{PyMicrobatchCurve, PyTimeCurve, check_predictions, choose_sizes};
    #[pymodule_export]
    use crate::model::PyCostModel;
    #[pymodule_export]
    use crate::schedule::{PyRoute, PySchedule};
    #[pymodule_export]
    use crate::table::Table;
    #[pymodule_export]
    use crate::tasks::{
        PyShardWriter, index_part, merge_index, pack_all, pack_finish, pack_list, pack_one, pack_rows,
        pack_tables,
    };
    #[pymodule_export]
    use crate::train::train;
    #[pymodule_export]
    use crate::transform::{PySampleTransform, PyTransform};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        dflop_import::register_tables();
        crate::other_stores::install();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
