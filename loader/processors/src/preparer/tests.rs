//! Tests preparation with a small tokenizer; end-to-end tests compare it with `transformers`.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use dflop_costmodel::ModelSpec;
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_samples::inputs::{MediaRun, TensorValues};
use dflop_samples::media::{Audio, PixelBuffer, RgbImage};
use dflop_samples::sample::{Field, PaddingSide};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::*;

const CHATML: &[u8] = include_bytes!("../../../../tests/golden/model_inputs/chatml/tokenizer.json");

fn tokenizer() -> Tokenizer {
    Tokenizer::from_json(CHATML).unwrap().special_token("eos_token", "<|im_end|>")
}

fn builder(model: &str) -> PreparerBuilder {
    Preparer::builder(&ModelSpec::preset(model).unwrap()).tokenizer(tokenizer())
}

fn preparer(model: &str) -> Preparer {
    builder(model).build().unwrap()
}

fn field(extension: &str, media: Media) -> Field {
    Field { extension: extension.into(), media }
}

fn image(extension: &str, width: u32, height: u32) -> Field {
    let pixels = vec![0; 3 * width as usize * height as usize];
    field(extension, Media::Image(RgbImage { width, height, pixels, is_truncated: false }))
}

fn clip(extension: &str, frames: usize) -> Field {
    let samples = vec![0.0; frames];
    field(
        extension,
        Media::Audio(Audio { sample_rate_hz: 16_000, channels: 1, samples, is_truncated: false }),
    )
}

fn text(text: &str) -> Field {
    field("txt", Media::Text(text.to_owned()))
}

fn json_field(json: Value) -> Field {
    field("json", Media::Json(json))
}

