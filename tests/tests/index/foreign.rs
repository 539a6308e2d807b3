//! Checks that foreign index files are only hints: the index is the same as after a scan.

use std::path::Path;

use dflop_loader::index::foreign::{ForeignIndexes, energon};
use dflop_loader::index::{FieldRow, Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_tests::media::jpeg;
use dflop_tests::tar::TarBytes;
use proptest::prelude::*;
use serde_json::json;

/// Writes entries that tools treat differently, among ordinary ones.
fn odd_archive(shard: usize) -> TarBytes {
    let mut tar = TarBytes::new().empty("images", b'5').file("README", &vec![b'a'; shard * 2_000]);
    for number in 0..12 {
        let key = format!("{shard}-{number:03}");
        tar = match number {
            3 => tar.file(".DS_Store", b"x").file(&format!("{key}.txt"), b"after a dotfile"),
            5 => tar.gnu_long_name(&format!("{}/{key}.txt", "d".repeat(200))).file("cut", b"a long name"),
            6 => tar.pax(&[("path", &format!("{}/{key}.txt", "p".repeat(200)))]).file("cut", b"a PAX name"),
            8 => tar.file(&format!("{key}.txt"), b"1").file(&format!("{key}.txt"), b"a duplicate"),
            9 => tar.file(&format!("{key}.jpg"), b"no image"),
            10 => tar.file(&format!("{key}.txt"), b"").empty(&format!("{key}.lnk"), b'2'),
            _ => tar
                .file(&format!("{key}.jpg"), &jpeg(20 + number, 30, number))
                .file(&format!("{key}.TXT"), b"a kite"),
        };
    }
    tar
}

/// Two shards in a temporary directory.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self::of([odd_archive(0).finish(), odd_archive(1).finish()])
    }

    fn of(archives: [Vec<u8>; 2]) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        for (shard, archive) in archives.into_iter().enumerate() {
            place.put(&format!("shard-{shard}.tar"), &archive);
        }
        place
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn index(&self, foreign: ForeignIndexes) -> Index {
        self.index_of(self.0.path().to_str().unwrap(), foreign)
    }

    fn index_of(&self, pattern: &str, foreign: ForeignIndexes) -> Index {
        let directory = Some(self.0.path().join("index"));
        let options = IndexOptions { directory, is_rebuilt: true, foreign, ..IndexOptions::default() };
        Index::open_or_build(expand_shards(&[pattern]).unwrap(), &options).unwrap()
    }

    /// Returns the offsets at which samples start for Energon, and the end of the last sample: the Energon
    /// table, if Energon grouped as this project does.
    fn energon_offsets(&self, shard: usize) -> Vec<u64> {
        let index = self.index(ForeignIndexes::Ignore);
        let rows = index.shard_samples(shard).map(|sample| index.sample(sample));
        let mut offsets: Vec<u64> = rows.map(|row| row.offset()).collect();
        let bad =
            index.skipped().iter().filter(|skipped| skipped.shard.ends_with(&format!("shard-{shard}.tar")));
        // A skipped duplicate is reported at the second entry; the sample starts a header and a payload
        // earlier.
        offsets.extend(bad.map(|bad| bad.offset - if bad.reason.contains("duplicate") { 1024 } else { 0 }));
        offsets.sort_unstable();
        let last = index.sample(index.shard_samples(shard).end - 1);
        let end =
            last.fields().map(|field| (field.offset + field.bytes).next_multiple_of(512)).max().unwrap();
        offsets.push(end);
        offsets
    }

    /// Writes webshart's JSON: payloads by name, where a repeated name replaces the first.
    fn webshart(&self, shard: usize) -> Vec<u8> {
        let archive = std::fs::read(self.0.path().join(format!("shard-{shard}.tar"))).unwrap();
        let entries = dflop_loader::shard::tar::slice::SliceEntries::new(archive.clone().into());
        let files = entries.map(|entry| entry.unwrap().0).map(|entry| {
            (
                entry.name.clone(),
                json!({"path": entry.name, "offset": entry.payload_offset, "length": entry.bytes}),
            )
        });
        let files: serde_json::Map<String, serde_json::Value> = files.collect();
        let name = format!("shard-{shard}.tar");
        let document = json!({"path": name, "filesize": archive.len(), "includes_image_geometry": false, "files": files});
        serde_json::to_vec(&document).unwrap()
    }
}

fn le_bytes(offsets: &[u64]) -> Vec<u8> {
    offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect()
}

type Row<'a> = (String, usize, u64, Vec<FieldRow<'a>>);

fn rows(index: &Index) -> Vec<Row<'_>> {
    let row = |sample| {
        let row = index.sample(sample);
        (row.key().to_owned(), row.shard, row.offset(), row.fields().collect())
    };
    (0..index.len()).map(row).collect()
}

fn assert_equal(index: &Index, own: &Index) {
    assert_eq!(rows(index), rows(own));
    assert_eq!(index.fingerprint(), own.fingerprint());
    assert_eq!(index.skipped(), own.skipped());
    assert_eq!(index.indexed_shards(), own.indexed_shards());
}

