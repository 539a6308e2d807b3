//! Checks microbatches with a fixed number of tokens, from the plan to the tensors.

use std::path::Path;
use std::sync::Arc;

use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};
use dflop_loader::error::PlanError;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::inputs::{IGNORED, ModelInputs, TensorValues};
use dflop_loader::processors::{PlainText, Preparer, PreparerBuilder, Tokenizer};
use dflop_loader::sample::{BatchLayout, PaddingSide};
use dflop_loader::{
    BalancedLoader, Error, Microbatch, PadTo, Result, Step, StepPlanner, StepPlannerBuilder, StepStream,
};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::run;
use futures::{StreamExt, TryStreamExt};

const TOKENS: u64 = 1_500;
const RANKS: usize = 2;

fn spec() -> ModelSpec {
    ModelSpec::preset("qwen2.5-vl-7b").unwrap()
}

fn model() -> CostModel {
    CostModel::new(spec(), DeviceRate::preset("h100").unwrap())
}

fn builder(data: &TempDataset) -> StepPlannerBuilder {
    StepPlanner::builder(data.index(), model()).global_batch(16).dp_size(RANKS).microbatches(2).work(2_000)
}

fn preparer() -> PreparerBuilder {
    let chatml = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/model_inputs/chatml");
    Preparer::builder(&spec()).tokenizer(Tokenizer::open(chatml).unwrap())
}

fn loader(planner: &StepPlanner, dp_rank: usize, preparer: PreparerBuilder) -> BalancedLoader {
    let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(2);
    let loader = loader.preparer(Arc::new(preparer.build().unwrap()));
    loader.error_budget(ErrorBudget::new(1.0).unwrap()).build().unwrap()
}

fn steps(loader: &BalancedLoader) -> Vec<Step> {
    run(loader.stream().try_collect()).unwrap()
}

/// Returns the microbatches on all ranks.
fn all(planner: &StepPlanner, layout: BatchLayout) -> Vec<Microbatch> {
    let of_rank = |rank| steps(&loader(planner, rank, preparer().layout(layout)));
    (0..RANKS).flat_map(of_rank).flat_map(|step| step.microbatches).collect()
}

fn inputs(microbatch: &Microbatch) -> &ModelInputs {
    microbatch.inputs.as_ref().expect("every microbatch has tensors")
}

fn ints<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [i64] {
    match &inputs.tensor(name).unwrap_or_else(|| panic!("no tensor `{name}`")).values {
        TensorValues::I64(values) => values,
        _ => panic!("`{name}` is not an integer tensor"),
    }
}

fn shape<'a>(inputs: &'a ModelInputs, name: &str) -> &'a [usize] {
    &inputs.tensor(name).unwrap_or_else(|| panic!("no tensor `{name}`")).shape
}

/// Returns the LLM time for a text without target tokens.
fn text_ns(tokens: u64) -> u64 {
    let shape = SampleShape { text_tokens: tokens as u32, ..SampleShape::default() };
    if tokens == 0 { 0 } else { model().predict(&shape).unwrap().module_ns.as_slice()[1] }
}

