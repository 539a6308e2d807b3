//! Writes videos as lists of numbered frame images, InternVL, or as frame layers with times, Qwen3-VL.
//!
//! Completes microbatches so that a model can run them: padding where there is no sample, blank media where
//! an encoder would otherwise have no input.
//!
//! The chat template writes a single word for a video. Before tokenization the word is replaced by a line for
//! each frame, `Frame1: ` and an image placeholder, or by the time and the placeholder for each layer, so
//! that the tokenizer joins the labels with the surrounding text as usual. From then on, frames are handled
//! like other images, and layers like other videos.
//!
//! A model fails without an input token, and an encoder that runs on only some ranks leaves parameters
//! without gradients (DDP) or ranks waiting for each other (FSDP). A filler has no targets and attends only
//! to itself, so it changes neither the loss nor the gradient.

use super::Preparer;
use crate::chat::MarkedText;
use crate::family::{ImageWord, Placeholder};
use crate::message::MessagePart;
use dflop_costmodel::Module;
use dflop_samples::inputs::{
    Filler, IGNORED, ModelInputs, PixelValues, PrepareError, PreparedSample, VideoValues,
};
use dflop_samples::media::{Audio, Modality, RgbImage};
use dflop_samples::{Error, Result};
use std::ops::Range;

/// Images and frames in text order, with token counts.
#[derive(Debug, Default)]
pub(super) struct ImagesInText {
    pub(super) media: Vec<PixelValues>,
    pub(super) tokens: Vec<u32>,
}

/// Replaces every video word by the video frames.
///
/// # Errors
/// [`PrepareError::MediaTokens`] if the number of words differs from the number of videos.
pub(super) fn write_frames(
    marked: &mut MarkedText,
    [image, word]: [&str; 2],
    images: Vec<PixelValues>,
    videos: Vec<VideoValues>,
) -> Result<ImagesInText, PrepareError> {
    let found = marked.text.matches(word).count();
    if found != videos.len() {
        let (token, modality, media) = (word.to_owned(), Modality::Video, videos.len());
        return Err(PrepareError::MediaTokens { token, modality, found, media });
    }
    let (mut images, mut videos) = (images.into_iter(), videos.into_iter());
    let mut in_text = ImagesInText::default();
    let mut written = EditedText::default();
    let mut rest = marked.text.as_str();
    while let Some((at, modality)) = next_medium(rest, image, word) {
        written.text += &rest[..at];
        rest = &rest[at..];
        if modality == Modality::Image {
            rest = &rest[image.len()..];
            written.text += image;
            in_text.push(images.next());
            continue;
        }
        rest = &rest[word.len()..];
        let Some(video) = videos.next() else { continue };
        let frames: Vec<String> = (1..=video.frames).map(|frame| format!("Frame{frame}: {image}")).collect();
        written.replace(word, &frames.join("\n"));
        let tokens = video.pixels.tokens / video.frames.max(1);
        in_text.tokens.extend(std::iter::repeat_n(tokens, video.frames as usize));
        in_text.media.push(video.pixels);
    }
    // More images than placeholders; the expansion reports the mismatch.
    images.for_each(|image| in_text.push(Some(image)));
    written.text += rest;
    marked.targets.iter_mut().for_each(|target| *target = written.shift(target));
    marked.text = written.text;
    Ok(in_text)
}