fn asked(value: &str) -> Field {
    json_field(json!({"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "yes"}]}))
}

fn prepare(preparer: &Preparer, fields: Vec<Field>) -> Result<PreparedSample, PrepareError> {
    preparer.prepare(&Sample::new("directory/key", fields))
}

fn refusal(preparer: &Preparer, fields: Vec<Field>) -> String {
    dflop_samples::error_reason(&prepare(preparer, fields).unwrap_err())
}

/// Returns the text for the ids, and the text for the targets.
fn written(preparer: &Preparer, sample: &PreparedSample) -> (String, String) {
    let learned: Vec<u32> = sample.labels.iter().filter(|&&id| id >= 0).map(|&id| id as u32).collect();
    (preparer.decode(&sample.input_ids).unwrap(), preparer.decode(&learned).unwrap())
}

#[test]
fn placeholders_and_images_that_do_not_match_are_refused_with_both_counts() {
    let preparer = preparer("qwen2-vl-7b");
    let fields = vec![asked("<image><image>what"), image("jpg", 56, 56)];
    assert_eq!(refusal(&preparer, fields), "2 image placeholders for 1 images");
    let error = prepare(&preparer, vec![asked("<image>what")]).unwrap_err();
    assert_eq!(
        (error.to_string().as_str(), error.field()),
        ("1 image placeholders for 0 images", Some("json"))
    );
    let audio = refusal(&preparer, vec![asked("<audio>what"), clip("wav", 16_000)]);
    assert_eq!(audio, "1 audio placeholders for 0 clips");
}

#[test]
fn images_without_a_placeholder_go_in_front_of_the_first_user_turn() {
    let preparer = preparer("qwen2-vl-7b");
    let fields = || vec![asked("what"), image("0.jpg", 56, 56), image("1.jpg", 28, 56)];
    let (rendered, learned) = written(&preparer, &prepare(&preparer, fields()).unwrap());
    let four = "<|image_pad|>".repeat(4);
    let six = "<|image_pad|>".repeat(6);
    let expected = format!(
        "<|im_start|>user\n<|vision_start|>{four}<|vision_end|><|vision_start|>{six}<|vision_end|>what<|im_end|>\n"
    );
    assert!(rendered.contains(&expected), "{rendered}");
    assert_eq!(learned, "yes<|im_end|>");
}

#[test]
fn the_json_names_the_order_of_images_by_extension_or_entry_name() {
    let preparer = preparer("qwen2-vl-7b");
    let tokens_in_order = |images: Value| {
        let turns =
            [json!({"from": "human", "value": "<image><image>"}), json!({"from": "gpt", "value": "yes"})];
        let json = json_field(json!({"conversations": turns, "images": images}));
        let fields = vec![json, image("left.jpg", 28, 28), image("right.jpg", 28, 56)];
        prepare(&preparer, fields).map(|sample| sample.images.iter().map(|of| of.tokens).collect::<Vec<_>>())
    };
    // The shorter side is scaled up to two patches of 28 pixels.
    let in_shard_order = tokens_in_order(json!(["photos/a.jpg", "photos/b.jpg"])).unwrap();
    assert_eq!(tokens_in_order(json!(["left.jpg", "right.jpg"])).unwrap(), in_shard_order);
    let turned: Vec<u32> = in_shard_order.iter().rev().copied().collect();
    assert_ne!(turned, in_shard_order);
    assert_eq!(tokens_in_order(json!(["right.jpg", "left.jpg"])).unwrap(), turned);
    assert_eq!(tokens_in_order(json!(["x/key.right.jpg", "key.left.jpg"])).unwrap(), turned);
    let partly = tokens_in_order(json!(["right.jpg", "other.jpg"])).unwrap_err().to_string();
    assert_eq!(partly, "the sample has no field of this name");
}

#[test]
fn numbered_images_come_in_the_order_of_their_numbers() {
    let fields = ["10.jpg", "2.jpg", "1.jpg"].map(|name| image(name, 28, 28)).to_vec();
    let sample = Sample::new("key", [vec![asked("<image><image><image>")], fields].concat());
    let conversation = read_conversation(&sample, |_| true).unwrap();
    assert_eq!(conversation.images, [3, 2, 1]);
}

#[test]
fn a_caption_is_learned_whole_behind_its_image() {
    let preparer = preparer("internvl3-8b");
    let sample = prepare(&preparer, vec![image("jpg", 448, 448), text("a red kite")]).unwrap();
    let (rendered, learned) = written(&preparer, &sample);
    assert_eq!(rendered, format!("<img>{}</img>a red kite<|im_end|>", "<IMG_CONTEXT>".repeat(256)));
    assert_eq!(learned, "a red kite<|im_end|>");
    let question = PlainText::Answer { question: "What is it?".to_owned() };
    let preparer = builder("internvl3-8b").plain_text(question).build().unwrap();
    let sample = prepare(&preparer, vec![image("jpg", 448, 448), text("a red kite")]).unwrap();
    let (rendered, learned) = written(&preparer, &sample);
    assert!(
        rendered.ends_with("\nWhat is it?<|im_end|>\n<|im_start|>assistant\na red kite<|im_end|>\n"),
        "{rendered}"
    );
    assert_eq!(learned, "a red kite<|im_end|>");
}

#[test]
fn the_first_token_of_a_sample_is_never_learned() {
    let preparer = preparer("qwen2-vl-7b");
    let sample = prepare(&preparer, vec![text("a red kite")]).unwrap();
    assert_eq!(sample.labels[0], IGNORED);
    assert_eq!(sample.target_tokens(), sample.tokens() - 1);
}

#[test]
fn media_that_the_model_does_not_take_are_left_out() {
    let preparer = preparer("qwen2-audio-7b");
    let with = prepare(&preparer, vec![asked("what"), image("jpg", 8, 8)]).unwrap();
    assert_eq!(with, prepare(&preparer, vec![asked("what")]).unwrap());
    let nothing = refusal(&preparer, vec![image("jpg", 8, 8)]);
    assert_eq!(nothing, "the sample has no text and no media that this model takes");
}

#[test]
fn a_model_of_both_takes_both() {
    let preparer = preparer("omni-7b");
    let fields = vec![asked("<audio>\nand <image>"), image("jpg", 384, 384), clip("wav", 16_000)];
    let sample = prepare(&preparer, fields).unwrap();
    let runs: Vec<_> = sample.runs.iter().map(|run| (run.modality, run.tokens, run.has_markers)).collect();
    assert_eq!(runs, [(Modality::Audio, 25, true), (Modality::Image, 1_485, false)]);
}

#[test]
fn the_token_of_a_placeholder_in_a_text_is_refused() {
    let fields = vec![asked("what is <|image_pad|>?")];
    let reason = refusal(&preparer("qwen2-vl-7b"), fields);
    assert_eq!(reason, "the text has 1 `<|image_pad|>` tokens for 0 images");
}

#[test]
fn turns_that_cannot_be_read_are_refused_with_their_number() {
    let preparer = preparer("qwen2-vl-7b");
    for (turn, reason) in [
        (json!({"content": "x"}), "turn 0: a role is required"),
        (json!({"role": "user"}), "turn 0: its content must be a string or a list of parts"),
        (json!({"role": "user", "content": [{"type": "video"}]}), "1 video placeholders for 0 videos"),
    ] {
        assert_eq!(refusal(&preparer, vec![json_field(json!({"messages": [turn]}))]), reason);
    }
    assert_eq!(
        refusal(&preparer, vec![json_field(json!({"messages": []}))]),
        "the conversation has no turns"
    );
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let reason = |builder: PreparerBuilder| builder.build().unwrap_err().to_string();
    let model = ModelSpec::preset("qwen2-vl-7b").unwrap();
    assert!(reason(Preparer::builder(&model)).contains("`tokenizer`: a tokenizer is required"));
    let deaf = builder("qwen2-vl-7b").audio_processor(Arc::new(CountedAudio(AudioRule::QWEN2_AUDIO)));
    assert!(reason(deaf).contains("takes no audio"));
    assert!(reason(builder("qwen2-vl-7b").tokens_max(0)).contains("tokens_max"));
    let broken = reason(builder("qwen2-vl-7b").chat_template("{% for x in %}"));
    assert!(broken.contains("chat_template") && broken.contains("line 1"), "{broken}");
    let forgetful = "{% for message in messages %}{{ message.role }}{% endfor %}";
    assert!(reason(builder("qwen2-vl-7b").chat_template(forgetful)).contains("omits"));
    let shouting = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{% endfor %}";
    assert!(reason(builder("qwen2-vl-7b").chat_template(shouting)).contains("chat template"));
}

#[test]
fn a_vocabulary_without_the_placeholder_is_refused_by_name() {
    let bare = json!({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}});
    let bare = Tokenizer::from_json(bare.to_string().as_bytes()).unwrap();
    let model = ModelSpec::preset("qwen2-vl-7b").unwrap();
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let built = Preparer::builder(&model).tokenizer(bare).chat_template(template).build();
    assert!(built.unwrap_err().to_string().contains("the vocabulary has no `<|image_pad|>`"));
}

fn render(template: &str, turns: &[(&str, &str)]) -> Result<String, String> {
    let variables = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let now = SystemTime::UNIX_EPOCH + Duration::from_hours(24 * 365);
    let template =
        ChatTemplate::parse(template, variables, &Family::text(), now).map_err(|e| e.to_string())?;
    let message =
        |(role, words): &(&str, &str)| Message::new(role, vec![MessagePart::Text((*words).to_owned())]);
    template.render(&Dialogue::new(turns.iter().map(message).collect()), true)
}

/// The expected lines were rendered by `transformers` 5.23.
#[test]
fn templates_render_as_in_python() {
    const ALL: &str = "{% for m in messages %}{{ m['content'] }}{% endfor %}";
    let table = [
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content.strip() }}]\n  {% endif %}\n{% endfor %}",
            "[a]\n",
        ),
        ("{{ bos_token + messages[0]['content'] }}", "<s> a "),
        ("{{ messages[0]['content'] | trim }}{{ strftime_now('%d %b %Y') }}", "a01 Jan 1971"),
        (
            "{{ messages[0]['content'] }}{{ {'a': ['<', 1, none, true]} | tojson }}",
            " a {\"a\": [\"<\", 1, null, true]}",
        ),
        (
            "{{ messages[0]['content'] }}{{ [1, [], 'é'] | tojson(indent=2) }}",
            " a [\n  1,\n  [],\n  \"é\"\n]",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}{{ messages[-1].content }}",
            " a ",
        ),
        (
            "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
            " a ",
        ),
        ("{{ messages[0].content.split('a')[0] }}{{ messages | length }}{{ messages[0].content }}", " 1 a "),
        ("{{ messages[0].content }}{% if not add_generation_prompt is defined %}x{% endif %}", " a "),
    ];
    for (template, rendered) in table {
        assert_eq!(render(template, &[("user", " a ")]).as_deref(), Ok(rendered), "{template}");
    }
    assert_eq!(render(ALL, &[("user", "a"), ("assistant", "b")]).as_deref(), Ok("ab"));
    let strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}{{ messages[0].content }}";
    assert_eq!(render(strict, &[("system", "a")]), Err("no system turns (chat template, line 1)".to_owned()));
}

