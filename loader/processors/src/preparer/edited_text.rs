//! Text in which words are replaced before tokenization, with the places of what follows them.

use std::ops::Range;

use crate::chat::MarkedText;
use crate::family::ImageWord;

/// Text in which words were replaced.
#[derive(Debug, Default)]
pub(super) struct EditedText {
    pub(super) text: String,
    /// End of each replaced word in the old text, and the shift in bytes of everything after it.
    shifts: Vec<(usize, isize)>,
}

impl EditedText {
    /// Appends `by` in place of a word of the old text.
    pub(super) fn replace(&mut self, word: &str, by: &str) {
        let shift = self.shifts.last().map_or(0, |(_, shift)| *shift);
        let end_before = (self.text.len() + word.len()).saturating_add_signed(-shift);
        self.text += by;
        self.shifts.push((end_before, shift + by.len() as isize - word.len() as isize));
    }

    /// Returns the place of a range of the old text.
    pub(super) fn shift(&self, range: &Range<usize>) -> Range<usize> {
        let place = |at: usize| {
            let known = self.shifts.partition_point(|(end, _)| *end <= at);
            known.checked_sub(1).map_or(at, |last| at.saturating_add_signed(self.shifts[last].1))
        };
        place(range.start)..place(range.end)
    }
}

/// Replaces the word of every image by its text.
pub(super) fn write_images(marked: &mut MarkedText, word: ImageWord) {
    let mut written = EditedText::default();
    let mut rest = marked.text.as_str();
    while let Some((before, after)) = rest.split_once(word.word) {
        written.text += before;
        written.replace(word.word, word.text);
        rest = after;
    }
    written.text += rest;
    marked.targets.iter_mut().for_each(|target| *target = written.shift(target));
    marked.text = written.text;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_stay_where_they_were() {
        let word = ImageWord { word: "<P>", text: "\n<P><soft>\n" };
        let mut marked = MarkedText { text: "a <P>b <P> said".to_owned(), targets: vec![0..1, 5..6, 11..15] };
        write_images(&mut marked, word);
        assert_eq!(marked.text, "a \n<P><soft>\nb \n<P><soft>\n said");
        let words: Vec<&str> = marked.targets.iter().map(|target| &marked.text[target.clone()]).collect();
        assert_eq!(words, ["a", "b", "said"]);
    }
}
