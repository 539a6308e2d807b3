//! Checks plans over texts that a model's tokenizer counted at indexing: they have the tokens that are
//! delivered.

use std::path::Path;
use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};
use dflop_loader::index::{Index, IndexOptions, TextCounter, TokenCounts};
use dflop_loader::processors::{PlainText, Preparer, Tokenizer};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, StepPlanner};
use dflop_tests::media::{jpeg, png, wav};
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::TryStreamExt;

const SEEING: [&str; 4] = ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-ov-qwen2.5-7b", "internvl3-8b"];
const HEARING: &str = "qwen2-audio-7b";

fn tokenizer() -> Tokenizer {
    Tokenizer::open(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml")).unwrap()
}

fn preparer(model: &ModelSpec) -> Preparer {
    Preparer::builder(model).tokenizer(tokenizer()).build().unwrap()
}

/// Writes conversations, captions and media without text; audio clips for a model with an audio encoder.
fn write_shards(directory: &Path, is_heard: bool) -> String {
    let (word, one, other) = if is_heard {
        ("<audio>", ("0.wav", wav(24_000, 16_000)), ("1.wav", wav(11_025, 22_050)))
    } else {
        ("<image>", ("0.jpg", jpeg(300, 200, 1)), ("1.png", png(90, 500, 2)))
    };
    let turns = |first: &str| {
        format!(
            r#"{{"conversations": [{{"from": "human", "value": "{first}what is this?"}},
                {{"from": "gpt", "value": "Zwölf Drachen über der See, an unusually long answer 12345."}},
                {{"from": "human", "value": "and below?"}}, {{"from": "gpt", "value": "boats"}}]}}"#
        )
    };
    let named = |name: &str, kind: &str| format!("{name}.{kind}");
    for shard in 0..2 {
        let mut tar = TarBytes::new();
        tar = tar.file("text.json", turns("").as_bytes());
        tar = tar.file(&named("one", one.0), &one.1).file("one.json", turns(word).as_bytes());
        tar = tar.file(&named("two", one.0), &one.1).file(&named("two", other.0), &other.1);
        tar = tar.file("two.json", turns(&format!("{word} and {word} ")).as_bytes());
        tar = tar.file(&named("said", other.0), &other.1).file("said.txt", b"a caption of some words");
        tar = tar.file("words.txt", b"only words").file(&named("bare", one.0), &one.1);
        std::fs::write(directory.join(format!("{shard}.tar")), tar.finish()).unwrap();
    }
    directory.to_str().unwrap().to_owned()
}

fn open(pattern: &str, token_counts: TokenCounts) -> Index {
    let options = IndexOptions { token_counts, ..IndexOptions::default() };
    Index::open_or_build(expand_shards(&[pattern]).unwrap(), &options).unwrap()
}

fn of(counter: impl TextCounter + 'static) -> TokenCounts {
    TokenCounts::Of(Arc::new(counter))
}

/// Returns tokens and target tokens in the texts of every sample.
fn texts(index: &Index) -> Vec<(u32, u32)> {
    let mut shape = SampleShape::default();
    let mut text = |sample| {
        index.sample(sample).read_shape(&mut shape);
        (shape.text_tokens, shape.target_tokens)
    };
    (0..index.len()).map(&mut text).collect()
}

#[test]
fn plans_of_counted_texts_say_what_is_delivered() {
    for family in SEEING.into_iter().chain([HEARING]) {
        let directory = tempfile::tempdir().unwrap();
        let pattern = write_shards(directory.path(), family == HEARING);
        let model = ModelSpec::preset(family).unwrap();
        let preparer = preparer(&model);
        let index = Arc::new(open(&pattern, of(preparer.text_counter())));
        assert!(index.token_counts().is_some() && index.warnings().is_empty(), "{:?}", index.warnings());
        let costs = CostModel::new(model, DeviceRate::preset("h100").unwrap());
        let planner = StepPlanner::builder(index.clone(), costs).global_batch(index.len()).dp_size(1);
        let planner = planner.microbatches(3).work(200).build().unwrap();
        let loader =
            BalancedLoader::builder(planner, 0).steps(1).preparer(Arc::new(preparer)).build().unwrap();
        let steps: Vec<_> = run(loader.stream().try_collect()).unwrap();
        assert!(loader.skipped().is_empty(), "{:?}", loader.skipped());
        let microbatches = steps.iter().flat_map(|step| &step.microbatches);
        for microbatch in microbatches {
            let keys: Vec<&str> = microbatch.samples.iter().map(|sample| sample.key.as_str()).collect();
            assert_eq!(microbatch.tokens, microbatch.planned_tokens, "{family}: {keys:?}");
            assert_eq!(microbatch.target_tokens, microbatch.planned_target_tokens, "{family}: {keys:?}");
        }
    }
}

