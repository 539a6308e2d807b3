use std::num::NonZeroU32;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::flops::{Attention, EncoderFlops, Gradients, LlmFlops, Recomputation};
use crate::memory::{Execution, ModuleStages, PipelineMemory};
use crate::model::config::Documents;
use crate::model::{EncoderParameters, EncoderSpec, LlmParameters, LlmSpec, ModelSpec};
use crate::tokens::VisionRule;
use crate::tokens::audio::AudioRule;
use crate::{AudioLength, CostModel, DeviceRate, ImageSize, SampleShape};

fn model(document: &Value) -> Result<ModelSpec> {
    ModelSpec::from_hugging_face("kite", &Documents { config: document.clone(), ..Documents::default() })
}

fn hand(config: Value) -> ModelSpec {
    ModelSpec::from_hugging_face("kite", &Documents { config, ..Documents::default() }).unwrap()
}

#[expect(clippy::needless_pass_by_value, reason = "documents are written where they are passed")]
fn flops(forward: Value, backward: Value) -> Map<String, Value> {
    let Value::Object(both) = json!({"flops_forward": forward, "flops_backward": backward}) else {
        unreachable!()
    };
    both
}

fn with(object: Value, more: Map<String, Value>) -> Value {
    let Value::Object(mut object) = object else { unreachable!() };
    object.extend(more);
    object.into()
}

/// Describes a language model by its closed formulas, a run for each layer.
fn llm_document(llm: &LlmSpec) -> Value {
    let parameters = LlmParameters::new(llm);
    let runs = (0..llm.layers).map(|layer| {
        let has_experts = llm.has_experts(layer);
        let weights = u64::try_from(llm.attention_weights() + llm.active_mlp_weights(has_experts)).unwrap();
        let pairs = 4 * u64::from(llm.heads) * u64::from(llm.head_dim);
        let window = llm.windows.filter(|_| llm.is_windowed(layer));
        let pattern = window.map_or("causal", |window| match window.kind {
            crate::model::Window::Sliding => "sliding",
            crate::model::Window::Chunk => "chunk",
        });
        let mut run = with(
            json!({"first": layer, "count": 1, "parameters": parameters.layer_parameters(layer..layer + 1),
                "message_width": llm.hidden,
                "attention": {"pattern": pattern, "window": window.map(|window| window.tokens)}}),
            flops(
                json!({"per_token": 2 * weights, "per_pair": pairs}),
                json!({"per_token": 4 * weights, "per_pair": 2 * pairs}),
            ),
        );
        if let Some(experts) = llm.experts.filter(|_| has_experts) {
            run["experts"] = json!({"count": experts.experts, "per_token": experts.experts_per_token,
                "parameters_each": parameters.experts / u64::from(experts.experts)});
        }
        run
    });
    let words = u64::from(llm.hidden) * u64::from(llm.vocab);
    let head = json!({"parameters": parameters.head, "is_tied": llm.details.has_tied_embeddings,
        "vocabulary": llm.vocab});
    json!({"module": "llm", "path": "model", "layers_path": "model.layers", "unit": "tokens",
        "parameters": parameters.total(), "layer_runs": runs.collect::<Vec<_>>(),
        "sizes": {"hidden": llm.hidden, "heads": llm.heads, "kv_heads": llm.kv_heads,
            "head_dim": llm.head_dim, "ffn": llm.ffn},
        "outside_layers": flops(json!({}), json!({"per_token": 0})),
        "embedding": {"width": llm.hidden, "parameters": parameters.embedding},
        "head": with(head, flops(json!({"per_token": 2 * words}), json!({"per_token": 4 * words})))})
}

