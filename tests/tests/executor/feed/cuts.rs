//! Compares runs over the same global batches under different splits.

use dflop_balancer::Strategy;

use super::corpus::{Corpus, Family, mixed};
use super::job::{Setting, run};

#[test]
fn balanced_and_data_blind_steps_have_the_same_losses_and_gradients() {
    for family in Family::ALL {
        let corpus = Corpus::new(family, &mixed(24));
        let whole = run(&corpus, &Setting { microbatches: 1, ..Setting::new(8, 3) });
        for strategy in [Strategy::SEARCH, Strategy::ROUND_ROBIN] {
            let cut = Setting { strategy, encoder: [2, 1], llm: [2, 1], ..Setting::new(8, 3) };
            whole.assert_close(&run(&corpus, &cut));
        }
        assert!(whole.steps[0].loss > 5.0, "{family:?}: a new model knows nothing");
        assert!(whole.gradients[0].values().any(|values| values.iter().any(|&value| value != 0.0)));
    }
}

#[test]
fn encoders_and_llm_of_any_dp_sizes_and_stages_agree() {
    let corpus = Corpus::new(Family::InternVl, &mixed(24));
    let setting = Setting { microbatches: 4, ..Setting::new(12, 2) };
    let whole = run(&corpus, &setting);
    for (encoder, llm) in [
        ([1, 1], [2, 1]),
        ([2, 1], [1, 1]),
        ([3, 1], [1, 1]),
        ([2, 2], [2, 1]),
        ([3, 1], [2, 1]),
        ([1, 2], [1, 1]),
        ([3, 2], [2, 1]),
    ] {
        let microbatches = 4 / llm[0];
        whole.assert_close(&run(&corpus, &Setting { microbatches, encoder, llm, ..setting.clone() }));
    }
}

#[test]
fn the_balanced_cut_is_another_than_the_data_blind_one() {
    let corpus = Corpus::new(Family::InternVl, &mixed(24));
    let setting = Setting { llm: [2, 1], ..Setting::new(12, 2) };
    let balanced = run(&corpus, &setting);
    let blind = run(&corpus, &Setting { strategy: Strategy::ROUND_ROBIN, ..setting });
    for (this, that) in balanced.steps.iter().zip(&blind.steps) {
        assert_eq!(this.samples, that.samples);
        assert_ne!(this.ranks, that.ranks);
    }
}

#[test]
fn the_same_run_has_the_same_bits() {
    for family in [Family::Qwen25Vl, Family::Qwen2Audio] {
        let corpus = Corpus::new(family, &mixed(16));
        let setting = Setting { encoder: [3, 1], llm: [2, 1], ..Setting::new(8, 2) };
        let (first, second) = (run(&corpus, &setting), run(&corpus, &setting));
        assert!(first.steps == second.steps && first.gradients == second.gradients);
    }
}