/// Creates a sample with `tokens` ids that count up from `first`, all targets but the first, with an image.
fn numbered(first: u32, tokens: usize, grid: [u32; 2]) -> PreparedSample {
    let [rows, columns] = grid;
    let run = (rows * columns / 4) as usize;
    let mut input_ids: Vec<u32> = (first..first + tokens as u32).collect();
    input_ids.extend(std::iter::repeat_n(7, run));
    let mut labels: Vec<i32> = input_ids.iter().map(|&id| id as i32).collect();
    labels[0] = IGNORED;
    labels[tokens..].fill(IGNORED);
    let image = PixelValues {
        values: PixelBuffer::F32(vec![first as f32; (rows * columns * 2) as usize]),
        shape: vec![(rows * columns) as usize, 2],
        grid_thw: Some([1, rows, columns]),
        image_size: Some([rows, columns]),
        tokens: run as u32,
    };
    let runs = vec![MediaRun { modality: Modality::Image, start: tokens, tokens: run, has_markers: false }];
    PreparedSample { input_ids, labels, runs, images: vec![image], ..PreparedSample::default() }
}

fn ints(inputs: &ModelInputs, name: &str) -> Vec<i64> {
    match &inputs.tensor(name).unwrap().values {
        TensorValues::I64(values) => values.clone(),
        _ => panic!("`{name}` must hold integers"),
    }
}