#[test]
fn rows_read_where_energon_and_webshart_say_are_those_of_a_scan() {
    for archives in [
        [odd_archive(0).finish(), odd_archive(1).finish()],
        [odd_archive(0).without_end(), odd_archive(1).file("z.txt", b"unpadded").without_end()],
    ] {
        let place = Place::of(archives);
        let own = place.index(ForeignIndexes::Ignore);
        assert!(own.len() >= 20 && own.skipped().len() == 4, "{:?}", own.skipped());
        for shard in 0..2 {
            place.put(&format!("shard-{shard}.tar.idx"), &le_bytes(&place.energon_offsets(shard)));
        }
        for foreign in [ForeignIndexes::Check, ForeignIndexes::Follow] {
            let index = place.index(foreign);
            assert_equal(&index, &own);
            assert_eq!(index.warnings(), own.warnings(), "Energon, {foreign:?}");
        }
        for shard in 0..2 {
            std::fs::remove_file(place.0.path().join(format!("shard-{shard}.tar.idx"))).unwrap();
            place.put(&format!("shard-{shard}.json"), &place.webshart(shard));
        }
        let index = place.index(ForeignIndexes::Follow);
        assert_equal(&index, &own);
        assert_eq!(index.warnings(), own.warnings(), "webshart");
    }
}

#[test]
fn a_shard_without_padding_at_its_end_is_followed_too() {
    let mut archive = TarBytes::new().file("a.txt", b"first").file("b.txt", b"unpadded").without_end();
    archive.truncate(archive.len() - 500);
    let place = Place::of([archive, odd_archive(1).finish()]);
    let own = place.index(ForeignIndexes::Ignore);
    place.put("shard-0.json", &place.webshart(0));
    let index = place.index(ForeignIndexes::Follow);
    assert_equal(&index, &own);
    assert!(index.warnings().is_empty(), "{:?}", index.warnings());
}

#[test]
fn other_numbers_and_lengths_are_warnings_that_name_both() {
    let place = Place::new();
    let own = place.index(ForeignIndexes::Ignore);
    place.put(
        ".nv-meta/.info.json",
        br#"{"shard_counts": {"shard-0.tar": 12, "shard-1.tar": 7, "else.tar": 1}}"#,
    );
    let list = json!({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [
        {"url": "shard-0.tar", "nsamples": 11, "filesize": 512}, {"url": "shard-1.tar", "nsamples": 12}]});
    place.put("shardindex.json", list.to_string().as_bytes());
    let index = place.index(ForeignIndexes::Check);
    assert_equal(&index, &own);
    let warnings = index.warnings().join("\n");
    let bytes = own.indexed_shards()[0].bytes;
    for expected in [
        "shard-1.tar` has 7 samples; its headers show 12".to_owned(),
        "shard-0.tar` has 11 samples; its headers show 12".to_owned(),
        format!("shard-0.tar` has 512 bytes; it has {bytes}"),
    ] {
        assert!(warnings.contains(&expected), "{expected}: {warnings}");
    }
    assert_eq!(index.warnings().len(), 3, "{warnings}");
    assert!(place.index(ForeignIndexes::Ignore).warnings().is_empty());
}

#[test]
fn other_groups_are_a_warning_and_ours_are_used() {
    let place = Place::new();
    let own = place.index(ForeignIndexes::Ignore);
    let mut split = place.energon_offsets(0);
    split.insert(2, split[1] + 512 + own.sample(1).fields().next().unwrap().bytes.next_multiple_of(512));
    let mut joined = place.energon_offsets(0);
    joined.remove(1);
    for (offsets, expected) in
        [(split, "13 samples; the headers show 12"), (joined, "no sample starts at offset")]
    {
        place.put("shard-0.tar.idx", &le_bytes(&offsets));
        for foreign in [ForeignIndexes::Check, ForeignIndexes::Follow] {
            let index = place.index(foreign);
            assert_equal(&index, &own);
            assert!(
                index.warnings().iter().any(|warning| warning.contains(expected)),
                "{:?}",
                index.warnings()
            );
        }
    }
}

