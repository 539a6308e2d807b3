//! Checks that every microbatch is an input that a model can run: without samples, with damaged ones, and
//! where only some ranks have images.

use std::sync::Arc;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, Module};
use dflop_loader::error::{BudgetError, PlanError};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::inputs::{IGNORED, ModelInputs, TensorValues};
use dflop_loader::processors::{Buckets, Preparer, Tokenizer};
use dflop_loader::sample::{BatchLayout, PaddingSide};
use dflop_loader::shard::expand_shards;
use dflop_loader::{
    BalancedLoader, BlankMedia, Error, Microbatch, Result, Step, StepEvent, StepPlanner, StepPlannerBuilder,
};
use dflop_tests::media::{png, wav};
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::{StreamExt, TryStreamExt};

const FAMILIES: [&str; 5] =
    ["qwen2-vl-7b", "qwen2.5-vl-7b", "llava-ov-qwen2.5-7b", "internvl3-8b", "qwen2-audio-7b"];
const LAYOUTS: [BatchLayout; 2] = [BatchLayout::Packed, BatchLayout::Padded { side: PaddingSide::Left }];
const RANKS: usize = 2;

struct Data {
    _directory: tempfile::TempDir,
    index: Arc<Index>,
    model: ModelSpec,
}

impl Data {
    /// Writes texts, media, and media that cannot be decoded after the headers.
    fn new(family: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut tar = TarBytes::new();
        let is_audio = family == "qwen2-audio-7b";
        for number in 0..12_u8 {
            let key = format!("{number:02}");
            tar = tar.file(&format!("{key}.txt"), b"a kite over the sea");
            if number % 3 == 0 {
                continue;
            }
            let mut medium = if is_audio { wav(8_000, 16_000) } else { png(60, 90, number.into()) };
            if number % 3 == 1 {
                // The header is complete, and the announced data is missing.
                medium.truncate(if is_audio { 44 } else { 48 });
            }
            tar = tar.file(&format!("{key}.{}", if is_audio { "wav" } else { "png" }), &medium);
        }
        let shard = directory.path().join("media.tar");
        std::fs::write(&shard, tar.finish()).unwrap();
        let shards = expand_shards(&[shard.to_str().unwrap()]).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        Self { _directory: directory, index, model: ModelSpec::preset(family).unwrap() }
    }

    fn preparer(&self, layout: BatchLayout) -> Preparer {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
        let tokenizer = Tokenizer::open(directory).unwrap();
        Preparer::builder(&self.model).tokenizer(tokenizer).layout(layout).build().unwrap()
    }

    /// Plans the data as one step, with so many microbatches that all samples except one are alone.
    fn planner(&self, policy: BlankMedia, layout: BatchLayout) -> StepPlannerBuilder {
        let costs = CostModel::new(self.model.clone(), DeviceRate::preset("h100").unwrap());
        let samples = self.index.len();
        let planner = StepPlanner::builder(self.index.clone(), costs).global_batch(samples);
        let planner = planner.dp_size(RANKS).microbatches(samples as usize / RANKS).work(500);
        planner.blank_media(policy, self.preparer(layout).blank_tokens().unwrap())
    }

    fn loader(&self, planner: &StepPlanner, rank: usize, layout: BatchLayout) -> BalancedLoader {
        let loader = BalancedLoader::builder(planner.clone(), rank).steps(1);
        let loader = loader.preparer(Arc::new(self.preparer(layout)));
        loader.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap()
    }

    /// Returns the microbatches on all ranks.
    fn microbatches(&self, planner: StepPlannerBuilder, layout: BatchLayout) -> Vec<Microbatch> {
        let planner = planner.build().unwrap();
        let of_rank =
            |rank| -> Vec<Step> { run(self.loader(&planner, rank, layout).stream().try_collect()).unwrap() };
        (0..RANKS).flat_map(of_rank).flat_map(|step| step.microbatches).collect()
    }
}

fn ints<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [i64] {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::I64(values)) => values,
        _ => &[],
    }
}

/// Returns the number of labels that are targets.
fn targets(inputs: &ModelInputs) -> usize {
    ints(inputs, "labels").iter().filter(|label| **label != i64::from(IGNORED)).count()
}

fn has_media(inputs: &ModelInputs) -> bool {
    inputs.tensor("pixel_values").is_some() || inputs.tensor("input_features").is_some()
}

