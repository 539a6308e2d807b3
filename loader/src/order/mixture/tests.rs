use proptest::prelude::*;

use crate::order::mixture::*;
use crate::order::steps::{StepPositions, StepPositionsInput, Tail};

/// Rules over integer weights.
fn rules(weights: &[u64], repeat: &[Option<u64>], stop: Stop) -> MixRules {
    let weights = vec![WeightsFrom { step: 0, weights: weights.to_vec() }];
    MixRules { weights, choose: None, repeat: repeat.to_vec(), stop }
}

fn pace(rules: &MixRules, sizes: &[u64], origin: &Origin, global_batch: u64) -> StepPositions {
    let tail = Tail::Carry;
    StepPositions::new(StepPositionsInput {
        sizes,
        rules,
        origin,
        first_epoch: 0,
        global_batch,
        tail,
        seed: 9,
    })
    .unwrap()
}

fn draws(pace: &StepPositions, positions: std::ops::Range<u64>) -> Vec<(usize, u64)> {
    pace.layout.draws(positions).iter().map(|draw| (draw.dataset, draw.number)).collect()
}

fn sizes_weights_repeats() -> impl Strategy<Value = Vec<(u64, u64, Option<u64>)>> {
    prop::collection::vec((1u64..40, 1u64..9, prop::option::of(1u64..4)), 1..5)
}

proptest! {
    #[test]
    fn each_dataset_is_drawn_in_its_own_order_without_gaps(
        sets in sizes_weights_repeats(), stop in prop::sample::select(vec![Stop::FirstExhausted, Stop::AllExhausted]),
    ) {
        let sizes: Vec<u64> = sets.iter().map(|set| set.0).collect();
        let rules = rules(&sets.iter().map(|set| set.1).collect::<Vec<_>>(), &sets.iter().map(|set| set.2).collect::<Vec<_>>(), stop);
        let pace = pace(&rules, &sizes, &Origin::at_epoch(0, &sizes), 7);
        let end = pace.layout.end.unwrap_or(500);
        let mut counts = vec![0; sizes.len()];
        for (dataset, number) in draws(&pace, 0..end) {
            prop_assert_eq!(number, counts[dataset]);
            counts[dataset] += 1;
        }
        prop_assert_eq!(pace.layout.draws_before(end).unwrap(), counts.clone());
        let limits: Vec<Option<u64>> = sets.iter().map(|set| set.2.map(|epochs| epochs * set.0)).collect();
        let exhausted = counts.iter().zip(&limits).filter(|(count, limit)| Some(**count) == **limit).count();
        prop_assert!(counts.iter().zip(&limits).all(|(count, limit)| limit.is_none_or(|limit| *count <= limit)));
        match (pace.layout.end, stop) {
            (Some(_), Stop::FirstExhausted) => prop_assert!(exhausted == 1),
            (Some(_), Stop::AllExhausted) => prop_assert!(exhausted == sizes.len()),
            (None, Stop::FirstExhausted) => prop_assert!(limits.iter().all(Option::is_none)),
            (None, Stop::AllExhausted) => prop_assert!(limits.iter().any(Option::is_none)),
        }
    }

    #[test]
    fn draws_do_not_depend_on_where_one_begins(sets in sizes_weights_repeats(), cut in 0u64..400, length in 0u64..300) {
        let sizes: Vec<u64> = sets.iter().map(|set| set.0).collect();
        let repeat: Vec<_> = sets.iter().map(|set| set.2).collect();
        let rules = rules(&sets.iter().map(|set| set.1).collect::<Vec<_>>(), &repeat, Stop::AllExhausted);
        let pace = pace(&rules, &sizes, &Origin::at_epoch(0, &sizes), 7);
        let end = (cut + length).min(pace.layout.end.unwrap_or(u64::MAX));
        let cut = cut.min(end);
        prop_assert_eq!(&draws(&pace, 0..end)[cut as usize..], draws(&pace, cut..end));
    }

    #[test]
    fn a_new_origin_goes_on_with_the_same_draws_in_batches_of_another_size(
        sets in sizes_weights_repeats(), step in 0u64..20, other_batch in 1u64..20, is_pattern: bool,
    ) {
        let sizes: Vec<u64> = sets.iter().map(|set| set.0).collect();
        let repeat: Vec<_> = sets.iter().map(|set| set.2).collect();
        let mut rules = rules(&sets.iter().map(|set| set.1).collect::<Vec<_>>(), &repeat, Stop::AllExhausted);
        if is_pattern {
            rules.choose = Some((0..sizes.len() as u32).flat_map(|set| [set, 0]).collect());
        }
        let run = pace(&rules, &sizes, &Origin::at_epoch(0, &sizes), 7);
        let step = step.min(run.len().unwrap_or(u64::MAX));
        let position = run.position(step).unwrap();
        let origin = Origin { step, draws: run.draws_before(step).unwrap(), phase: run.layout.phase_at(position) };
        let other = pace(&rules, &sizes, &origin, other_batch);
        let end = run.layout.end.unwrap_or(position + 300);
        prop_assert_eq!(other.layout.end, run.layout.end.map(|end| end - position));
        prop_assert_eq!(draws(&run, position..end), draws(&other, 0..end - position));
    }
}

