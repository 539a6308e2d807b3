//! Route properties: everything sent arrives, nothing else does, and gradients return the same way.

use dflop_device::Cpu;
use dflop_device::ops::elementwise::CopyRange;
use dflop_executor::pipeline::{MediumPlan, MicrobatchPlan, ModuleParallelism, PipelineStepPlan, RouteEnd};
use dflop_models::ModuleKind;
use proptest::prelude::*;

use super::batch::{LLM_LAYERS, with_encoders};
use super::job::Setting;
use crate::claim::claims;

claims! {
    cpu:
    a_route_and_its_transpose_are_the_identity,
}

const WIDTH: usize = 3;

/// Extracts a message from rows.
fn pack(ranges: &[CopyRange], rows: &[f32]) -> Vec<f32> {
    let mut message = vec![f32::NAN; ranges.iter().map(|range| range.len).sum()];
    for &CopyRange { from, to, len } in ranges {
        message[to..to + len].copy_from_slice(&rows[from..from + len]);
    }
    message
}

/// Writes a message to rows.
fn unpack(ranges: &[CopyRange], message: &[f32], rows: &mut [f32]) {
    for &CopyRange { from, to, len } in ranges {
        rows[from..from + len].copy_from_slice(&message[to..to + len]);
    }
}

/// DP sizes of encoder and LLM, and the media in every microbatch: number of tokens (0 among them), and
/// whether the second encoder takes the medium.
fn steps() -> impl Strategy<Value = ([usize; 2], Vec<Vec<(usize, bool)>>)> {
    let sizes = prop::sample::select(vec![[1, 4], [4, 1], [3, 2], [4, 4], [5, 3], [1, 1], [2, 3]]);
    let media = || prop::collection::vec((0_usize..7, prop::bool::weighted(0.3)), 0..5);
    (sizes, 1_usize..4).prop_flat_map(move |(sizes, rounds)| {
        (Just(sizes), prop::collection::vec(media(), rounds * sizes[1]))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    fn a_route_and_its_transpose_are_the_identity(([encoders, llm], media) in steps()) {
        let model = with_encoders(true, true);
        let encoder = |module| ModuleParallelism::even(module, 2, 1).dp_size(encoders);
        let decoder = ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 1).dp_size(llm);
        let modules = vec![encoder(ModuleKind::Vision), encoder(ModuleKind::Audio), decoder];
        let job = Setting::<Cpu>::new(&model, modules).job().unwrap();
        let medium = |&(tokens, is_audio): &(usize, bool)| {
            let module = if is_audio { ModuleKind::Audio } else { ModuleKind::Vision };
            MediumPlan { module, tokens, cost_ns: tokens as u64 * 10 }
        };
        let microbatch = |media: &Vec<(usize, bool)>| {
            let media: Vec<MediumPlan> = media.iter().map(medium).collect();
            MicrobatchPlan { tokens: 9 + media.iter().map(|medium| medium.tokens).sum::<usize>(), media }
        };
        let microbatches: Vec<MicrobatchPlan> = media.iter().map(microbatch).collect();
        let plan = PipelineStepPlan::new(&job, 0, 1, microbatches.clone()).unwrap();
        prop_assert_eq!(&plan, &PipelineStepPlan::new(&job, 0, 1, microbatches.clone()).unwrap());

        // Every row in a source has a different value.
        let mut arrived: Vec<Vec<f32>> =
            (0..media.len()).map(|at| vec![-1.0; plan.media_tokens(at as u32) * WIDTH]).collect();
        let mut seen = 0;
        for module in [ModuleKind::Vision, ModuleKind::Audio] {
            let route = plan.route(&job, module).unwrap();
            let planned = microbatches.iter().flat_map(|own| &own.media).filter(|own| own.module == module);
            prop_assert_eq!(route.rows().len(), planned.count());
            let sources: Vec<u32> =
                (0..encoders).flat_map(|replica| plan.replica_microbatches(&job, module, replica)).collect();
            for &source in &sources {
                let first = seen as f32;
                let sent: Vec<f32> =
                    (0..route.source_tokens(source) * WIDTH).map(|element| first + element as f32).collect();
                seen += sent.len();
                let mut back = vec![-1.0; sent.len()];
                let round = source as usize / encoders;
                for destination in 0..media.len() as u32 {
                    let pair = [source, destination];
                    if destination as usize / llm != round {
                        prop_assert_eq!(route.between(source, destination).count(), 0);
                    }
                    let message = pack(&route.elements(pair, RouteEnd::Source, WIDTH), &sent);
                    prop_assert_eq!(message.len(), route.tokens_between(source, destination) * WIDTH);
                    let there = &mut arrived[destination as usize];
                    unpack(&route.elements(pair, RouteEnd::Destination, WIDTH), &message, there);
                    let returned = pack(&route.elements(pair, RouteEnd::Destination, WIDTH), there);
                    prop_assert_eq!(&returned, &message);
                    unpack(&route.elements(pair, RouteEnd::Source, WIDTH), &returned, &mut back);
                }
                prop_assert_eq!(back, sent);
            }
        }
        // Every row got exactly one value.
        let mut values: Vec<i64> = arrived.concat().into_iter().map(|value| value as i64).collect();
        values.sort_unstable();
        prop_assert!((0..).zip(&values).all(|(at, &value)| value == at));
        prop_assert_eq!(values.len(), seen);
    }
}
