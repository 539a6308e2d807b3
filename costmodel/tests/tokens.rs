//! Compares media items and tokens with the Hugging Face processors, as recorded by `tests/record/tokens.py`.

use std::io::Read;

use dflop_costmodel::config::{Documents, PartialModelSpec};
use dflop_costmodel::tokens::audio::AudioRule;
use dflop_costmodel::tokens::dynamic_tiles::label_tokens;
use dflop_costmodel::tokens::{EncoderWork, MediaRule, VisionRule};
use dflop_costmodel::{AudioLength, Error, ImageSize, ModelSpec, SampleShape, VideoShape};
use serde_json::Value;

const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokens");

/// Reads the token rule from a family's checkpoint files.
fn rule(files: &Value) -> MediaRule {
    let file = |name: &str| files.get(name).cloned();
    let documents = Documents {
        config: file("config").expect("a configuration"),
        preprocessor: file("preprocessor"),
        video_preprocessor: file("video_preprocessor"),
        processor: file("processor"),
    };
    let part = PartialModelSpec::from_hugging_face(&documents).unwrap();
    let llm =
        PartialModelSpec { llm: Some(ModelSpec::preset("tiny").unwrap().llm), ..PartialModelSpec::default() };
    let parts = if part.llm.is_some() { vec![part] } else { vec![part, llm] };
    let spec = ModelSpec::compose("recorded", &parts).unwrap();
    let mut rules = spec.encoders().map(|(_, _, rule)| rule);
    let rule = rules.next().expect("an encoder");
    assert!(rules.next().is_none());
    rule
}

/// Parses a line without its counts: `images WxH …`, `video FRAMES WxH` or `audio SAMPLES`.
fn shape(media: &str) -> SampleShape {
    let size = |text: &str| {
        let (width, height) = text.split_once('x').expect("a size");
        ImageSize { width: width.parse().unwrap(), height: height.parse().unwrap() }
    };
    let mut words = media.split(' ');
    let mut shape = SampleShape::default();
    match words.next().unwrap() {
        "images" => shape.images = words.map(size).collect(),
        "video" => {
            let frames = words.next().unwrap().parse().unwrap();
            let ImageSize { width, height } = size(words.next().unwrap());
            shape.videos.push(VideoShape { frames, width, height });
        }
        "audio" => {
            let frames = words.next().unwrap().parse().unwrap();
            shape.audio.push(AudioLength { frames, sample_rate_hz: 16_000 });
        }
        kind => panic!("{kind}"),
    }
    shape
}

/// Parses `items,encoder tokens,tokens`; `None` for media that the processor rejects.
fn counts(line: &str) -> (&str, Option<[u64; 3]>) {
    let (media, counted) = line.split_once(',').expect("counts");
    if counted == "refused" {
        return (media, None);
    }
    let counts: Vec<u64> = counted.split(',').map(|count| count.parse().unwrap()).collect();
    (media, Some(counts.try_into().unwrap()))
}

fn of(work: &EncoderWork) -> [u64; 3] {
    [work.items, work.encoder_tokens, work.tokens]
}

fn lines(family: &str) -> Vec<String> {
    let file = std::fs::File::open(format!("{DIRECTORY}/{family}.csv.gz")).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// Returns every family's files; newer families have separate files.
fn families() -> serde_json::Map<String, Value> {
    let paths = std::fs::read_dir(DIRECTORY).unwrap().map(|entry| entry.unwrap().path());
    let files = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let read = |path| -> serde_json::Map<String, Value> {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    files.flat_map(read).collect()
}

#[test]
fn every_recorded_sample_has_the_tokens_of_its_processor() {
    let families = families();
    assert!(families.len() >= 10);
    for (family, files) in &families {
        let rule = rule(files);
        let (lines, mut differences) = (lines(family), Vec::new());
        assert!(lines.len() >= 2_000, "{family} has {} samples", lines.len());
        for line in &lines {
            let (media, mut expected) = counts(line);
            // Only media tokens are recorded; the rule also counts the words before each frame.
            if let (MediaRule::Vision(VisionRule::DynamicTiles(rule)), [video], Some([_, _, tokens])) =
                (&rule, shape(media).videos.as_slice(), &mut expected)
            {
                *tokens += label_tokens(video.frames.min(rule.frames_max).into());
            }
            let made = match rule.work(&shape(media)) {
                Ok(work) => Some(of(&work)),
                Err(Error::AspectRatio { .. }) => None,
                Err(error) => panic!("{family} {media}: {error}"),
            };
            // The recorded processor cuts a clip at 30 seconds; the rule continues in further windows, see
            // the next test.
            let is_cut = media.strip_prefix("audio ").is_some_and(|n| n.parse::<u64>().unwrap() > 480_000);
            if made != expected && !is_cut {
                differences.push(format!("{media}: {made:?} for {expected:?}"));
            }
        }
        let first = &differences[..differences.len().min(5)];
        assert!(differences.is_empty(), "{family}: {} of {}: {first:#?}", differences.len(), lines.len());
    }
}

/// Whisper's feature extractor cuts a clip off at 30 seconds; so does the rule with at most one window.
#[test]
fn a_clip_of_one_window_is_cut_off_as_the_processor_does() {
    let MediaRule::Audio(AudioRule::Windows(mut rule)) = rule(&families()["qwen2_audio"]) else {
        panic!("a rule of windows")
    };
    rule.windows_max = 1;
    let mut long = 0;
    for line in lines("qwen2_audio") {
        let (media, expected) = counts(&line);
        let clip = shape(media).audio[0];
        assert_eq!(Some(of(&rule.clip(clip).unwrap())), expected, "{media}");
        long += u32::from(clip.frames > 480_000);
    }
    assert!(long > 50);
}

/// Resampling keeps a started sample, and a started mel frame counts: the same duration gives the same tokens
/// at any rate.
#[test]
fn the_rate_of_a_clip_does_not_change_its_tokens() {
    let MediaRule::Audio(rule) = rule(&families()["qwen2_audio"]) else { panic!("a rule for clips") };
    for rate in [8_000_u32, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000] {
        for hundredths in [1_u64, 2_999, 3_000, 3_001, 60_000, 59_999] {
            for off_by in [-1_i64, 0, 1] {
                let frames = (hundredths * u64::from(rate) / 100).saturating_add_signed(off_by);
                let resampled = (u128::from(frames) * 16_000).div_ceil(u128::from(rate)) as u64;
                let [own, at_16_khz] =
                    [(frames, rate), (resampled, 16_000)].map(|(frames, sample_rate_hz)| {
                        rule.clip(AudioLength { frames, sample_rate_hz }).unwrap()
                    });
                assert_eq!(own, at_16_khz, "{frames} at {rate} Hz");
            }
        }
    }
}
