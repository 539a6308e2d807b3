//! Checks rows with a fixed number of tokens, from the plan to the tensors: every token once, exact resume
//! inside a document, on any number of ranks.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::inputs::{IGNORED, ModelInputs, TensorValues};
use dflop_loader::processors::{Preparer, Tokenizer};
use dflop_loader::shard::expand_shards;
use dflop_loader::write::ShardWriter;
use dflop_loader::{
    BalancedLoader, BlankMedia, LoaderState, Microbatch, RowLayout, Shuffle, Step, StepPlanner,
    StepPlannerBuilder, Synchronization, Tail,
};
use dflop_tests::media::jpeg;
use dflop_tests::run;
use futures::TryStreamExt;

/// Documents with these numbers of words are much shorter and much longer than a row.
const WORDS: [usize; 12] = [3, 250, 12, 40, 1, 900, 33, 8, 120, 64, 5, 71];
const TOKENS: u32 = 96;

fn spec() -> ModelSpec {
    ModelSpec::preset("qwen2.5-vl-7b").unwrap()
}

fn preparer() -> Preparer {
    let chatml = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs/chatml");
    Preparer::builder(&spec()).tokenizer(Tokenizer::open(chatml).unwrap()).build().unwrap()
}

/// Writes documents with numbered words, the first `images` with an image; texts are counted exactly.
fn index(directory: &Path, documents: usize, images: usize) -> Arc<Index> {
    let shards = directory.join("shards");
    let mut writer = ShardWriter::builder(&shards).build().unwrap();
    let mut random = SplitMix64::new(5);
    for document in 0..documents {
        let count = WORDS[document % WORDS.len()].min(if document < images { 40 } else { usize::MAX });
        let words: Vec<String> = (0..count).map(|_| random.below(1_000).to_string()).collect();
        let (key, text) = (format!("document-{document:03}"), words.join(" "));
        let image = jpeg(56, 56, document as u32);
        let fields = [("jpg", image.as_slice()), ("txt", text.as_bytes())];
        writer.write(&key, &fields[usize::from(document >= images)..]).unwrap();
    }
    writer.finish().unwrap();
    let token_counts = TokenCounts::Of(Arc::new(preparer().text_counter()));
    let options = IndexOptions { token_counts, ..IndexOptions::default() };
    let shards = expand_shards(&[shards.to_str().unwrap()]).unwrap();
    Arc::new(Index::open_or_build(shards, &options).unwrap())
}

/// Configures steps of 6 rows.
fn builder(index: &Arc<Index>, layout: &str, ranks: usize) -> StepPlannerBuilder {
    let model = CostModel::new(spec(), DeviceRate::preset("h100").unwrap());
    let blank_tokens = preparer().blank_tokens().unwrap();
    StepPlanner::builder(index.clone(), model)
        .rows(layout.parse::<RowLayout>().unwrap())
        .global_batch(6)
        .dp_size(ranks)
        .microbatches(6 / ranks)
        .blank_media(BlankMedia::Auto, blank_tokens)
        .one_device(Synchronization::PerStep)
        .seed(3)
}

fn steps(planner: &StepPlanner, rank: usize) -> Vec<Step> {
    let loader = BalancedLoader::builder(planner.clone(), rank).preparer(Arc::new(preparer()));
    let loader = loader.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
    run(loader.stream().try_collect()).unwrap()
}

fn ints<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [i64] {
    match &inputs.tensor(name).unwrap_or_else(|| panic!("no tensor `{name}`")).values {
        TensorValues::I64(values) => values,
        _ => panic!("`{name}` is not an integer tensor"),
    }
}

/// Piece of a document in a row: place in the plan, key, first token, ids.
type Piece = (u32, String, usize, Vec<i64>);