#[test]
fn packed_microbatches_have_one_shape_on_all_ranks_and_learn_what_they_did_before() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let planner = builder(&data).pad_to_tokens(TOKENS, BatchLayout::Packed).build().unwrap();
    let (padded, plain) =
        (all(&planner, BatchLayout::Packed), all(&builder(&data).build().unwrap(), BatchLayout::Packed));
    assert_eq!(padded.len(), 8);
    let row = TOKENS as usize;
    for microbatch in &padded {
        let inputs = inputs(microbatch);
        for name in ["input_ids", "labels", "mm_token_type_ids"] {
            assert_eq!(shape(inputs, name), [1, row], "{name}");
        }
        assert_eq!(shape(inputs, "position_ids"), [4, 1, row]);
        assert_eq!(microbatch.tokens + microbatch.padding_tokens, TOKENS);
        assert_eq!(inputs.tokens, microbatch.tokens);
        let (start, missing) = (microbatch.tokens as usize, microbatch.padding_tokens as usize);
        assert!(missing > 0);
        let samples = microbatch.samples.len();
        assert_eq!(inputs.cu_seqlens.len(), samples + 2);
        assert_eq!(inputs.cu_seqlens[samples..], [start as i32, row as i32]);
        assert!(inputs.max_seqlen as usize >= missing);
        assert!(ints(inputs, "labels")[start..].iter().all(|&label| label == i64::from(IGNORED)));
        let learned = ints(inputs, "labels").iter().filter(|&&label| label != i64::from(IGNORED)).count();
        assert_eq!((learned as u64, inputs.target_tokens), (microbatch.target_tokens, learned as u64));
        let pad_id = ints(inputs, "input_ids")[start];
        assert!(ints(inputs, "input_ids")[start..].iter().all(|&id| id == pad_id));
        assert!(ints(inputs, "mm_token_type_ids")[start..].iter().all(|&kind| kind == 0));
        let counted: Vec<i64> = (0..missing as i64).collect();
        for axis in ints(inputs, "position_ids").chunks(row) {
            assert_eq!(axis[start..], counted);
        }
    }
    let sums = |all: &[Microbatch]| {
        let scales = all.iter().map(|microbatch| microbatch.loss_scale).sum::<f64>();
        let samples = all.iter().map(|microbatch| microbatch.samples.len()).sum::<usize>();
        (scales, samples, all.iter().map(|microbatch| microbatch.target_tokens).sum::<u64>())
    };
    let ((scale, samples, targets), (plain_scale, plain_samples, plain_targets)) =
        (sums(&padded), sums(&plain));
    assert_eq!((samples, targets), (plain_samples, plain_targets));
    assert!((scale - plain_scale).abs() < 1e-9);
}

#[test]
fn padded_rows_have_the_fixed_length_and_their_padding_is_in_the_cost_of_their_samples() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    for side in [PaddingSide::Left, PaddingSide::Right] {
        let layout = BatchLayout::Padded { side };
        let planner = builder(&data).pad_to_tokens(400, layout).build().unwrap();
        for microbatch in all(&planner, layout) {
            let (inputs, rows) = (inputs(&microbatch), microbatch.samples.len());
            for name in ["input_ids", "labels", "attention_mask", "mm_token_type_ids"] {
                assert_eq!(shape(inputs, name), [rows, 400], "{name}");
            }
            assert_eq!(ints(inputs, "attention_mask").iter().sum::<i64>() as u64, microbatch.tokens);
            assert_eq!(microbatch.padding_tokens, 400 * rows as u64 - microbatch.tokens);
            assert_eq!(inputs.cu_seqlens.len(), rows + 1);
            let llm_ns: u64 = microbatch.costs.iter().map(|cost| cost.module_ns.as_slice()[1]).sum();
            assert_eq!(microbatch.module_ns[1], llm_ns);
            for cost in &microbatch.costs {
                let shape = SampleShape {
                    text_tokens: cost.tokens,
                    target_tokens: cost.target_tokens,
                    ..SampleShape::default()
                };
                let own = model().predict(&shape).unwrap().module_ns.as_slice()[1];
                let padding = text_ns(400 - u64::from(cost.tokens));
                assert_eq!(cost.module_ns.as_slice()[1], own + padding);
            }
        }
    }
}