#[test]
fn weights_change_at_their_step() {
    let mut rules = rules(&[1, 0], &[None, None], Stop::default());
    rules.weights.push(WeightsFrom { step: 3, weights: vec![0, 1] });
    rules.weights.push(WeightsFrom { step: 5, weights: vec![1, 1] });
    let pace = pace(&rules, &[10, 10], &Origin::at_epoch(0, &[10, 10]), 4);
    let counts = [0, 3, 5, 6].map(|step| pace.draws_before(step).unwrap());
    assert_eq!(counts, [vec![0, 0], vec![12, 0], vec![12, 8], vec![14, 10]]);
}

#[test]
fn a_pattern_goes_on_without_its_exhausted_dataset() {
    let mut rules = rules(&[1, 1, 1], &[None, Some(1), Some(1)], Stop::AllExhausted);
    rules.choose = Some(vec![0, 1, 2]);
    let pace = pace(&rules, &[5, 2, 3], &Origin::at_epoch(0, &[5, 2, 3]), 4);
    let drawn: Vec<usize> = draws(&pace, 0..12).iter().map(|draw| draw.0).collect();
    assert_eq!(drawn, [0, 1, 2, 0, 1, 2, 0, 2, 0, 0, 0, 0]);
    assert_eq!(pace.len(), None);
}

#[test]
fn a_run_that_ends_gives_its_rest_and_says_where_it_ended() {
    let rules = rules(&[1], &[Some(2)], Stop::default());
    let pace = pace(&rules, &[5], &Origin::at_epoch(0, &[5]), 4);
    assert_eq!((pace.len(), pace.positions(2).unwrap()), (Some(3), 8..10));
    let error = pace.positions(3).unwrap_err().to_string();
    assert!(error.contains("has 3 steps"), "{error}");
    assert_eq!(pace.draws_before(3).unwrap(), [10]);
    assert!(pace.draws_before(4).is_err());
}

#[test]
fn weights_that_make_no_sense_are_refused() {
    let message = |weights: &[f64]| checked_weights(weights, 2).unwrap_err().to_string();
    assert!(message(&[0.5]).contains("1 weights for 2 datasets"));
    assert!(message(&[0.5, -1.0]).contains("-1 is not between"));
    assert!(message(&[0.5, f64::NAN]).contains("NaN is not between"));
    assert!(message(&[0.0, 0.0]).contains("all are 0"));
    assert!(message(&[1.0, 0.000_01]).contains("less than the unit"));
    assert_eq!(checked_weights(&[0.7, 0.3], 2).unwrap(), [7_000, 3_000]);
}