#[test]
fn every_rank_runs_the_encoder_in_every_microbatch() {
    for family in FAMILIES {
        let data = Data::new(family);
        for layout in LAYOUTS {
            let microbatches = data.microbatches(data.planner(BlankMedia::Auto, layout), layout);
            let empty = microbatches.iter().filter(|microbatch| microbatch.samples.is_empty()).count();
            assert!(empty >= 4, "{family}: {empty} microbatches lost all of their samples");
            for microbatch in &microbatches {
                let inputs = microbatch.inputs.as_ref().unwrap();
                assert!(has_media(inputs), "{family}, {layout:?}");
                assert_eq!(targets(inputs), microbatch.target_tokens as usize);
                let ids = ints(inputs, "input_ids").len() as u64;
                assert_eq!(microbatch.padding_tokens, ids - microbatch.tokens);
                if microbatch.samples.is_empty() {
                    assert!(microbatch.tokens == 0 && microbatch.padding_tokens > 0);
                    assert_eq!(microbatch.loss_scale.to_bits(), 0f64.to_bits());
                }
            }
        }
    }
}

#[test]
fn a_blank_medium_has_the_tokens_of_its_features_and_changes_no_sample() {
    for family in FAMILIES {
        let data = Data::new(family);
        let layout = BatchLayout::Packed;
        let preparer = data.preparer(layout);
        let [(_, blank_tokens)] = preparer.blank_tokens().unwrap()[..] else { panic!("one encoder") };
        let filled = data.microbatches(data.planner(BlankMedia::Always, layout), layout);
        let plain = data.microbatches(data.planner(BlankMedia::Never, layout), layout);
        for (filled, plain) in filled.iter().zip(&plain) {
            let [inputs, without] = [filled, plain].map(|one| one.inputs.as_ref().unwrap());
            assert_eq!((filled.tokens, filled.target_tokens), (plain.tokens, plain.target_tokens));
            let samples = filled.tokens as usize;
            assert_eq!(ints(inputs, "input_ids")[..samples], ints(without, "input_ids")[..samples]);
            assert_eq!(ints(inputs, "labels")[..samples], ints(without, "labels")[..samples]);
            if filled.samples.is_empty() {
                assert!(!has_media(without));
                assert_eq!((without.cu_seqlens.as_slice(), plain.padding_tokens), (&[0, 1][..], 1));
            }
            if !has_media(without) {
                assert_eq!(filled.padding_tokens, blank_tokens);
                let end = inputs.cu_seqlens[inputs.cu_seqlens.len() - 1];
                assert_eq!(inputs.cu_seqlens[inputs.cu_seqlens.len() - 2], end - blank_tokens as i32);
            }
            if let Some(grid) = inputs.tensor("image_grid_thw") {
                let patches = inputs.tensor("pixel_values").unwrap().shape[0] as i64;
                let TensorValues::I64(grid) = &grid.values else { panic!("integers") };
                assert_eq!(grid.chunks(3).map(|grid| grid.iter().product::<i64>()).sum::<i64>(), patches);
            }
        }
    }
}

#[test]
fn a_fixed_length_leaves_room_for_blank_media() {
    let (data, layout) = (Data::new("qwen2.5-vl-7b"), BatchLayout::Packed);
    let planner = data.planner(BlankMedia::Auto, layout).pad_to_tokens(64, layout);
    for microbatch in data.microbatches(planner, layout) {
        let inputs = microbatch.inputs.as_ref().unwrap();
        assert_eq!(inputs.tensor("input_ids").unwrap().shape, [1, 64]);
        assert!(has_media(inputs));
        assert_eq!(microbatch.tokens + microbatch.padding_tokens, 64);
    }
    let alone = data.planner(BlankMedia::Auto, layout).pad_to_tokens(64, layout);
    assert_eq!(
        alone.build().unwrap().pad_to().unwrap().capacity_tokens(),
        64 - 6,
        "four tokens between two markers"
    );
    let short = data.planner(BlankMedia::Auto, layout).pad_to_tokens(18, layout).build().unwrap();
    let Err(Error::Plan(PlanError::StepTooLong { tokens_needed, .. })) = short.plan(0) else {
        panic!("too short")
    };
    let enough = data.planner(BlankMedia::Auto, layout).pad_to_tokens(tokens_needed, layout);
    assert!(enough.build().unwrap().plan(0).is_ok());
}