#[test]
fn costs_and_makespans_count_padding() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    for strategy in [Strategy::SEARCH, Strategy::ROUND_ROBIN, Strategy::MULTI_LPT, Strategy::KARMARKAR_KARP] {
        let builder = builder(&data).strategy(strategy).stages(vec![1, 2]);
        let planner = builder.pad_to_tokens(TOKENS, BatchLayout::Packed).build().unwrap();
        for step in 0..4 {
            let plan = planner.plan(step).unwrap();
            let tokens = |places: &Vec<u32>| -> u64 {
                places.iter().map(|&place| u64::from(plan.costs[place as usize].tokens)).sum()
            };
            assert!(plan.ranks.iter().flatten().all(|places| tokens(places) <= TOKENS));
            let placed: usize = plan.ranks.iter().flatten().map(Vec::len).sum();
            assert_eq!(placed, 16, "{strategy}");
            // Two microbatches, each through two LLM stages with half of the work.
            let llm_ns = |places: &Vec<u32>| -> u64 {
                let of_samples =
                    places.iter().map(|&place| plan.costs[place as usize].module_ns.as_slice()[1]);
                of_samples.sum::<u64>() + text_ns(TOKENS - tokens(places))
            };
            let slowest = plan.ranks.iter().map(|rank| rank.iter().map(llm_ns).sum::<u64>()).max().unwrap();
            assert!(plan.makespan_ns >= slowest / 2, "{} {slowest}", plan.makespan_ns);
            assert!(plan.bound.ns <= plan.makespan_ns && plan.bound.ns > 0, "{strategy}");
        }
        for microbatch in steps(&loader(&planner, 1, preparer())).iter().flat_map(|step| &step.microbatches) {
            let own: u64 = microbatch.costs.iter().map(|cost| cost.module_ns.as_slice()[1]).sum();
            let padding = text_ns(TOKENS - microbatch.planned_tokens);
            assert_eq!(microbatch.module_ns[1], own + padding);
            assert!(microbatch.cost_seconds() * 1e9 >= padding as f64);
        }
    }
}

/// With an equal LLM length in every microbatch, the search is free to balance the rest.
#[test]
fn the_search_is_no_worse_than_others_by_the_makespan_with_padding() {
    let data = TempDataset::new(1, 96, Compression::Plain);
    let planner = builder(&data).global_batch(48).microbatches(4).pad_to_tokens(TOKENS, BatchLayout::Packed);
    let makespan = |strategy| -> u64 {
        let planner = planner.clone().strategy(strategy).build().unwrap();
        (0..4).map(|step| planner.plan(step).unwrap().makespan_ns).sum()
    };
    let [searched, blind, lpt] = [Strategy::SEARCH, Strategy::ROUND_ROBIN, Strategy::MULTI_LPT].map(makespan);
    assert!(searched < blind && searched <= lpt, "{searched} {blind} {lpt}");
}

#[test]
fn a_microbatch_without_a_good_sample_is_all_padding() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    for layout in [BatchLayout::Packed, BatchLayout::Padded { side: PaddingSide::Right }] {
        // Six samples on two ranks with four microbatches: some microbatches are empty.
        let builder = StepPlanner::builder(data.index(), model()).dp_size(2).microbatches(4);
        let builder = builder.global_batch(8).validation().pad_to_tokens(600, layout);
        let planner = builder.build().unwrap();
        let (mut empty, mut samples) = (0, 0);
        for rank in 0..2 {
            let loader = BalancedLoader::builder(planner.clone(), rank);
            let preparer = Arc::new(preparer().layout(layout).build().unwrap());
            for step in steps(&loader.preparer(preparer).build().unwrap()) {
                assert_eq!(step.microbatches.len(), 4);
                for microbatch in &step.microbatches {
                    samples += microbatch.samples.len();
                    assert_eq!(shape(inputs(microbatch), "input_ids")[1], 600);
                    if microbatch.samples.is_empty() {
                        empty += 1;
                        check_empty(microbatch);
                    }
                }
            }
        }
        assert!(empty >= 2 && samples == 6, "{empty} {samples}");
    }
}

fn check_empty(microbatch: &Microbatch) {
    let inputs = inputs(microbatch);
    assert_eq!((microbatch.tokens, microbatch.padding_tokens), (0, 600));
    assert_eq!(microbatch.loss_scale.to_bits(), 0f64.to_bits());
    assert!(microbatch.loss_scale_sum > 0.0);
    assert_eq!(inputs.cu_seqlens, [0, 600]);
    assert_eq!((inputs.tokens, inputs.target_tokens), (0, 0));
    assert_eq!(shape(inputs, "labels"), [1, 600]);
    assert!(ints(inputs, "labels").iter().all(|&label| label == i64::from(IGNORED)));
    // Attention over an empty row would produce NaN.
    if inputs.tensor("attention_mask").is_some() {
        assert!(ints(inputs, "attention_mask").iter().all(|&is_seen| is_seen == 1));
    }
    assert_eq!(microbatch.module_ns, [0, text_ns(600)]);
}

