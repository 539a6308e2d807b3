//! What training needs around the pipeline: from gradients to weights, to files, to figures.
//!
//! [`Trainer`] takes one step: it finds the norm of all gradients of the job, clips, and updates the weights of this rank's
//! stages with `AdamW` under a [`LearningRate`]. Which of several ranks with the same parameter counts and writes it is
//! [`Ownership`].
//!
//! [`checkpoint`] saves and restores. [`TraceWriter`] writes what every action took beside what was predicted, and
//! [`utilization`] says what share of the machine that used.
//!
//! **Guarantees.** All ranks have the same norm and learning rate bit by bit, and a tied parameter has the same bits
//! wherever it is. A cut into other stages gives the same bits, as far as its gradients have them.

pub mod checkpoint;
mod clip;
mod loss;
mod mfu;
mod optimizer;
mod ownership;
mod schedule;
mod trace;
mod trainer;

pub use clip::{clip_factor, gradient_norm};
pub use loss::{LossSum, StepLoss};
pub use mfu::{executed_flops, model_flops, utilization};
pub use optimizer::{Decayed, Optimizer, OptimizerSettings, Precision};
pub use ownership::Ownership;
pub use schedule::{Decay, LearningRate};
pub use trace::{TraceWriter, TracedAction, join_traces};
pub use trainer::{Trainer, TrainerSettings, UpdateReport};
