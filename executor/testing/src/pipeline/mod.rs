//! Compares multi-rank jobs with each other and with stages that are run by hand.

#[path = "../../../examples/own_stage/adapter.rs"]
mod adapter;
pub mod batch;
pub mod collective_order;
pub mod divided_gradients;
pub mod experts;
pub mod failures;
pub mod job;
pub mod language_models;
pub mod media;
pub mod message_failures;
pub mod message_order;
pub mod own_stage;
pub mod reference;
pub mod refusals;
pub mod routes;
pub mod sharded_states;
pub mod shared_ranks;

use dflop_device::Cpu;

use crate::claim::Claim;
use crate::device::TestBackend;

/// Lists the claims that hold on every device.
pub fn claims<B: TestBackend>() -> Vec<Claim> {
    let files = [
        collective_order::claims::<B>(),
        divided_gradients::claims::<B>(),
        experts::claims::<B>(),
        language_models::claims::<B>(),
        media::claims::<B>(),
        own_stage::claims::<B>(),
        sharded_states::claims::<B>(),
        shared_ranks::claims::<B>(),
    ];
    files.into_iter().flatten().collect()
}

/// Lists the claims that only the CPU device checks.
pub fn on_cpu() -> Vec<Claim> {
    let files = [
        failures::claims::<Cpu>(),
        message_failures::claims(),
        message_order::claims(),
        refusals::claims(),
        routes::claims(),
    ];
    files.into_iter().flatten().collect()
}
