//! Writes videos as lists of numbered frame images: InternVL.
//!
//! The chat template writes one word for a video. Before tokenization the word is replaced by a line for each
//! frame, `Frame1: ` and the placeholder of an image, so that the tokenizer joins frame labels with the
//! surrounding text as usual. From then on, frames are handled like other images.

use std::ops::Range;

use super::error::PrepareError;
use super::image::PixelValues;
use super::labels::Marked;
use super::video::VideoValues;
use crate::sample::text::MediumSlot;

/// Images and frames in the order of the text, with the tokens of each.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub(super) media: Vec<PixelValues>,
    pub(super) tokens: Vec<u32>,
}

/// Replaces the word of every video by its frames.
///
/// # Errors
/// [`PrepareError::MediaTokens`] if the number of words differs from the number of videos.
pub(super) fn write_frames(
    marked: &mut Marked,
    [image, word]: [&str; 2],
    images: Vec<PixelValues>,
    videos: Vec<VideoValues>,
) -> Result<Shown, PrepareError> {
    let found = marked.text.matches(word).count();
    if found != videos.len() {
        let (token, slot, media) = (word.to_owned(), MediumSlot::Video, videos.len());
        return Err(PrepareError::MediaTokens { token, slot, found, media });
    }
    let (mut images, mut videos) = (images.into_iter(), videos.into_iter());
    let mut shown = Shown::default();
    let mut written = Written::default();
    let mut rest = marked.text.as_str();
    while let Some((at, slot)) = next_of(rest, image, word) {
        written.text += &rest[..at];
        rest = &rest[at..];
        if slot == MediumSlot::Image {
            rest = &rest[image.len()..];
            written.text += image;
            shown.push(images.next());
            continue;
        }
        rest = &rest[word.len()..];
        let Some(video) = videos.next() else { continue };
        let frames: Vec<String> = (1..=video.frames).map(|frame| format!("Frame{frame}: {image}")).collect();
        written.replace(word, &frames.join("\n"));
        let tokens = video.pixels.tokens / video.frames.max(1);
        shown.tokens.extend(std::iter::repeat_n(tokens, video.frames as usize));
        shown.media.push(video.pixels);
    }
    // More images than placeholders; the expansion reports the mismatch.
    images.for_each(|image| shown.push(Some(image)));
    written.text += rest;
    marked.targets.iter_mut().for_each(|target| *target = written.moved(target));
    marked.text = written.text;
    Ok(shown)
}

impl Shown {
    fn push(&mut self, image: Option<PixelValues>) {
        self.tokens.extend(image.as_ref().map(|image| image.tokens));
        self.media.extend(image);
    }
}

/// Returns the position and modality of the next image or video.
fn next_of(text: &str, image: &str, word: &str) -> Option<(usize, MediumSlot)> {
    let places = [(text.find(image), MediumSlot::Image), (text.find(word), MediumSlot::Video)];
    places.into_iter().filter_map(|(at, slot)| Some((at?, slot))).min_by_key(|(at, _)| *at)
}

/// Text in which words were replaced.
#[derive(Debug, Default)]
struct Written {
    text: String,
    /// End of each replaced word in the old text, and the shift in bytes of everything after it.
    moves: Vec<(usize, isize)>,
}

impl Written {
    fn replace(&mut self, word: &str, by: &str) {
        let moved = self.moves.last().map_or(0, |(_, moved)| *moved);
        let end_before = (self.text.len() + word.len()).saturating_add_signed(-moved);
        self.text += by;
        self.moves.push((end_before, moved + by.len() as isize - word.len() as isize));
    }

    fn moved(&self, range: &Range<usize>) -> Range<usize> {
        let place = |at: usize| {
            let known = self.moves.partition_point(|(end, _)| *end <= at);
            known.checked_sub(1).map_or(at, |last| at.saturating_add_signed(self.moves[last].1))
        };
        place(range.start)..place(range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 2] = ["<P>", "<video>"];

    fn image(tokens: u32) -> PixelValues {
        PixelValues { tokens, ..PixelValues::default() }
    }

    fn video(frames: u32, tokens: u32) -> VideoValues {
        VideoValues { pixels: image(tokens), frames, seconds_per_grid: 1.0 }
    }

    #[test]
    fn every_frame_gets_its_line_and_what_is_learned_stays_where_it_was() {
        let text = "a <P> <video>\nsaid <video> more".to_owned();
        let targets = vec![0..1, 14..18, 27..31];
        let words = |marked: &Marked| -> Vec<String> {
            marked.targets.iter().map(|target| marked.text[target.clone()].to_owned()).collect()
        };
        let mut marked = Marked { text, targets };
        assert_eq!(words(&marked), ["a", "said", "more"]);
        let videos = vec![video(2, 10), video(1, 5)];
        let shown = write_frames(&mut marked, WORDS, vec![image(7)], videos).unwrap();
        assert_eq!(marked.text, "a <P> Frame1: <P>\nFrame2: <P>\nsaid Frame1: <P> more");
        assert_eq!(words(&marked), ["a", "said", "more"]);
        assert_eq!(shown.tokens, [7, 5, 5, 5]);
        assert_eq!(shown.media.iter().map(|media| media.tokens).collect::<Vec<_>>(), [7, 10, 5]);
    }

    #[test]
    fn words_and_videos_must_match() {
        let mut marked = Marked { text: "<video>".into(), targets: Vec::new() };
        let error = write_frames(&mut marked, WORDS, Vec::new(), Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "the text has 1 `<video>` tokens for 0 videos");
    }
}
