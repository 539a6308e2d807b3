//! Checks rounds, ranks and entire steps without any medium.

use dflop_balancer::Strategy;

use super::corpus::{Corpus, Family, mixed};
use super::job::{Setting, run};

#[test]
fn steps_of_texts_only_and_of_one_image_train_models_that_see() {
    for family in Family::ALL {
        let mut samples = mixed(18);
        // Texts only, then one medium, then a mixture.
        samples[..12].iter_mut().for_each(|sample| sample.media.clear());
        samples[8].media = vec![33];
        let corpus = Corpus::new(family, &samples);
        let whole = run(&corpus, &Setting { microbatches: 1, ..Setting::new(6, 3) });
        let is_encoder =
            |name: &str| name.contains("vision") || name.contains("visual") || name.contains("audio");
        let all: Vec<&String> = whole.gradients[0].keys().filter(|name| is_encoder(name)).collect();
        assert!(!all.is_empty(), "{family:?}");
        for name in all {
            assert!(whole.gradients[0][name].iter().all(|&value| value == 0.0), "{family:?}: {name}");
        }
        for (encoder, llm) in [([1, 1], [1, 1]), ([2, 1], [2, 1]), ([3, 2], [1, 1])] {
            for strategy in [Strategy::SEARCH, Strategy::ROUND_ROBIN] {
                whole.assert_close(&run(&corpus, &Setting { strategy, encoder, llm, ..Setting::new(6, 3) }));
            }
        }
    }
}

#[test]
fn more_microbatches_than_samples_leave_some_empty() {
    let corpus = Corpus::new(Family::InternVl, &mixed(10));
    let whole = run(&corpus, &Setting { microbatches: 1, ..Setting::new(5, 2) });
    for (microbatches, llm) in [(5, [1, 1]), (2, [2, 1])] {
        let cut = Setting { microbatches, encoder: [2, 1], llm, ..Setting::new(5, 2) };
        whole.assert_close(&run(&corpus, &cut));
    }
}