/// Replaces every video token by the video layers, each a time and the placeholder with markers.
///
/// - returns the number of tokens in each layer
///
/// # Errors
/// [`PrepareError::MediaTokens`] if the number of tokens differs from the number of videos.
///
/// # Source
/// `Qwen3VLProcessor` in transformers 5.24.0, which keeps the markers that the chat template wrote around the
/// token.
pub(super) fn write_times(
    marked: &mut MarkedText,
    placeholder: &Placeholder,
    videos: &[VideoValues],
) -> Result<Vec<u32>, PrepareError> {
    let token = placeholder.token;
    let found = marked.text.matches(token).count();
    if found != videos.len() {
        let (token, modality, media) = (token.to_owned(), Modality::Video, videos.len());
        return Err(PrepareError::MediaTokens { token, modality, found, media });
    }
    let layer_text = placeholder.to_text();
    let mut written = EditedText::default();
    let (mut tokens, mut rest) = (Vec::new(), marked.text.as_str());
    for video in videos {
        let Some((before, after)) = rest.split_once(token) else { break };
        written.text += before;
        rest = after;
        let label = |seconds: &f64| format!("<{seconds:.1} seconds>{layer_text}");
        let labels: String = video.layer_seconds.iter().map(label).collect();
        written.replace(token, &labels);
        let layers = video.layer_seconds.len();
        tokens.extend(std::iter::repeat_n(video.pixels.tokens / layers.max(1) as u32, layers));
    }
    written.text += rest;
    marked.targets.iter_mut().for_each(|target| *target = written.shift(target));
    marked.text = written.text;
    Ok(tokens)
}

impl ImagesInText {
    fn push(&mut self, image: Option<PixelValues>) {
        self.tokens.extend(image.as_ref().map(|image| image.tokens));
        self.media.extend(image);
    }
}

/// Returns the position and modality of the next image or video.
fn next_medium(text: &str, image: &str, word: &str) -> Option<(usize, Modality)> {
    let places = [(text.find(image), Modality::Image), (text.find(word), Modality::Video)];
    places.into_iter().filter_map(|(at, modality)| Some((at?, modality))).min_by_key(|(at, _)| *at)
}

/// Text in which words were replaced.
#[derive(Debug, Default)]
struct EditedText {
    text: String,
    /// End of each replaced word in the old text, and the shift in bytes for everything after the word.
    shifts: Vec<(usize, isize)>,
}

impl EditedText {
    /// Appends `by` in place of a word in the old text.
    fn replace(&mut self, word: &str, by: &str) {
        let shift = self.shifts.last().map_or(0, |(_, shift)| *shift);
        let end_before = (self.text.len() + word.len()).saturating_add_signed(-shift);
        self.text += by;
        self.shifts.push((end_before, shift + by.len() as isize - word.len() as isize));
    }

    /// Returns the new range for a range in the old text.
    fn shift(&self, range: &Range<usize>) -> Range<usize> {
        let place = |at: usize| {
            let known = self.shifts.partition_point(|(end, _)| *end <= at);
            known.checked_sub(1).map_or(at, |last| at.saturating_add_signed(self.shifts[last].1))
        };
        place(range.start)..place(range.end)
    }
}

/// Replaces every image word by the image text, including crops; a word without an image becomes the text for
/// an image without crops.
pub(super) fn write_images(marked: &mut MarkedText, word: ImageWord, images: &[PixelValues]) {
    let mut written = EditedText::default();
    let mut images = images.iter();
    let mut rest = marked.text.as_str();
    while let Some((before, after)) = rest.split_once(word.word) {
        written.text += before;
        let tokens = images.next().map_or(0, |image| image.tokens);
        written.replace(word.word, &word.write(tokens));
        rest = after;
    }
    written.text += rest;
    marked.targets.iter_mut().for_each(|target| *target = written.shift(target));
    marked.text = written.text;
}

/// Side of a blank image in pixels; a processor may enlarge the image.
const BLANK_SIDE: u32 = 56;
/// Sample rate of a blank audio clip in Hz, and number of samples: a second.
const BLANK_RATE_HZ: u32 = 16_000;

impl Preparer {
    /// Returns the number of blank medium tokens for each encoder in the model, including markers.
    ///
    /// # Errors
    /// [`Error::Config`] if a processor rejects a blank medium.
    pub fn blank_tokens(&self) -> Result<Vec<(Module, u64)>> {
        let encoders = [(Module::Vision, self.images.is_some()), (Module::Audio, self.audio.is_some())];
        let encoders = encoders.into_iter().filter(|(_, is_present)| *is_present);
        encoders.map(|(module, _)| Ok((module, self.blank(module)?.tokens() as u64))).collect()
    }

