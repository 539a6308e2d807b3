//! Checks that a stream resumed from a state delivers the same as an uninterrupted stream.

use dflop_loader::decode::Batch;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::shard::expand_shards;
use dflop_loader::{Loader, LoaderBuilder, RestoredInput, ShuffleBuffer, StreamState};
use dflop_tests::dataset::{Compression, MixedTexts};
use dflop_tests::{expand_with_pipes, run};
use futures::{StreamExt, TryStreamExt};
use proptest::prelude::*;

/// Key, epoch and fields for every sample in a batch.
type Seen = Vec<Vec<(String, u64, String)>>;

/// Result of a partial stream.
#[derive(Debug)]
struct Part {
    batches: Seen,
    /// Number of skipped samples, summed over epochs.
    skipped: u64,
    state: StreamState,
}

fn seen(batches: &[Batch]) -> Seen {
    let sample = |sample: &dflop_loader::sample::Sample| {
        (sample.key.clone(), sample.epoch, format!("{:?}", sample.fields))
    };
    batches.iter().map(|batch| batch.samples.iter().map(sample).collect()).collect()
}

/// Reads at most `most` batches; the state is written as JSON and read back.
fn part(builder: LoaderBuilder, most: usize) -> Part {
    let budget = ErrorBudget::new(1.0).unwrap();
    let loader = builder.workers(2).error_budget(budget).build().unwrap();
    let batches: Vec<Batch> = run(loader.stream().take(most).try_collect()).unwrap();
    let text = serde_json::to_string(&loader.state().unwrap()).unwrap();
    let state = serde_json::from_str(&text).unwrap();
    Part { batches: seen(&batches), skipped: loader.skip_log().skipped_samples(), state }
}

/// Interrupts a stream after `cut` batches and compares both parts with the complete stream.
fn check_cut(builder: &LoaderBuilder, cut: usize) {
    let whole = part(builder.clone(), usize::MAX);
    let first = part(builder.clone(), cut);
    let second = part(builder.clone().restore(first.state.clone()), usize::MAX);
    let joined: Seen = first.batches.iter().chain(&second.batches).cloned().collect();
    assert_eq!(joined, whole.batches, "cut after {cut}");
    let skipped = first.state.skipped() + second.skipped;
    assert_eq!(skipped, whole.skipped, "nothing is skipped twice");
    let samples: u64 = whole.batches.iter().map(|batch| batch.len() as u64).sum();
    assert_eq!((second.state.delivered(), second.state.skipped()), (samples, skipped));
    let rest = part(builder.clone().restore(second.state), usize::MAX);
    assert_eq!((rest.batches.len(), rest.skipped), (0, 0), "nothing follows the end");
}

fn storage() -> impl Strategy<Value = Compression> {
    prop_oneof![Just(Compression::Plain), Just(Compression::Gzip), Just(Compression::Zstd)]
}

fn buffers() -> impl Strategy<Value = Option<ShuffleBuffer>> {
    let buffer = (1usize..40, 1usize..40, 1u64..6_000, 0u64..5);
    prop::option::weighted(
        0.8,
        buffer.prop_map(|(samples_max, samples_initial, bytes_max, seed)| ShuffleBuffer {
            samples_max,
            bytes_max,
            samples_initial,
            seed: Some(seed),
        }),
    )
}

