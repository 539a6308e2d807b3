//! Checks the balanced loader steps end to end.

use std::collections::BTreeSet;

use dflop_loader::decode::Decode;
use dflop_loader::error::Skipped;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::Index;
use dflop_loader::media::Media;
use dflop_loader::shard::FieldSelection;
use dflop_loader::{BalancedLoader, Step, StepPlanner, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

fn planned_steps(planner: &StepPlanner, dp_rank: usize, steps: u64) -> Vec<Step> {
    let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(steps).build().unwrap();
    run(loader.stream().try_collect()).unwrap()
}

fn keys(step: &Step) -> impl Iterator<Item = &str> {
    step.microbatches.iter().flat_map(|microbatch| &microbatch.samples).map(|sample| sample.key.as_str())
}

#[test]
fn the_ranks_together_deliver_every_sample_of_an_epoch_once_decoded() {
    for stored in [Compression::Plain, Compression::Gzip] {
        let data = TempDataset::new(2, 24, stored);
        let planner = planner(&data.index(), 16, 2, 2, Tail::Carry);
        let mut seen = BTreeSet::new();
        for dp_rank in 0..2 {
            for step in planned_steps(&planner, dp_rank, 3) {
                assert!(keys(&step).all(|key| seen.insert(key.to_owned())));
                let samples = step.microbatches.iter().flat_map(|microbatch| &microbatch.samples);
                let is_decoded = |media: &Media| !matches!(media, Media::Opaque(_));
                assert!(samples.flat_map(|sample| &sample.fields).all(|field| is_decoded(&field.media)));
            }
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), data.keys, "{stored:?}");
    }
}

#[test]
fn loss_scales_of_all_ranks_add_up_to_the_token_true_mean() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let dp_size = 3;
    let planner = planner(&data.index(), 24, dp_size, 2, Tail::Carry);
    let (mut weight, mut tokens, mut target_tokens) = (0.0, 0, 0);
    for dp_rank in 0..dp_size {
        let step = &planned_steps(&planner, dp_rank, 1)[0];
        target_tokens = step.target_tokens;
        for microbatch in &step.microbatches {
            tokens += microbatch.target_tokens;
            weight += microbatch.loss_scale / dp_size as f64;
            let scaled = microbatch.loss_scale_sum * microbatch.target_tokens as f64;
            assert!((scaled - microbatch.loss_scale).abs() < 1e-12);
        }
    }
    assert_eq!(tokens, target_tokens);
    assert!((weight - 1.0).abs() < 1e-12, "{weight}");
}

#[test]
fn a_run_from_a_later_step_is_the_tail_of_the_full_run() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let planner = planner(&data.index(), 8, 2, 2, Tail::Carry);
    let all = planned_steps(&planner, 1, 6);
    let late = BalancedLoader::builder(planner, 1).from_step(4).steps(2).workers(1).build().unwrap();
    let late: Vec<Step> = run(late.stream().try_collect()).unwrap();
    for (expected, step) in all[4..].iter().zip(&late) {
        assert_eq!((expected.step, expected.plan.digest), (step.step, step.plan.digest));
        assert!(keys(expected).eq(keys(step)));
    }
}

#[test]
fn only_the_wanted_fields_are_read() {
    let data = TempDataset::new(1, 12, Compression::Plain);
    let planner = planner(&data.index(), 12, 1, 1, Tail::Carry);
    let loader = BalancedLoader::builder(planner, 0)
        .fields(FieldSelection::new(["txt"]).unwrap())
        .steps(1)
        .build()
        .unwrap();
    let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
    let samples = &steps[0].microbatches[0].samples;
    assert_eq!(samples.len(), 12);
    for sample in samples {
        let extensions: Vec<_> = sample.fields.iter().map(|field| &*field.extension).collect();
        assert_eq!(extensions, ["txt"]);
    }
}