/// Describes an encoder by its closed formulas: layers with windows first.
///
/// - `item_tokens`: tokens per item with class tokens; `None` for native resolution
fn encoder_document(
    encoder: &EncoderSpec,
    llm_hidden: u32,
    item_tokens: Option<u64>,
    rule: &Value,
    feature: [u64; 3],
) -> Value {
    let parameters = EncoderParameters::new(encoder, llm_hidden);
    let [hidden, ffn] = [encoder.hidden, encoder.ffn].map(u64::from);
    let weights = 4 * hidden * hidden + u64::from(encoder.mlp.matrices()) * hidden * ffn;
    let class_tokens = u64::from(encoder.details.class_tokens);
    let unit = item_tokens.map_or(1, |tokens| tokens - class_tokens);
    let name = if item_tokens.is_some() { "per_item" } else { "per_token" };
    let layer = |factor: u64| match item_tokens {
        Some(tokens) => json!({"per_item": factor * (2 * weights * tokens + 4 * hidden * tokens * tokens)}),
        None => json!({"per_token": factor * 2 * weights, "per_pair": factor * 4 * hidden}),
    };
    let attention = |is_windowed: bool| {
        let (pattern, window) = if is_windowed { ("window", Some(8)) } else { ("full", None) };
        json!({"pattern": pattern, "window": window})
    };
    let run = |first: u32, count: u32, is_windowed: bool| {
        with(
            json!({"first": first, "count": count, "parameters": parameters.layer, "message_width": hidden,
                "attention": attention(is_windowed)}),
            flops(layer(1), layer(2)),
        )
    };
    let windowed = encoder.windowed_layers;
    let mut runs = vec![run(windowed, encoder.layers - windowed, false)];
    if windowed > 0 {
        runs.insert(0, run(0, windowed, true));
    }
    let stem = 2 * u64::from(encoder.stem_inputs) * hidden * unit;
    let medium = 2 * u64::from(encoder.details.stem_medium_inputs) * hidden * unit;
    let projector = encoder.projector;
    let middle = u64::from(projector.middle.unwrap());
    let projected = middle * (u64::from(projector.input) + u64::from(llm_hidden));
    let merged = u64::from(projector.merged_tokens.get());
    let sets = projector.count();
    let connector = |factor: u64| Value::from(factor * 2 * projected * unit / merged);
    let connectors = (0..sets).map(|_| {
        with(
            json!({"path": "merger", "parameters": parameters.projector / sets}),
            flops(json!({name: connector(1)}), json!({name: connector(2)})),
        )
    });
    json!({"module": "vision", "media": ["image"], "parameters": parameters.total(), "layers_path": "blocks",
        "sizes": {"hidden": 7, "heads": encoder.heads, "kv_heads": null, "head_dim": null,
            "ffn": encoder.ffn},
        "unit": if item_tokens.is_some() { "items" } else { "tokens" }, "tokens_per_item": item_tokens,
        "layer_runs": runs, "connectors": connectors.collect::<Vec<_>>(), "output_width": llm_hidden,
        "outside_layers": flops(json!({name: stem}), json!({name: 2 * stem - medium})),
        "token_rule": rule, "feature_tokens": [feature]})
}

fn document(modules: &[Value]) -> Value {
    let parameters: u64 = modules.iter().map(|module| module["parameters"].as_u64().unwrap()).sum();
    json!({"format": "dflop model", "version": 1, "name": "kite", "model_type": "kite_vl",
        "config_sha256": "0", "made_with": {"torch": "2.8.0", "transformers": "5.1.0"},
        "parameters": parameters, "parameters_beside_modules": 0, "modules": modules})
}

fn qwen2_5_vl() -> (ModelSpec, Value) {
    let spec = ModelSpec::preset("qwen2.5-vl-7b").unwrap();
    let rule = json!({"medium": "image", "source": "_get_num_multimodal_tokens", "marker_tokens": 2,
        "kind": "rule", "checked": 361, "rule": {"rule": "native", "patch_size": 14, "merge_size": 2,
        "min_pixels": 3136, "max_pixels": 12_845_056}});
    let encoder = spec.vision.unwrap().encoder;
    let vision = encoder_document(&encoder, spec.llm.hidden, None, &rule, [1, 1024, 256]);
    let described = document(&[vision, llm_document(&spec.llm)]);
    (spec, described)
}

fn intern_vl() -> (ModelSpec, Value) {
    let spec = ModelSpec::preset("internvl3-8b").unwrap();
    let rule = json!({"medium": "image", "source": "processor", "marker_tokens": null, "kind": "rule",
        "checked": 25, "rule": {"rule": "tiles", "tile_size": 448, "patch_size": 14, "merge_size": 2,
        "max_tiles": 12, "marker_tokens": 2}});
    let encoder = spec.vision.unwrap().encoder;
    let vision = encoder_document(&encoder, spec.llm.hidden, Some(1025), &rule, [1, 1025, 256]);
    let described = document(&[vision, llm_document(&spec.llm)]);
    (spec, described)
}

