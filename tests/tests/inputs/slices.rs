//! Checks that the slices of all ranks put together are the whole samples.

use std::collections::HashMap;
use std::sync::Arc;

use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::{CostModel, DeviceRate, KeyExchange, KeyExchangeKind, ModelSpec};
use dflop_loader::error::PlanError;
use dflop_loader::flow::{ErrorBudget, LoaderStage};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::inputs::{IGNORED, ModelInputs, TensorValues};
use dflop_loader::processors::{Buckets, Preparer, Tokenizer};
use dflop_loader::sample::{BatchLayout, PaddingSide};
use dflop_loader::shard::expand_shards;
use dflop_loader::{
    BalancedLoader, ContextGroups, Error, LoaderState, Step, StepPlanner, StepPlannerBuilder, Synchronization,
};
use dflop_tests::media::png;
use dflop_tests::run;
use dflop_tests::tar::TarBytes;
use futures::{StreamExt, TryStreamExt};

const FAMILIES: [&str; 3] = ["qwen2-vl-7b", "internvl3-8b", "llava-ov-qwen2.5-7b"];
const SAMPLES: u64 = 12;
const WORDS: [&str; 8] = ["a", "kite", "over", "the", "sea", "and", "its", "shadow"];

struct Data {
    _directory: tempfile::TempDir,
    index: Arc<Index>,
    model: ModelSpec,
}

impl Data {
    /// Writes texts of random lengths, most of them with images of random sizes.
    ///
    /// - `damaged`: sample whose last image ends after the header
    fn new(family: &str, damaged: Option<u64>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (mut tar, mut random) = (TarBytes::new(), SplitMix64::new(3));
        for number in 0..SAMPLES {
            let text: Vec<&str> = (0..=random.below(60)).map(|_| WORDS[random.below(WORDS.len())]).collect();
            let images = random.below(4);
            for image in 0..images {
                let [width, height] = [0; 2].map(|_| 28 + random.below(400) as u32);
                let mut medium = png(width, height, image as u32);
                if damaged == Some(number) && image + 1 == images {
                    medium.truncate(48);
                }
                tar = tar.file(&format!("{number:02}.{image}.png"), &medium);
            }
            tar = tar.file(&format!("{number:02}.txt"), text.join(" ").as_bytes());
        }
        let shard = directory.path().join("media.tar");
        std::fs::write(&shard, tar.finish()).unwrap();
        let shards = expand_shards(&[shard.to_str().unwrap()]).unwrap();
        let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
        Self { _directory: directory, index, model: ModelSpec::preset(family).unwrap() }
    }

    fn preparer(&self) -> dflop_loader::processors::PreparerBuilder {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/golden/model_inputs/chatml");
        Preparer::builder(&self.model).tokenizer(Tokenizer::open(directory).unwrap())
    }

    fn planner(&self, dp_size: usize, microbatches: usize) -> StepPlannerBuilder {
        let costs = CostModel::new(self.model.clone(), DeviceRate::preset("h100").unwrap());
        let planner = StepPlanner::builder(self.index.clone(), costs).global_batch(SAMPLES).work(2_000);
        let planner = planner.one_device(Synchronization::PerMicrobatch);
        planner.dp_size(dp_size).microbatches(microbatches)
    }

    fn steps(&self, planner: &StepPlanner, rank: usize, steps: u64) -> Vec<Step> {
        let loader = BalancedLoader::builder(planner.clone(), rank).steps(steps);
        let loader = loader.preparer(Arc::new(self.preparer().build().unwrap())).build().unwrap();
        run(loader.stream().try_collect()).unwrap()
    }

    /// Returns the inputs of every sample alone, by key.
    fn alone(&self) -> HashMap<String, ModelInputs> {
        let planner = self.planner(1, SAMPLES as usize).build().unwrap();
        let steps = self.steps(&planner, 0, 1);
        let microbatches = steps.into_iter().flat_map(|step| step.microbatches);
        microbatches.map(|mut one| (one.samples.remove(0).key, one.inputs.unwrap())).collect()
    }
}

