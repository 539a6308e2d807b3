//! Checks samples that are valid in the index, but cannot be trained on.

use super::corpus::{Corpus, Family, mixed};
use super::job::{Ran, Setting, run};
use dflop_executor::pipeline::Placement;

/// Stages and DP sizes for encoder and LLM.
const LAYOUTS: [[[usize; 2]; 2]; 3] = [[[1, 1], [1, 1]], [[2, 2], [2, 1]], [[3, 1], [1, 1]]];

/// Creates the same samples with a damaged sample, and without it.
fn with_and_without(family: Family, bad: usize) -> [Corpus; 2] {
    let mut samples = mixed(8);
    samples[bad].is_damaged = true;
    let with = Corpus::new(family, &samples);
    samples.remove(bad);
    [with, Corpus::new(family, &samples)]
}

/// Returns the sample that a single-step run skips, and the reason.
#[track_caller]
fn dropped(ran: &Ran) -> (u64, &str) {
    let [step] = ran.steps.as_slice() else { panic!("there are {} steps", ran.steps.len()) };
    let [dropped] = step.skipped.as_slice() else { panic!("dropped are {:?}", step.skipped) };
    (step.samples[dropped.index as usize], &dropped.reason)
}

#[test]
fn a_damaged_image_is_dropped_by_all_ranks_and_the_rest_learned() {
    for family in Family::ALL.into_iter().filter(|family| !family.hears()) {
        for bad in [4, 6] {
            let [with, without] = with_and_without(family, bad);
            let truth = run(&without, &Setting { microbatches: 1, ..Setting::new(7, 1) });
            for [encoder, llm] in LAYOUTS {
                let damaged = run(&with, &Setting { encoder, llm, ..Setting::new(8, 1) });
                let (sample, reason) = dropped(&damaged);
                assert_eq!((sample, reason), (bad as u64, "its images could not be decoded"), "{family:?}");
                truth.assert_close(&damaged);
            }
        }
    }
}

/// With joint placement a rank reads texts and media together, with colocated placement for each module.
#[test]
fn a_damaged_image_is_dropped_where_modules_share_ranks() {
    for family in Family::ALL.into_iter().filter(|family| !family.hears()) {
        let [with, without] = with_and_without(family, 4);
        let truth = run(&without, &Setting { microbatches: 1, ..Setting::new(7, 1) });
        for (placement, [encoder, llm], reason) in [
            (Placement::Joint, [[1, 1], [1, 2]], "its text or media could not be prepared"),
            (Placement::Joint, [[1, 1], [2, 1]], "its text or media could not be prepared"),
            (Placement::Colocated, [[2, 1], [1, 2]], "its images could not be decoded"),
        ] {
            let ran = run(&with, &Setting { placement, encoder, llm, ..Setting::new(8, 1) });
            assert_eq!(dropped(&ran), (4, reason), "{family:?}");
            truth.assert_close(&ran);
        }
    }
}

#[test]
fn the_rank_that_cannot_decode_a_image_names_it() {
    let [corpus, _] = with_and_without(Family::InternVl, 4);
    let ran = run(&corpus, &Setting { encoder: [2, 1], llm: [2, 1], ..Setting::new(8, 1) });
    let skipped: Vec<_> = ran.ranks.iter().flat_map(|rank| &rank.skipped).collect();
    let [skipped] = skipped.as_slice() else { panic!("one rank reads it: {skipped:?}") };
    assert_eq!(skipped.key.as_deref(), Some("sample-004"));
    assert!(skipped.field.as_deref().is_some_and(|field| field.starts_with("0.")), "{skipped:?}");
}

#[test]
fn a_text_that_is_too_long_is_dropped_with_its_images() {
    let mut samples = mixed(8);
    samples[4].words = 150;
    let with = Corpus::new(Family::InternVl, &samples);
    samples.remove(4);
    let without = Corpus::new(Family::InternVl, &samples);
    let truth = run(&without, &Setting { microbatches: 1, ..Setting::new(7, 1) });
    for [encoder, llm] in LAYOUTS {
        let setting = Setting { encoder, llm, tokens_max: Some(200), ..Setting::new(8, 1) };
        let ran = run(&with, &setting);
        assert_eq!(dropped(&ran), (4, "its text could not be prepared"));
        truth.assert_close(&ran);
    }
}

#[test]
fn a_step_of_which_nothing_is_left_learns_nothing_and_the_next_goes_on() {
    let mut samples = mixed(8);
    for sample in &mut samples[..4] {
        (sample.media, sample.is_damaged) = (vec![40], true);
    }
    let corpus = Corpus::new(Family::InternVl, &samples);
    for [encoder, llm] in LAYOUTS {
        let ran = run(&corpus, &Setting { encoder, llm, ..Setting::new(4, 2) });
        assert_eq!((ran.steps[0].skipped.len(), ran.steps[0].tokens, ran.steps[0].target_tokens), (4, 0, 0));
        assert_eq!(ran.steps[0].loss.to_bits(), 0.0_f64.to_bits());
        assert!(ran.gradients[0].values().flatten().all(|&value| value == 0.0));
        assert!(ran.steps[1].skipped.is_empty() && ran.steps[1].loss > 5.0);
    }
}