#[test]
fn hints_that_do_not_fit_are_named_and_the_shard_is_read_from_its_beginning() {
    let place = Place::new();
    let own = place.index(ForeignIndexes::Ignore);
    let offsets = place.energon_offsets(0);
    let shifted: Vec<u64> = offsets.iter().map(|offset| offset + 512).collect();
    let swapped: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_be_bytes()).collect();
    let absurd = [0, 1 << 62, u64::MAX];
    for bytes in
        [le_bytes(&shifted), swapped, le_bytes(&absurd), le_bytes(&offsets)[..20].to_vec(), Vec::new()]
    {
        place.put("shard-0.tar.idx", &bytes);
        let index = place.index(ForeignIndexes::Follow);
        assert_equal(&index, &own);
        let expected = "shard-0.tar.idx` is ignored";
        assert!(index.warnings()[0].contains(expected), "{:?}", index.warnings());
    }
    std::fs::remove_file(place.0.path().join("shard-0.tar.idx")).unwrap();
    let other = String::from_utf8(place.webshart(1)).unwrap().replace("shard-1.tar", "shard-0.tar");
    for bytes in [place.webshart(1), place.webshart(0)[..300].to_vec(), other.into_bytes(), b"[]".to_vec()] {
        place.put("shard-0.json", &bytes);
        let index = place.index(ForeignIndexes::Follow);
        assert_equal(&index, &own);
        assert!(index.warnings()[0].contains("shard-0.json` is ignored"), "{:?}", index.warnings());
    }
    place.put(".nv-meta/.info.json", b"{");
    let index = place.index(ForeignIndexes::Check);
    assert!(index.warnings()[0].contains(".info.json` is ignored"), "{:?}", index.warnings());
}

#[test]
fn damage_behind_good_hints_is_reported_as_by_a_scan() {
    let whole = odd_archive(0).finish();
    let mut rotten = whole.clone();
    let middle = whole.len() / 2 / 512 * 512;
    rotten[middle..middle + 512].fill(0xff);
    let mut tail = whole.clone();
    tail.extend([7; 512]);
    for damaged in [whole[..whole.len() / 2].to_vec(), rotten, tail] {
        let place = Place::of([whole.clone(), odd_archive(1).finish()]);
        let offsets = le_bytes(&place.energon_offsets(0));
        place.put("shard-0.tar", &damaged);
        let own = place.index(ForeignIndexes::Ignore);
        place.put("shard-0.tar.idx", &offsets);
        assert_equal(&place.index(ForeignIndexes::Follow), &own);
    }
}

#[test]
fn a_shard_list_of_wids_is_a_dataset() {
    let place = Place::new();
    let list = json!({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [
        {"url": "shard-1.tar", "nsamples": 12}, {"url": "shard-0.tar", "nsamples": 12}]});
    place.put("all.json", list.to_string().as_bytes());
    let list = place.0.path().join("all.json");
    let index = place.index_of(list.to_str().unwrap(), ForeignIndexes::Check);
    let names: Vec<&str> = index.shards().iter().map(Shard::base_name).collect();
    assert_eq!(names, ["shard-1.tar", "shard-0.tar"]);
    place.put("all.json", b"{\"a\": 1}");
    let error = expand_shards(&[list.to_str().unwrap()]).unwrap_err().to_string();
    assert!(error.contains("a shard list of wids must have"), "{error}");
}

#[test]
fn the_splits_of_energon_are_named_lists_of_shards() {
    let place = Place::new();
    assert_eq!(energon::splits(place.0.path()).unwrap(), None);
    place.put(
        ".nv-meta/split.yaml",
        b"split_parts:\n  train:\n  - shard-{0..1}.tar\n  val: []\nexclude: [shard-1.tar]\n",
    );
    let splits = energon::splits(place.0.path()).unwrap().unwrap();
    let named: Vec<_> = splits.iter().map(|split| (split.name.as_str(), split.shards.as_slice())).collect();
    assert_eq!(named, [("train", ["shard-0.tar".to_owned()].as_slice()), ("val", &[])]);
    place.put(".nv-meta/split.yaml", b"split_parts: *x");
    let error = energon::splits(place.0.path()).unwrap_err().to_string();
    assert!(error.contains("split.yaml"), "{error}");
}

/// Damages bytes: truncates them, overwrites some, or replaces them by a different shard's bytes.
fn damage(bytes: &[u8], cut: usize, writes: &[(usize, u8)]) -> Vec<u8> {
    let mut damaged = bytes[..bytes.len() - cut % bytes.len().max(1)].to_vec();
    for (at, byte) in writes {
        let length = damaged.len().max(1);
        if let Some(place) = damaged.get_mut(at % length) {
            *place = *byte;
        }
    }
    damaged
}

fn put_damaged(place: &Place, directory: &Path, cut: usize, writes: &[(usize, u8)], is_other: usize) {
    let write = |name: String, bytes: &[u8]| {
        std::fs::write(directory.join(name), damage(bytes, cut, writes)).unwrap();
    };
    write("shard-0.tar.idx".into(), &le_bytes(&place.energon_offsets(is_other)));
    write("shard-1.json".into(), &place.webshart(1 - is_other));
    let list = json!({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [
        {"url": "shard-0.tar", "nsamples": 12, "filesize": 9}]});
    write("list.json".into(), list.to_string().as_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_damage_to_a_hint_changes_the_index(
        cut in prop_oneof![Just(0), any::<usize>()],
        writes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4),
        is_other in 0_usize..2,
    ) {
        let place = Place::new();
        let own = place.index(ForeignIndexes::Ignore);
        put_damaged(&place, place.0.path(), cut, &writes, is_other);
        assert_equal(&place.index(ForeignIndexes::Follow), &own);
        assert_equal(&place.index(ForeignIndexes::Check), &own);
    }
}
