//! Checks costs from user code: plans follow them, equally on all ranks, and faults end the stream by name.

use std::sync::Arc;

use dflop_costmodel::correction::{CorrectionTable, FACTOR_ONE};
use dflop_costmodel::{Module, ModuleTimes};
use dflop_loader::error::{BoxError, UserCodeError};
use dflop_loader::{BalancedLoader, CostFault, CostFunction, CostInput, Error, StepPlan, StepPlanner};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::builder;
use dflop_tests::run;
use futures::StreamExt;

/// Test cost function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Costs {
    /// One sample costs as much as a thousand other samples.
    Dominated,
    /// Model predictions.
    Same,
    TooFewRows,
    TooFewModules,
    Huge,
    Fails,
    Panics,
}

const HEAVY: &str = "sample-00009";

impl CostFunction for Costs {
    fn module_ns(&self, modules: &[Module], samples: &[CostInput<'_>]) -> Result<Vec<ModuleTimes>, BoxError> {
        let times = |sample: &CostInput<'_>| {
            assert_eq!(sample.predicted.module_ns.as_slice().len(), modules.len());
            let ns = match self {
                Self::Dominated if sample.key == HEAVY => 1_000_000_000,
                Self::Dominated | Self::TooFewRows | Self::TooFewModules => 1_000_000,
                Self::Huge => u64::MAX / 4,
                _ => return sample.predicted.module_ns,
            };
            let modules = modules.len() - usize::from(*self == Self::TooFewModules);
            ModuleTimes::new(&vec![ns; modules]).unwrap()
        };
        let samples = &samples[usize::from(*self == Self::TooFewRows)..];
        match self {
            Self::Fails => Err("no table for this device".into()),
            Self::Panics => panic!("a bug"),
            _ => Ok(samples.iter().map(times).collect()),
        }
    }
}

/// Plans 16 samples over 2 ranks with 2 microbatches each.
fn planner(data: &TempDataset, costs: Option<Costs>) -> StepPlanner {
    let builder = builder(data.index(), 16, 2).microbatches(2);
    let builder = match costs {
        Some(costs) => builder.cost_function(Arc::new(costs)),
        None => builder,
    };
    builder.build().unwrap()
}

fn heavy_microbatch(planner: &StepPlanner, plan: &StepPlan) -> Vec<String> {
    let keys = |places: &Vec<u32>| -> Vec<String> {
        places.iter().map(|&place| planner.row(plan.samples[place as usize]).key().to_owned()).collect()
    };
    let mut microbatches = plan.ranks.iter().flatten().map(keys);
    microbatches.find(|keys| keys.iter().any(|key| key == HEAVY)).unwrap()
}

#[test]
fn plans_follow_the_function_on_all_ranks_alike() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let (first, second) = (planner(&data, Some(Costs::Dominated)), planner(&data, Some(Costs::Dominated)));
    let (plan, model) = (first.plan(0).unwrap(), planner(&data, None).plan(0).unwrap());
    assert_eq!(heavy_microbatch(&first, &plan), [HEAVY], "the heavy sample is alone");
    assert_eq!(plan.digest, second.plan(0).unwrap().digest);
    assert_ne!(plan.digest, model.digest);
    assert!(plan.makespan_ns >= 1_000_000_000);
    for (said, predicted) in plan.costs.iter().zip(&model.costs) {
        assert_eq!((said.tokens, said.target_tokens), (predicted.tokens, predicted.target_tokens));
        assert!(said.module_ns.as_slice().iter().all(|&ns| ns == 1_000_000 || ns == 1_000_000_000));
    }
    let same = planner(&data, Some(Costs::Same)).plan(0).unwrap();
    assert_eq!(
        (same.digest, same.costs),
        (model.digest, model.costs),
        "the model's times give the model's plan"
    );
}

#[test]
fn microbatches_are_weighed_by_the_function() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let planner = planner(&data, Some(Costs::Dominated));
    let mut heaviest = 0.0f64;
    for dp_rank in 0..2 {
        let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(1).build().unwrap();
        let steps: Vec<_> = run(loader.stream().collect());
        for microbatch in &steps[0].as_ref().unwrap().microbatches {
            heaviest = heaviest.max(microbatch.cost_seconds());
        }
    }
    assert!((heaviest - 1.0).abs() < 1e-9, "{heaviest}");
}

#[test]
fn a_function_that_fails_ends_the_stream_and_names_the_step() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let error = |costs| {
        let loader = BalancedLoader::builder(planner(&data, Some(costs)), 1).from_step(3).build().unwrap();
        let mut items: Vec<_> = run(loader.stream().collect());
        assert_eq!(items.len(), 1);
        match items.pop().unwrap().unwrap_err() {
            Error::UserCode(UserCodeError::CostFunction { step: 3, source }) => source,
            other => panic!("{other}"),
        }
    };
    let fault = |costs| *error(costs).downcast::<CostFault>().unwrap();
    assert_eq!(error(Costs::Fails).to_string(), "no table for this device");
    assert_eq!(fault(Costs::Panics), CostFault::Panicked);
    assert_eq!(fault(Costs::TooFewRows), CostFault::Rows { expected: 16, given: 15 });
    assert!(matches!(fault(Costs::TooFewModules), CostFault::Modules { expected: 3, given: 2, .. }));
    assert!(matches!(fault(Costs::Huge), CostFault::Overflow { .. }));
}

#[test]
fn corrections_of_the_model_are_refused() {
    let data = TempDataset::new(1, 16, Compression::Plain);
    let table = CorrectionTable::new(1, 5, [(Module::Llm, 1000, 2 * FACTOR_ONE)]).unwrap();
    let error = planner(&data, Some(Costs::Same)).correct(table.clone()).unwrap_err().to_string();
    assert!(error.contains("cost function"), "{error}");
    planner(&data, None).correct(table).unwrap();
}
