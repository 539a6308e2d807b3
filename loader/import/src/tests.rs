use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dflop_samples::media::{DecodeLimits, decode};
use dflop_samples::sample::document::{ChatTurn, ContentPart, SampleMedia};
use dflop_samples::sample::{Field, Sample};

use super::{ColumnMap, LabelSource, PackOptions, Packed, SkippedSource, SourceFormat, pack};
use dflop_loader::error::{Error, OutputError};
use dflop_loader::flow::Progress;
use dflop_loader::shard::{FIELD_BYTES_MAX, MappedSamples, RawField, RawSample, ShardItem};

/// Directory with the source `in` and the output `out`.
struct Workspace(tempfile::TempDir);

impl Workspace {
    fn new(files: &[(&str, &str)]) -> Self {
        let workspace = Self(tempfile::tempdir().unwrap());
        for (path, content) in files {
            let path = workspace.source().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        workspace
    }

    fn source(&self) -> std::path::PathBuf {
        self.0.path().join("in")
    }

    fn pack(&self, source: &str) -> Result<Packed, Error> {
        pack(&self.source().join(source), &self.0.path().join("out"), &PackOptions::default())
    }

    /// Packs; returns `key[extension=payload …]` per sample, and the skipped paths below the source with
    /// reasons.
    fn packed(&self, source: &str) -> (Vec<String>, Vec<String>) {
        let packed = self.pack(source).unwrap();
        let samples: Vec<String> = packed.shards.iter().flat_map(|shard| read_shard(shard)).collect();
        assert_eq!(packed.samples, samples.len() as u64);
        let prefix = format!("{}/", self.source().display());
        let below = |path: &str| path.replacen(&prefix, "", 1);
        let skipped =
            packed.skipped.iter().map(|skip| format!("{}: {}", below(&skip.path), below(&skip.reason)));
        (samples, skipped.collect())
    }
}

fn show(item: ShardItem) -> String {
    let ShardItem::Sample(RawSample { key, fields, .. }) = item else { panic!("{item:?}") };
    let fields = fields.iter().map(|field| {
        format!("{}={}", field.extension, String::from_utf8_lossy(field.payload.as_ref().unwrap()))
    });
    format!("{key}[{}]", fields.collect::<Vec<_>>().join(" "))
}

fn read_shard(shard: &Path) -> Vec<String> {
    let archive = fs::read(shard).unwrap().into();
    MappedSamples::new(Arc::from("s.tar"), archive, FIELD_BYTES_MAX).map(show).collect()
}

#[test]
fn files_of_a_directory_group_by_their_path_without_extension() {
    let workspace = Workspace::new(&[
        ("b/2.jpg", "J2"),
        ("b/2.txt", "T2"),
        ("b/1.JPG", "J1"),
        ("a.v1/x.json.gz", "Z"),
        ("top.png", "P"),
        ("README", "R"),
        (".git/config.txt", "C"),
        ("b/.DS_Store", "D"),
    ]);
    let (samples, skipped) = workspace.packed("");
    assert_eq!(samples, ["a.v1/x[json.gz=Z]", "b/1[jpg=J1]", "b/2[jpg=J2 txt=T2]", "top[png=P]"]);
    assert_eq!(skipped, [".git: hidden", "README: a file needs an extension", "b/.DS_Store: hidden"]);
}

#[test]
fn documents_about_the_dataset_are_left_out_and_those_of_a_sample_are_not() {
    let workspace = Workspace::new(&[
        ("README.md", "# Kites"),
        ("a/LICENSE.txt", "MIT"),
        ("gallery.md", "x"),
        ("a/1.jpg", "J"),
        ("a/1.md", "of the sample"),
        ("readme.jpg", "R"),
        ("readme.txt", "of the image"),
    ]);
    let (samples, skipped) = workspace.packed("");
    assert_eq!(samples, ["a/1[jpg=J md=of the sample]", "readme[jpg=R txt=of the image]"]);
    let left: Vec<&str> = skipped.iter().filter_map(|skip| skip.split(':').next()).collect();
    assert_eq!(left, ["README.md", "a/LICENSE.txt", "gallery.md"]);
    assert!(skipped[0].contains("a document, without a medium"), "{skipped:?}");
}

#[test]
fn directories_of_classes_give_labels() {
    let files = [
        ("in/dog/x/1.jpg", "D"),
        ("in/cat/1.jpg", "C"),
        ("in/cat/2.jpg", "C"),
        ("in/cat/2.cls", "7"),
        ("in/top.jpg", "T"),
    ];
    let workspace = Workspace::new(&files);
    let options = PackOptions { labels: LabelSource::Directory, ..PackOptions::default() };
    let out = workspace.0.path().join("out");
    let packed = pack(&workspace.source().join("in"), &out, &options).unwrap();
    assert_eq!(read_shard(&packed.shards[0]), ["cat/1[jpg=C cls=0]", "dog/x/1[jpg=D cls=1]"]);
    assert_eq!(packed.taken.classes, ["cat", "dog"]);
    assert_eq!(fs::read_to_string(out.join("classes.json")).unwrap(), r#"["cat","dog"]"#);
    let reasons: Vec<&str> = packed.skipped.iter().map(|skip| skip.reason.as_str()).collect();
    assert_eq!(
        reasons,
        ["has a label already"; 2]
            .into_iter()
            .chain(["in no directory that names its class"])
            .collect::<Vec<_>>()
    );
    let splits = Workspace::new(&[("train/cat/1.jpg", "C"), ("val/cat/1.jpg", "C")]);
    let error = pack(&splits.source(), &splits.0.path().join("out"), &options).unwrap_err();
    assert!(error.to_string().contains("its directories are splits"), "{error}");
}

#[test]
fn entries_that_hold_media_as_base64_become_fields() {
    let lines = [
        r#"{"id": "u", "image": "data:image/jpeg;base64,/9j/4CBh", "text": "t", "label": 4}"#,
        r#"{"id": "v", "image": "p/1.jpg", "label": 2, "text": "t"}"#,
        r#"{"id": "w", "image": "data:image/jpeg;base64,%%%", "text": "t"}"#,
    ];
    let workspace = Workspace::new(&[("p/1.jpg", "J1"), ("x.jsonl", &lines.join("\n"))]);
    let packed = workspace.pack("x.jsonl").unwrap();
    let samples = read_shard(&packed.shards[0]);
    assert!(samples[0].starts_with("u[jpg="), "{samples:?}");
    let document = r#" cls=4 json={"id":"u","image":"jpg","text":"t","label":4}]"#;
    assert!(samples[0].ends_with(document), "{samples:?}");
    assert_eq!(samples[1], format!("v[jpg=J1 cls=2 json={}]", lines[1]));
    assert_eq!(packed.skipped.len(), 1);
    let SkippedSource { path, reason } = &packed.skipped[0];
    assert!(
        path.ends_with("x.jsonl:3") && reason.starts_with("column `image`: its base64"),
        "{path}: {reason}"
    );
}

#[test]
fn a_format_that_is_set_is_not_detected() {
    let workspace = Workspace::new(&[("x.txt", "{\"text\": \"a\"}\n"), ("s.tar", "")]);
    let packed = |name: &str, format| {
        let options = PackOptions { format, ..PackOptions::default() };
        pack(&workspace.source().join(name), &workspace.0.path().join("out"), &options)
    };
    assert_eq!(packed("x.txt", Some(SourceFormat::Jsonl)).unwrap().samples, 1);
    let error = packed("x.txt", Some(SourceFormat::Table)).unwrap_err().to_string();
    assert!(error.contains("in the way") || error.contains("expected a Parquet or Arrow file"), "{error}");
    assert!(packed("s.tar", None).unwrap_err().to_string().contains("a shard already"));
}

#[test]
fn names_that_fall_together_are_all_packed() {
    let workspace = Workspace::new(&[
        ("a.b.jpg", "1"),
        ("a.b.txt", "2"),
        ("a_b.jpg", "3"),
        ("a_b.txt", "4"),
        ("c.JPG", "5"),
        ("c.jpg", "6"),
        ("c.txt", "7"),
        ("__m__/x.txt", "8"),
    ]);
    let (samples, skipped) = workspace.packed("");
    let expected =
        ["x__m__/x[txt=8]", "a_b[jpg=1 txt=2]", "a_b_1[jpg=3 txt=4]", "c[jpg=5 txt=7]", "c_1[jpg=6]"];
    assert_eq!(samples, expected);
    assert!(skipped.is_empty(), "{skipped:?}");
}

#[test]
fn numbered_media_belong_to_the_sample_that_has_other_files() {
    let workspace = Workspace::new(&[
        ("kite.json", "J"),
        ("kite.10.jpg", "10"),
        ("kite.2.jpg", "2"),
        ("kite.2.wav", "W"),
        ("photo.2024.jpg", "P"),
        ("photo.7.jpg", "7"),
        ("old.2024.jpg", "O"),
        ("old.txt", "T"),
    ]);
    let (samples, skipped) = workspace.packed("");
    let expected = [
        "kite[json=J 2.jpg=2 2.wav=W 10.jpg=10]",
        "old[txt=T]",
        "old_2024[jpg=O]",
        "photo_2024[jpg=P]",
        "photo_7[jpg=7]",
    ];
    assert_eq!(samples, expected);
    assert!(skipped.is_empty(), "{skipped:?}");
}

#[test]
fn links_are_followed_but_not_in_circles() {
    use std::os::unix::fs::symlink;
    let workspace = Workspace::new(&[("a/1.txt", "1")]);
    symlink("a/1.txt", workspace.source().join("2.txt")).unwrap();
    symlink("..", workspace.source().join("a/up")).unwrap();
    symlink("a", workspace.source().join("b")).unwrap();
    symlink("nowhere", workspace.source().join("c.txt")).unwrap();
    let (samples, skipped) = workspace.packed("");
    assert_eq!(samples, ["2[txt=1]", "a/1[txt=1]"]);
    let again = "a link to a directory that was already packed";
    assert_eq!(skipped.len(), 3);
    assert!(skipped[0].starts_with("c.txt: No such file"), "{skipped:?}");
    assert_eq!(skipped[1..], [format!("a/up: {again}"), format!("b: {again}")]);
}

#[test]
fn files_outside_of_the_source_are_packed_only_if_allowed() {
    use std::os::unix::fs::symlink;
    let secret = tempfile::tempdir().unwrap();
    std::fs::write(secret.path().join("secret.jpg"), "SECRET").unwrap();
    let absolute = secret.path().join("secret.jpg");
    let entry = |path: &str| format!(r#"{{"id": "x", "image": "{path}", "conversations": []}}"#);
    let entries = [entry(absolute.to_str().unwrap()), entry("p/link.jpg"), entry("p/1.jpg")].join("\n");
    let files = [("p/1.jpg", "J1"), ("p/inside.txt", "T"), ("list.jsonl", entries.as_str())];
    for source in ["list.jsonl", "p"] {
        let workspace = Workspace::new(&files);
        symlink(&absolute, workspace.source().join("p/link.jpg")).unwrap();
        symlink(secret.path(), workspace.source().join("p/directory")).unwrap();
        let (samples, skipped) = workspace.packed(source);
        assert!(!samples.iter().any(|sample| sample.contains("SECRET")), "{samples:?}");
        let outside = skipped.iter().filter(|reason| reason.contains("--allow-outside")).count();
        assert_eq!((samples.is_empty(), outside), (false, 2), "{source}: {skipped:?}");
        let out = tempfile::tempdir().unwrap();
        let options = PackOptions { is_outside_allowed: true, ..PackOptions::default() };
        let packed = pack(&workspace.source().join(source), out.path(), &options).unwrap();
        assert!(packed.skipped.is_empty(), "{:?}", packed.skipped);
    }
}

#[test]
fn tables_outside_of_the_source_are_packed_only_if_allowed() {
    use std::os::unix::fs::symlink;
    let elsewhere = Workspace::new(&[("state.json", r#"{"_data_files": [{"filename": "a.parquet"}]}"#)]);
    std::fs::write(elsewhere.source().join("a.parquet"), "PAR1").unwrap();
    let up = elsewhere.source().to_str().unwrap().to_owned();
    let refused = |prepare: &dyn Fn(&Path)| {
        let workspace = Workspace::new(&[("keep/a.txt", "")]);
        prepare(&workspace.source());
        let out = tempfile::tempdir().unwrap();
        let [error, allowed] = [false, true].map(|is_outside_allowed| {
            let options = PackOptions { is_outside_allowed, ..PackOptions::default() };
            pack(&workspace.source(), out.path(), &options).unwrap_err().to_string()
        });
        assert!(
            error.contains("--allow-outside") && !allowed.contains("--allow-outside"),
            "{error}; {allowed}"
        );
    };
    refused(&|source| symlink(elsewhere.source().join("a.parquet"), source.join("train.parquet")).unwrap());
    refused(&|source| {
        let splits = format!(r#"{{"splits": ["{up}"]}}"#);
        std::fs::write(source.join("dataset_dict.json"), splits).unwrap();
    });
}

#[test]
fn llava_json_gives_images_and_the_whole_object() {
    let entries = r#"[
        {"id": "x.1", "image": "p/1.jpg", "conversations": [{"from": "human", "value": "<image>"}]},
        {"id": "x.1", "image": ["p/1.jpg", "2.PNG"],"extra":1.50},
        {"instruction": "say", "output": "hi"},
        {"id": 5, "image": "p/none.jpg"},
        {"id": 6, "score": 1}
    ]"#;
    let workspace = Workspace::new(&[("p/1.jpg", "J1"), ("2.PNG", "P2"), ("llava.json", entries)]);
    let (samples, skipped) = workspace.packed("llava.json");
    let expected = [
        r#"x_1[jpg=J1 json={"id": "x.1", "image": "p/1.jpg", "conversations": [{"from": "human", "value": "<image>"}]}]"#,
        r#"x_1_1[0.jpg=J1 1.png=P2 json={"id": "x.1", "image": ["p/1.jpg", "2.PNG"],"extra":1.50}]"#,
        r#"000000002[json={"instruction": "say", "output": "hi"}]"#,
    ];
    assert_eq!(samples, expected);
    assert_eq!(skipped.len(), 2);
    assert!(skipped[0].starts_with("p/none.jpg: No such file"), "{skipped:?}");
    assert!(skipped[0].ends_with("named by llava.json:4"), "{skipped:?}");
    assert!(skipped[1].starts_with("llava.json:5: expected a column for a medium"), "{skipped:?}");
}

#[test]
fn json_lines_skip_what_is_no_object() {
    let lines = "{\"text\": \"a\"}\r\n\n{broken\n[1]\n{\"id\": \"é\", \"caption\": \"b\"}";
    let workspace = Workspace::new(&[("x.jsonl", lines)]);
    let (samples, skipped) = workspace.packed("x.jsonl");
    assert_eq!(samples, [r#"000000000[json={"text": "a"}]"#, r#"é[json={"id": "é", "caption": "b"}]"#]);
    assert_eq!(skipped.len(), 2);
    assert!(skipped[0].starts_with("x.jsonl:3: not JSON"), "{skipped:?}");
    assert_eq!(skipped[1], "x.jsonl:4: expected a JSON object");
}

#[test]
fn nemo_manifests_give_recording_and_transcript() {
    let line = r#"{"audio_filepath": "w/1.flac", "text": "hello", "duration": 1.5}"#;
    let workspace = Workspace::new(&[("w/1.flac", "F"), ("manifest.json", line)]);
    let (samples, _) = workspace.packed("manifest.json");
    assert_eq!(samples, [format!("000000000[flac=F txt=hello json={line}]")]);
}

#[test]
fn speechbrain_csv_takes_the_root_for_its_placeholder() {
    let table =
        "ID, duration, wav, wrd\nu1, 1.0, $data_root/1.wav,\"HELLO, YOU\"\nu2, 2.0\nu3, 1, 3.wav, X\n";
    let workspace = Workspace::new(&[("w/1.wav", "W"), ("t/x.csv", table)]);
    let options = PackOptions { root: Some(workspace.source().join("w")), ..PackOptions::default() };
    let packed =
        pack(&workspace.source().join("t/x.csv"), &workspace.0.path().join("out"), &options).unwrap();
    let json = r#"{"ID":"u1","duration":"1.0","wav":"$data_root/1.wav","wrd":"HELLO, YOU"}"#;
    assert_eq!(read_shard(&packed.shards[0]), [format!("u1[wav=W txt=HELLO, YOU json={json}]")]);
    assert_eq!(packed.skipped.len(), 2);
    assert!(packed.skipped[0].path.ends_with("x.csv:3"), "{:?}", packed.skipped);
    assert!(packed.skipped[1].path.ends_with("w/3.wav"), "{:?}", packed.skipped);
}

#[test]
fn speechbrain_json_takes_its_ids_for_keys() {
    let document = r#"{
        "spk1_snt1": {"wav": "{data_root}/1.wav", "path": "{data_root}/1.wav", "words": "HELLO"},
        "spk1.2": {"wav": {"file": "{data_root}/1.wav", "start": 0}},
        "note": "text"
    }"#;
    let workspace = Workspace::new(&[("1.wav", "W"), ("x.json", document)]);
    let (samples, skipped) = workspace.packed("x.json");
    assert!(samples[0].starts_with("spk1_snt1[wav=W txt=HELLO json={"), "{samples:?}");
    assert!(samples[1].starts_with("spk1_2[wav=W json={"), "{samples:?}");
    assert_eq!(skipped, ["x.json:3: expected a JSON object"]);
}

#[test]
fn a_sample_loses_no_field_alone() {
    let workspace = Workspace::new(&[("a.jpg", "1"), ("b.txt", "3")]);
    let long = fs::File::create(workspace.source().join("a.mp4")).unwrap();
    long.set_len(FIELD_BYTES_MAX + 1).unwrap();
    let (samples, skipped) = workspace.packed("");
    assert_eq!(samples, ["b[txt=3]"]);
    assert!(skipped[0].starts_with("a.jpg: its sample is skipped because of"), "{skipped:?}");
    assert!(skipped[1].starts_with("a.mp4: 1073741825 bytes exceed"), "{skipped:?}");
}

#[test]
fn an_entry_whose_fields_collide_is_accounted_for() {
    let workspace =
        Workspace::new(&[("a.json", "{}"), ("x.jsonl", "{\"path\": \"a.json\"}\n{\"text\": \"t\"}")]);
    let (samples, skipped) = workspace.packed("x.jsonl");
    assert_eq!(samples.len(), 1);
    assert_eq!(skipped, ["x.jsonl:1: two fields have the extension `json`"]);
}

#[test]
fn an_empty_source_says_what_was_looked_for_and_leaves_no_file() {
    let workspace = Workspace::new(&[
        ("e/README", ""),
        ("c.csv", "wav\nnone.wav\n"),
        ("h.csv", "a,b\n1,2\n"),
        ("x.txt", "hello"),
        ("x.json", "[]"),
    ]);
    let table = [
        ("e", "looked for regular files with an extension, not hidden; 1 skipped, the first"),
        ("c.csv", "none.wav`: No such file"),
        ("h.csv", "the header must have a column for a medium"),
        ("x.txt", "expected a directory, JSON"),
        ("x.json", "looked for a JSON array of objects"),
    ];
    for (source, expected) in table {
        let error = workspace.pack(source).unwrap_err();
        assert!(
            matches!(error, Error::Output(OutputError::Pack { .. })) && error.to_string().contains(expected),
            "{error}"
        );
        assert!(fs::read_dir(workspace.0.path().join("out")).map_or(0, Iterator::count) == 0);
    }
}

#[test]
fn a_document_that_breaks_off_is_an_error_that_leaves_no_partial_shard() {
    let workspace = Workspace::new(&[("x.json", "[{\"text\": \"a\"}, {\"text\": \"b\"")]);
    let error = workspace.pack("x.json").unwrap_err();
    assert!(error.to_string().contains("line 1 column"), "{error}");
    assert_eq!(fs::read_dir(workspace.0.path().join("out")).unwrap().count(), 0);
}

#[test]
fn shards_that_are_there_are_not_overwritten() {
    let workspace = Workspace::new(&[("a.txt", "1")]);
    workspace.pack("").unwrap();
    assert!(matches!(workspace.pack(""), Err(Error::Output(OutputError::ShardExists { .. }))));
}

#[derive(Debug, Default)]
struct Count {
    total: AtomicU64,
    done: AtomicU64,
}

impl Progress for Count {
    fn begin(&self, _: &str, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    fn advance(&self, units: u64) {
        self.done.fetch_add(units, Ordering::Relaxed);
    }
}

#[test]
fn zstd_shards_roll_and_progress_is_told() {
    let files: Vec<(String, String)> = (0..40).map(|n| (format!("{n:02}.txt"), "x".repeat(900))).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
    let workspace = Workspace::new(&files);
    let progress = Arc::new(Count::default());
    let options = PackOptions {
        shard_bytes: 20_000,
        is_zstd: true,
        progress: progress.clone(),
        ..PackOptions::default()
    };
    let packed = pack(&workspace.source(), &workspace.0.path().join("out"), &options).unwrap();
    assert_eq!((packed.shards.len(), packed.samples, packed.bytes), (4, 40, 36_000));
    assert_eq!((progress.total.load(Ordering::Relaxed), progress.done.load(Ordering::Relaxed)), (40, 40));
    let mut keys = Vec::new();
    for shard in &packed.shards {
        let archive = zstd::decode_all(fs::File::open(shard).unwrap()).unwrap().into();
        let samples = MappedSamples::new(Arc::from("s.tar.zst"), archive, FIELD_BYTES_MAX);
        keys.extend(samples.map(|item| show(item)[..2].to_owned()));
    }
    assert_eq!(keys, (0..40).map(|n| format!("{n:02}")).collect::<Vec<_>>());
}

/// Returns the conversation, or the plain text, of each sample.
pub(super) fn told(packed: &Packed) -> Vec<String> {
    let sample = |item: ShardItem| {
        let ShardItem::Sample(raw) = item else { panic!("{item:?}") };
        let decoded = |field: &RawField| Field {
            extension: field.extension.clone(),
            media: decode(&field.extension, field.payload.clone().unwrap(), &DecodeLimits::default())
                .unwrap(),
        };
        Sample::new("k", raw.fields.iter().map(decoded).collect())
    };
    let tell = |sample: Sample| {
        let media = SampleMedia::from_sample(&sample).unwrap();
        let words = |parts: &[ContentPart<'_>]| {
            let word = |part: &ContentPart<'_>| match part {
                ContentPart::Text(text) => (*text).to_owned(),
                ContentPart::Medium(modality, _) => format!("<{}>", modality.name()),
            };
            parts.iter().map(word).collect::<String>()
        };
        match media.turns().unwrap() {
            Some(turns) => {
                let turn = |turn: &ChatTurn<'_>| format!("{}: {}", turn.role, words(&turn.parts));
                let variables = media.variables().map(|(name, value)| format!("{name}={value}"));
                turns.iter().map(turn).chain(variables).collect::<Vec<_>>().join(" | ")
            }
            None => words(&media.parts().unwrap()),
        }
    };
    let samples = packed.shards.iter().flat_map(|shard| {
        let archive = fs::read(shard).unwrap().into();
        MappedSamples::new(Arc::from("s.tar"), archive, FIELD_BYTES_MAX).map(sample).collect::<Vec<_>>()
    });
    samples.map(tell).collect()
}

/// Documents with one text each, in every layout.
pub(super) const LAYOUTS: [(&str, &str); 16] = [
    (
        r#"{"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "kite"}]}"#,
        ASKED,
    ),
    (
        r#"{"messages": "[{\"role\": \"user\", \"content\": \"what\"}, {\"role\": \"assistant\", \"content\": \"kite\"}]"}"#,
        ASKED,
    ),
    (r#"{"conversations": [{"from": "human", "value": "what"}, {"from": "gpt", "value": "kite"}]}"#, ASKED),
    (
        r#"{"conversation": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "kite"}]}"#,
        ASKED,
    ),
    (r#"{"texts": [{"user": "what", "assistant": "kite"}]}"#, ASKED),
    (r#"{"query": "what", "response": "kite", "history": []}"#, ASKED),
    (r#"{"prompt": "what", "completion": "kite"}"#, ASKED),
    (
        r#"{"prompt": [{"role": "user", "content": "what"}], "completion": [{"role": "assistant", "content": "kite"}]}"#,
        ASKED,
    ),
    (r#"{"instruction": "wh", "input": "at", "output": "kite"}"#, "user: wh\nat | assistant: kite"),
    (r#"{"question": "what", "answers": ["kite", "a kite"]}"#, ASKED),
    (r#"{"question": "what", "multiple_choice_answer": "kite", "similarity": NaN}"#, ASKED),
    (r#"{"problem": "what", "solution": "kite"}"#, ASKED),
    (
        r#"{"system": "brief", "question": "what", "answer": "kite"}"#,
        "system: brief | user: what | assistant: kite",
    ),
    (
        r#"{"tools": "[{\"z\": 1, \"a\": 2}]", "query": "what", "response": "kite"}"#,
        r#"user: what | assistant: kite | tools=[{"z":1,"a":2}]"#,
    ),
    (r#"{"caption": ["a kite", "kite"]}"#, "a kite"),
    (r#"{"text": "a kite"}"#, "a kite"),
];
const ASKED: &str = "user: what | assistant: kite";

#[test]
fn every_layout_is_read_from_lines_and_from_rows() {
    let lines = LAYOUTS.map(|(document, _)| document).join("\n");
    let workspace = Workspace::new(&[("lines.jsonl", lines.as_str())]);
    let packed = workspace.pack("lines.jsonl").unwrap();
    assert_eq!(packed.skipped, [] as [SkippedSource; 0]);
    assert_eq!(told(&packed), LAYOUTS.map(|(_, told)| told));
    // With a mapping, each line is a row.
    let map = ColumnMap::new([("similarity".to_owned(), "score".to_owned())]).unwrap();
    let options = PackOptions { map, ..PackOptions::default() };
    let rows =
        pack(&workspace.source().join("lines.jsonl"), &workspace.0.path().join("rows"), &options).unwrap();
    assert_eq!(told(&rows), LAYOUTS.map(|(_, told)| told));
}

#[test]
fn a_document_as_python_writes_it_is_packed() {
    let entry = r#"{"score": -Infinity, "id": "a", "id": "b", "url": "\ud800", "question": "what", "answer": "kite"}"#;
    for (name, content) in [("array.json", format!("[\n{entry}]")), ("line.jsonl", entry.to_owned())] {
        let workspace = Workspace::new(&[(name, content.as_str())]);
        let packed = workspace.pack(name).unwrap();
        assert_eq!(packed.skipped, [] as [SkippedSource; 0], "{name}");
        assert_eq!(told(&packed), ["user: what | assistant: kite"], "{name}");
    }
}
