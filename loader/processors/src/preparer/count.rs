//! Counts the text tokens in a sample exactly, so that a plan matches the delivered samples.
//!
//! Handles samples that exceed the token limit.
//!
//! The index stores these counts in addition to estimates.
//!
//! Planning uses estimated text tokens; preparation knows the exact number. The user chooses how samples over
//! the limit are handled, and each of them is recorded.

use super::expand::Expanded;
use super::{Preparer, VisionInText, labels};
use crate::chat::{Conversation, Tokenizer, read_conversation, target_tokens};
use crate::message::MessagePart;
use crate::tensors::{CountedImages, CountedVideos, ImageTensors, VideoTensors};
use dflop_costmodel::tokens::VisionRule;
use dflop_costmodel::tokens::native::NativeResolution;
use dflop_costmodel::{ModelSpec, VideoShape};
use dflop_samples::BoxError;
use dflop_samples::inputs::{IGNORED, PixelValues, PrepareError, TextCounter, VideoValues};
use dflop_samples::media::{Media, Modality, TextLength, Video};
use dflop_samples::sample::Sample;
use xxhash_rust::xxh3::Xxh3;

/// Version of the conversation reader and the target finder: texts are counted again after a change.
const READER: &[u8] = b"2";

/// Counts the tokens that a [`Preparer`] writes for text: words, chat template and special tokens.
///
/// Markers around media are omitted, because the cost model counts them with the media: the sum is the length
/// of the prepared sample.
#[derive(Debug, Clone)]
pub struct PreparedTexts {
    preparer: Preparer,
    markers: MarkerTokens,
    digest: String,
}

/// Number of marker tokens around a medium, by the model's token rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct MarkerTokens {
    /// Number of marker tokens around an image or a crop.
    pub(super) image: u8,
    pub(super) audio: u8,
    pub(super) video: u8,
}

impl MarkerTokens {
    /// Returns the marker tokens for a model's token rules.
    pub(super) fn from_model(model: &ModelSpec) -> Self {
        let vision = model.vision.map(|vision| Self::from_vision_rule(&vision.rule)).unwrap_or_default();
        Self { audio: model.audio.map_or(0, |audio| audio.rule.marker_tokens()), ..vision }
    }

    fn from_vision_rule(rule: &VisionRule) -> Self {
        match rule {
            VisionRule::AnyRes(_)
            | VisionRule::ListedGrids(_)
            | VisionRule::ScaledTiles(_)
            | VisionRule::FittedTiles(_)
            | VisionRule::LongestEdge(_)
            | VisionRule::Table(_) => Self::default(),
            VisionRule::Fixed(rule) => Self { image: rule.marker_tokens, ..Self::default() },
            VisionRule::PanAndScan(rule) => Self { image: rule.tile.marker_tokens, ..Self::default() },
            // Video frames are written as text, whose labels the rule counts.
            VisionRule::DynamicTiles(rule) => Self { image: rule.marker_tokens, ..Self::default() },
            VisionRule::Native(rule) => {
                Self { image: rule.marker_tokens, video: rule.marker_tokens, ..Self::default() }
            }
        }
    }
}

impl Preparer {
    /// Returns a counter of the texts that this preparer writes.
    #[must_use]
    pub fn text_counter(&self) -> PreparedTexts {
        let mut digest = Xxh3::new();
        digest.update(self.tokenizer.serialized().as_bytes());
        digest.update(READER);
        // The digest covers `Debug` texts: after a rename inside these types, indexes count their texts
        // again.
        let rest = (&self.family, &self.chat_template, &self.plain_text, self.markers);
        digest.update(format!("{rest:?}").as_bytes());
        if let Some(rule) = &self.timed_videos {
            digest.update(format!("{rule:?}").as_bytes());
        }
        if let Some(rule) = &self.cut_images {
            digest.update(format!("{rule:?}").as_bytes());
        }
        PreparedTexts { preparer: self.clone(), markers: self.markers, digest: hex(&digest) }
    }

