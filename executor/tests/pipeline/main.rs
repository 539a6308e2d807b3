//! Compares jobs of several ranks with one another and with stages that are run by hand.

#[path = "../../comm/tests/support/mod.rs"]
mod support;

#[path = "../../examples/own_stage/adapter.rs"]
mod adapter;
mod batch;
mod collective_order;
#[path = "../../device/tests/support/cpu.rs"]
mod device;
mod divided_gradients;
mod experts;
mod failures;
mod job;
mod language_models;
mod media;
mod message_failures;
mod message_order;
mod own_stage;
mod recorded;
mod reference;
mod refusals;
mod routes;
mod sharded_states;
mod shared_ranks;