#[test]
fn blank_media_are_for_data_with_media_on_several_ranks() {
    let data = Data::new("qwen2.5-vl-7b");
    let required_encoders = |policy, ranks| {
        data.planner(policy, BatchLayout::Packed).dp_size(ranks).build().unwrap().required_encoders().to_vec()
    };
    assert_eq!(required_encoders(BlankMedia::Auto, 2), [Module::Vision]);
    assert_eq!(required_encoders(BlankMedia::Auto, 1), []);
    assert_eq!(required_encoders(BlankMedia::Always, 1), [Module::Vision]);
    assert_eq!(required_encoders(BlankMedia::Never, 2), []);
    // These data have clips and no image.
    let heard = Data::new("qwen2-audio-7b");
    let heard = Data { model: data.model.clone(), ..heard };
    let planner = heard.planner(BlankMedia::Auto, BatchLayout::Packed).build().unwrap();
    assert_eq!(planner.required_encoders(), []);
}

#[test]
fn microbatches_come_one_by_one_and_a_step_that_fails_is_not_counted() {
    let (data, layout) = (Data::new("qwen2.5-vl-7b"), BatchLayout::Packed);
    let planner = data.planner(BlankMedia::Auto, layout).build().unwrap();
    let whole: Vec<Step> = run(data.loader(&planner, 1, layout).stream().try_collect()).unwrap();
    let loader = data.loader(&planner, 1, layout);
    let events: Vec<StepEvent> = run(loader.events().try_collect()).unwrap();
    assert_eq!(loader.state().unwrap().step, 1);
    let [StepEvent::Start { plan, microbatches }, rest @ ..] = &events[..] else { panic!("a start") };
    assert_eq!((plan.digest, *microbatches), (whole[0].plan.digest, rest.len()));
    for (event, expected) in rest.iter().zip(&whole[0].microbatches) {
        let StepEvent::Microbatch(microbatch) = event else { panic!("a microbatch") };
        assert_eq!(
            (&microbatch.plan_indices, &microbatch.inputs),
            (&expected.plan_indices, &expected.inputs)
        );
    }

    let strict = BalancedLoader::builder(planner, 1).steps(1).error_budget(ErrorBudget::new(0.0).unwrap());
    let strict = strict.preparer(Arc::new(data.preparer(layout))).build().unwrap();
    let items: Vec<Result<StepEvent>> = run(strict.events().collect());
    assert!(matches!(items.first(), Some(Ok(StepEvent::Start { .. }))));
    assert!(matches!(items.last(), Some(Err(Error::ErrorBudget(BudgetError::Share { .. })))));
    assert_eq!(strict.state().unwrap().step, 0, "the step is to be done again");
}

#[test]
fn what_does_not_fit_into_memory_is_refused_with_its_size() {
    let (data, layout) = (Data::new("qwen2.5-vl-7b"), BatchLayout::Packed);
    let planner = data.planner(BlankMedia::Auto, layout).microbatches(1).build().unwrap();
    let loader = |buffered: Option<u64>, bytes| {
        let loader = BalancedLoader::builder(planner.clone(), 0).steps(1);
        let mut loader = loader.error_budget(ErrorBudget::new(1.0).unwrap()).microbatch_bytes_max(bytes);
        if let Some(most) = buffered {
            loader = loader.buffered_bytes_max(most);
        }
        loader.preparer(Arc::new(data.preparer(layout))).build().unwrap()
    };
    // The limit holds whether a microbatch is buffered with others or loaded alone.
    for buffered in [Some(1), None, Some(1 << 40)] {
        let steps = run(loader(buffered, 1 << 30).stream().try_collect::<Vec<_>>()).unwrap();
        assert_eq!(steps.len(), 1);
        let refused = run(loader(buffered, 100_000).stream().try_collect::<Vec<_>>()).unwrap_err();
        let Error::Plan(PlanError::MicrobatchTooLarge { samples, bytes, bytes_max, .. }) = refused else {
            panic!("{refused}")
        };
        assert!(samples > 1 && bytes > bytes_max && bytes_max == 100_000);
        assert!(refused.to_string().contains("use more microbatches"), "{refused}");
    }
}

#[test]
fn a_global_batch_larger_than_the_data_is_refused_unless_asked_for() {
    let data = Data::new("qwen2.5-vl-7b");
    let planner = |samples| data.planner(BlankMedia::Auto, BatchLayout::Packed).global_batch(samples);
    let samples = data.index.len();
    let refused = planner(samples + 1).build().unwrap_err().to_string();
    assert!(refused.contains(&format!("the {samples} of the data")), "{refused}");
    let step = planner(samples + 1).repeat_samples().build().unwrap().plan(0).unwrap();
    assert_eq!(step.samples.len() as u64, samples + 1);
    let short = planner(samples + 1).validation().build().unwrap().plan(0).unwrap();
    assert_eq!(short.samples.len() as u64, samples);
}

