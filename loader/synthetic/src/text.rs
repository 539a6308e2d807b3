//! Generates prose and conversations with a given number of words.

use std::io;

use serde::Serialize;

use crate::draws::Rng;

const WORDS: [&str; 64] = [
    "a", "the", "two", "some", "small", "large", "old", "new", "red", "green", "blue", "bright", "quiet",
    "narrow", "wooden", "empty", "street", "table", "window", "house", "river", "garden", "market",
    "station", "bridge", "harbour", "mountain", "kitchen", "person", "child", "dog", "bird", "horse", "boat",
    "train", "bicycle", "lamp", "letter", "number", "total", "stands", "sits", "runs", "holds", "shows",
    "reads", "carries", "crosses", "looks", "waits", "near", "under", "behind", "above", "with", "without",
    "and", "while", "because", "before", "slowly", "again", "today", "there",
];

/// Writes this many words as sentences with 6 to 14 words; at least one word.
pub(crate) fn prose(words: usize, rng: &mut Rng) -> String {
    let mut text = String::new();
    let mut left = 0;
    for word in 0..words.max(1) {
        let drawn = WORDS[rng.below(WORDS.len())];
        if left == 0 {
            left = 6 + rng.below(9);
            text.push_str(if word == 0 { "" } else { ". " });
            text.push_str(&drawn[..1].to_ascii_uppercase());
            text.push_str(&drawn[1..]);
        } else {
            text.push(' ');
            text.push_str(drawn);
        }
        left -= 1;
    }
    text.push('.');
    text
}

#[derive(Serialize)]
struct Conversation<'a> {
    id: &'a str,
    conversations: Vec<Turn>,
}

#[derive(Serialize)]
struct Turn {
    from: &'static str,
    value: String,
}

/// Writes a conversation with one to three questions about some images, in the LLaVA training data format.
///
/// - `words`: number of words in all turns together, a quarter in questions
/// - returns JSON with a list of turns under `conversations`
///
/// # Source
/// Liu et al., "Visual Instruction Tuning", 2023, arXiv:2304.08485.
pub(crate) fn conversation(key: &str, images: usize, words: usize, rng: &mut Rng) -> io::Result<Vec<u8>> {
    let questions = 1 + rng.below(3);
    let mut conversations = Vec::with_capacity(2 * questions);
    for question in 0..questions {
        // LLaVA puts all images before the first question.
        let placeholders = if question == 0 { "<image>\n".repeat(images) } else { String::new() };
        let asked = prose(words / 4 / questions, rng);
        conversations.push(Turn { from: "human", value: placeholders + &asked });
        conversations.push(Turn { from: "gpt", value: prose(words * 3 / 4 / questions, rng) });
    }
    Ok(serde_json::to_vec(&Conversation { id: key, conversations })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_has_the_wanted_number_of_words() {
        let mut rng = Rng::new(1, 1);
        for words in [1, 7, 444] {
            assert_eq!(prose(words, &mut rng).split_whitespace().count(), words);
        }
    }

    #[test]
    fn a_conversation_names_every_image_once() {
        let json = conversation("k", 3, 100, &mut Rng::new(1, 1)).unwrap();
        assert_eq!(String::from_utf8(json).unwrap().matches("<image>").count(), 3);
    }
}
