//! The pipeline suite on the CUDA device, on the stand-in: ranks and stages on one device.

#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../../../examples/own_stage/adapter.rs"]
mod adapter;
#[path = "../../../tests/pipeline/batch.rs"]
mod batch;
#[path = "../support/cuda.rs"]
mod device;
#[path = "../../../tests/pipeline/divided_gradients.rs"]
mod divided_gradients;
#[path = "../../../tests/pipeline/job.rs"]
mod job;
#[path = "../../../tests/pipeline/language_models.rs"]
mod language_models;
#[path = "../../../tests/pipeline/media.rs"]
mod media;
#[path = "../../../tests/pipeline/own_stage.rs"]
mod own_stage;
#[path = "../../../tests/pipeline/recorded.rs"]
mod recorded;
#[path = "../../../tests/pipeline/reference.rs"]
mod reference;
#[path = "../../../tests/pipeline/sharded_states.rs"]
mod sharded_states;
#[path = "../../../tests/pipeline/shared_ranks.rs"]
mod shared_ranks;
#[path = "../../../comm/tests/support/mod.rs"]
mod support;