/// Returns the pieces in a row, whose tensors are checked.
fn pieces(step: &Step, microbatch: &Microbatch) -> Vec<Piece> {
    let inputs = microbatch.inputs.as_ref().expect("every microbatch has tensors");
    let (ids, labels) = (ints(inputs, "input_ids"), ints(inputs, "labels"));
    let positions = ints(inputs, "position_ids");
    assert_eq!(inputs.tensor("input_ids").unwrap().shape, [1, TOKENS as usize]);
    assert_eq!(microbatch.tokens + microbatch.padding_tokens, u64::from(TOKENS));
    let is_target = |label: &&i64| **label != i64::from(IGNORED);
    assert_eq!(labels.iter().filter(is_target).count() as u64, microbatch.target_tokens);
    assert_eq!(microbatch.target_tokens, microbatch.planned_target_tokens);
    let mut found = Vec::new();
    for (at, sample) in microbatch.samples.iter().enumerate() {
        let range = inputs.cu_seqlens[at] as usize..inputs.cu_seqlens[at + 1] as usize;
        assert_eq!((labels[range.start], positions[range.start]), (i64::from(IGNORED), 0), "{}", sample.key);
        let place = microbatch.plan_indices[at];
        let span = step.plan.span(place).unwrap();
        assert_eq!(span.tokens as usize, range.len());
        found.push((place, sample.key.clone(), span.start as usize, ids[range].to_vec()));
    }
    found
}

/// Returns the pieces of each step over all ranks, in the order of the plan, with the rows of the ranks.
fn all_steps(planner: &StepPlanner) -> Vec<Vec<Piece>> {
    let ranks: Vec<Vec<Step>> = (0..planner.dp_size()).map(|rank| steps(planner, rank)).collect();
    let step = |at: usize| {
        let all = ranks.iter().flat_map(|steps| {
            steps[at].microbatches.iter().flat_map(move |microbatch| pieces(&steps[at], microbatch))
        });
        let mut all: Vec<Piece> = all.collect();
        all.sort_by_key(|(place, ..)| *place);
        let places = all.iter().map(|(place, ..)| *place as usize);
        assert!(places.eq(0..ranks[0][at].plan.samples.len()), "no rank repeats or misses a piece");
        let scales = ranks.iter().flat_map(|steps| &steps[at].microbatches);
        let scale: f64 = scales.map(|microbatch| microbatch.loss_scale).sum();
        assert!((scale - planner.dp_size() as f64).abs() < 1e-9, "every target counts once: {scale}");
        all
    };
    assert!(ranks.iter().all(|steps| steps.len() == ranks[0].len()));
    (0..ranks[0].len()).map(step).collect()
}

/// Returns the ids of each document, without rows.
fn documents(index: &Arc<Index>) -> BTreeMap<String, Vec<i64>> {
    let model = CostModel::new(spec(), DeviceRate::preset("h100").unwrap());
    let planner = StepPlanner::builder(index.clone(), model).global_batch(1).validation().build().unwrap();
    let loader = BalancedLoader::builder(planner, 0).preparer(Arc::new(preparer())).build().unwrap();
    let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
    let ids = |step: &Step| {
        let microbatch = &step.microbatches[0];
        let ids = ints(microbatch.inputs.as_ref().unwrap(), "input_ids").to_vec();
        (microbatch.samples[0].key.clone(), ids)
    };
    steps.iter().map(ids).collect()
}

/// Checks that pieces are all documents, each token once in its document.
fn check_all_tokens(steps: &[Vec<Piece>], expected: &BTreeMap<String, Vec<i64>>) {
    let mut found: BTreeMap<String, Vec<(usize, Vec<i64>)>> = BTreeMap::new();
    for (_, key, start, ids) in steps.iter().flatten() {
        found.entry(key.clone()).or_default().push((*start, ids.clone()));
    }
    assert!(found.keys().eq(expected.keys()));
    for (key, mut pieces) in found {
        pieces.sort_unstable();
        let mut ids = Vec::new();
        for (start, piece) in pieces {
            assert_eq!(start, ids.len(), "{key}");
            ids.extend(piece);
        }
        assert_eq!(ids, expected[&key], "{key}");
    }
}