/// Groups whose messages take no time.
fn groups(least: usize, most: usize) -> ContextGroups {
    let exchange = KeyExchange { kind: KeyExchangeKind::Ring, link: None, element_bytes: 2 };
    ContextGroups { ranks: [least, most], exchange }
}

fn ints<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [i64] {
    match inputs.tensor(name).map(|tensor| &tensor.values) {
        Some(TensorValues::I64(values)) => values,
        _ => &[],
    }
}

fn floats(inputs: &ModelInputs) -> &[f32] {
    match inputs.tensor("pixel_values").map(|tensor| &tensor.values) {
        Some(TensorValues::F32(values)) => values,
        _ => &[],
    }
}

/// Returns the labels of the next tokens.
fn shifted(labels: &[i64]) -> Vec<i64> {
    labels[1..].iter().copied().chain([i64::from(IGNORED)]).collect()
}

/// Returns the values of a sequence in every axis of a tensor.
fn axes<'a>(inputs: &'a ModelInputs, name: &str) -> Vec<&'a [i64]> {
    let tokens = ints(inputs, "input_ids").len();
    ints(inputs, name).chunks(tokens).collect()
}

/// Puts the slices of a step together and compares them with whole samples; returns the number of split
/// samples.
fn check(data: &Data, alone: &HashMap<String, ModelInputs>, ranks: &[Step]) -> usize {
    let context = ranks[0].plan.context.as_ref().unwrap();
    let targets = |inputs: &ModelInputs| inputs.target_tokens;
    let all: u64 = ranks.iter().flat_map(|step| &step.microbatches).map(|one| one.target_tokens).sum();
    assert_eq!(all, alone.values().map(targets).sum::<u64>(), "{}", data.model.name);
    for (at, place) in context.places.iter().enumerate().filter(|(_, place)| place.is_split()) {
        let mut whole: HashMap<&str, Vec<Vec<i64>>> = HashMap::new();
        let (mut order, mut key) = (Vec::new(), String::new());
        let mut length = 0;
        for rank in place.ranks.clone() {
            let microbatch = &ranks[rank].microbatches[place.microbatch];
            let inputs = microbatch.inputs.as_ref().unwrap();
            let own = microbatch.plan_indices.iter().position(|index| *index as usize == at).unwrap();
            key.clone_from(&microbatch.samples[own].key);
            let groups = &microbatch.context.as_ref().unwrap().groups;
            let group = groups.iter().find(|group| group.ranks == place.ranks).unwrap();
            let inside = own - group.samples.start;
            let [first, end] = [inside, inside + 1].map(|at| i64::from(group.cu_seqlens[at]));
            length = group.lengths[inside] as usize;
            let [row, next] = [own, own + 1].map(|at| inputs.cu_seqlens[at] as usize);
            assert!(group.rows.start <= row && next <= group.rows.end);
            let positions = &group.positions[row - group.rows.start..next - group.rows.start];
            assert!(positions.iter().all(|position| (first..end).contains(position)));
            order.extend(positions.iter().map(|position| (position - first) as usize));
            for name in ["input_ids", "labels", "shift_labels", "position_ids", "mm_token_type_ids"] {
                for (axis, values) in axes(inputs, name).into_iter().enumerate() {
                    let known = whole.entry(name).or_default();
                    known.resize(known.len().max(axis + 1), Vec::new());
                    known[axis].extend(&values[row..next]);
                }
            }
        }
        let reference = &alone[&key];
        assert_eq!(length, ints(reference, "input_ids").len());
        assert!(order.len().is_multiple_of(2 * place.ranks.len()) && order.len() < length + 16);
        let put = |values: &[i64]| {
            let mut placed = vec![0; values.len()];
            order.iter().zip(values).for_each(|(place, value)| placed[*place] = *value);
            placed
        };
        for (name, axes_found) in &whole {
            let expected = match *name {
                "shift_labels" => vec![shifted(ints(reference, "labels"))],
                name => axes(reference, name).into_iter().map(<[i64]>::to_vec).collect(),
            };
            assert_eq!(axes_found.len(), expected.len(), "{name}");
            for (found, expected) in axes_found.iter().zip(expected) {
                let found = put(found);
                assert_eq!(found[..length], expected[..], "{name} of {key}");
                if name.ends_with("labels") {
                    assert!(found[length..].iter().all(|label| *label == i64::from(IGNORED)));
                }
            }
        }
    }
    context.split_samples()
}