    /// Returns the number of sample tokens without media tokens.
    ///
    /// If video frames are written as text, frame labels are omitted too, because the cost model counts them.
    fn text_length(&self, sample: &Sample, markers: MarkerTokens) -> Result<TextLength, PrepareError> {
        let read = read_conversation(sample, |modality| self.takes(modality))?;
        let media = [read.images.len(), read.clips.len(), read.videos.len()];
        let (mut marked, has_special) = self.render_conversation(read.conversation)?;
        let images = read.images.iter().map(|&place| self.cut_image(&sample.fields[place].media)).collect();
        let timed = read.videos.iter().map(|&place| self.timed_video(&sample.fields[place].media));
        let timed: Vec<Option<(VideoValues, u64)>> = timed.collect();
        let of_times = timed.iter().flatten().map(|(_, tokens)| *tokens as usize).sum::<usize>();
        let untimed = timed.iter().filter(|timed| timed.is_none()).count();
        let videos = timed.into_iter().map(|timed| timed.unwrap_or_default().0).collect();
        let VisionInText { images, videos, video_tokens } = self.place_vision(&mut marked, images, videos)?;
        // A family that writes frames as text has no videos left, and no frame here.
        let has_frames = videos.len() < media[2];
        let counts = [images.tokens.len(), media[1], video_tokens.len()];
        let one_token = |modality| match modality {
            Modality::Image => vec![1; counts[0]],
            Modality::Audio => vec![1; counts[1]],
            Modality::Video => vec![1; counts[2]],
        };
        let refused = |reason| PrepareError::Tokenizer { reason };
        let encoded = self.tokenizer.encode(&marked.text, has_special).map_err(refused)?;
        let is_target = target_tokens(&encoded, &marked.targets);
        let expanded = self.expander.expand(&encoded.ids, &is_target, one_token, &[])?;
        let of_markers =
            [markers.image, markers.audio, markers.video].into_iter().zip([counts[0], media[1], untimed]);
        let marker_tokens: usize = of_markers.map(|(tokens, media)| usize::from(tokens) * media).sum();
        let marker_tokens = marker_tokens + of_times;
        let learned = labels(&expanded).iter().filter(|&&label| label != IGNORED).count();
        // The frames precede the caption, so its first token has a predecessor and is a target after all.
        let learned = learned + usize::from(has_frames && expanded.is_target.first() == Some(&true));
        let media_tokens: usize = counts.iter().sum();
        let tokens = expanded.ids.len().saturating_sub(media_tokens + marker_tokens);
        Ok(TextLength { tokens: to_u32(tokens), target_tokens: to_u32(learned) })
    }

    /// Returns an image without pixels, with the tokens for all crops if the family writes words around
    /// crops. Without crop tokens if the image size is unknown: then the text is counted as for an image
    /// without crops.
    fn cut_image(&self, media: &Media) -> PixelValues {
        let (Some(rule), Media::Image(image)) = (self.cut_images, media) else {
            return PixelValues::default();
        };
        let counted = CountedImages(VisionRule::PanAndScan(rule)).images(&[image]);
        counted.ok().and_then(|mut images| images.pop()).unwrap_or_default()
    }

    /// Returns a video with layer times but without tokens, and the number of marker and label tokens that
    /// the cost model counts with the video. `None` for a family without times in the text, or if the times
    /// are unknown: then the text is counted without times, as in the cost model.
    fn timed_video(&self, media: &Media) -> Option<(VideoValues, u64)> {
        let (Some(rule), Media::Video(video)) = (self.timed_videos, media) else { return None };
        timed_values(rule, video)
    }
}

fn timed_values(rule: NativeResolution, video: &Video) -> Option<(VideoValues, u64)> {
    let values = CountedVideos(VisionRule::Native(rule)).video(video).ok()?;
    let shape = VideoShape { frames: video.frames() as u32, width: video.width, height: video.height };
    let planned = rule.video(shape).ok()?.tokens;
    let around = planned.saturating_sub(u64::from(values.pixels.tokens));
    Some((values, around))
}

impl TextCounter for PreparedTexts {
    fn digest(&self) -> String {
        self.digest.clone()
    }

    fn reads_video_times(&self) -> bool {
        self.preparer.timed_videos.is_some()
    }

    fn reads_image_sizes(&self) -> bool {
        self.preparer.cut_images.is_some()
    }

    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
        Ok(self.preparer.text_length(sample, self.markers)?)
    }
}

