//! Checks that steps are planned for the schedule that runs them.

use dflop_balancer::schedule::ScheduleKind;
use dflop_loader::{Error, StepPlannerBuilder, Synchronization, simulate_plan};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

/// Plans 24 samples with images, audio and text over 2 ranks with 6 microbatches each, on four stages.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    loaders::builder(data.index(), 24, 2).microbatches(6).stages(vec![1, 1, 2])
}

#[test]
fn the_makespan_of_a_step_is_that_of_its_schedule() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    for name in ["gpipe", "1f1b", "1f1b-ahead:2", "interleaved:2"] {
        let schedule: ScheduleKind = name.parse().unwrap();
        let planner = builder(&data).schedule(schedule).build().unwrap();
        let plan = planner.plan(0).unwrap();
        let ranks = simulate_plan(&planner, &plan, schedule).unwrap();
        assert_eq!(ranks.iter().map(|rank| rank.makespan_ns).max(), Some(plan.makespan_ns), "{name}");
        assert!(plan.bound.ns <= plan.makespan_ns, "{name}");
        let plain = builder(&data).build().unwrap().schedule(schedule).unwrap().plan(0).unwrap();
        assert_eq!(plain.digest, plan.digest, "{name}");
    }
}

#[test]
fn schedules_that_do_not_fit_the_stages_are_refused() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    for name in ["zb-h1", "interleaved:3"] {
        let refused = builder(&data).schedule(name.parse().unwrap()).build();
        assert!(matches!(refused, Err(Error::Config { setting: "schedule", .. })), "{name}: {refused:?}");
    }
    let one_device =
        loaders::builder(data.index(), 24, 2).microbatches(6).one_device(Synchronization::PerStep);
    let refused = one_device.schedule(ScheduleKind::GPipe).build().unwrap_err().to_string();
    assert!(refused.contains("`schedule`") && refused.contains("needs `stages`"), "{refused}");
    let shared = builder(&data).module_dp_sizes(vec![1, 2, 2]).schedule("interleaved:2".parse().unwrap());
    assert!(matches!(shared.build(), Err(Error::Config { setting: "schedule", .. })));
}
