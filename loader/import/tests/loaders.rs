use super::*;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::decode::Decode;
use dflop_loader::error::BoxError;
use dflop_loader::media::Media;
use dflop_loader::sample::Sample;
use dflop_loader::shard::{Shard, expand_shards_in};
use dflop_loader::store::object_store::memory::InMemory;
use dflop_loader::store::object_store::{ObjectStore, ObjectStoreExt, path};
use dflop_loader::store::{ShardStore, Stores};
use dflop_loader::{BalancedLoader, Loader, LoaderState, Mixture, Shuffle, StepPlanner, StreamState};
use futures::TryStreamExt;
use std::collections::{BTreeMap, BTreeSet};

/// Steps of a global batch of 8 in two epochs of 60 rows.
const STEPS: usize = 15;

/// A place with a table of 60 rows in row groups of 7, and the same rows packed.
fn data() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let table = write(&place.path().join("t.parquet"), &texts_with_ids(60), properties(7));
    let packed = place.path().join("packed");
    pack(&table, &packed, &PackOptions::default()).unwrap();
    (place, table, packed)
}

fn texts_with_ids(count: usize) -> RecordBatch {
    let ids = (0..count).map(|number| Some(format!("row-{number}")));
    let captions = (0..count).map(|number| Some(format!("caption {number} ").repeat(1 + number % 5)));
    table(&[("id", texts(ids)), ("caption", texts(captions))])
}

fn shards(path: &Path) -> Vec<Shard> {
    register_tables();
    expand_shards(&[path.to_str().unwrap()]).unwrap()
}

fn content(samples: &[Sample]) -> Vec<(String, Vec<Bytes>)> {
    let bytes = |media: &Media| match media {
        Media::Opaque(bytes) => bytes.clone(),
        other => panic!("nothing is decoded: {other:?}"),
    };
    let fields = |sample: &Sample| sample.fields.iter().map(|field| bytes(&field.media)).collect();
    samples.iter().map(|sample| (sample.key.clone(), fields(sample))).collect()
}

/// Reads with the plain loader; stops after `batches` and returns the state.
fn streamed(
    shards: Vec<Shard>,
    batches: usize,
    state: Option<StreamState>,
) -> (Vec<(String, Vec<Bytes>)>, StreamState) {
    let shuffle = dflop_loader::ShuffleBuffer::new(10);
    let builder = Loader::builder(shards).decode(Decode::Raw).batch_size(4).seed(3).shuffle(shuffle);
    let builder = match state {
        Some(state) => builder.restore(state),
        None => builder,
    };
    let loader = builder.build().unwrap();
    let read: Vec<_> = block_on(async { loader.stream().take(batches).try_collect().await }).unwrap();
    let samples: Vec<Sample> = read.into_iter().flat_map(|batch| batch.samples).collect();
    (content(&samples), loader.state().unwrap())
}

fn planner(data: impl Into<Mixture>, shuffle: Shuffle) -> StepPlanner {
    let model = CostModel::new(ModelSpec::preset("omni-7b").unwrap(), DeviceRate::preset("h100").unwrap());
    let builder = StepPlanner::builder(data, model).global_batch(8).dp_size(2).microbatches(2).work(200);
    builder.seed(5).shuffle(shuffle).build().unwrap()
}

/// Reads steps with the balanced loader of a rank.
fn balanced(
    planner: &StepPlanner,
    dp_rank: usize,
    steps: usize,
    state: Option<LoaderState>,
) -> (Vec<(String, Vec<Bytes>)>, LoaderState) {
    let builder = BalancedLoader::builder(planner.clone(), dp_rank).decode(Decode::Raw);
    let builder = match state {
        Some(state) => builder.restore(state),
        None => builder,
    };
    let loader = builder.build().unwrap();
    let read: Vec<_> = block_on(async { loader.stream().take(steps).try_collect().await }).unwrap();
    let microbatches = read.into_iter().flat_map(|step| step.microbatches);
    let samples: Vec<Sample> = microbatches.flat_map(|microbatch| microbatch.samples).collect();
    (content(&samples), loader.state().unwrap())
}

#[test]
fn the_plain_loader_shuffles_and_resumes_a_table_as_it_does_a_tar() {
    let (_place, table, packed) = data();
    let whole = streamed(shards(&table), 99, None).0;
    let documents = |samples: &[(String, Vec<Bytes>)]| samples.to_vec();
    assert_eq!(documents(&whole), documents(&streamed(shards(&packed), 99, None).0));
    for batches in [1, 2, 7, 14] {
        let (before, state) = streamed(shards(&table), batches, None);
        let saved = serde_json::to_string(&state).unwrap();
        let (after, _) = streamed(shards(&table), 99, Some(serde_json::from_str(&saved).unwrap()));
        assert_eq!([before, after].concat(), whole, "after {batches} batches");
    }
}