#[test]
fn slices_put_together_are_the_whole_samples() {
    for family in FAMILIES {
        let data = Data::new(family, None);
        let (alone, mut split) = (data.alone(), 0);
        for (ranks, least, most) in [(2, 1, 2), (4, 1, 4), (4, 2, 2), (8, 1, 8), (8, 4, 4)] {
            let planner = data.planner(ranks, 1).context(groups(least, most)).build().unwrap();
            let steps: Vec<Step> = (0..ranks).flat_map(|rank| data.steps(&planner, rank, 1)).collect();
            let digests: Vec<u64> = steps.iter().map(|step| step.plan.digest.to_u64()).collect();
            assert!(digests.iter().all(|digest| *digest == digests[0]));
            let own = check(&data, &alone, &steps);
            assert!(least == 1 || own == SAMPLES as usize, "{family}: {own}");
            split += if least == 1 { own } else { 0 };
            check_pixels(&alone, &steps, family);
        }
        assert!(split > 0, "costs split no sample of {family}");
    }
}

/// Puts the pixels of all ranks together, for families whose tensors join the rows of all media.
fn check_pixels(alone: &HashMap<String, ModelInputs>, ranks: &[Step], family: &str) {
    if family.starts_with("llava") {
        return;
    }
    // Rows of each rank that are not taken yet.
    let mut rest: Vec<&[f32]> =
        ranks.iter().map(|step| floats(step.microbatches[0].inputs.as_ref().unwrap())).collect();
    let context = ranks[0].plan.context.as_ref().unwrap();
    let mut found: HashMap<u32, Vec<f32>> = HashMap::new();
    for (rank, step) in ranks.iter().enumerate() {
        for &at in &step.microbatches[0].plan_indices {
            let place = &context.places[at as usize];
            let key = &step.microbatches[0].samples
                [step.microbatches[0].plan_indices.iter().position(|own| *own == at).unwrap()]
            .key;
            let reference = &alone[key];
            let Some(pixels) = reference.tensor("pixel_values") else { continue };
            let row_values: usize = pixels.shape[1..].iter().product();
            let grids = ints(reference, "image_grid_thw");
            for part in &place.media {
                let rows = match grids.get(3 * part.index as usize..3 * part.index as usize + 3) {
                    Some(grid) => grid.iter().product::<i64>() as usize,
                    None => part.parts_in_medium as usize,
                };
                let own = rows / part.parts_in_medium as usize * (part.parts.end - part.parts.start) as usize;
                if part.rank == rank {
                    let (taken, others) = rest[rank].split_at(own * row_values);
                    rest[rank] = others;
                    // Parts are in the order of the media, and ranks in the order of parts or later.
                    found.entry(at).or_default().extend(taken);
                }
            }
        }
    }
    for (at, values) in found {
        let step = ranks.iter().find(|step| step.microbatches[0].plan_indices.contains(&at)).unwrap();
        let own = step.microbatches[0].plan_indices.iter().position(|own| *own == at).unwrap();
        let expected = floats(&alone[&step.microbatches[0].samples[own].key]);
        let sorted = |values: &[f32]| {
            let mut bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
            bits.sort_unstable();
            bits
        };
        assert_eq!(sorted(&values), sorted(expected), "{family}, sample {at}");
    }
    assert!(rest.iter().all(|values| values.is_empty()), "pixels that belong to no medium");
}

