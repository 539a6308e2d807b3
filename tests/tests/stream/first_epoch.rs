//! Checks plain loaders that start with a later epoch, as trainers do that loop over epochs themselves.

use dflop_loader::decode::Batch;
use dflop_loader::media::augment::Augment;
use dflop_loader::shard::expand_shards;
use dflop_loader::{Loader, LoaderBuilder, ShuffleBuffer, StreamState};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

/// Streams 24 samples per epoch in batches of 6, with every kind of shuffle.
fn loader(data: &TempDataset) -> LoaderBuilder {
    let augment = Augment::builder().flip(0.5).seed(5).build().unwrap();
    let builder = Loader::builder(expand_shards(&[data.pattern()]).unwrap()).batch_size(6).augment(augment);
    builder.seed(3).shuffle_shards().shuffle(ShuffleBuffer::new(10))
}

fn batches(builder: LoaderBuilder) -> Vec<String> {
    let batches: Vec<Batch> = run(builder.build().unwrap().stream().try_collect()).unwrap();
    batches.iter().map(|batch| format!("{:?}", batch.samples)).collect()
}

fn json(state: &StreamState) -> StreamState {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}

#[test]
fn a_stream_that_begins_with_an_epoch_is_that_epoch_of_a_longer_run() {
    let data = TempDataset::new(4, 6, Compression::Plain);
    let long = batches(loader(&data).epochs(4));
    assert_eq!(long.len(), 16);
    for epoch in 0..4 {
        let pass = batches(loader(&data).first_epoch(epoch));
        assert_eq!(pass, long[epoch as usize * 4..][..4], "epoch {epoch}");
    }
    assert_eq!(batches(loader(&data).first_epoch(2).epochs(2)), long[8..]);
    let plain = |builder: LoaderBuilder| batches(builder.seed(9).shuffle_shards());
    assert_eq!(plain(loader(&data).first_epoch(1)), plain(loader(&data).epochs(2))[4..]);
}

#[test]
fn a_later_epoch_goes_on_from_its_state_wherever_it_was_cut() {
    let data = TempDataset::new(4, 6, Compression::Plain);
    let whole = batches(loader(&data).first_epoch(2).epochs(2));
    for cut in 0..=8 {
        let first = loader(&data).first_epoch(2).epochs(2).build().unwrap();
        let begun: Vec<Batch> = run(first.stream().take(cut).try_collect()).unwrap();
        let state = json(&first.state().unwrap());
        assert_eq!((state.first_epoch(), state.delivered()), (2, 6 * begun.len() as u64));
        assert!(state.epoch() >= 2, "{}", state.epoch());
        // The state determines the first epoch, not the builder.
        let rest = batches(loader(&data).first_epoch(7).epochs(2).restore(state));
        assert_eq!(rest, whole[cut..], "cut after {cut}");
    }
}

#[test]
fn an_absurd_epoch_is_refused() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let refused = loader(&data).first_epoch(u64::MAX).build().unwrap_err().to_string();
    assert!(refused.contains("first_epoch"), "{refused}");
}