#[test]
fn an_index_keeps_the_counts_of_several_counters_and_the_estimates() {
    let directory = tempfile::tempdir().unwrap();
    let pattern = write_shards(directory.path(), false);
    let model = ModelSpec::preset("qwen2-vl-7b").unwrap();
    let prepared = preparer(&model).text_counter();
    let estimates = texts(&open(&pattern, TokenCounts::Estimated));
    let if_present = || TokenCounts::IfPresent(Arc::new(prepared.clone()));
    assert_eq!(texts(&open(&pattern, if_present())), estimates);
    let counted = texts(&open(&pattern, of(prepared.clone())));
    let bare = texts(&open(&pattern, of(tokenizer().text_counter())));
    // The chat template adds tokens to the words.
    assert!(bare.iter().zip(&counted).all(|(bare, counted)| bare.0 <= counted.0), "{bare:?} {counted:?}");
    assert!(bare != counted && bare != estimates && counted != estimates);
    let index = open(&pattern, if_present());
    let written = || std::fs::metadata(index.path().unwrap()).unwrap().modified().unwrap();
    let before = written();
    assert_eq!(texts(&index), counted);
    assert_eq!(texts(&open(&pattern, of(prepared.clone()))), counted);
    assert_eq!(texts(&open(&pattern, TokenCounts::Estimated)), estimates);
    assert_eq!(written(), before, "nothing was rebuilt");
    let rebuilt = IndexOptions { is_rebuilt: true, ..IndexOptions::default() };
    Index::open_or_build(expand_shards(&[&pattern]).unwrap(), &rebuilt).unwrap();
    assert_eq!(texts(&open(&pattern, if_present())), counted, "counts outlive a rebuild of the same shards");
    assert_eq!(open(&pattern, if_present()).fingerprint(), index.fingerprint());
}

#[test]
fn counters_that_count_otherwise_have_other_digests() {
    let model = |name| ModelSpec::preset(name).unwrap();
    let of_model = |name| preparer(&model(name)).text_counter().digest();
    let question = PlainText::Answer { question: "what?".into() };
    let asked = Preparer::builder(&model("qwen2-vl-7b")).tokenizer(tokenizer()).plain_text(question);
    let digests = [
        of_model("qwen2-vl-7b"),
        of_model("internvl3-8b"),
        asked.build().unwrap().text_counter().digest(),
        tokenizer().text_counter().digest(),
    ];
    let distinct: std::collections::BTreeSet<&String> = digests.iter().collect();
    assert_eq!(distinct.len(), digests.len());
    assert_eq!(of_model("qwen2-vl-7b"), digests[0]);
}

#[test]
fn what_cannot_be_counted_keeps_its_estimate_and_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let shard = directory.path().join("x.tar");
    let bad = br#"{"conversations": [{"from": "human", "value": "<image>where?"}, {"from": "gpt", "value": "a b"}]}"#;
    let tar = TarBytes::new().file("good.txt", b"a kite").file("bad.json", bad);
    std::fs::write(&shard, tar.finish()).unwrap();
    let pattern = shard.to_str().unwrap();
    let model = ModelSpec::preset("qwen2-vl-7b").unwrap();
    let estimates = texts(&open(pattern, TokenCounts::Estimated));
    let index = open(pattern, of(preparer(&model).text_counter()));
    assert_eq!((index.len(), texts(&index)[1]), (2, estimates[1]));
    let [warning] = index.warnings() else { panic!("{:?}", index.warnings()) };
    assert!(warning.contains("1 samples of shard `x.tar`") && warning.contains("`bad`"), "{warning}");
}