#[test]
fn the_balanced_loader_delivers_every_row_once_and_resumes() {
    let (_place, table, packed) = data();
    let expected: BTreeSet<_> = streamed(shards(&packed), 99, None).0.into_iter().collect();
    for shuffle in [Shuffle::Global, Shuffle::Blocks { block_samples: 2, open_blocks: 2 }, Shuffle::None] {
        let index = Arc::new(index(&table).unwrap());
        let planner = planner(index, shuffle);
        let all: Vec<_> = (0..2).map(|rank| balanced(&planner, rank, STEPS, None).0).collect();
        let delivered: Vec<_> = all.concat();
        assert_eq!(delivered.len(), 120, "two epochs");
        let mut epochs: BTreeMap<_, usize> = BTreeMap::new();
        for sample in delivered {
            *epochs.entry(sample).or_default() += 1;
        }
        assert!(epochs.values().all(|&times| times == 2), "{shuffle:?}");
        assert_eq!(epochs.into_keys().collect::<BTreeSet<_>>(), expected, "{shuffle:?}");
        let (before, state) = balanced(&planner, 1, 3, None);
        let (after, _) = balanced(&planner, 1, STEPS - 3, Some(state));
        assert_eq!([before, after].concat(), all[1], "{shuffle:?}");
    }
}

#[test]
fn tables_and_tar_files_are_mixed() {
    let (place, table, packed) = data();
    let both = [table.to_str().unwrap(), packed.to_str().unwrap()];
    register_tables();
    let listed = expand_shards(&both).unwrap();
    let index = Index::open_or_build(
        listed,
        &IndexOptions { directory: Some(place.path().into()), ..Default::default() },
    );
    let planner = planner(Arc::new(index.unwrap()), Shuffle::Global);
    let delivered: Vec<_> = (0..2).flat_map(|rank| balanced(&planner, rank, STEPS, None).0).collect();
    let keys: BTreeSet<&str> = delivered.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!((delivered.len(), keys.len()), (120, 60), "each row twice");
}

#[test]
fn fields_are_selected_and_cut_and_a_changed_table_is_named() {
    let (_place, table, _) = data();
    let index = Arc::new(index(&table).unwrap());
    let mut reader = dflop_loader::SampleReader::new(index);
    let part = block_on(reader.field(17, 0, 2..12)).unwrap();
    let whole = block_on(reader.field(17, 0, 0..u64::MAX)).unwrap();
    assert_eq!(part, whole.slice(2..12));
    assert!(block_on(reader.field(17, 1, 0..1)).unwrap_err().to_string().contains("has 1 fields"));
    let classes = block_on(dflop_loader::read_classes(&reader_dataset(&table), "id")).unwrap();
    assert_eq!(classes[59], "row-59");
    let index = Arc::new(self::index(&table).unwrap());
    write(&table, &texts_with_ids(61), properties(9));
    let changed = block_on(dflop_loader::read_samples(&index, &[0], 1 << 20)).unwrap_err();
    let changed = format!("{changed}: {}", std::error::Error::source(&changed).unwrap());
    assert!(
        changed.contains("t.parquet") && changed.contains("has changed since it was indexed"),
        "{changed}"
    );
}

fn reader_dataset(table: &Path) -> dflop_loader::Dataset {
    Arc::new(index(table).unwrap()).into()
}

/// Shards in memory.
struct Memory(Arc<InMemory>);

impl ShardStore for Memory {
    fn open(&self, _root: &str) -> Result<Arc<dyn ObjectStore>, BoxError> {
        Ok(self.0.clone())
    }
}

#[test]
fn remote_tables_are_read_by_range_and_equal_local_ones() {
    let (place, table, _) = data();
    register_tables();
    let memory = Arc::new(InMemory::new());
    let bytes = fs::read(&table).unwrap();
    for name in ["d/t.parquet", "d/cache-1.arrow", "d/notes.txt"] {
        block_on(memory.put(&path::Path::from(name), bytes.clone().into())).unwrap();
    }
    let stores = Stores::builder().store("memory", Arc::new(Memory(memory))).build().unwrap();
    let remote = expand_shards_in(&["memory://bucket/d/"], &(&stores).into()).unwrap();
    assert_eq!(remote.len(), 1, "{remote:?}");
    assert_eq!(streamed(remote.clone(), 99, None).0, streamed(shards(&table), 99, None).0);
    let (before, state) = streamed(remote.clone(), 5, None);
    let (after, _) = streamed(remote.clone(), 99, Some(state));
    assert_eq!([before, after].concat(), streamed(shards(&table), 99, None).0);
    let options = IndexOptions { directory: Some(place.path().join("index")), ..IndexOptions::default() };
    let of_remote = Arc::new(Index::open_or_build(remote, &options).unwrap());
    let of_local = Arc::new(index(&table).unwrap());
    assert_eq!(of_remote.fingerprint(), of_local.fingerprint());
    let read = |index| balanced(&planner(index, Shuffle::Global), 0, STEPS, None).0;
    assert_eq!(read(of_remote), read(of_local));
}
