//! The pipeline suite over NCCL, on the stand-ins: losses and gradients are those of ranks that are threads.

#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../../../examples/own_stage/adapter.rs"]
mod adapter;
#[path = "../../../tests/pipeline/batch.rs"]
mod batch;
#[path = "../support/nccl.rs"]
mod device;
#[path = "../../../tests/pipeline/failures.rs"]
mod failures;
#[path = "../../../tests/pipeline/job.rs"]
mod job;
#[path = "../../../tests/pipeline/language_models.rs"]
mod language_models;
#[path = "../../../tests/pipeline/media.rs"]
mod media;
mod orders;
#[path = "../../../tests/pipeline/own_stage.rs"]
mod own_stage;
#[path = "../../../tests/pipeline/reference.rs"]
mod reference;
#[path = "../../../tests/pipeline/sharded_states.rs"]
mod sharded_states;
#[path = "../../../tests/pipeline/shared_ranks.rs"]
mod shared_ranks;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