#[test]
fn a_rank_reads_only_the_images_that_it_encodes() {
    let data = Data::new(FAMILIES[0], None);
    let planner = data.planner(4, 1).context(groups(4, 4)).build().unwrap();
    let whole = data.planner(1, 1).build().unwrap();
    let read = |planner: &StepPlanner, rank: usize| -> u64 {
        let loader = BalancedLoader::builder(planner.clone(), rank).steps(1);
        let loader = loader.preparer(Arc::new(data.preparer().build().unwrap())).build().unwrap();
        let _: Vec<Step> = run(loader.stream().try_collect()).unwrap();
        let stages = loader.metrics().stages;
        stages.iter().filter(|stage| stage.stage == LoaderStage::Read).map(|stage| stage.bytes).sum()
    };
    let (all, split) = (read(&whole, 0), (0..4).map(|rank| read(&planner, rank)).sum::<u64>());
    let texts = 4 * SAMPLES * 60 * 7;
    assert!(split > all && split < all + texts, "{split} bytes of {all}");
}

#[test]
fn a_run_resumes_inside_with_the_same_slices() {
    let data = Data::new(FAMILIES[0], None);
    let build = |state: Option<LoaderState>| {
        let planner = data.planner(4, 1).context(groups(1, 4));
        let planner = match state {
            Some(state) => planner.restore(state),
            None => planner,
        };
        planner.build().unwrap()
    };
    let preparer = Arc::new(data.preparer().build().unwrap());
    let first = BalancedLoader::builder(build(None), 1).preparer(preparer.clone()).build().unwrap();
    let whole: Vec<Step> = run(first.stream().take(3).try_collect()).unwrap();
    let begun = BalancedLoader::builder(build(None), 1).preparer(preparer.clone()).build().unwrap();
    let _: Vec<Step> = run(begun.stream().take(1).try_collect()).unwrap();
    let resumed = build(Some(begun.state().unwrap()));
    let resumed = BalancedLoader::builder(resumed, 1).preparer(preparer).build().unwrap();
    let rest: Vec<Step> = run(resumed.stream().take(2).try_collect()).unwrap();
    for (expected, found) in whole[1..].iter().zip(&rest) {
        assert_eq!(expected.plan.digest, found.plan.digest);
        assert_eq!(expected.microbatches[0].inputs, found.microbatches[0].inputs);
        assert_eq!(expected.microbatches[0].context, found.microbatches[0].context);
    }
}

#[test]
fn a_damaged_image_of_a_split_sample_ends_the_stream_where_it_is_encoded() {
    let data = Data::new(FAMILIES[0], Some(0));
    let planner = data.planner(2, 1).context(groups(2, 2)).build().unwrap();
    let outcomes = [0, 1].map(|rank| {
        let loader = BalancedLoader::builder(planner.clone(), rank).steps(1);
        let loader = loader.error_budget(ErrorBudget::new(1.0).unwrap());
        let loader = loader.preparer(Arc::new(data.preparer().build().unwrap())).build().unwrap();
        run(loader.stream().try_collect::<Vec<Step>>())
    });
    let failed: Vec<&Error> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "one rank encodes the image");
    assert!(
        matches!(failed[0], Error::Plan(PlanError::SplitSample { first: 0, last: 1, .. })),
        "{}",
        failed[0]
    );
}

#[test]
fn settings_without_slices_are_refused_by_name() {
    let data = Data::new(FAMILIES[0], None);
    let planner = data.planner(2, 1).context(groups(1, 2)).build().unwrap();
    let side = PaddingSide::Left;
    for (preparer, reason) in [
        (None, "set a tokenizer"),
        (Some(data.preparer().layout(BatchLayout::Padded { side })), "packed layout"),
        (Some(data.preparer().length_buckets(Buckets::Ladder)), "no buckets"),
    ] {
        let mut loader = BalancedLoader::builder(planner.clone(), 0);
        if let Some(preparer) = preparer {
            loader = loader.preparer(Arc::new(preparer.build().unwrap()));
        }
        let refused = loader.build().unwrap_err();
        assert!(
            matches!(&refused, Error::Config { setting: "context", reason: found } if found.contains(reason)),
            "{refused}"
        );
    }
    for wrong in [groups(1, 3), groups(4, 4), groups(2, 1)] {
        assert!(data.planner(2, 1).context(wrong).build().is_err(), "{wrong:?}");
    }
}