/// Counts texts with only a tokenizer, without chat template and special tokens.
#[derive(Debug, Clone)]
pub struct TokenizedTexts {
    tokenizer: Tokenizer,
    digest: String,
}

impl Tokenizer {
    /// Returns a counter for bare texts.
    #[must_use]
    pub fn text_counter(&self) -> TokenizedTexts {
        let mut digest = Xxh3::new();
        digest.update(self.serialized().as_bytes());
        digest.update(READER);
        TokenizedTexts { tokenizer: self.clone(), digest: hex(&digest) }
    }
}

impl TokenizedTexts {
    fn length(&self, parts: &[MessagePart]) -> Result<usize, BoxError> {
        let mut tokens = 0;
        for part in parts {
            if let MessagePart::Text(text) = part {
                tokens += self.tokenizer.encode(text, false)?.ids.len();
            }
        }
        Ok(tokens)
    }
}

impl TextCounter for TokenizedTexts {
    fn digest(&self) -> String {
        self.digest.clone()
    }

    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
        let (mut tokens, mut learned) = (0, 0);
        match read_conversation(sample, |_| true)?.conversation {
            Conversation::Plain(parts) => {
                tokens = self.length(&parts)?;
                learned = tokens;
            }
            Conversation::Turns(dialogue) => {
                for message in &dialogue.messages {
                    let of_message = self.length(&message.content)?;
                    tokens += of_message;
                    learned += if message.is_target { of_message } else { 0 };
                }
            }
        }
        Ok(TextLength { tokens: to_u32(tokens), target_tokens: to_u32(learned) })
    }
}

fn hex(digest: &Xxh3) -> String {
    format!("{:016x}", digest.digest())
}