#[test]
fn split_rows_are_the_documents_in_order_without_padding() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 60, 0);
    let expected = documents(&index);
    let planner = builder(&index, "split:96", 2).shuffle(Shuffle::None).epochs(1).build().unwrap();
    let steps = all_steps(&planner);
    check_all_tokens(&steps, &expected);
    let stream: Vec<i64> = steps.iter().flatten().flat_map(|(.., ids)| ids.clone()).collect();
    assert_eq!(stream, expected.values().flatten().copied().collect::<Vec<_>>());
    assert_eq!(planner.end_step(), Some(stream.len().div_ceil(6 * TOKENS as usize) as u64));
    // All rows but the last are full.
    let full = &steps[..steps.len() - 1];
    let tokens = |step: &Vec<Piece>| step.iter().map(|(.., ids)| ids.len()).sum::<usize>();
    assert!(full.iter().all(|step| tokens(step) == 6 * TOKENS as usize));
    assert!(full.len() > 5);
}

#[test]
fn fitted_rows_cut_only_long_documents_and_are_nearly_full() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 240, 0);
    let expected = documents(&index);
    let planner = builder(&index, "fit:96", 3).epochs(1).build().unwrap();
    let steps = all_steps(&planner);
    check_all_tokens(&steps, &expected);
    for (_, key, _, ids) in steps.iter().flatten() {
        assert!(ids.len() == expected[key].len() || expected[key].len() > TOKENS as usize, "{key}");
    }
    let tokens: usize = expected.values().map(Vec::len).sum();
    let rows = tokens.div_ceil(TOKENS as usize);
    assert!(steps.len() <= rows.div_ceil(6) + 1, "{} steps for {rows} rows", steps.len());
}

#[test]
fn a_run_resumes_inside_a_document_on_any_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 20, 0);
    for layout in ["split:96", "fit:96", "fit:96:10"] {
        let build = |ranks| builder(&index, layout, ranks).epochs(2);
        let planner = build(2).build().unwrap();
        let steps = all_steps(&planner);
        assert!(steps.len() > 6, "{layout}");
        let mut is_inside = false;
        for (step, ranks) in (0..steps.len()).zip([1, 2, 3, 6].into_iter().cycle()) {
            let state = planner.state(step as u64).unwrap().to_json();
            is_inside |= step > 0 && steps[step][0].2 > 0;
            let resumed = build(ranks).restore(LoaderState::from_json(&state).unwrap()).build().unwrap();
            assert_eq!(resumed.first_step(), step as u64);
            assert_eq!(all_steps(&resumed), steps[step..], "{layout} at step {step} on {ranks} ranks");
            // A state of the resumed run is that of the run.
            assert_eq!(resumed.state(step as u64).unwrap(), planner.state(step as u64).unwrap());
        }
        assert!(is_inside, "{layout}: some step begins inside a document");
        let end = planner.state(steps.len() as u64).unwrap();
        let resumed = build(1).restore(end).build().unwrap();
        assert!(all_steps(&resumed).is_empty(), "{layout}");
        assert!(planner.state(steps.len() as u64 + 1).is_err());
    }
}

#[test]
fn rows_that_are_split_may_continue_with_another_length_and_batch() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 48, 0);
    let planner = builder(&index, "split:48", 1).shuffle(Shuffle::None).epochs(1).build().unwrap();
    let state = planner.state(7).unwrap();
    let longer = builder(&index, "split:96", 1).shuffle(Shuffle::None).epochs(1);
    let longer = longer.global_batch(3).microbatches(3).restore(state).build().unwrap();
    // The 42 rows of 48 tokens are 21 rows of 96.
    let whole = builder(&index, "split:96", 1).shuffle(Shuffle::None).epochs(1);
    let whole = whole.global_batch(3).microbatches(3).build().unwrap();
    assert_eq!(all_steps(&longer), all_steps(&whole)[7..]);
    let again = longer.state(9).unwrap();
    let resumed = builder(&index, "split:96", 3).shuffle(Shuffle::None).epochs(1);
    let resumed = resumed.global_batch(3).microbatches(1).restore(again).build().unwrap();
    assert_eq!(all_steps(&resumed), all_steps(&whole)[9..]);
}