fn with_order(
    builder: LoaderBuilder,
    buffer: Option<ShuffleBuffer>,
    shard_seed: Option<u64>,
) -> LoaderBuilder {
    let builder = match buffer {
        Some(buffer) => builder.shuffle(buffer),
        None => builder,
    };
    match shard_seed {
        Some(seed) => builder.seed(seed).shuffle_shards(),
        None => builder,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_restored_stream_is_the_rest_of_the_whole_one(
        counts in prop::collection::vec(1usize..14, 1..6),
        stored in storage(),
        is_piped: bool,
        batch_size in 1usize..9,
        epochs in 1u64..4,
        cut in 0usize..30,
        buffer in buffers(),
        shard_seed in prop::option::of(0u64..4),
    ) {
        let texts = MixedTexts::new(&counts, stored);
        let names = if is_piped { texts.pipes() } else { vec![texts.pattern()] };
        let builder = Loader::builder(expand_with_pipes(&names)).batch_size(batch_size).epochs(epochs);
        check_cut(&with_order(builder, buffer, shard_seed), cut);
    }
}

#[test]
fn a_chain_of_restores_is_the_whole_stream() {
    let texts = MixedTexts::new(&[9, 14, 3, 8], Compression::Plain);
    let builder = Loader::builder(expand_shards(&[texts.pattern()]).unwrap()).batch_size(3).epochs(3);
    let builder =
        builder.shuffle(ShuffleBuffer { seed: Some(4), ..ShuffleBuffer::new(10) }).seed(1).shuffle_shards();
    let whole = part(builder.clone(), usize::MAX);
    let mut joined = Seen::new();
    let mut next = builder.clone();
    loop {
        let one = part(next, 1);
        if one.batches.is_empty() {
            break;
        }
        joined.extend(one.batches);
        next = builder.clone().restore(one.state);
    }
    assert_eq!(joined, whole.batches);
}

#[test]
fn a_cut_by_samples_loses_and_doubles_nothing() {
    let texts = MixedTexts::new(&[20, 20], Compression::Gzip);
    let builder = Loader::builder(expand_shards(&[texts.pattern()]).unwrap()).batch_size(4);
    let builder = builder.shuffle(ShuffleBuffer::new(8));
    let keys = |part: &Part| part.batches.iter().flatten().map(|sample| sample.0.clone()).collect::<Vec<_>>();
    let first = part(builder.clone().samples_max(13), usize::MAX);
    let second = part(builder.clone().restore(first.state.clone()), usize::MAX);
    assert_eq!([keys(&first), keys(&second)].concat(), keys(&part(builder, usize::MAX)));
}

#[test]
fn what_was_read_ahead_is_not_lost() {
    let texts = MixedTexts::new(&[30, 30], Compression::Plain);
    let shards = expand_shards(&[texts.pattern()]).unwrap();
    let builder = Loader::builder(shards).batch_size(2).error_budget(ErrorBudget::new(1.0).unwrap());
    let loader = builder.clone().build().unwrap();
    let state = run(async {
        let mut batches = loader.stream();
        batches.next().await.unwrap().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        loader.state().unwrap()
    });
    let whole = part(builder.clone(), usize::MAX);
    assert_eq!(part(builder.restore(state), usize::MAX).batches, whole.batches[1..]);
}

#[test]
fn a_stream_that_failed_goes_on_once_the_shard_is_there() {
    let texts = MixedTexts::new(&[10, 10, 10], Compression::Plain);
    let builder = Loader::builder(expand_shards(&[texts.pattern()]).unwrap()).batch_size(4);
    let builder = builder.error_budget(ErrorBudget::new(1.0).unwrap()).shuffle(ShuffleBuffer::new(5));
    let whole = part(builder.clone(), usize::MAX);
    let away = texts.directory().join("away");
    std::fs::rename(texts.shard(2), &away).unwrap();
    let loader = builder.clone().build().unwrap();
    let items: Vec<_> = run(loader.stream().collect());
    assert!(items.last().unwrap().as_ref().unwrap_err().to_string().contains("shard-002"));
    std::fs::rename(&away, texts.shard(2)).unwrap();
    let rest = part(builder.restore(loader.state().unwrap()), usize::MAX);
    assert_eq!(rest.batches, whole.batches[items.len() - 1..]);
}

#[test]
fn a_pipe_may_go_on_with_the_rest_of_its_stream() {
    let texts = MixedTexts::new(&[40], Compression::Plain);
    let builder = Loader::builder(expand_with_pipes(&texts.pipes())).batch_size(4);
    let builder = builder.shuffle(ShuffleBuffer::new(7));
    let whole = part(builder.clone(), usize::MAX);
    let first = part(builder.clone(), 3);
    let consumed =
        serde_json::to_value(&first.state).unwrap()["position"]["items"].as_u64().unwrap() as usize;
    assert!((12..40).contains(&consumed), "{consumed}");
    std::fs::write(texts.shard(0), texts.archive(0, consumed)).unwrap();
    let rest = builder.restore(first.state).restored_input(RestoredInput::Rest);
    assert_eq!(part(rest, usize::MAX).batches, whole.batches[3..]);
}

#[test]
fn the_state_of_a_full_buffer_is_small() {
    let texts = MixedTexts::new(&[400, 400], Compression::Plain);
    let state = |names: &[String]| {
        let builder = Loader::builder(expand_with_pipes(names)).batch_size(16);
        let part = part(builder.shuffle(ShuffleBuffer::new(300)), 20);
        serde_json::to_string(&part.state).unwrap()
    };
    let small = state(&[texts.pattern()]);
    assert!(small.len() < 300 * 50, "{} bytes: {small}", small.len());
    assert!(state(&texts.pipes()).len() > 2 * small.len(), "samples of pipes are in the state themselves");
}

#[test]
fn passing_over_what_was_read_before_is_no_stall() {
    let texts = MixedTexts::new(&[800], Compression::Plain);
    // In pieces: all together take longer than the stall timeout, but no single piece does.
    let slow = format!(
        "pipe:for i in 0 1 2 3 4 5 6 7 8 9 10 11; do dd if={0} bs=64k skip=$i count=1 2>/dev/null; sleep 0.25; done; dd if={0} bs=64k skip=12",
        texts.shard(0).display()
    );
    let slow = Loader::builder(expand_with_pipes(&[format!("{slow} 2>/dev/null")])).batch_size(8);
    let fast = Loader::builder(expand_shards(&[texts.pattern()]).unwrap()).batch_size(8);
    let first = part(slow.clone(), 60);
    let rest = part(slow.restore(first.state).stall_seconds_error(1.8), usize::MAX);
    assert_eq!(rest.batches, part(fast, usize::MAX).batches[60..]);
}
