//! One rank of a job: the balancer's action lists run over stages and communicators.
//!
//! A [`Job`] says how a model is spread over ranks, a [`StepPlan`] what microbatches a step has and who encodes which medium;
//! both are the same on all ranks. [`StepWork`] adds what this rank's own module needs. [`Pipeline::step`] runs the rank's
//! list of [`Action`](dflop_balancer::schedule::Action)s, the one that was simulated.
//!
//! **Guarantees.** No shape is ever sent: both ends of a message know it from the plan, and a message without rows is not
//! sent at all. Sums have an order that the layout fixes: two runs give the same bits, and so does any number of stages.
//! A rank or microbatch without media or tokens computes nothing there, and changes no gradient. Whatever fails on one
//! rank ends the job on all, with the action that failed.

mod assign;
mod edge;
mod exchange;
mod groups;
mod job;
mod plan;
mod rank;
mod ranks;
mod reduce;
mod route;
mod run;
mod timeline;
mod topology;
mod work;

pub use assign::assign;
pub use job::{Job, JobStage, ModuleLayout};
pub(crate) use plan::name as module_name;
pub use plan::{MediumPlan, MicrobatchPlan, StepPlan};
pub use rank::{Pipeline, StepOutcome};
pub use ranks::Place;
pub use route::{End, RoutePlan, RouteRow};
pub use timeline::Timed;
pub(crate) use topology::simulate;
pub use work::StepWork;