#[test]
fn media_are_never_cut() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 48, 24);
    let expected = documents(&index);
    let refused = builder(&index, "split:96", 2).build().unwrap_err().to_string();
    assert!(refused.contains("use fit:96"), "{refused}");
    let planner = builder(&index, "fit:96", 2).epochs(1).build().unwrap();
    let whole = |key: &str| key < "document-024";
    let ranks: Vec<Vec<Step>> = (0..2).map(|rank| steps(&planner, rank)).collect();
    let mut delivered = 0;
    for step in ranks.iter().flatten() {
        for microbatch in &step.microbatches {
            let inputs = microbatch.inputs.as_ref().unwrap();
            assert_eq!(inputs.tensor("input_ids").unwrap().shape, [1, 96]);
            assert!(inputs.tensor("pixel_values").is_some(), "every row runs the encoder");
            for (at, sample) in microbatch.samples.iter().enumerate().filter(|(_, sample)| whole(&sample.key))
            {
                let tokens = (inputs.cu_seqlens[at + 1] - inputs.cu_seqlens[at]) as usize;
                assert_eq!(tokens, expected[&sample.key].len());
                delivered += 1;
            }
        }
    }
    // Rows leave room for a blank image.
    let blank_tokens: u64 = preparer().blank_tokens().unwrap().iter().map(|(_, tokens)| tokens).sum();
    let room = 96 - blank_tokens as usize;
    let fits = expected.iter().filter(|(key, ids)| whole(key) && ids.len() <= room).count();
    assert!(delivered == fits && fits > 0);
    // The same rows on one rank, where no blank image is needed.
    let alone = builder(&index, "fit:96", 1).epochs(1).build().unwrap();
    assert_eq!(alone.plan(1).unwrap().samples, planner.plan(1).unwrap().samples);
    // A longer sample with media is refused by name, not cut.
    let short = builder(&index, "fit:24", 2).epochs(1).build().unwrap();
    let plans = (0..short.end_step().unwrap()).map(|step| short.plan(step).unwrap());
    let refused: Vec<(usize, String)> = plans.flat_map(|plan| plan.refused).collect();
    assert!(
        refused.iter().any(|(_, reason)| reason.contains("a sample with media is not cut")),
        "{refused:?}"
    );
}

#[test]
fn what_does_not_go_with_rows_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let index = index(directory.path(), 24, 0);
    let build = |layout: &str| builder(&index, layout, 2);
    for (builder, expected) in [
        (build("split:96").global_batch(12), "2 ranks with 3 microbatches have 6, found 12"),
        (build("split:96").tail(Tail::Drop), "use the tail `carry`"),
        (build("fit:96").pad_to_tokens(96, dflop_loader::sample::BatchLayout::Packed), "leave it out"),
        (
            build("fit:96").caps(dflop_balancer::Caps { tokens_max: Some(96), ..Default::default() }),
            "leave it out",
        ),
    ] {
        let refused = builder.build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let state = build("fit:96").build().unwrap().state(2).unwrap();
    for (builder, expected) in [
        (
            build("fit:96:10").restore(state.clone()),
            "it has rows `fit:96`, and this run has rows `fit:96:10`",
        ),
        (build("split:96").restore(state), "this run has rows `split:96`"),
    ] {
        let refused = builder.build().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let shards = expand_shards(&[directory.path().join("shards").to_str().unwrap()]).unwrap();
    let estimated = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
    let refused = builder(&estimated, "fit:96", 1).build().unwrap_err().to_string();
    assert!(refused.contains("count them with the tokenizer"), "{refused}");
}
