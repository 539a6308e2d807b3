//! Text in which words are replaced before tokenization, with the positions of the following text.

use std::ops::Range;

use dflop_samples::inputs::PixelValues;

use crate::chat::MarkedText;
use crate::family::ImageWord;

/// Text in which words were replaced.
#[derive(Debug, Default)]
pub(super) struct EditedText {
    pub(super) text: String,
    /// End of each replaced word in the old text, and the shift in bytes for everything after the word.
    shifts: Vec<(usize, isize)>,
}

impl EditedText {
    /// Appends `by` in place of a word in the old text.
    pub(super) fn replace(&mut self, word: &str, by: &str) {
        let shift = self.shifts.last().map_or(0, |(_, shift)| *shift);
        let end_before = (self.text.len() + word.len()).saturating_add_signed(-shift);
        self.text += by;
        self.shifts.push((end_before, shift + by.len() as isize - word.len() as isize));
    }

    /// Returns the new range for a range in the old text.
    pub(super) fn shift(&self, range: &Range<usize>) -> Range<usize> {
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::family::CropWords;

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
