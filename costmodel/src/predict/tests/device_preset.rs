//! Checks layer times on known devices by TP degree.

use super::super::*;
use crate::Module;
use crate::model::ModelSpec;

const TILE: u32 = 729;

fn spec() -> ModelSpec {
    ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap()
}

fn presets() -> impl Iterator<Item = DevicePreset> {
    DeviceRate::preset_names().iter().map(|name| DevicePreset::named(name).unwrap())
}

/// Returns a SigLIP layer's time over a tile on every rank in a TP group, in GPU nanoseconds.
fn siglip_gpu_ns(preset: &DevicePreset, tp: u32) -> f64 {
    let times = LayerTimes::from_preset(&spec(), Module::Vision, tp, preset, TILE);
    times.layer_ns(1.0, TILE.into()) * f64::from(tp)
}

#[test]
fn a_whole_module_of_the_reference_width_takes_the_time_of_the_rate() {
    // The model whose rates were measured.
    let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
    for preset in presets() {
        let stated = LayerTimes::from_rate(&spec, Module::Vision, 1, preset.rate(), TILE);
        let own = LayerTimes::from_preset(&spec, Module::Vision, 1, &preset, TILE);
        for (own, stated) in [
            (own.layer_ns(5.0, 729.0), stated.layer_ns(5.0, 729.0)),
            (own.outside_layers_ns(5.0, 729.0), stated.outside_layers_ns(5.0, 729.0)),
        ] {
            assert!((own / stated - 1.0).abs() < 1e-12, "{own} {stated}");
        }
        let llm = |times: &LayerTimes| times.layer_ns(1.0, 4096.0) + times.attention_ns(1.0, 4096.0);
        let stated = llm(&LayerTimes::from_rate(&spec, Module::Llm, 1, preset.rate(), 0));
        let own = llm(&LayerTimes::from_preset(&spec, Module::Llm, 1, &preset, 0));
        assert!((own / stated - 1.0).abs() < 0.01, "keys and values are narrower: {own} {stated}");
    }
}

#[test]
fn narrow_shards_are_slower_per_gpu() {
    for preset in presets() {
        let gpu_ns = [1, 2, 4, 8, 16].map(|tp| siglip_gpu_ns(&preset, tp));
        assert!(gpu_ns.windows(2).all(|pair| pair[0] < pair[1]), "{gpu_ns:?}");
        // A group is still faster than a single GPU in it.
        assert!(gpu_ns[2] / 4.0 < gpu_ns[1] / 2.0 && gpu_ns[1] / 2.0 < gpu_ns[0], "{gpu_ns:?}");
    }
}

#[test]
fn siglip_at_tp_4_loses_what_an_llm_does_not() {
    for name in ["a100", "h100", "h200", "b200"] {
        let preset = DevicePreset::named(name).unwrap();
        let siglip = siglip_gpu_ns(&preset, 4) / siglip_gpu_ns(&preset, 1) - 1.0;
        let llm_ns = |tp: u32| {
            let times = LayerTimes::from_preset(&spec(), Module::Llm, tp, &preset, 0);
            times.layer_ns(1.0, 4096.0) * f64::from(tp)
        };
        let llm = llm_ns(4) / llm_ns(1) - 1.0;
        assert!((0.06..0.4).contains(&siglip), "{name}: {siglip}");
        assert!(llm > 0.0 && llm < 0.75 * siglip, "{name}: {llm} {siglip}");
    }
}

#[test]
fn attention_is_cut_by_heads_and_loses_nothing() {
    let a100 = DevicePreset::named("a100").unwrap();
    let of = |tp: u32| {
        LayerTimes::from_preset(&spec(), Module::Llm, tp, &a100, 0).attention_ns(1.0, 8192.0) * f64::from(tp)
    };
    assert!((of(4) / of(1) - 1.0).abs() < 1e-12);
}
