//! Checks that a state from a different stream, or for changed shards, is an error that names the reason.

use dflop_loader::flow::ErrorBudget;
use dflop_loader::shard::expand_shards;
use dflop_loader::{Loader, LoaderBuilder, ShuffleBuffer, StreamState};
use dflop_tests::dataset::{Compression, MixedTexts};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

fn builder(texts: &MixedTexts) -> LoaderBuilder {
    let shards = expand_shards(&[texts.pattern()]).unwrap();
    Loader::builder(shards).batch_size(2).error_budget(ErrorBudget::new(1.0).unwrap())
}

fn state_after(builder: LoaderBuilder, batches: usize) -> StreamState {
    let loader = builder.build().unwrap();
    run(loader.stream().take(batches).try_for_each(|_| async { Ok(()) })).unwrap();
    loader.state().unwrap()
}

/// Returns the error from the restored stream.
fn refusal(builder: LoaderBuilder) -> String {
    let loader = builder.build().unwrap();
    let error = run(async { loader.stream().next().await.unwrap().unwrap_err() });
    error.to_string()
}

#[test]
fn a_shard_with_another_length_is_refused_by_name() {
    let texts = MixedTexts::new(&[10, 10], Compression::Plain);
    let state = state_after(builder(&texts), 5);
    std::fs::write(texts.shard(1), texts.archive(1, 3)).unwrap();
    let message = refusal(builder(&texts).restore(state));
    assert!(message.contains("shard-001.tar") && message.contains("bytes"), "{message}");
}

#[test]
fn a_shard_with_another_first_header_is_refused_by_name() {
    for stored in [Compression::Plain, Compression::Zstd] {
        let texts = MixedTexts::new(&[10], stored);
        let state = state_after(builder(&texts), 1);
        let mut bytes = std::fs::read(texts.shard(0)).unwrap();
        bytes[20] ^= 1;
        std::fs::write(texts.shard(0), bytes).unwrap();
        let message = refusal(builder(&texts).restore(state));
        assert!(message.contains("shard-000.tar") && message.contains("first header"), "{message}");
    }
}

#[test]
fn a_changed_shard_of_which_only_the_buffer_has_samples_is_refused_by_name() {
    let texts = MixedTexts::new(&[12, 12], Compression::Plain);
    let shuffled = |texts: &MixedTexts| builder(texts).shuffle(ShuffleBuffer::new(14));
    let state = state_after(shuffled(&texts), 1);
    std::fs::write(texts.shard(0), texts.archive(0, 1)).unwrap();
    let message = refusal(shuffled(&texts).restore(state));
    assert!(message.contains("shard-000.tar"), "{message}");
}

#[test]
fn a_shard_that_changed_behind_its_first_header_is_refused_where_the_buffer_shows_it() {
    let texts = MixedTexts::new(&[12, 12], Compression::Plain);
    let shuffled = |texts: &MixedTexts| builder(texts).shuffle(ShuffleBuffer::new(14));
    let state = state_after(shuffled(&texts), 1);
    let mut bytes = std::fs::read(texts.shard(0)).unwrap();
    bytes[512..].fill(0);
    std::fs::write(texts.shard(0), bytes).unwrap();
    let message = refusal(shuffled(&texts).restore(state));
    assert!(message.contains("shard-000.tar") && message.contains("no sample at offset"), "{message}");
}

#[test]
fn a_shard_may_lie_in_another_directory() {
    let (texts, moved) =
        (MixedTexts::new(&[10, 4], Compression::Plain), MixedTexts::new(&[10, 4], Compression::Plain));
    let state = state_after(builder(&texts).shuffle(ShuffleBuffer::new(3)), 2);
    let loader = builder(&moved).shuffle(ShuffleBuffer::new(3)).restore(state.clone()).build().unwrap();
    let samples: u64 =
        run(loader.stream().try_fold(0, |sum, batch| async move { Ok(sum + batch.samples.len() as u64) }))
            .unwrap();
    assert_eq!(state.delivered() + state.skipped() + samples + loader.skipped().len() as u64, 14);
}

#[test]
fn a_state_of_another_stream_is_refused() {
    let texts = MixedTexts::new(&[4, 4, 4], Compression::Plain);
    let plain = state_after(builder(&texts), 1);
    let refused = |builder: LoaderBuilder, mentioned: &str| {
        let message = builder.build().unwrap_err().to_string();
        assert!(message.contains(mentioned), "{message}");
    };
    refused(builder(&texts).restore(plain.clone()).shuffle(ShuffleBuffer::new(3)), "shuffled");
    refused(builder(&texts).restore(plain.clone()).seed(1).shuffle_shards(), "dealt");
    refused(builder(&texts).restore(plain.clone()).shards_of_rank(0, 2), "dealt");
    refused(builder(&MixedTexts::new(&[4, 4], Compression::Plain)).restore(plain.clone()), "3 shards");
    let other = expand_shards(
        &[texts.shard(0), texts.shard(2), texts.shard(1)].map(|path| path.display().to_string()),
    );
    refused(Loader::builder(other.unwrap()).restore(plain.clone()), "other names");
    let mut value = serde_json::to_value(&plain).unwrap();
    value["position"]["place"] = 3.into();
    refused(builder(&texts).restore(serde_json::from_value(value.clone()).unwrap()), "behind the last shard");
    value["version"] = 9.into();
    refused(builder(&texts).restore(serde_json::from_value(value).unwrap()), "version 9");
}

/// Regression: such a number made the reader panic, and the panic looked like the end of the data.
#[test]
fn numbers_that_nobody_saved_are_refused() {
    let texts = MixedTexts::new(&[10], Compression::Plain);
    let state = serde_json::to_string(&state_after(builder(&texts), 2)).unwrap();
    for name in ["drawn", "delivered", "skipped"] {
        let mut edited: serde_json::Value = serde_json::from_str(&state).unwrap();
        edited[name] = u64::MAX.into();
        let edited: StreamState = serde_json::from_value(edited).unwrap();
        let refused = builder(&texts).restore(edited).build().unwrap_err().to_string();
        assert!(refused.contains("it was edited"), "{refused}");
    }
}

#[test]
fn a_state_whose_numbers_were_changed_to_likely_ones_is_refused() {
    let texts = MixedTexts::new(&[10, 10], Compression::Plain);
    let state = serde_json::to_string(&state_after(builder(&texts), 2)).unwrap();
    let whole: StreamState = serde_json::from_str(&state).unwrap();
    assert!(builder(&texts).restore(whole).build().is_ok());
    for (name, value) in [("items", 1), ("place", 1), ("epoch", 1)] {
        let mut edited: serde_json::Value = serde_json::from_str(&state).unwrap();
        edited["position"][name] = value.into();
        let edited: StreamState = serde_json::from_value(edited).unwrap();
        let refused = builder(&texts).restore(edited).build().unwrap_err().to_string();
        assert!(refused.contains("its check does not fit it"), "{name}: {refused}");
    }
}