    /// Creates the filler for microbatches that all have to run `encoders`.
    ///
    /// # Errors
    /// [`Error::Config`] if a processor rejects a blank medium.
    pub(super) fn make_filler(&self, encoders: &[Module]) -> Result<Filler> {
        let (input_ids, labels) = (vec![self.packer.pad_id], vec![IGNORED]);
        let padding = PreparedSample { input_ids, labels, ..PreparedSample::default() };
        let padding = Some(padding).filter(|_| self.packer.pad_to_tokens.is_none());
        let blanks = encoders.iter().map(|&module| Ok((module, self.blank(module)?)));
        Ok(Filler::new(padding, blanks.collect::<Result<_>>()?))
    }

    /// Creates the tensors for a microbatch that a model can run, for any samples.
    pub(super) fn pack_filled(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        let fillers: Vec<PreparedSample> = filler.of(&samples).cloned().collect();
        // A blank image exists only if samples have none.
        let has_blank = fillers.iter().any(|filler| !filler.images.is_empty());
        let blank = self.media_filler(if has_blank { &fillers } else { &samples });
        self.packer.pack(samples, fillers.into_iter().chain(blank).collect()).unwrap_or_default()
    }

    /// Creates a sequence with a blank medium, black or silent, without targets.
    fn blank(&self, module: Module) -> Result<PreparedSample> {
        let refused = |reason: String| Error::Config {
            setting: "blank_media",
            reason: format!("no blank medium for the {module} encoder: {reason}"),
        };
        let part = MessagePart::Medium(match module {
            Module::Audio => Modality::Audio,
            Module::Vision | Module::Llm => Modality::Image,
        });
        let mut filler = PreparedSample::default();
        match (module, &self.images, &self.audio) {
            (Module::Vision, Some(images), _) => {
                let pixels = vec![0; 3 * (BLANK_SIDE * BLANK_SIDE) as usize];
                let image = RgbImage { width: BLANK_SIDE, height: BLANK_SIDE, pixels, is_truncated: false };
                filler.images = images.images(&[&image]).map_err(|error| refused(error.to_string()))?;
            }
            (Module::Audio, _, Some(audio)) => {
                let samples = vec![0.0; BLANK_RATE_HZ as usize];
                let clip = Audio { samples, sample_rate_hz: BLANK_RATE_HZ, channels: 1, is_truncated: false };
                filler.clips = vec![audio.clip(&clip).map_err(|error| refused(error.to_string()))?];
            }
            _ => return Err(refused("the model has no such encoder".into())),
        }
        let mut marked = MarkedText { text: self.family.inline(&[part], ""), targets: Vec::new() };
        if let Some(word) = self.family.image_word() {
            write_images(&mut marked, word, &filler.images);
        }
        let encoded = self.tokenizer.encode(&marked.text, false).map_err(refused)?;
        let is_target = vec![false; encoded.ids.len()];
        let tokens_of = |modality| match modality {
            Modality::Image => self.image_runs(&filler.images),
            Modality::Audio => filler.clips.iter().map(|clip| clip.tokens).collect(),
            Modality::Video => Vec::new(),
        };
        let expanded = self.expander.expand(&encoded.ids, &is_target, tokens_of, &filler.images);
        let expanded = expanded.map_err(|error| refused(error.to_string()))?;
        filler.labels = vec![IGNORED; expanded.ids.len()];
        (filler.input_ids, filler.runs) = (expanded.ids, expanded.runs);
        Ok(filler)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::CropWords;
    use std::num::NonZeroU32;

    const WORDS: [&str; 2] = ["<P>", "<video>"];

    fn image(tokens: u32) -> PixelValues {
        PixelValues { tokens, ..PixelValues::default() }
    }

    fn video(frames: u32, tokens: u32) -> VideoValues {
        VideoValues { pixels: image(tokens), frames, seconds_per_grid: 1.0, ..VideoValues::default() }
    }

    #[test]
    fn every_frame_gets_its_line_and_what_is_learned_stays_where_it_was() {
        let text = "a <P> <video>\nsaid <video> more".to_owned();
        let targets = vec![0..1, 14..18, 27..31];
        let words = |marked: &MarkedText| -> Vec<String> {
            marked.targets.iter().map(|target| marked.text[target.clone()].to_owned()).collect()
        };
        let mut marked = MarkedText { text, targets };
        assert_eq!(words(&marked), ["a", "said", "more"]);
        let videos = vec![video(2, 10), video(1, 5)];
        let in_text = write_frames(&mut marked, WORDS, vec![image(7)], videos).unwrap();
        assert_eq!(marked.text, "a <P> Frame1: <P>\nFrame2: <P>\nsaid Frame1: <P> more");
        assert_eq!(words(&marked), ["a", "said", "more"]);
        assert_eq!(in_text.tokens, [7, 5, 5, 5]);
        assert_eq!(in_text.media.iter().map(|media| media.tokens).collect::<Vec<_>>(), [7, 10, 5]);
    }

    #[test]
    fn every_layer_gets_its_time() {
        const PAD: Placeholder =
            Placeholder { token: "<P>", markers: Some(["<", ">"]), has_markers_in_text: true };
        let mut marked = MarkedText { text: "ab <<P>> cd <<P>>".to_owned(), targets: vec![0..2, 9..11] };
        let timed = |layer_seconds: Vec<f64>, tokens| VideoValues {
            pixels: image(tokens),
            layer_seconds,
            ..VideoValues::default()
        };
        let tokens = write_times(&mut marked, &PAD, &[timed(vec![0.25, 11.04], 8), timed(vec![0.0], 3)]);
        assert_eq!(tokens.unwrap(), [4, 4, 3]);
        assert_eq!(marked.text, "ab <<0.2 seconds><<P>><11.0 seconds><<P>>> cd <<0.0 seconds><<P>>>");
        let words = marked.targets.iter().map(|target| &marked.text[target.clone()]).collect::<Vec<_>>();
        assert_eq!(words, ["ab", "cd"]);
        let error = write_times(&mut marked, &PAD, &[]).unwrap_err().to_string();
        assert_eq!(error, "the text has 3 `<P>` tokens for 0 videos");
    }

    #[test]
    fn words_and_videos_must_match() {
        let mut marked = MarkedText { text: "<video>".into(), targets: Vec::new() };
        let error = write_frames(&mut marked, WORDS, Vec::new(), Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "the text has 1 `<video>` tokens for 0 videos");
    }

    #[test]
    fn targets_stay_where_they_were() {
        let word = ImageWord { word: "<P>", text: "\n<P><soft>\n", crops: None };
        let mut marked = MarkedText { text: "a <P>b <P> said".to_owned(), targets: vec![0..1, 5..6, 11..15] };
        write_images(&mut marked, word, &[]);
        assert_eq!(marked.text, "a \n<P><soft>\nb \n<P><soft>\n said");
        let words: Vec<&str> = marked.targets.iter().map(|target| &marked.text[target.clone()]).collect();
        assert_eq!(words, ["a", "b", "said"]);
    }

    #[test]
    fn an_image_with_crops_is_several_in_the_text() {
        let crops = CropWords {
            before: "all ",
            between: " parts ",
            separator: " ",
            tile_tokens: NonZeroU32::new(4).unwrap(),
        };
        let word = ImageWord { word: "<P>", text: "<soft>", crops: Some(crops) };
        let mut marked =
            MarkedText { text: "a <P>b <P> said <P>".to_owned(), targets: vec![0..1, 5..6, 11..15] };
        let image = |tokens| PixelValues { tokens, ..PixelValues::default() };
        let images = [image(12), image(4)];
        write_images(&mut marked, word, &images);
        assert_eq!(marked.text, "a all <soft> parts <soft> <soft>b <soft> said <soft>");
        let words: Vec<&str> = marked.targets.iter().map(|target| &marked.text[target.clone()]).collect();
        assert_eq!(words, ["a", "b", "said"]);
        let runs = images.iter().flat_map(|image| word.runs(image.tokens));
        assert_eq!(runs.collect::<Vec<_>>(), [4, 4, 4, 4]);
        assert_eq!(word.runs(0).collect::<Vec<_>>(), [0], "counted without its size");
    }
}
