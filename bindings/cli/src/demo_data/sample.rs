//! Makes one sample: which media it has, and their files.

use std::io;

use super::dice::Dice;
use super::quantiles::{PHOTO_SIZES, RECEIPT_SIZES, SPEECH_SECONDS, TEXT_WORDS};
use super::{audio_file, photo, receipt, speech, text};

/// Share of image samples that show scanned receipts in place of photos, percent.
const RECEIPT_PERCENT: usize = 10;
/// Share of clips that are WAV in place of FLAC, percent.
const WAV_PERCENT: usize = 6;
/// How fast people read aloud: `LibriSpeech` has about 9.4 million words in 960 hours.
const WORDS_PER_SECOND: f64 = 2.7;

/// One file of a sample.
#[derive(Debug)]
pub(super) struct Field {
    /// What follows the key and a dot in the entry name.
    pub(super) extension: String,
    /// Content of the file.
    pub(super) payload: Vec<u8>,
}

/// Media of a sample.
#[derive(Debug, Clone, Copy)]
enum Mix {
    Text,
    Image,
    Images,
    Audio,
    AudioAndImage,
}

/// Kinds and their shares in percent: 100 together.
const SHARES: [(Mix, usize); 5] =
    [(Mix::Text, 20), (Mix::Image, 45), (Mix::Images, 15), (Mix::Audio, 12), (Mix::AudioAndImage, 8)];

/// Makes the files of the sample that these dice stand for.
///
/// # Errors
/// If an encoder refuses its input.
pub(super) fn make_sample(key: &str, dice: &mut Dice) -> io::Result<Vec<Field>> {
    Ok(match draw_mix(dice) {
        Mix::Text => {
            let words = TEXT_WORDS.draw(dice) as usize;
            vec![text_field(text::prose(words, dice))]
        }
        Mix::Image => vec![image_field("jpg", draw_is_receipt(dice), dice)?, caption(dice)],
        Mix::Images => make_conversation(key, dice)?,
        Mix::Audio => {
            let seconds = SPEECH_SECONDS.draw(dice);
            vec![audio_field(seconds, dice)?, transcript(seconds, dice)]
        }
        Mix::AudioAndImage => {
            let seconds = SPEECH_SECONDS.draw(dice);
            let image = image_field("jpg", false, dice)?;
            vec![image, audio_field(seconds, dice)?, transcript(seconds, dice)]
        }
    })
}

fn draw_mix(dice: &mut Dice) -> Mix {
    let mut place = dice.below(100);
    for (mix, share) in SHARES {
        if place < share {
            return mix;
        }
        place -= share;
    }
    Mix::Text
}

/// Two to four images and a conversation about them.
fn make_conversation(key: &str, dice: &mut Dice) -> io::Result<Vec<Field>> {
    let images = 2 + dice.below(3);
    let is_receipt = draw_is_receipt(dice);
    let mut fields = Vec::with_capacity(images + 1);
    for image in 0..images {
        fields.push(image_field(&format!("{image}.jpg"), is_receipt, dice)?);
    }
    let words = TEXT_WORDS.draw(dice) as usize;
    let payload = text::conversation(key, images, words, dice)?;
    fields.push(Field { extension: "json".to_owned(), payload });
    Ok(fields)
}

fn draw_is_receipt(dice: &mut Dice) -> bool {
    dice.chance(RECEIPT_PERCENT)
}

fn image_field(extension: &str, is_receipt: bool, dice: &mut Dice) -> io::Result<Field> {
    let payload = if is_receipt {
        let (width, height) = RECEIPT_SIZES.draw(dice);
        receipt::receipt_jpeg(width, height, dice)?
    } else {
        let (width, height) = PHOTO_SIZES.draw(dice);
        photo::photo_jpeg(width, height, dice)?
    };
    Ok(Field { extension: extension.to_owned(), payload })
}

fn audio_field(seconds: f64, dice: &mut Dice) -> io::Result<Field> {
    let is_wav = dice.chance(WAV_PERCENT);
    let samples = speech::speak(seconds, dice);
    let (extension, payload) = if is_wav {
        ("wav", audio_file::encode_wav(&samples)?)
    } else {
        ("flac", audio_file::encode_flac(&samples)?)
    };
    Ok(Field { extension: extension.to_owned(), payload })
}

/// Captions have 8 to 20 words, as people write them under photos.
fn caption(dice: &mut Dice) -> Field {
    let words = 8 + dice.below(13);
    text_field(text::prose(words, dice))
}

fn transcript(seconds: f64, dice: &mut Dice) -> Field {
    text_field(text::prose((seconds * WORDS_PER_SECOND) as usize, dice))
}

fn text_field(text: String) -> Field {
    Field { extension: "txt".to_owned(), payload: text.into_bytes() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_all_samples() {
        assert_eq!(SHARES.iter().map(|(_, share)| share).sum::<usize>(), 100);
    }
}