fn sparse() -> (ModelSpec, Value) {
    let spec = hand(json!({"model_type": "qwen3_moe", "num_hidden_layers": 6, "hidden_size": 64,
        "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "mlp_only_layers": [0], "tie_word_embeddings": false}));
    let described = document(&[llm_document(&spec.llm)]);
    (spec, described)
}

/// Returns seconds per module, tokens and encoder tokens of samples with images.
fn costs(spec: &ModelSpec, shapes: &[(u32, u32, u32)]) -> Vec<crate::SampleCost> {
    let model = CostModel::new(spec.clone(), DeviceRate::preset("h100").unwrap());
    let cost = |&(text_tokens, width, height): &(u32, u32, u32)| {
        let images = if spec.vision.is_some() { vec![ImageSize { width, height }] } else { Vec::new() };
        model.predict(&SampleShape { text_tokens, images, ..SampleShape::default() }).unwrap()
    };
    shapes.iter().map(cost).collect()
}

const SHAPES: [(u32, u32, u32); 4] = [(0, 640, 480), (100, 1000, 333), (7000, 56, 56), (12, 2480, 3508)];

/// Tokens, FLOPs over a rate, parameters and the memory of pipeline stages at two TP degrees.
#[test]
fn a_family_by_hand_and_its_description_are_the_same_model() {
    for (known, document) in [qwen2_5_vl(), intern_vl(), sparse()] {
        let described = model(&document).unwrap();
        assert_eq!(described.llm, known.llm);
        assert_eq!(described.parameters(), known.parameters());
        assert_eq!(costs(&described, &SHAPES), costs(&known, &SHAPES));
        for tp in [1, 2] {
            let tp = NonZeroU32::new(tp).unwrap();
            let execution = Execution { tp, ..Execution::default() };
            let stages = |spec: &ModelSpec| {
                let encoder = spec.vision.map(|vision| vision.encoder.layers);
                let layers = encoder.into_iter().map(|layers| vec![layers]);
                let halves = vec![spec.llm.layers / 2, spec.llm.layers - spec.llm.layers / 2];
                let layouts: Vec<_> = layers
                    .chain([halves])
                    .map(|layers| ModuleStages { layers, execution, microbatch_tokens: 8192 })
                    .collect();
                PipelineMemory::new(spec).microbatches(8).stages(&layouts).unwrap()
            };
            assert_eq!(stages(&described), stages(&known), "{}", known.name);
        }
        let (Some(made), Some(encoder)) = (described.vision, known.vision) else { continue };
        assert_eq!(made.encoder.counts, None, "{:?}", made.encoder);
        let [made, encoder] = [made.encoder, encoder.encoder];
        for parts in [[Gradients::All; 2], [Gradients::None, Gradients::Weights]] {
            let flops = |encoder: &EncoderSpec| {
                let work = known.vision.unwrap().rule.images(&[ImageSize { width: 640, height: 480 }]);
                let flops = EncoderFlops::new(encoder, known.llm.hidden).gradients(parts[0], parts[1]);
                flops.training(&work.unwrap(), Recomputation::Layers)
            };
            assert_eq!(flops(&made), flops(&encoder), "{}", known.name);
        }
    }
}

/// The same numbers as counts, which replace the formulas: FLOPs and parameters stay.
#[test]
fn counts_give_what_formulas_give() {
    for (known, mut document) in [qwen2_5_vl(), intern_vl(), sparse()] {
        let mut total = document["parameters"].as_u64().unwrap();
        for module in document["modules"].as_array_mut().unwrap() {
            // No formula has a layer with a further parameter.
            let run = &mut module["layer_runs"][0];
            run["parameters"] = json!(run["parameters"].as_u64().unwrap() + 1);
            let more = run["count"].as_u64().unwrap();
            module["parameters"] = json!(module["parameters"].as_u64().unwrap() + more);
            total += more;
        }
        document["parameters"] = json!(total);
        let described = model(&document).unwrap();
        assert!(described.llm.counts.is_some());
        assert_eq!(described.parameters(), total);
        assert_eq!(costs(&described, &SHAPES), costs(&known, &SHAPES), "{}", known.name);
        for gradients in [Gradients::All, Gradients::Inputs, Gradients::None] {
            let training = |llm: &LlmSpec| {
                let flops = LlmFlops::new(llm).gradients(gradients);
                flops.training(&[700, 9000], Attention::Causal, Recomputation::Layers)
            };
            assert_eq!(training(&described.llm), training(&known.llm));
        }
        let [own, by_hand] = [&described.llm, &known.llm].map(LlmParameters::new);
        assert_eq!(own.layer_parameters(1..5), by_hand.layer_parameters(1..5));
        assert_eq!(own.experts_of_layers(0..6), by_hand.experts_of_layers(0..6));
        let more = own.layer_parameters(0..1) - by_hand.layer_parameters(0..1);
        assert_eq!((more, own.active()), (1, by_hand.active() + 1));
        let json = serde_json::to_string(&described).unwrap();
        assert_eq!(serde_json::from_str::<ModelSpec>(&json).unwrap(), described);
        let Some(vision) = described.vision else { continue };
        assert!(vision.encoder.counts.is_some());
        for recomputation in Recomputation::ALL {
            let training = |encoder: &EncoderSpec| {
                let work = known.vision.unwrap().rule.images(&[ImageSize { width: 640, height: 480 }]);
                EncoderFlops::new(encoder, known.llm.hidden).training(&work.unwrap(), recomputation)
            };
            let (own, by_hand) = (training(&vision.encoder), training(&known.vision.unwrap().encoder));
            assert_eq!((own.forward, own.backward), (by_hand.forward, by_hand.backward));
            // Counts per item do not tell attention apart, whose scores run again in fused kernels.
            assert!(own.recomputed == by_hand.recomputed || vision.encoder.details.class_tokens > 0);
        }
    }
}

/// Linear attention in two of three layers, windows in the last: every layer counts by its own polynomial.
#[test]
fn layers_of_several_kinds_add_up() {
    let (known, mut document) = sparse();
    let runs = document["modules"][0]["layer_runs"].as_array_mut().unwrap();
    for (at, run) in runs.iter_mut().enumerate() {
        match at % 3 {
            0 | 1 => {
                run["attention"] = json!({"pattern": "linear", "window": null});
                run["flops_forward"].as_object_mut().unwrap().remove("per_pair");
                run["flops_backward"].as_object_mut().unwrap().remove("per_pair");
            }
            _ => run["attention"] = json!({"pattern": "sliding", "window": 100}),
        }
    }
    let described = model(&document).unwrap();
    let (own, all) = (LlmFlops::new(&described.llm), LlmFlops::new(&known.llm));
    let per_token = u128::from(all.layers_per_token());
    let squares = 1000 * 1000 - 900 * 900;
    let pairs = 2 * 2 * 4 * 32 * squares; // two layers, two FLOPs per half pair and width
    assert_eq!(own.layers_forward(&[1000], Attention::Causal), 1000 * per_token + pairs);
    assert!((own.windowed_share() - 1.0).abs() < 1e-12);
    // Without a causal mask every pair counts once, whatever is asked for.
    for run in document["modules"][0]["layer_runs"].as_array_mut().unwrap() {
        run["attention"] = json!({"pattern": "full", "window": null});
    }
    let own = LlmFlops::new(&model(&document).unwrap().llm);
    let pairs = 2 * 4 * 4 * 32 * 1_000_000;
    for attention in [Attention::Causal, Attention::Full] {
        assert_eq!(own.layers_forward(&[1000], attention), 1000 * per_token + pairs);
    }
}

fn measured(rows: &Value) -> Value {
    json!({"medium": "image", "source": "processor", "marker_tokens": 3, "kind": "measured", "table": {
        "columns": ["width_pixels", "height_pixels", "tokens", "items", "encoder_tokens", "pairs",
            "window_pairs"],
        "rows": rows}})
}

#[test]
fn measured_sizes_and_fixed_tokens_are_counted_and_other_sizes_are_errors() {
    let (known, mut document) = intern_vl();
    let rows = json!([
        [64, 32, 512, 2, 2050, 2_101_250, 2_101_250],
        [32, 64, 256, 1, 1025, 1_050_625, 1_050_625],
        [8, 8, null, null, null, null, null]
    ]);
    document["modules"][0]["token_rule"] = measured(&rows);
    let described = model(&document).unwrap();
    let rule = described.vision.unwrap().rule;
    assert!(matches!(rule, VisionRule::Table(_)) && !rule.is_native());
    let images = |width, height| rule.images(&[ImageSize { width, height }]);
    let work = images(64, 32).unwrap();
    assert_eq!((work.items, work.encoder_tokens, work.tokens), (2, 2050, 515));
    assert!(images(8, 8).unwrap_err().to_string().contains("rejected by the model's processor"));
    assert!(images(9, 8).unwrap_err().to_string().contains("describe it again with this size"));
    // Two tiles cost what two tiles of the known rule cost.
    let flops = |spec: &ModelSpec, tiles: u64| {
        let work = crate::tokens::EncoderWork {
            items: tiles,
            encoder_tokens: tiles
                * if spec.vision.unwrap().encoder.details.class_tokens > 0 { 1024 } else { 1025 },
            attention_pairs: tiles * 1024 * 1024,
            ..crate::tokens::EncoderWork::default()
        };
        EncoderFlops::new(&spec.vision.unwrap().encoder, spec.llm.hidden).forward(&work)
    };
    assert!(described.vision.unwrap().encoder.counts.is_some());
    assert_eq!(flops(&described, 2), flops(&known, 2));
    document["modules"][0]["token_rule"] = json!({"medium": "image", "source": "processor",
        "marker_tokens": 1, "kind": "fixed", "tokens": 256, "checked": 25});
    let every = model(&document).unwrap().vision.unwrap().rule;
    let work = every.images(&[ImageSize { width: 1, height: 999 }; 3]).unwrap();
    assert_eq!((work.items, work.tokens), (3, 3 * 257));
    let json = serde_json::to_string(&every).unwrap();
    assert_eq!(serde_json::from_str::<VisionRule>(&json).unwrap(), every);
    assert!(every.video(crate::VideoShape { frames: 2, width: 64, height: 64 }).is_err());
}

/// Videos are counted by a native rule that cuts frames like images, and by no other.
#[test]
fn videos_are_counted_by_their_own_rule() {
    let (_, mut document) = qwen2_5_vl();
    let tokens = |document: &Value| {
        let rule = model(document).unwrap().vision.unwrap().rule;
        rule.video(crate::VideoShape { frames: 8, width: 280, height: 140 }).map(|work| work.tokens)
    };
    assert!(tokens(&document).is_err());
    let rule = json!({"rule": "native", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "min_pixels": 3136, "max_pixels": 12_845_056});
    let markers = document["modules"][0]["token_rule"]["marker_tokens"].clone();
    document["modules"][0]["media"] = json!(["image", "video"]);
    assert!(error(&document).contains("`modules[0].media` must be [\"image\"]"));
    document["modules"][0]["video_token_rule"] = json!({"medium": "video", "source": "processor",
        "marker_tokens": markers, "kind": "rule", "checked": 9, "rule": rule});
    // Four pairs of frames with 10 by 5 squares, and the markers.
    let outer = document["modules"][0]["token_rule"]["rule"]["marker_tokens"].as_u64().unwrap_or(0);
    document["modules"][0]["video_token_rule"]["rule"]["marker_tokens"] = json!(outer);
    let expected = 4 * 50 + outer + markers.as_u64().unwrap_or(0);
    assert_eq!(tokens(&document).unwrap(), expected);
    document["modules"][0]["video_token_rule"]["rule"]["patch_size"] = json!(16);
    assert!(tokens(&document).is_err());
    document["modules"][0]["video_token_rule"]["rule"]["rule"] = json!("square");
    assert!(error(&document).contains("video_token_rule"));
    document["modules"][0]["media"] = json!(["image"]);
    assert!(error(&document).contains("must be [\"image\", \"video\"]"));
}

/// An audio encoder with chunked attention: windows of 100 tokens, to which the stem pads.
#[test]
fn clips_in_chunks_count_the_padding() {
    let (known, _) = sparse();
    let layer = json!({"per_token": 2000, "per_pair": 40});
    let twice = json!({"per_token": 4000, "per_pair": 80});
    let run = with(
        json!({"first": 0, "count": 3, "parameters": 1500, "message_width": 10,
            "attention": {"pattern": "chunk", "window": 100}}),
        flops(layer, twice),
    );
    let stem = with(
        json!({"chunk_tokens": 100}),
        flops(json!({"per_chunk": 70_000}), json!({"per_chunk": 130_000})),
    );
    let connector = with(
        json!({"path": "proj", "parameters": 640}),
        flops(json!({"per_token": 640}), json!({"per_token": 1280})),
    );
    let audio = json!({"module": "audio", "media": ["audio"], "parameters": 6000, "layers_path": "layers",
        "sizes": {"hidden": 10, "heads": 2, "kv_heads": null, "head_dim": null, "ffn": 40}, "unit": "tokens",
        "tokens_per_item": null, "layer_runs": [run], "connectors": [connector], "output_width": 64,
        "outside_layers": stem, "feature_tokens": [[1, 250, 125]],
        "token_rule": {"medium": "audio", "source": "features", "sample_rate_hz": 16_000,
            "marker_tokens": null,
            "kind": "measured", "table": {
                "columns": ["samples", "tokens", "items", "encoder_tokens", "pairs", "window_pairs"],
                "rows": [[80_000, 125, 1, 250, 62_500, 22_500]]}}});
    let spec = model(&document(&[audio, llm_document(&known.llm)])).unwrap();
    let audio = spec.audio.unwrap();
    assert!(matches!(audio.rule, AudioRule::Table(_)) && spec.is_native(crate::Module::Audio));
    let work = audio.rule.clip(AudioLength { frames: 80_000, sample_rate_hz: 16_000 }).unwrap();
    assert_eq!((work.items, work.padded_tokens, work.window_pairs), (250, 50, 22_500));
    let flops = EncoderFlops::new(&audio.encoder, spec.llm.hidden);
    let layers = 3 * (2000 * 250 + 40 * 22_500);
    assert_eq!(flops.forward(&work), layers + 3 * 70_000 + 640 * 250);
    assert_eq!(flops.backward_pass(&work).tower, 2 * layers + 3 * 130_000);
    assert_eq!(EncoderParameters::new(&audio.encoder, 64).total(), 6000);
}

/// Every field of the documents, by its JSON pointer.
fn pointers(value: &Value, path: &str, found: &mut Vec<String>) {
    let mut visit = |key: String, inner: &Value| {
        let path = format!("{path}/{key}");
        pointers(inner, &path, found);
        found.push(path);
    };
    match value {
        Value::Object(object) => object.iter().for_each(|(key, inner)| visit(key.clone(), inner)),
        Value::Array(list) => list.iter().enumerate().for_each(|(at, inner)| visit(at.to_string(), inner)),
        _ => {}
    }
}

fn error(document: &Value) -> String {
    model(document).unwrap_err().to_string()
}

#[test]
fn missing_and_unknown_fields_are_errors_that_name_them() {
    for (_, document) in [qwen2_5_vl(), sparse()] {
        let mut all = Vec::new();
        pointers(&document, "", &mut all);
        // Without the format it is no description.
        for pointer in all.iter().filter(|pointer| *pointer != "/format") {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let mut changed = document.clone();
            let Some(Value::Object(object)) = changed.pointer_mut(parent) else { continue };
            object.insert("kite".to_owned(), json!(1));
            let unknown = error(&changed);
            assert!(
                unknown.contains("kite` ") || key == "torch" || key == "transformers",
                "{pointer}: {unknown}"
            );
            let Some(Value::Object(object)) = changed.pointer_mut(parent) else { unreachable!() };
            object.remove("kite");
            object.remove(key);
            // Nothing is missing if there are no experts, no FLOPs of a kind, or a size is not declared.
            let is_optional = [
                "experts",
                "window",
                "message_width",
                "marker_tokens",
                "tokens_per_item",
                "torch",
                "transformers",
                "merge_size",
            ]
            .contains(&key)
                || parent.ends_with("/sizes")
                || key.starts_with("per_");
            match model(&changed) {
                Ok(_) => assert!(is_optional, "{pointer} may be missing"),
                Err(error) => assert!(error.to_string().contains(key) || is_optional, "{pointer}: {error}"),
            }
        }
    }
}

#[test]
fn wrong_values_are_errors_that_name_the_field() {
    let (_, document) = qwen2_5_vl();
    let with = |pointer: &str, value: Value| {
        let mut changed = document.clone();
        *changed.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        error(&changed)
    };
    let run = "/modules/1/layer_runs/0";
    for (pointer, value, message) in [
        ("/version", json!(2), "`version` = 2 is unknown, known is 1: describe the model again"),
        ("/format", json!("dflop models"), "`format` = \"dflop models\" is unknown"),
        ("/parameters", json!(7), "`parameters` = 7 is not the sum over modules"),
        ("/parameters", json!(-7), "`parameters` must be a whole number of at least 0, found -7"),
        ("/parameters_beside_modules", json!(u64::MAX), "more than 64 bits"),
        ("/modules", json!([]), "`modules` must be at most one of vision and audio each, then llm"),
        ("/modules", json!(7), "`modules` must be a list of objects, found 7"),
        ("/modules/0/module", json!("llm"), "`modules[0].embedding` is missing"),
        ("/modules/0/output_width", json!(8), "`modules[vision].output_width` = 8 is not the LLM width 3584"),
        ("/modules/0/unit", json!("items"), "`modules[0].tokens_per_item` is missing"),
        ("/modules/0/layer_runs/0/first", json!(1), "`modules[0].layer_runs[0].first` = 1 must follow"),
        (
            "/modules/0/layer_runs/1/count",
            json!(1000),
            "`modules[0].layer_runs[1].count` makes more than 256",
        ),
        ("/modules/0/parameters", json!(9), "`modules[0].parameters` = 9 is less than its parts have"),
        ("/modules/0/media", json!(["video"]), "`modules[0].media` must be [\"image\"]"),
        ("/modules/0/token_rule/rule/rule", json!("kites"), "`modules[0].token_rule.rule.rule` = \"kites\""),
        ("/modules/0/token_rule/marker_tokens", json!(300), "must be at most 255, found 300"),
        ("/modules/0/feature_tokens", json!([[1, 2]]), "`modules[0].feature_tokens` must be rows with 3"),
        (
            &format!("{run}/flops_forward/per_token"),
            json!(1.5),
            "must be a whole number of at least 0, found 1.5",
        ),
        (&format!("{run}/flops_forward/per_token"), json!(f64::MAX), "must be a whole number of at least 0"),
        (&format!("{run}/attention/pattern"), json!("other"), "follow no pattern that dflop knows"),
        (&format!("{run}/attention/pattern"), json!("sliding"), "attention.window` is missing"),
        (&format!("{run}/attention/pattern"), json!("stars"), "attention.pattern` = \"stars\" is unknown"),
    ] {
        let found = with(pointer, value);
        assert!(found.starts_with("`model.json`: ") && found.contains(message), "{pointer}: {found}");
    }
    let mut per_item = document.clone();
    per_item["modules"][0]["outside_layers"]["flops_forward"]["per_item"] = json!(5);
    assert!(error(&per_item).contains("`modules[0].outside_layers.flops_forward` must count per tokens"));
    let mut windows = document.clone();
    windows["modules"][1]["layer_runs"][0]["attention"] = json!({"pattern": "sliding", "window": 8});
    windows["modules"][1]["layer_runs"][1]["attention"] = json!({"pattern": "sliding", "window": 9});
    assert!(error(&windows).contains("one kind and length"));
}

proptest! {
    /// Any number anywhere is a model or an error, and a model costs samples.
    #[test]
    fn no_number_panics(at in 0_usize..4000, number in prop_oneof![
        Just(json!(0)), Just(json!(1)), Just(json!(u64::MAX)), Just(json!(u32::MAX)), Just(json!(-1)),
        Just(json!(1e300)), Just(Value::Null), any::<u64>().prop_map(Value::from),
    ]) {
        let (_, mut document) = if at % 2 == 0 { qwen2_5_vl() } else { sparse() };
        let mut all = Vec::new();
        pointers(&document, "", &mut all);
        let pointer = &all[at / 2 % all.len()];
        *document.pointer_mut(pointer).unwrap() = number;
        if let Ok(spec) = model(&document) {
            let model = CostModel::new(spec.clone(), DeviceRate::preset("a100").unwrap());
            let images = vec![ImageSize { width: 640, height: 480 }];
            let _cost = model.predict(&SampleShape { text_tokens: 9, images, ..SampleShape::default() });
            let _parameters = (spec.parameters(), spec.llm_parameters().active());
        }
    }
}
