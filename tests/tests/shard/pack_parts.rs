//! Checks packing in parts: the samples are the same as for packing at once, and a killed part can be run
//! again.

use std::fs;
use std::path::{Path, PathBuf};

use dflop_import::{PackOptions, Packed, PackedPart, SourcePart, finish_parts, list_parts, pack, pack_part};
use dflop_loader::error::{DataError, OutputError};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::{Error, Result};
use dflop_tests::loaders::{LoaderOutput, plain};

/// Temporary directories for a source and the shards.
struct Place(tempfile::TempDir);

impl Place {
    /// Writes media, and manifests that name them: ids repeat across any cut, some before a missing medium.
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let media = place.source().join("media");
        fs::create_dir_all(media.join("below")).unwrap();
        for number in 0..13 {
            fs::write(media.join(format!("{number:02}.txt")), format!("words {number}")).unwrap();
            fs::write(media.join(format!("{number:02}.cls")), format!("{number}")).unwrap();
            fs::write(media.join("below").join(format!("{number}.a.txt")), format!("dots {number}")).unwrap();
            fs::write(media.join("below").join(format!("{number}_a.txt")), format!("none {number}")).unwrap();
        }
        fs::write(media.join(".hidden"), "x").unwrap();
        let entry = |number: usize| {
            let image = if number == 1 { r#", "image": "gone.jpg""# } else { "" };
            format!(r#"{{"id": "same{}"{image}, "text": "n{number}"}}"#, number % 3)
        };
        let entries: Vec<String> = (0..17).map(entry).collect();
        let lines = format!("{}\n\nno object\n{}\n", entries[..5].join("\n"), entries[5..].join("\n"));
        fs::write(place.source().join("lines.jsonl"), lines).unwrap();
        fs::write(place.source().join("array.json"), format!("[{}]", entries.join(",\n"))).unwrap();
        let rows: Vec<String> = (0..9).map(|number| format!("same{},words {number}", number % 2)).collect();
        let table = format!("id,text\n{}\none,too,many\n", rows.join("\n"));
        fs::write(place.source().join("table.csv"), table).unwrap();
        place
    }

    fn source(&self) -> PathBuf {
        self.0.path().join("in")
    }

    fn out(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn options() -> PackOptions {
    PackOptions { shard_samples: Some(4), ..PackOptions::default() }
}

fn shards(out: &Path) -> Vec<Shard> {
    expand_shards(&[out.to_str().unwrap()]).unwrap()
}

fn delivered(out: &Path) -> LoaderOutput {
    let run = plain(shards(out), 1);
    assert_eq!(run.error, None);
    run
}

/// Packs in parts, the last part first.
fn in_parts(source: &Path, out: &Path, parts: u32) -> Result<Packed> {
    let listed = list_parts(source, parts, &options())?;
    let packed: Result<Vec<_>> =
        listed.iter().rev().map(|part| pack_part(source, out, part, &options())).collect();
    finish_parts(out, packed?, &options())
}

#[test]
fn samples_keys_and_order_are_those_of_packing_at_once() {
    let place = Place::new();
    for name in ["media", "lines.jsonl", "array.json", "table.csv"] {
        let (source, whole) = (place.source().join(name), place.out(&format!("{name}-whole")));
        let at_once = pack(&source, &whole, &options()).unwrap();
        for parts in [1, 2, 5, 40] {
            let out = place.out(&format!("{name}-{parts}"));
            let packed = in_parts(&source, &out, parts).unwrap();
            assert_eq!(delivered(&out), delivered(&whole), "{name} in {parts} parts");
            assert_eq!((packed.samples, packed.bytes), (at_once.samples, at_once.bytes));
            assert_eq!(packed.skipped, at_once.skipped, "{name} in {parts} parts");
            let listed: Vec<PathBuf> = shards(&out).iter().map(|s| s.path().unwrap().to_owned()).collect();
            assert_eq!(packed.shards, listed, "a directory lists them in their order");
            check_index(&out, &packed);
        }
    }
}

/// Checks that the merged index equals the index built from the shards.
fn check_index(out: &Path, packed: &Packed) {
    let elsewhere = tempfile::tempdir().unwrap();
    let options = IndexOptions { directory: Some(elsewhere.path().to_owned()), ..IndexOptions::default() };
    let scanned = Index::open_or_build(shards(out), &options).unwrap();
    let joined = packed.index.as_ref().expect("an index");
    assert!(joined.starts_with(out), "{}", joined.display());
    assert_eq!(fs::read(joined).unwrap(), fs::read(scanned.path().unwrap()).unwrap());
}

#[test]
fn names_tell_part_and_number_and_parts_survive_json() {
    let place = Place::new();
    let (source, out) = (place.source().join("lines.jsonl"), place.out("out"));
    let listed = list_parts(&source, 2, &options()).unwrap();
    assert_eq!(listed.iter().map(|part| part.entries).sum::<u64>(), 18);
    assert_eq!((listed[0].first_entry, listed[1].first_entry), (0, 9));
    assert!(listed.iter().all(|part| !part.renamed.is_empty()));
    let sent: SourcePart = serde_json::from_str(&serde_json::to_string(&listed[1]).unwrap()).unwrap();
    assert_eq!(sent, listed[1]);
    let packed = pack_part(&source, &out, &sent, &options()).unwrap();
    let names = [
        "shard-00001-of-00002-000000.tar",
        "shard-00001-of-00002-000001.tar",
        "shard-00001-of-00002-000002.tar",
    ];
    assert_eq!(packed.shards, names);
    let sent: PackedPart = serde_json::from_str(&serde_json::to_string(&packed).unwrap()).unwrap();
    assert_eq!(sent, packed);
}

#[test]
fn a_killed_part_is_run_again_and_replaces_its_own_leftovers_only() {
    let place = Place::new();
    let (source, out) = (place.source().join("media"), place.out("out"));
    let listed = list_parts(&source, 3, &options()).unwrap();
    let run = |part: usize| pack_part(&source, &out, &listed[part], &options());
    let others = [run(0).unwrap(), run(2).unwrap()];
    let before = delivered(&out);
    // The files that a killed run for part 1 leaves, with part 2 still running.
    fs::write(out.join("shard-00001-of-00003-000000.tar"), "half").unwrap();
    fs::write(out.join("shard-00001-of-00003-000007.tar"), "more").unwrap();
    fs::write(out.join(".shard-00001-of-00003-000001.tar.partial"), "rest").unwrap();
    fs::write(out.join(".shard-00002-of-00003-000009.tar.partial"), "at work").unwrap();
    let again = run(1).unwrap();
    assert!(!out.join("shard-00001-of-00003-000007.tar").exists());
    assert!(!out.join(".shard-00001-of-00003-000001.tar.partial").exists());
    assert!(out.join(".shard-00002-of-00003-000009.tar.partial").exists());
    let parts = || [others[0].clone(), again.clone(), others[1].clone()].to_vec();
    let error = finish_parts(&out, parts(), &options()).unwrap_err();
    assert!(
        matches!(&error, Error::Output(OutputError::ShardExists { path }) if path.contains(".partial")),
        "{error}"
    );
    fs::remove_file(out.join(".shard-00002-of-00003-000009.tar.partial")).unwrap();
    let packed = finish_parts(&out, parts(), &options()).unwrap();
    let whole = place.out("whole");
    pack(&source, &whole, &options()).unwrap();
    assert_eq!(delivered(&out), delivered(&whole));
    assert!(packed.samples > before.samples.len() as u64);
}

#[test]
fn what_is_missing_doubled_or_of_another_listing_is_named() {
    let place = Place::new();
    let (source, out) = (place.source().join("lines.jsonl"), place.out("out"));
    let listed = list_parts(&source, 3, &options()).unwrap();
    let packed: Vec<_> =
        listed.iter().map(|part| pack_part(&source, &out, part, &options()).unwrap()).collect();
    let check = |parts: Vec<PackedPart>, number: u32, word: &str| {
        let error = finish_parts(&out, parts, &options()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::Output(OutputError::PackPart { part, .. }) if part == number),
            "{text}"
        );
        assert!(text.contains(word), "{text}");
    };
    check(vec![], 0, "missing");
    check(packed[..2].to_vec(), 2, "missing");
    check(vec![packed[0].clone(), packed[2].clone()], 1, "missing");
    check([&packed[..], &packed[1..2]].concat(), 1, "twice");
    let mut other = packed.clone();
    other[1].source_digest ^= 1;
    check(other, 1, "another listing");
    let mut rowless = packed.clone();
    rowless[2].index_part = None;
    check(rowless, 2, "without index rows");
    let lost = out.join(&packed[1].shards[0]);
    let bytes = fs::read(&lost).unwrap();
    fs::remove_file(&lost).unwrap();
    check(packed.clone(), 1, &packed[1].shards[0]);
    fs::write(&lost, &bytes[..bytes.len() - 512]).unwrap();
    let changed = finish_parts(&out, packed.clone(), &options()).unwrap_err();
    assert!(matches!(changed, Error::Data(DataError::IndexShard { .. })), "{changed}");
    assert!(finish_parts(&out, packed, &PackOptions { is_indexed: false, ..options() }).is_ok());
}

#[test]
fn parts_fit_their_source_and_their_directory() {
    let place = Place::new();
    let (source, out) = (place.source().join("lines.jsonl"), place.out("out"));
    let listed = list_parts(&source, 2, &options()).unwrap();
    pack_part(&source, &out, &listed[0], &options()).unwrap();
    let three = list_parts(&source, 3, &options()).unwrap();
    let error = pack_part(&source, &out, &three[2], &options()).unwrap_err();
    assert!(
        matches!(error, Error::Output(OutputError::ShardExists { .. })),
        "another number of parts: {error}"
    );
    assert!(matches!(pack(&source, &out, &options()), Err(Error::Output(OutputError::ShardExists { .. }))));
    let whole = place.out("whole");
    pack(&source, &whole, &options()).unwrap();
    let error = pack_part(&source, &whole, &listed[0], &options()).unwrap_err();
    assert!(matches!(error, Error::Output(OutputError::ShardExists { .. })), "shards of no part: {error}");
    fs::write(&source, "{\"text\": \"other\"}\n").unwrap();
    let error = pack_part(&source, &out, &listed[1], &options()).unwrap_err();
    assert!(matches!(error, Error::Output(OutputError::PackPart { part: 1, .. })), "{error}");
    assert!(error.to_string().contains("changed"), "{error}");
    for parts in [0, 100_001] {
        assert!(matches!(list_parts(&source, parts, &options()), Err(Error::Config { .. })));
    }
    fs::write(&source, "{broken\n").unwrap();
    let nothing = in_parts(&source, &place.out("nothing"), 2).unwrap_err();
    assert!(matches!(nothing, Error::Output(OutputError::Pack { .. })), "{nothing}");
}