#[test]
fn buckets_round_lengths_and_pixels_up() {
    for family in ["qwen2.5-vl-7b", "internvl3-8b"] {
        let data = Data::new(family);
        let planner = data.planner(BlankMedia::Always, BatchLayout::Packed).microbatches(3).build().unwrap();
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
        let preparer = Preparer::builder(&data.model).tokenizer(Tokenizer::open(directory).unwrap());
        let preparer = preparer.length_buckets(Buckets::Multiple(64)).sample_multiple(4);
        let preparer = preparer.media_buckets(Buckets::Multiple(32)).build().unwrap();
        let loader = BalancedLoader::builder(planner, 0).steps(1).preparer(Arc::new(preparer));
        let loader = loader.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap();
        let steps: Vec<Step> = run(loader.stream().try_collect()).unwrap();
        for microbatch in &steps[0].microbatches {
            let inputs = microbatch.inputs.as_ref().unwrap();
            let tokens = inputs.tensor("input_ids").unwrap().shape[1];
            let rows = inputs.tensor("pixel_values").unwrap().shape[0];
            assert_eq!((tokens % 64, rows % 32), (0, 0), "{family}: {tokens} tokens, {rows} rows");
            assert!(inputs.cu_seqlens.iter().all(|boundary| boundary % 4 == 0), "{:?}", inputs.cu_seqlens);
            assert_eq!(targets(inputs), microbatch.target_tokens as usize);
            assert_eq!(microbatch.tokens + microbatch.padding_tokens, tokens as u64);
            let ids = ints(inputs, "input_ids");
            let placeholder = if family == "internvl3-8b" { "<IMG_CONTEXT>" } else { "<|image_pad|>" };
            let id = data.preparer(BatchLayout::Packed).tokenizer().id(placeholder).unwrap();
            let tokens_of_rows = if family == "internvl3-8b" { rows * 256 } else { rows / 4 };
            assert_eq!(ids.iter().filter(|found| **found == i64::from(id)).count(), tokens_of_rows);
        }
    }
}

#[test]
fn the_ladder_wastes_an_eighth_at_most() {
    for length in 1..100_000 {
        let bucket = Buckets::Ladder.round_up(length);
        assert!(bucket >= length && (bucket - length) * 8 <= length.max(128), "{length}: {bucket}");
    }
    let distinct: std::collections::BTreeSet<_> =
        (4_096..8_192).map(|length| Buckets::Ladder.round_up(length)).collect();
    assert_eq!(distinct.len(), 9);
    let lengths = Buckets::Lengths(vec![512, 1_024]);
    assert_eq!([0, 1, 513, 1_025].map(|length| lengths.round_up(length)), [0, 512, 1_024, 2_048]);
}

#[test]
fn buckets_that_make_no_sense_are_refused() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
    let builder = |family: &str| {
        Preparer::builder(&ModelSpec::preset(family).unwrap()).tokenizer(Tokenizer::open(directory).unwrap())
    };
    for (refused, word) in [
        (builder("qwen2-vl-7b").length_buckets(Buckets::Multiple(0)), "length_buckets"),
        (builder("qwen2-vl-7b").media_buckets(Buckets::Lengths(Vec::new())), "media_buckets"),
        (builder("qwen2-vl-7b").sample_multiple(0), "sample_multiple_of"),
        (builder("qwen2-vl-7b").sample_multiple(2).layout(LAYOUTS[1]), "only packed"),
        (builder("llava-ov-qwen2.5-7b").media_buckets(Buckets::Ladder), "padded to each other"),
    ] {
        let error = refused.build().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let data = Data::new("qwen2.5-vl-7b");
    let fixed = data.planner(BlankMedia::Never, LAYOUTS[0]).pad_to_tokens(64, LAYOUTS[0]).build().unwrap();
    let preparer = builder("qwen2.5-vl-7b").length_buckets(Buckets::Ladder).build().unwrap();
    let error = BalancedLoader::builder(fixed, 0).preparer(Arc::new(preparer)).build().unwrap_err();
    assert!(error.to_string().contains("fixed length"), "{error}");
}