#[test]
fn a_sample_that_fails_in_its_decoder_keeps_its_slot_and_is_accounted_for() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let broken = data.break_images(1).remove(0);
    let planner = planner(&data.index(), 16, 2, 2, Tail::Carry);
    let (mut seen, mut skipped): (BTreeSet<String>, Vec<Skipped>) = Default::default();
    for dp_rank in 0..2 {
        let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(2).build().unwrap();
        let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
        for step in &steps {
            assert!(keys(step).all(|key| seen.insert(key.to_owned())));
            let planned: u64 = step.plan.costs.iter().map(|cost| u64::from(cost.target_tokens)).sum();
            assert_eq!(step.target_tokens, planned);
        }
        skipped.extend(loader.skipped());
    }
    assert_eq!((seen.len(), skipped.len()), (31, 1));
    assert_eq!((skipped[0].key.as_deref(), skipped[0].field.as_deref()), (Some(&*broken), Some("jpg")));
}

#[test]
fn an_error_budget_of_nothing_ends_the_stream_with_the_bad_sample_named() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let broken = data.break_images(1).remove(0);
    let planner = planner(&data.index(), 16, 1, 2, Tail::Carry);
    let budget = ErrorBudget::new(0.0).unwrap();
    let loader = BalancedLoader::builder(planner, 0).steps(2).error_budget(budget).build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    let error = items.last().unwrap().as_ref().unwrap_err().to_string();
    assert!(error.contains(&broken) && error.contains("1 of 32"), "{error}");
}

#[test]
fn a_tiny_byte_budget_only_slows_down() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let planner = planner(&data.index(), 16, 1, 2, Tail::Carry);
    let loader = BalancedLoader::builder(planner, 0).steps(3).buffered_bytes_max(1).decode(Decode::Raw);
    let steps: Vec<Step> = run(loader.build().unwrap().stream().try_collect()).unwrap();
    assert_eq!(steps.iter().flat_map(keys).count(), 48);
}

#[test]
fn a_dropped_stream_ends_its_threads() {
    let data = TempDataset::new(2, 24, Compression::Plain);
    let planner = planner(&data.index(), 8, 1, 2, Tail::Carry);
    run(async {
        let loader = BalancedLoader::builder(planner, 0).build().unwrap();
        let mut steps = loader.stream();
        steps.next().await.unwrap().unwrap();
        drop(steps);
    });
    // The runtime above joins all blocking threads when it is dropped: a planner that did not stop would hang
    // here.
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let planner = planner(&data.index(), 8, 2, 2, Tail::Carry);
    let message = |result: dflop_loader::Result<BalancedLoader>| result.unwrap_err().to_string();
    assert!(message(BalancedLoader::builder(planner.clone(), 2).build()).contains("dp_rank"));
    assert!(message(BalancedLoader::builder(planner, 0).workers(0).build()).contains("workers"));
}

#[test]
fn a_changed_shard_is_indexed_again() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    let before = data.index().fingerprint().to_owned();
    let other = TempDataset::new(2, 9, Compression::Plain);
    std::fs::copy(other.shard(1), data.shard(1)).unwrap();
    let after: std::sync::Arc<Index> = data.index();
    assert_ne!(after.fingerprint(), before);
    assert_eq!(after.len(), 6 + 9);
}

#[test]
fn a_shard_with_the_same_name_size_and_time_but_other_samples_is_indexed_again() {
    let (data, other) =
        (TempDataset::new(1, 8, Compression::Plain), TempDataset::new(1, 8, Compression::Plain));
    let before = data.index().fingerprint().to_owned();
    let modified = std::fs::metadata(data.shard(0)).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(other.shard(0)).unwrap();
    for at in 0..bytes.len() - 7 {
        if bytes[at..].starts_with(b"sample-") {
            bytes[at..at + 7].copy_from_slice(b"tample+");
            let header = at / 512 * 512;
            bytes[header + 148..header + 156].fill(b' ');
            let sum: u64 = bytes[header..header + 512].iter().map(|&byte| u64::from(byte)).sum();
            bytes[header + 148..header + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
    std::fs::write(data.shard(0), bytes).unwrap();
    std::fs::File::options().write(true).open(data.shard(0)).unwrap().set_modified(modified).unwrap();
    let after = data.index();
    assert_ne!(after.fingerprint(), before);
    assert!(after.sample(0).key().starts_with("tample+"));
}
