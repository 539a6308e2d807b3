//! Checks saved states: a run resumes exactly, on any number of ranks, or the error names the reason.

use dflop_loader::{
    Dataset, LoaderState, Mixture, Shuffle, StepPlanner, StepPlannerBuilder, StepSample, Tail,
};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::{builder, stream_all_ranks};
use proptest::prelude::*;

fn saved(planner: &StepPlanner, step: u64) -> LoaderState {
    LoaderState::from_json(&planner.state(step).unwrap().to_json()).unwrap()
}

fn samples(planner: &StepPlanner, steps: std::ops::Range<u64>) -> Vec<StepSample> {
    steps.flat_map(|step| planner.steps().samples(step).unwrap()).collect()
}

#[test]
fn a_mixed_run_restored_on_three_and_two_ranks_delivers_what_the_uninterrupted_run_does() {
    let (plain, packed) =
        (TempDataset::new(2, 25, Compression::Plain), TempDataset::new(2, 8, Compression::Zstd));
    let settings = |dp_size| {
        let mixture = Mixture::new().dataset(plain.index(), 0.7).dataset(packed.index(), 0.3);
        builder(mixture.weights_from(5, &[0.5, 0.5]), 12, dp_size).microbatches(2)
    };
    let (whole, end) = stream_all_ranks(&settings(2).build().unwrap(), 9);
    let mut batches = Vec::new();
    let mut state: Option<LoaderState> = None;
    for (dp_size, steps) in [(1, 2), (3, 3), (2, 4)] {
        let restored = state.map_or(settings(dp_size), |state| settings(dp_size).restore(state));
        let (part, reached) = stream_all_ranks(&restored.build().unwrap(), steps);
        batches.extend(part);
        state = Some(LoaderState::from_json(&reached.to_json()).unwrap());
    }
    assert_eq!(batches, whole);
    assert_eq!(state.unwrap(), end);
}

