//! Collects a command's results and renders them as a self-contained HTML page.
//!
//! A [`RunReport`] is a JSON document: `collect` fills the sections from plans, datasets and training runs,
//! `page` embeds documents in a page with script and style, `read` reads them back. The page has no network,
//! and escapes everything that comes from data.

pub(crate) mod collect;
mod document;
mod fit;
mod format;
mod origin;
mod page;
mod read;
mod verdict;
mod write;

pub(crate) use document::{
    Accuracy, Basis, DataProfile, Origin, Plan, PlannedModule, PlannedParallelism, Quantity, RunReport,
    StrategyResult, Study, StudyStep, Timeline, TrainedStep, Training, Verdict,
};
pub(crate) use format::seconds;
pub(crate) use page::{PAGE_DOM, PAGE_FORMAT, PAGE_STYLE};
pub(crate) use read::read_run;
pub(crate) use verdict::{compare_steps, verdict};
pub(crate) use write::{write_page, write_report};