#[test]
fn a_microbatch_over_the_length_ends_the_stream_before_its_step() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let planner = builder(&data).pad_to_tokens(TOKENS, BatchLayout::Packed).build().unwrap();
    // A template that adds many more tokens than the estimate assumes.
    let template = "{% for m in messages %}{{ 'word ' * 300 }}{{ m.content }}<|im_end|>{% endfor %}";
    let question = PlainText::Answer { question: "What?".into() };
    let wordy = loader(&planner, 1, preparer().chat_template(template).plain_text(question));
    let stream: StepStream = wordy.stream();
    let items: Vec<Result<Step>> = run(stream.collect());
    let [Err(error)] = &items[..] else { panic!("one error and no step: {}", items.len()) };
    let text = error.to_string();
    let Error::Plan(PlanError::MicrobatchTooLong {
        step, dp_rank, tokens, pad_to_tokens, tokens_needed, ..
    }) = error
    else {
        panic!("{text}")
    };
    assert_eq!((*step, *dp_rank, *pad_to_tokens), (0, 1, TOKENS));
    assert!(*tokens > TOKENS && tokens_needed >= tokens);
    for word in ["tokenizer", "long_sample", "fixed length", &tokens.to_string()] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_step_that_does_not_fit_says_which_length_would_do() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    for strategy in [Strategy::SEARCH, Strategy::ROUND_ROBIN] {
        let planner =
            |tokens| builder(&data).strategy(strategy).pad_to_tokens(tokens, BatchLayout::Packed).build();
        let error = planner(60).unwrap().plan(0).unwrap_err();
        let Error::Plan(PlanError::StepTooLong { tokens, microbatches, tokens_max, tokens_needed, .. }) =
            error
        else {
            panic!("{error}")
        };
        assert_eq!((microbatches, tokens_max), (4, 60));
        assert!(tokens > 240 && tokens_needed >= tokens.div_ceil(4));
        assert!(error.to_string().contains("sample `sample-"), "{error}");
        assert!(planner(tokens_needed).unwrap().plan(0).is_ok());
        assert!(planner(tokens_needed - 1).unwrap().plan(0).is_err());
        let short = planner(tokens.div_ceil(4) - 1).unwrap().plan(0).unwrap_err();
        assert!(matches!(short, Error::Plan(PlanError::StepTooLong { .. })), "{short}");
    }
    let layout = BatchLayout::Padded { side: PaddingSide::Right };
    let error = builder(&data).pad_to_tokens(60, layout).build().unwrap().plan(0).unwrap_err();
    let Error::Plan(PlanError::StepTooLong { tokens_needed, .. }) = error else { panic!("{error}") };
    assert!(builder(&data).pad_to_tokens(tokens_needed, layout).build().unwrap().plan(0).is_ok());
}

#[test]
fn a_lower_token_cap_leaves_room_and_settings_have_to_fit() {
    let data = TempDataset::new(1, 32, Compression::Plain);
    let caps = Caps { tokens_max: Some(1_200), bytes_max: None };
    let planner = builder(&data).caps(caps).pad_to_tokens(TOKENS, BatchLayout::Packed).build().unwrap();
    assert_eq!(
        planner.pad_to(),
        Some(PadTo { tokens: TOKENS, layout: BatchLayout::Packed, blank_tokens: 0 })
    );
    let planned = all(&planner, BatchLayout::Packed);
    assert!(planned.iter().all(|microbatch| microbatch.planned_tokens <= 1_200));
    let error = BalancedLoader::builder(planner, 0)
        .preparer(Arc::new(
            preparer().layout(BatchLayout::Padded { side: PaddingSide::Left }).build().unwrap(),
        ))
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("pad_to_tokens"), "{error}");
    for tokens in [0, 1 << 31] {
        let error = builder(&data).pad_to_tokens(tokens, BatchLayout::Packed).build().unwrap_err();
        assert!(matches!(error, Error::Config { setting: "pad_to_tokens", .. }), "{error}");
    }
}
