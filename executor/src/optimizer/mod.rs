//! Updates weights from gradients: norm over all ranks, clipping, learning rate, `AdamW`.
//!
//! [`JobOptimizer::update`] runs one optimizer step: it computes the norm over all gradients in the job,
//! clips them, and updates the weights in this rank's stages under a [`LearningRate`]. A parameter may be on
//! several ranks; [`Ownership`] names the rank that counts it in the norm and writes it to checkpoints.
//!
//! **Guarantees.** All ranks have the same norm and learning rate bit by bit, and all copies of a tied
//! parameter have the same bits. Other partitions of the model into stages give the same bits, provided that
//! the gradients have the same bits.

mod adamw;
mod bucket_state;
mod job_optimizer;
mod step_metrics;

pub use adamw::{AdamWOptimizer, AdamWSettings, Decay, DecayedParameters, LearningRate, ParameterRate};
pub use bucket_state::{Ownership, Precision};
pub(crate) use bucket_state::{ParameterState, gather_bytes};
pub use job_optimizer::{JobOptimizer, JobOptimizerSettings, UpdateReport};
