//! One rank of a job: the balancer's action lists run over stages and communicators.
//!
//! A [`Job`] says how a model is spread over ranks, a [`StepPlan`] what microbatches a step has and who encodes which medium;
//! both are the same on all ranks. [`StepWork`] adds what this rank's own module needs. [`Pipeline::step`] runs the rank's
//! list of [`Action`](dflop_balancer::schedule::Action)s, the one that was simulated.
//!
//! **Guarantees.** No shape is ever sent: both ends of a message know it from the plan, and a message without rows is not
//! sent at all. Sums have an order that the layout fixes: two runs give the same bits, over any transport. So does any number
//! of stages, with one or two replicas; with more, the order in which replicas are added up depends on an element's place in
//! its bucket, hence on what else the stage holds. A rank or microbatch without media or tokens computes nothing
//! there, and changes no gradient. Whatever fails on one rank ends the job on all, with the action that failed.
//!
//! # Examples
//! ```
//! use std::sync::Arc;
//!
//! use dflop_balancer::schedule::ScheduleKind;
//! use dflop_executor::Result;
//! use dflop_executor::comm::{Comm, Settings, threads};
//! use dflop_executor::device::Cpu;
//! use dflop_executor::model::llm::TextBatch;
//! use dflop_executor::model::model_config::{FrozenModules, ModelConfig, ModuleKind};
//! use dflop_executor::pipeline::{Job, MicrobatchPlan, ModuleLayout, Pipeline, StepPlan, StepWork};
//! use dflop_executor::stage::Activations;
//! use dflop_executor::weights::Seed;
//!
//! // three layers on two ranks, two microbatches of four tokens
//! let model = ModelConfig::from_config(&serde_json::json!({"model_type": "qwen2", "hidden_size": 16,
//!     "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
//!     "vocab_size": 48}))?;
//! let layout = ModuleLayout::new(ModuleKind::Llm, vec![0..2, 2..3]);
//! let job = Job::new(model, FrozenModules::default(), vec![layout], ScheduleKind::OneForwardOneBackward)?;
//! let job = Arc::new(job);
//!
//! let loss_of_rank = |comm: threads::ThreadComm| -> Result<f64> {
//!     let (device, model) = (Cpu::new(1)?, job.model());
//!     let place = job.place(comm.rank())?;
//!     let stage = |range| model.stage(&device, range, FrozenModules::default(), Activations::Stored, &Seed(1));
//!     let stages = job.ranges(&place).iter().map(stage).collect::<Result<_>>()?;
//!     let mut pipeline = Pipeline::new(Box::new(comm), Arc::clone(&job), stages)?;
//!
//!     let microbatches = vec![MicrobatchPlan { tokens: 4, media: Vec::new() }; 2];
//!     let plan = Arc::new(StepPlan::new(&job, 0, 6, microbatches)?);
//!     let batch = TextBatch {
//!         input_ids: &[5, 6, 7, 8],
//!         labels: &[5, 6, 7, 8],
//!         positions: &[0, 1, 2, 3],
//!         cu_seqlens: &[0, 4],
//!         media_places: &[],
//!         loss_scale: plan.loss_scale(),
//!     };
//!     let own = plan.microbatches_of(&job, place.module, place.replica);
//!     let context = |own| Ok((own, Arc::new(model.llm.context(&device, &batch)?)));
//!     let contexts = own.map(context).collect::<Result<_>>()?;
//!     Ok(pipeline.step(&StepWork { plan, contexts })?.loss)
//! };
//! let losses = std::thread::scope(|scope| {
//!     let ranks = threads::world(2, Settings::default())?;
//!     let ranks: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(|| loss_of_rank(comm))).collect();
//!     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<f64>>>()
//! })?;
//! assert!(losses[0] > 3.0 && losses[0] == losses[1]);
//! # Ok::<(), dflop_executor::Error>(())
//! ```

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
