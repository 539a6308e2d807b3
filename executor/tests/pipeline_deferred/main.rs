//! The pipeline suite on the test device that computes late.

#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../../examples/own_stage/adapter.rs"]
mod adapter;
#[path = "../pipeline/batch.rs"]
mod batch;
#[path = "../pipeline/collective_order.rs"]
mod collective_order;
#[path = "../../device/tests/support/deferred.rs"]
mod device;
#[path = "../pipeline/divided_gradients.rs"]
mod divided_gradients;
#[path = "../pipeline/experts.rs"]
mod experts;
#[path = "../pipeline/job.rs"]
mod job;
#[path = "../pipeline/language_models.rs"]
mod language_models;
#[path = "../pipeline/media.rs"]
mod media;
#[path = "../pipeline/own_stage.rs"]
mod own_stage;
#[path = "../pipeline/recorded.rs"]
mod recorded;
#[path = "../pipeline/reference.rs"]
mod reference;
#[path = "../pipeline/sharded_states.rs"]
mod sharded_states;
#[path = "../pipeline/shared_ranks.rs"]
mod shared_ranks;
#[path = "../../comm/tests/support/mod.rs"]
mod support;
