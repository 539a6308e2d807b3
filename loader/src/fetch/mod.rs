//! TODO fetch.

mod ranges;
mod remote;
mod share;
mod step_reader;
pub use self::share::{DpShare, Share};
pub(crate) use self::step_reader::StepReader;
