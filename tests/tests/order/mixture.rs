//! Checks dataset mixtures end to end.

use std::collections::BTreeMap;

use dflop_loader::{Dataset, Mixture, Stop, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::{DeliveredId, builder, planner, stream_all_ranks};

/// Returns the number of deliveries per dataset sample, by epoch and key.
fn visits(batches: &[Vec<DeliveredId>], data: &TempDataset) -> BTreeMap<(u64, String), usize> {
    let mut visits = BTreeMap::new();
    let of_data = |(shard, _, _): &&DeliveredId| shard.starts_with(&data.pattern());
    for (_, key, epoch) in batches.iter().flatten().filter(of_data) {
        *visits.entry((*epoch, key.clone())).or_default() += 1;
    }
    visits
}

#[test]
fn a_mixture_meets_its_weights_and_each_epoch_visits_every_sample_once() {
    let (plain, packed) =
        (TempDataset::new(2, 21, Compression::Plain), TempDataset::new(2, 9, Compression::Zstd));
    let mixture = Mixture::new().dataset(plain.index(), 0.7).dataset(packed.index(), 0.3);
    let planner = builder(mixture, 20, 2).microbatches(2).build().unwrap();
    // Two epochs of each: 84 draws from the first dataset in 120, 36 from the second.
    let (batches, _) = stream_all_ranks(&planner, 6);
    for batch in &batches {
        let of_plain = batch.iter().filter(|(shard, _, _)| shard.starts_with(&plain.pattern())).count();
        assert_eq!((of_plain, batch.len()), (14, 20));
    }
    for data in [&plain, &packed] {
        let visits = visits(&batches, data);
        assert!(visits.values().all(|&count| count == 1));
        for epoch in 0..2 {
            let keys: Vec<&String> =
                visits.keys().filter(|(at, _)| *at == epoch).map(|(_, key)| key).collect();
            assert_eq!(keys, data.keys.iter().collect::<Vec<_>>(), "epoch {epoch}");
        }
    }
}

#[test]
fn one_dataset_of_any_weight_is_planned_as_without_a_mixture() {
    let data = TempDataset::new(2, 20, Compression::Plain);
    let alone = planner(&data.index(), 12, 2, 2, Tail::Carry);
    let mixture = Mixture::new().dataset(data.index(), 0.3);
    let mixed = builder(mixture, 12, 2).microbatches(2).work(2_000).build().unwrap();
    for step in [0, 1, 3, 7, 1_000] {
        assert_eq!(alone.plan(step).unwrap().digest, mixed.plan(step).unwrap().digest, "step {step}");
    }
}

#[test]
fn the_digest_tells_datasets_apart_and_twins_are_shuffled_differently() {
    let data = TempDataset::new(1, 20, Compression::Plain);
    let mixture = |first: f64, second: f64| {
        let mixture = Mixture::new().dataset(data.index(), first).dataset(data.index(), second);
        builder(mixture, 10, 1).build().unwrap()
    };
    let (first, second) = (mixture(1.0, 0.0).plan(0).unwrap(), mixture(0.0, 1.0).plan(0).unwrap());
    let numbers = |plan: &dflop_loader::StepPlan| -> Vec<u64> {
        plan.samples.iter().map(|sample| sample.sample).collect()
    };
    assert_ne!(numbers(&first), numbers(&second));
    assert_ne!(first.digest, second.digest);
    assert!(second.samples.iter().all(|sample| sample.dataset == 1));
}

#[test]
fn a_finite_mixture_ends_as_its_rule_says_and_delivers_its_rest() {
    let (long, short) =
        (TempDataset::new(1, 31, Compression::Plain), TempDataset::new(1, 10, Compression::Plain));
    let run = |stop| {
        let short = Dataset::from(short.index()).repeat(2);
        let mixture = Mixture::new().dataset(Dataset::from(long.index()).repeat(1), 1.0).dataset(short, 1.0);
        builder(mixture.stop(stop), 8, 2).build().unwrap()
    };
    let (batches, state) = stream_all_ranks(&run(Stop::AllExhausted), usize::MAX);
    assert_eq!((batches.len(), batches[6].len(), state.step), (7, 3, 7));
    assert_eq!((visits(&batches, &long).len(), visits(&batches, &short).len()), (31, 20));
    let first = run(Stop::FirstExhausted);
    let (batches, _) = stream_all_ranks(&first, usize::MAX);
    assert_eq!(visits(&batches, &short).len(), 20);
    assert!((19..=20).contains(&visits(&batches, &long).len()));
    let steps = first.steps().len().unwrap();
    let error = first.plan(steps).unwrap_err().to_string();
    assert!(error.contains(&format!("the run has {steps} steps")), "{error}");
}

#[test]
fn a_pattern_and_later_weights_are_followed() {
    let (a, b) = (TempDataset::new(1, 12, Compression::Plain), TempDataset::new(1, 7, Compression::Plain));
    let mixture = || Mixture::new().dataset(a.index(), 1.0).dataset(b.index(), 1.0);
    let sources = |mixture: Mixture| -> Vec<Vec<usize>> {
        let planner = builder(mixture, 6, 1).build().unwrap();
        (0..4)
            .map(|step| planner.plan(step).unwrap().samples.iter().map(|sample| sample.dataset).collect())
            .collect()
    };
    assert!(sources(mixture().choose(vec![0, 0, 1])).iter().all(|step| *step == [0, 0, 1, 0, 0, 1]));
    let changed = sources(mixture().weights_from(2, &[0.0, 1.0]));
    assert!(changed[..2].iter().all(|step| step.iter().sum::<usize>() == 3));
    assert!(changed[2..].iter().all(|step| step.iter().sum::<usize>() == 6));
}

#[test]
fn mixtures_that_make_no_sense_are_refused() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let two = || Mixture::new().dataset(data.index(), 0.5).dataset(data.index(), 0.5);
    let message = |mixture: Mixture, tail| builder(mixture, 4, 1).tail(tail).build().unwrap_err().to_string();
    assert!(message(two(), Tail::Short).contains("no end"));
    assert!(message(two().choose(vec![0, 2]), Tail::Carry).contains("dataset 2 of 2"));
    assert!(message(two().weights_from(3, &[1.0]), Tail::Carry).contains("1 weights for 2"));
    assert!(message(Mixture::new(), Tail::Carry).contains("0 datasets"));
    let never = Dataset::from(data.index()).repeat(0);
    assert!(message(never.into(), Tail::Carry).contains("no epoch"));
}