proptest! {
    #[test]
    fn packing_loses_no_token_and_restarts_with_every_sample(
        shapes in prop::collection::vec((1usize..40, 1u32..4, 1u32..4), 1..8),
    ) {
        let samples: Vec<_> = shapes.iter().enumerate()
            .map(|(at, &(tokens, rows, columns))| numbered(100 * (1 + at as u32), tokens, [2 * rows, 2 * columns]))
            .collect();
        let inputs = preparer("qwen2-vl-7b").pack(samples.clone()).unwrap();
        let ids = ints(&inputs, "input_ids");
        let all: Vec<i64> = samples.iter().flat_map(|sample| &sample.input_ids).map(|&id| i64::from(id)).collect();
        prop_assert_eq!(&ids, &all);
        prop_assert_eq!(inputs.cu_seqlens.len(), samples.len() + 1);
        prop_assert_eq!(*inputs.cu_seqlens.last().unwrap() as usize, ids.len());
        prop_assert_eq!(inputs.tokens as usize, ids.len());
        let labels = ints(&inputs, "labels");
        let learned = labels.iter().filter(|&&label| label != i64::from(IGNORED)).count();
        prop_assert_eq!(inputs.target_tokens as usize, learned);
        let positions = ints(&inputs, "position_ids");
        for (bounds, sample) in inputs.cu_seqlens.windows(2).zip(&samples) {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            prop_assert_eq!(end - start, sample.tokens());
            prop_assert_eq!(labels[start], i64::from(IGNORED));
            prop_assert_eq!(&positions[start..end], &(0..(end - start) as i64).collect::<Vec<_>>()[..]);
            for axis in 1..4 {
                prop_assert_eq!(positions[axis * ids.len() + start], 0);
            }
            prop_assert!(sample.tokens() <= inputs.max_seqlen as usize);
        }
        let pixels = inputs.tensor("pixel_values").unwrap();
        prop_assert_eq!(pixels.shape[0] as u32, shapes.iter().map(|(_, rows, columns)| 4 * rows * columns).sum::<u32>());
    }

    #[test]
    fn padding_hides_itself_and_nothing_else(
        shapes in prop::collection::vec((1usize..40, 1u32..4), 1..8), is_left in any::<bool>(),
    ) {
        let samples: Vec<_> = shapes.iter().map(|&(tokens, rows)| numbered(100, tokens, [2 * rows, 2])).collect();
        let side = if is_left { PaddingSide::Left } else { PaddingSide::Right };
        let preparer = builder("llava-ov-qwen2.5-7b").layout(BatchLayout::Padded { side }).build().unwrap();
        let inputs = preparer.pack(samples.clone()).unwrap();
        let longest = inputs.max_seqlen as usize;
        let [ids, mask, labels] = ["input_ids", "attention_mask", "labels"].map(|name| ints(&inputs, name));
        prop_assert_eq!(&inputs.tensor("input_ids").unwrap().shape, &[samples.len(), longest]);
        for (row, sample) in samples.iter().enumerate() {
            let missing = longest - sample.tokens();
            for at in 0..longest {
                let place = row * longest + at;
                let inside = if is_left { at.checked_sub(missing) } else { Some(at).filter(|&at| at < sample.tokens()) };
                prop_assert_eq!(mask[place], i64::from(inside.is_some()));
                let expected = inside.map(|at| (i64::from(sample.input_ids[at]), i64::from(sample.labels[at])));
                prop_assert_eq!((ids[place], labels[place]), expected.unwrap_or((1202, i64::from(IGNORED))));
            }
        }
        let pixels = inputs.tensor("pixel_values").unwrap();
        let tiles = shapes.iter().map(|&(_, rows)| 4 * rows as usize).max().unwrap();
        prop_assert_eq!(&pixels.shape, &[samples.len(), tiles, 2]);
        prop_assert_eq!(ints(&inputs, "batch_num_images"), vec![1; samples.len()]);
    }

    #[test]
    fn any_words_of_the_assistant_are_found_again(words in "[a-z<>|\u{e9}\u{1fa81}][ a-z<>|\\n\u{e9}\u{1fa81}]{0,30}") {
        let preparer = preparer("qwen2-vl-7b");
        let json = json!({"messages": [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": words}]});
        let sample = prepare(&preparer, vec![json_field(json)]).unwrap();
        prop_assert_eq!(written(&preparer, &sample).1, words + "<|im_end|>");
    }
}

#[test]
fn no_samples_make_no_tensors() {
    assert_eq!(preparer("qwen2-vl-7b").pack(Vec::new()), None);
}

#[test]
fn clips_of_fewer_frames_are_filled_up() {
    let clip = |frames: usize| AudioFeatures {
        values: vec![1.0; 2 * frames],
        shape: vec![1, 2, frames],
        attention_mask: vec![1; frames],
        tokens: 1,
    };
    let sample = |frames| PreparedSample {
        clips: vec![clip(frames)],
        images: Vec::new(),
        runs: Vec::new(),
        ..numbered(1, 3, [2, 2])
    };
    let inputs = preparer("qwen2-audio-7b").pack(vec![sample(2), sample(3)]).unwrap();
    let features = inputs.tensor("input_features").unwrap();
    assert_eq!(features.shape, [2, 2, 3]);
    let expected = vec![1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(features.values, TensorValues::F32(expected));
    assert_eq!(ints(&inputs, "feature_attention_mask"), [1, 1, 0, 1, 1, 1]);
}
