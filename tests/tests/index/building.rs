//! Checks that an index file depends only on the shards: not on threads, on the order in which shards are
//! ready, or on the build method.

use std::path::Path;
use std::sync::Arc;

use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::processors::Tokenizer;
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::write::ShardWriter;
use dflop_tests::tar::TarBytes;

/// More than waits in memory while an index is built.
const INDEX_BYTES_MIN: u64 = 18 << 20;
const KEY_BYTES: usize = 4_000;

fn shards(directory: &Path) -> Vec<Shard> {
    expand_shards(&[directory.to_str().unwrap()]).unwrap()
}

fn write(directory: &Path, number: usize, tar: TarBytes) {
    std::fs::write(directory.join(format!("shard-{number:03}.tar")), tar.finish()).unwrap();
}

/// Writes shards with different lengths and extensions; reading the first takes longest.
fn varied() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for number in 0..24 {
        let mut tar = TarBytes::new();
        for sample in 0..[300, 1, 7, 40][number % 4] {
            let text = "words ".repeat(1 + sample % 9);
            tar = tar.file(&format!("{sample:04}.txt"), text.as_bytes());
            tar = tar.file(&format!("{sample:04}.{}.bin", 90 - number), b"opaque");
            tar = tar.file(&format!("{sample:04}.{}.cls", number % 5), b"1");
        }
        tar = tar.file("torn.txt", b"caf\xe9").file("0000.txt", b"the key again");
        write(directory.path(), number, tar);
    }
    directory
}

/// Writes few samples whose long keys produce a long index.
fn long(directory: &Path) {
    for number in 0..24 {
        let mut tar = TarBytes::new();
        for sample in 0..210 {
            let key = format!("{number:02}{sample:04}{}", "k".repeat(KEY_BYTES));
            tar = tar.gnu_long_name(&format!("{key}.txt")).file("short", b"a kite");
        }
        write(directory, number, tar);
    }
}

fn counter() -> TokenCounts {
    let tokenizer = Tokenizer::open(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml"));
    TokenCounts::Of(Arc::new(tokenizer.unwrap().text_counter()))
}

fn built(directory: &Path, shards: &Path, threads: usize) -> Vec<u8> {
    let directory = Some(directory.to_owned());
    build(shards, &IndexOptions { directory, threads, is_rebuilt: true, ..IndexOptions::default() })
}

fn build(directory: &Path, options: &IndexOptions) -> Vec<u8> {
    let index = Index::open_or_build(shards(directory), options).unwrap();
    std::fs::read(index.path().expect("it was written")).unwrap()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn any_number_of_threads_writes_the_same_index() {
    let data = varied();
    let out = tempfile::tempdir().unwrap();
    let expected = built(out.path(), data.path(), 1);
    for threads in [2, 3, 8, 24] {
        assert!(built(out.path(), data.path(), threads) == expected, "{threads} threads");
    }
}

#[test]
fn a_rebuilt_index_is_that_of_the_first_time() {
    let data = varied();
    let [first, then] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let counted = |directory: &Path| IndexOptions {
        directory: Some(directory.to_owned()),
        token_counts: counter(),
        ..IndexOptions::default()
    };
    let expected = build(data.path(), &counted(first.path()));
    let estimated = built(then.path(), data.path(), 2);
    assert!(estimated.len() < expected.len());
    assert!(build(data.path(), &counted(then.path())) == expected, "counted at a later time");
    assert!(built(then.path(), data.path(), 2) == expected, "the counts are taken over");
}

#[test]
fn an_index_that_exceeds_memory_is_written_whole_in_all_ways() {
    let data = tempfile::tempdir().unwrap();
    long(data.path());
    let out = tempfile::tempdir().unwrap();
    let expected = built(out.path(), data.path(), 1);
    assert!(expected.len() as u64 > INDEX_BYTES_MIN);
    assert!(built(out.path(), data.path(), 4) == expected);
    let options = IndexOptions { directory: Some(out.path().to_owned()), ..IndexOptions::default() };
    let all = shards(data.path());
    let mut parts: Vec<_> = all.chunks(5).map(|part| Index::build_part(part, &options).unwrap()).collect();
    parts.rotate_left(2);
    let merged = Index::merge_parts(all, parts, &options).unwrap();
    assert!(std::fs::read(merged.path().unwrap()).unwrap() == expected);
    assert_eq!(merged.len(), 24 * 210);
    let last = merged.sample(merged.len() - 1);
    assert!(last.key().starts_with("230209kk") && last.key().len() == 6 + KEY_BYTES);
    assert_eq!(names(out.path()).len(), 2, "index and lock: {:?}", names(out.path()));
}

#[test]
fn written_shards_whose_index_exceeds_memory_are_indexed_as_by_a_scan() {
    let data = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::builder(data.path()).shard_samples(400).build().unwrap();
    for sample in 0..4_800 {
        writer.write(&format!("{sample:04}{}", "k".repeat(KEY_BYTES)), &[("txt", b"a kite")]).unwrap();
    }
    let written = writer.finish().unwrap();
    assert_eq!(written.shards.len(), 12);
    let index = std::fs::read(written.index.unwrap()).unwrap();
    assert!(index.len() as u64 > INDEX_BYTES_MIN);
    let out = tempfile::tempdir().unwrap();
    assert!(built(out.path(), data.path(), 2) == index);
    assert_eq!(names(&data.path().join(".dflop")).len(), 2, "index and lock");
}

#[test]
fn files_of_other_tools_beside_the_shards_change_nothing() {
    let shards = varied();
    let own = built(shards.path(), shards.path(), 2);
    let put = |name: &str, bytes: &[u8]| std::fs::write(shards.path().join(name), bytes).unwrap();
    std::fs::create_dir(shards.path().join(".nv-meta")).unwrap();
    put(".nv-meta/.info.json", br#"{"shard_counts": {"shard-000.tar": 7}}"#);
    put("shard-000.tar.idx", &[0, 512_u64, 1024].map(u64::to_le_bytes).concat());
    put("shard-001.json", br#"{"path": "shard-001.tar", "filesize": 9, "files": {}}"#);
    put(
        "list.json",
        br#"{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "shard-001.tar", "nsamples": 9}]}"#,
    );
    assert!(built(shards.path(), shards.path(), 2) == own);
}

#[test]
fn a_shard_list_of_wids_is_a_dataset() {
    let place = tempfile::tempdir().unwrap();
    for number in 0..2 {
        write(place.path(), number, TarBytes::new().file("a.txt", b"a kite"));
    }
    let path = place.path().join("all.json");
    let list = r#"{"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [
        {"url": "shard-001.tar", "nsamples": 1}, {"url": "shard-000.tar", "nsamples": 7}]}"#;
    std::fs::write(&path, list).unwrap();
    let index = Index::open_or_build(shards(&path), &IndexOptions::default()).unwrap();
    let names: Vec<&str> = index.shards().iter().map(Shard::base_name).collect();
    assert_eq!((names.as_slice(), index.len()), (["shard-001.tar", "shard-000.tar"].as_slice(), 2));
    std::fs::write(&path, b"{\"a\": 1}").unwrap();
    let error = expand_shards(&[path.to_str().unwrap()]).unwrap_err().to_string();
    assert!(error.contains("a shard list of wids must have"), "{error}");
}