#[test]
fn a_state_counts_what_was_given_out_and_not_what_was_read_ahead() {
    let data = TempDataset::new(1, 40, Compression::Plain);
    let planner = builder(data.index(), 4, 1).build().unwrap();
    let loader = dflop_loader::BalancedLoader::builder(planner.clone(), 0).steps_ahead(5).build().unwrap();
    dflop_tests::run(async {
        use futures::StreamExt;
        let mut steps = loader.stream();
        assert_eq!(loader.state().unwrap(), planner.state(0).unwrap());
        steps.next().await.unwrap().unwrap();
        steps.next().await.unwrap().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(loader.state().unwrap(), planner.state(2).unwrap());
    });
    let state = loader.state().unwrap();
    let again = dflop_loader::BalancedLoader::builder(planner, 0).restore(state).build().unwrap();
    assert_eq!(again.state().unwrap().step, 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_cuts_on_any_ranks_give_the_same_sequence_of_global_batches(
        cuts in prop::collection::vec((1u64..6, 1usize..5), 1..5),
        shuffle in prop::sample::select(vec![
            Shuffle::Global, Shuffle::None, Shuffle::Blocks { block_samples: 3, open_blocks: 2 },
        ]),
        repeat in prop::option::of(2u64..4), is_mixed: bool,
        tail in prop::sample::select(vec![Tail::Carry, Tail::Drop, Tail::Short]),
    ) {
        thread_local! {
            static DATA: [TempDataset; 2] = [TempDataset::new(2, 11, Compression::Plain), TempDataset::new(1, 9, Compression::Plain)];
        }
        let [first, second] = DATA.with(|data| [data[0].index(), data[1].index()]);
        let tail = if is_mixed && repeat.is_none() { Tail::Carry } else { tail };
        let settings = |dp_size| {
            let source = |index| Dataset::from(index);
            let mixture = Mixture::new().dataset(source(first.clone()), 0.65);
            let mixture = if is_mixed { mixture.dataset(source(second.clone()), 0.35) } else { mixture };
            let builder = builder(mixture, 8, dp_size).shuffle(shuffle).tail(tail);
            repeat.map_or(builder.clone(), |epochs| builder.epochs(epochs))
        };
        let whole = settings(1).build().unwrap();
        let until = cuts.iter().map(|cut| cut.0).sum::<u64>().min(whole.steps().len().unwrap_or(u64::MAX));
        let (mut step, mut batches) = (0, Vec::new());
        for (steps, dp_size) in cuts {
            let planner = settings(dp_size).restore(saved(&whole, step)).build().unwrap();
            prop_assert_eq!(planner.first_step(), step);
            let next = (step + steps).min(until);
            batches.extend(samples(&planner, step..next));
            prop_assert_eq!(saved(&planner, next), saved(&whole, next));
            step = next;
        }
        prop_assert_eq!(batches, samples(&whole, 0..until));
    }
}

#[test]
fn another_global_batch_goes_on_with_the_same_samples_under_carry_only() {
    let data = TempDataset::new(2, 13, Compression::Plain);
    let settings = |global_batch, tail| builder(data.index(), global_batch, 1).tail(tail);
    let whole = settings(6, Tail::Carry).build().unwrap();
    let other = settings(10, Tail::Carry).restore(saved(&whole, 5)).build().unwrap();
    assert_eq!(samples(&other, 5..8), samples(&whole, 5..10));
    // Resume from there, with the first batch again.
    let third = settings(6, Tail::Carry).restore(saved(&other, 8)).build().unwrap();
    assert_eq!(samples(&third, 8..10), samples(&whole, 10..12));
    let before = other.plan(4).unwrap_err().to_string();
    assert!(before.contains("before step 5"), "{before}");
    let state = saved(&settings(6, Tail::Short).build().unwrap(), 5);
    let refused = settings(10, Tail::Short).restore(state).build().unwrap_err().to_string();
    assert!(refused.contains("global batch of 6"), "{refused}");
}

#[test]
fn other_settings_and_edited_states_are_refused() {
    let data = TempDataset::new(1, 13, Compression::Plain);
    let settings = || builder(data.index(), 4, 1);
    let state = saved(&settings().build().unwrap(), 5);
    let message =
        |builder: StepPlannerBuilder| builder.restore(state.clone()).build().unwrap_err().to_string();
    assert!(message(settings().seed(8)).contains("seed 7, and this run has 8"));
    assert!(message(settings().shuffle(Shuffle::None)).contains("a shuffle of the whole epoch"));
    assert!(message(settings().tail(Tail::Drop)).contains("tail `carry`"));
    // Regression: a different first epoch was mistaken for more remaining epochs, so that a sum over samples
    // overflowed.
    for (saved, edited) in [
        ("\"offset\":7", "\"offset\":8"),
        ("\"first_epoch\":0", "\"first_epoch\":1"),
        ("\"samples\":13", "\"samples\":18446744073709551615"),
    ] {
        assert!(state.to_json().contains(saved), "{saved}");
        let edited = LoaderState::from_json(&state.to_json().replace(saved, edited)).unwrap();
        let refused = settings().restore(edited).build().unwrap_err().to_string();
        assert!(refused.contains("it was edited"), "{refused}");
    }
    let newer =
        LoaderState::from_json(&state.to_json().replace("\"version\":1", "\"version\":9")).unwrap_err();
    assert!(newer.to_string().contains("version 9"), "{newer}");
    assert!(LoaderState::from_json("{}").is_err());
}

#[test]
fn rules_may_change_behind_a_state_but_not_before_it() {
    let (a, b) = (TempDataset::new(1, 12, Compression::Plain), TempDataset::new(1, 7, Compression::Plain));
    let mixture = |first: f64| Mixture::new().dataset(a.index(), first).dataset(b.index(), 0.5);
    let state = saved(&builder(mixture(0.5), 4, 1).build().unwrap(), 5);
    let restore = |mixture: Mixture| builder(mixture, 4, 1).restore(state.clone()).build();
    assert!(restore(mixture(0.9)).unwrap_err().to_string().contains("rules of this mixture"));
    assert!(restore(mixture(0.5).weights_from(4, &[1.0, 0.0])).is_err());
    let later = restore(mixture(0.5).weights_from(6, &[1.0, 0.0])).unwrap();
    assert!(later.plan(6).unwrap().samples.iter().all(|sample| sample.dataset == 0));
}

type Change<'a> = Box<dyn Fn(&TempDataset) + 'a>;

/// Restores a state after `change` to the shards in the second of two datasets.
fn restored_after(change: impl Fn(&TempDataset)) -> (StepPlanner, String, StepPlanner) {
    let (kept, changed) =
        (TempDataset::new(1, 10, Compression::Plain), TempDataset::new(3, 6, Compression::Plain));
    let settings = || builder(Mixture::new().dataset(kept.index(), 0.5).dataset(changed.index(), 0.5), 6, 1);
    let before = settings().build().unwrap();
    let state = saved(&before, 4);
    change(&changed);
    let message = settings().restore(state.clone()).build().unwrap_err().to_string();
    let accepted = settings().restore(state).accept_changed_data().build().unwrap();
    (before, message, accepted)
}

#[test]
fn a_changed_shard_is_named_and_accepted_only_on_request() {
    let rename =
        |data: &TempDataset, to: &str| std::fs::rename(data.shard(1), data.directory().join(to)).unwrap();
    let copy = |data: &TempDataset, from: usize, to: usize| {
        std::fs::copy(data.shard(from), data.shard(to)).map(drop).unwrap();
    };
    let changes: [(Change<'_>, &str); 4] = [
        (Box::new(|data| copy(data, 0, 1)), "shard `shard-001.tar` was replaced"),
        (Box::new(|data| copy(data, 0, 3)), "shard `shard-003.tar` was added"),
        (Box::new(|data| std::fs::remove_file(data.shard(1)).unwrap()), "shard `shard-001.tar` was removed"),
        (
            Box::new(|data| rename(data, "shard-001b.tar")),
            "shard `shard-001.tar` was renamed to `shard-001b.tar`",
        ),
    ];
    for (change, expected) in changes {
        let (before, message, accepted) = restored_after(change);
        assert!(message.contains("dataset 1") && message.contains(expected), "{message}");
        // 12 draws from each: 1 epoch and 2 samples out of 10, and 12 out of 18 in the second dataset.
        let of = |planner: &StepPlanner, dataset| -> Vec<StepSample> {
            samples(planner, 4..12).into_iter().filter(|sample| sample.dataset == dataset).collect()
        };
        assert_eq!(of(&before, 0), of(&accepted, 0), "{expected}");
        let changed = of(&accepted, 1);
        let epoch = accepted.datasets()[1].len() as usize;
        let mut first: Vec<u64> = changed[..epoch].iter().map(|sample| sample.sample).collect();
        first.sort_unstable();
        assert_eq!(first, (0..epoch as u64).collect::<Vec<_>>(), "{expected}");
        assert!(changed[..epoch].iter().all(|sample| sample.epoch == 1), "{expected}");
        // The run is saved and restored like any other.
        let again = samples(&accepted, 6..9);
        assert!(accepted.plan(3).unwrap_err().to_string().contains("before step 4"));
        assert_eq!(saved(&accepted, 6).step, 6);
        assert_eq!(again.len(), 18);
    }
}

#[test]
fn a_state_stays_small() {
    let data = TempDataset::new(40, 1, Compression::Plain);
    let state = builder(data.index(), 4, 1).build().unwrap().state(1_000_000).unwrap().to_json();
    assert!(state.len() < 40 * 17 + 700, "{} bytes: {state}", state.len());
}

#[test]
fn datasets_with_one_index_list_its_shards_once() {
    let data = TempDataset::new(3, 8, Compression::Plain);
    let parity = |numbers: &[u64]| Ok(numbers.iter().map(|number| (number % 2).to_string()).collect());
    let settings = || builder(Mixture::by_class(data.index(), parity, None).unwrap(), 6, 1);
    let planner = settings().build().unwrap();
    let state = saved(&planner, 3);
    assert_eq!(state.to_json().matches("\"digests\"").count(), 1);
    let again = settings().restore(state.clone()).build().unwrap();
    assert_eq!(samples(&again, 3..9), samples(&planner, 3..9));
    std::fs::copy(data.shard(0), data.shard(1)).unwrap();
    let refused = settings().restore(state).build().unwrap_err().to_string();
    assert!(refused.contains("shard `shard-001.tar` was replaced"), "{refused}");
}
