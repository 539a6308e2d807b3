//! Synthetic samples, with prose and conversations of a given number of words.

use super::draws::{PHOTO_SIZES, RECEIPT_SIZES, Rng, SPEECH_SECONDS, TEXT_WORDS};
use super::{images, speech};
use serde::Serialize;
use std::io;

/// Percentage of image samples that show scanned receipts instead of photos.
const RECEIPT_PERCENT: usize = 10;
/// Percentage of audio clips that are WAV instead of FLAC.
const WAV_PERCENT: usize = 6;
/// Reading speed: `LibriSpeech` has about 9.4 million words in 960 hours.
const WORDS_PER_SECOND: f64 = 2.7;

/// A file in a sample.
#[derive(Debug)]
pub struct Field {
    /// Part of the entry name after the key and a dot.
    pub extension: String,
    /// File contents.
    pub payload: Vec<u8>,
}

/// Media in a sample.
#[derive(Debug, Clone, Copy)]
enum Mix {
    Text,
    Image,
    Images,
    Audio,
    AudioAndImage,
}

/// Percentages of the sample kinds, 100 together.
const SHARES: [(Mix, usize); 5] =
    [(Mix::Text, 20), (Mix::Image, 45), (Mix::Images, 15), (Mix::Audio, 12), (Mix::AudioAndImage, 8)];

/// Generates the files for the sample that `rng` was created for.
///
/// # Errors
/// If an encoder rejects an input.
pub fn make_sample(key: &str, rng: &mut Rng) -> io::Result<Vec<Field>> {
    Ok(match draw_mix(rng) {
        Mix::Text => {
            let words = TEXT_WORDS.draw(rng) as usize;
            vec![text_field(prose(words, rng))]
        }
        Mix::Image => vec![image_field("jpg", draw_is_receipt(rng), rng)?, caption(rng)],
        Mix::Images => make_conversation(key, rng)?,
        Mix::Audio => {
            let seconds = SPEECH_SECONDS.draw(rng);
            vec![audio_field(seconds, rng)?, transcript(seconds, rng)]
        }
        Mix::AudioAndImage => {
            let seconds = SPEECH_SECONDS.draw(rng);
            let image = image_field("jpg", false, rng)?;
            vec![image, audio_field(seconds, rng)?, transcript(seconds, rng)]
        }
    })
}

fn draw_mix(rng: &mut Rng) -> Mix {
    let mut place = rng.below(100);
    for (mix, share) in SHARES {
        if place < share {
            return mix;
        }
        place -= share;
    }
    Mix::Text
}

/// Generates two to four images and a conversation about them.
fn make_conversation(key: &str, rng: &mut Rng) -> io::Result<Vec<Field>> {
    let images = 2 + rng.below(3);
    let is_receipt = draw_is_receipt(rng);
    let mut fields = Vec::with_capacity(images + 1);
    for image in 0..images {
        fields.push(image_field(&format!("{image}.jpg"), is_receipt, rng)?);
    }
    let words = TEXT_WORDS.draw(rng) as usize;
    let payload = conversation(key, images, words, rng)?;
    fields.push(Field { extension: "json".to_owned(), payload });
    Ok(fields)
}

fn draw_is_receipt(rng: &mut Rng) -> bool {
    rng.chance(RECEIPT_PERCENT)
}

fn image_field(extension: &str, is_receipt: bool, rng: &mut Rng) -> io::Result<Field> {
    let payload = if is_receipt {
        let (width, height) = RECEIPT_SIZES.draw(rng);
        images::receipt_jpeg(width, height, rng)?
    } else {
        let (width, height) = PHOTO_SIZES.draw(rng);
        images::photo_jpeg(width, height, rng)?
    };
    Ok(Field { extension: extension.to_owned(), payload })
}

fn audio_field(seconds: f64, rng: &mut Rng) -> io::Result<Field> {
    let is_wav = rng.chance(WAV_PERCENT);
    let samples = speech::speak(seconds, rng);
    let (extension, payload) = if is_wav {
        ("wav", speech::encode_wav(&samples)?)
    } else {
        ("flac", speech::encode_flac(&samples)?)
    };
    Ok(Field { extension: extension.to_owned(), payload })
}

/// Writes a caption with 8 to 20 words, the usual length for photos.
fn caption(rng: &mut Rng) -> Field {
    let words = 8 + rng.below(13);
    text_field(prose(words, rng))
}

fn transcript(seconds: f64, rng: &mut Rng) -> Field {
    text_field(prose((seconds * WORDS_PER_SECOND) as usize, rng))
}

fn text_field(text: String) -> Field {
    Field { extension: "txt".to_owned(), payload: text.into_bytes() }
}

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
    fn shares_add_up_to_all_samples() {
        assert_eq!(SHARES.iter().map(|(_, share)| share).sum::<usize>(), 100);
    }

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