fn to_u32(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Treatment for a sample with more tokens than the limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LongSample {
    /// The sample is bad: skipped, listed, and counted against the error budget.
    #[default]
    Error,
    /// The text is cut from the end until the sample fits. Media tokens are never cut; a sample whose media
    /// tokens exceed the limit, or that has no target tokens left, is a bad sample.
    TruncateText,
    /// The sample is skipped and listed, and does not count against the error budget.
    Drop,
}

/// Shortens a sample to at most `tokens_max` tokens; returns the number of tokens cut.
pub(super) fn limit(
    expanded: &mut Expanded,
    tokens_max: usize,
    policy: LongSample,
) -> Result<usize, PrepareError> {
    let tokens = expanded.ids.len();
    let too_long = |note, is_dropped| PrepareError::TooLong { tokens, tokens_max, note, is_dropped };
    if tokens <= tokens_max {
        return Ok(0);
    }
    match policy {
        LongSample::Error => Err(too_long("", false)),
        LongSample::Drop => Err(too_long("; dropped, as configured", true)),
        LongSample::TruncateText => {
            let had_targets = expanded.is_target.iter().skip(1).any(|&is_target| is_target);
            let cut = tokens - tokens_max;
            if !cut_text(expanded, cut) {
                return Err(too_long(" by their media alone", false));
            }
            if had_targets && !expanded.is_target.iter().skip(1).any(|&is_target| is_target) {
                return Err(too_long(", and no target tokens are left within it", false));
            }
            Ok(cut)
        }
    }
}

/// Removes the last `cut` ids that do not belong to media; returns `false` if there are fewer.
fn cut_text(expanded: &mut Expanded, cut: usize) -> bool {
    let mut is_media = vec![false; expanded.ids.len()];
    for run in &expanded.runs {
        is_media[run.with_markers()].fill(true);
    }
    let Some(first_cut) = (0..is_media.len()).rev().filter(|&at| !is_media[at]).nth(cut - 1) else {
        return false;
    };
    let is_kept = |at: usize| at < first_cut || is_media[at];
    // Number of kept ids before each index, which is the start of a run after the cut.
    let mut kept = 0;
    let mut begins = Vec::with_capacity(is_media.len());
    for at in 0..is_media.len() {
        begins.push(kept);
        if is_kept(at) {
            expanded.ids[kept] = expanded.ids[at];
            expanded.is_target[kept] = expanded.is_target[at];
            kept += 1;
        }
    }
    begins.push(kept);
    expanded.ids.truncate(kept);
    expanded.is_target.truncate(kept);
    for run in &mut expanded.runs {
        run.start = begins[run.start];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_samples::inputs::MediaRun;
    use dflop_samples::media::Modality;
    use proptest::prelude::*;

    const MEDIA: u32 = 9;
    const MARKER: u32 = 8;

    /// Creates a sample from one-id texts and media as runs of `MEDIA` between markers; all text but the
    /// first is target.
    fn sample(parts: &[(bool, usize)]) -> Expanded {
        let mut sample = Expanded::default();
        for &(is_media, tokens) in parts {
            if is_media {
                let start = sample.ids.len() + 1;
                sample.ids.push(MARKER);
                sample.ids.extend(std::iter::repeat_n(MEDIA, tokens));
                sample.ids.push(MARKER);
                sample.runs.push(MediaRun { modality: Modality::Image, start, tokens, has_markers: true });
                sample.is_target.resize(sample.ids.len(), false);
            } else {
                sample.ids.extend(std::iter::repeat_n(1, tokens));
                sample.is_target.resize(sample.ids.len(), true);
            }
        }
        sample
    }

    #[test]
    fn text_is_cut_from_the_end_around_media() {
        let mut long = sample(&[(false, 4), (true, 2), (false, 2)]);
        assert_eq!(limit(&mut long, 7, LongSample::TruncateText).unwrap(), 3);
        assert_eq!(long.ids, [1, 1, 1, MARKER, MEDIA, MEDIA, MARKER]);
        assert_eq!(long.runs[0].start, 4);
    }

    #[test]
    fn media_alone_may_be_too_long_and_a_sample_without_anything_to_learn_is_refused() {
        let reason = |tokens_max| {
            let mut long = sample(&[(true, 4), (false, 3)]);
            limit(&mut long, tokens_max, LongSample::TruncateText).unwrap_err().to_string()
        };
        assert_eq!(reason(5), "9 tokens exceed the limit of 5 by their media alone");
        assert_eq!(reason(6), "9 tokens exceed the limit of 6, and no target tokens are left within it");
    }

    #[test]
    fn error_and_drop_name_both_counts() {
        for (policy, is_dropped) in [(LongSample::Error, false), (LongSample::Drop, true)] {
            let error = limit(&mut sample(&[(false, 5)]), 4, policy).unwrap_err();
            assert!(error.to_string().starts_with("5 tokens exceed the limit of 4"), "{error}");
            assert_eq!(error.is_dropped(), is_dropped);
        }
        assert_eq!(limit(&mut sample(&[(false, 5)]), 5, LongSample::Error).unwrap(), 0);
    }

    proptest! {
        #[test]
        fn truncation_keeps_all_media_and_the_first_words(
            parts in prop::collection::vec((any::<bool>(), 0usize..6), 1..6), tokens_max in 1usize..40,
        ) {
            let whole = sample(&parts);
            let mut cut = whole.clone();
            if let Ok(tokens) = limit(&mut cut, tokens_max, LongSample::TruncateText) {
                prop_assert_eq!(cut.ids.len() + tokens, whole.ids.len());
                prop_assert!(cut.ids.len() <= tokens_max);
                prop_assert_eq!(cut.is_target.len(), cut.ids.len());
                let media = |sample: &Expanded| sample.ids.iter().filter(|&&id| id != 1).count();
                prop_assert_eq!(media(&cut), media(&whole));
                for run in &cut.runs {
                    prop_assert_eq!(cut.ids[run.start - 1], MARKER);
                    prop_assert!(cut.ids[run.start..run.start + run.tokens].iter().all(|&id| id == MEDIA));
                    prop_assert_eq!(cut.ids[run.start + run.tokens], MARKER);
                }
                prop_assert!(tokens == 0 || cut.ids.len() == tokens_max);
            } else {
                let words = whole.ids.iter().filter(|&&id| id == 1).count();
                let media = whole.ids.len() - words;
                prop_assert!(tokens_max <= media || parts[0].0 || tokens_max <= media + 1);
            }
        }
    }
}
