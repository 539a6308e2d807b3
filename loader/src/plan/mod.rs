//! Plans steps: assigns every sample in a global batch to a rank and a microbatch.
//!
//! A plan is a pure function of the index, the cost model and a few settings; planning reads no payload and
//! is independent of the rank. Every rank computes the same plan, and [`StepPlan::digest`] lets ranks check
//! that.

mod builder;
mod compare_strategies;
mod config;
mod context;
mod cost_function;
mod data_parallel;
mod lockstep;
mod media_exchange;
mod media_shares;
mod padded_partition;
mod padding;
mod partition;
mod planned_rows;
mod planner;
mod rows;
mod settings;
mod stage_layers;
mod step_context;
mod step_plan;
mod token_balance;

pub use self::builder::StepPlannerBuilder;
pub use self::compare_strategies::{StrategySummary, compare_strategies, simulate_plan};
pub use self::config::{ContextGroups, PadTo};
pub use self::context::{ContextPlan, ContextSummary, compare_context};
pub use self::cost_function::{CostFault, CostFunction, CostInput};
pub use self::data_parallel::{
    LayoutSummary, RandomBatches, RankBalance, RankSummary, RankTraining, compare_layouts, compare_ranks,
    deal_random_batches,
};
pub use self::lockstep::Synchronization;
pub use self::media_exchange::ExchangedMedium;
pub use self::media_shares::{BlankMedia, SampleMedium};
pub use self::planner::StepPlanner;
pub use self::step_context::{MediumPart, SamplePlace, StepContext};
pub use self::step_plan::StepPlan;
