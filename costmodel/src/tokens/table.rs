//! Looks up media in a table that was counted, one row per size: for processors that follow no known rule.
//!
//! Nothing is interpolated between rows: a size without a row is an error.

use serde::{Deserialize, Serialize};

use super::{EncoderWork, require_pixels};
use crate::error::{Error, Result};
use crate::interned::{Intern, Pool};
use crate::{AudioLength, ImageSize};

/// Counted media.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenTable {
    /// Work for every medium, whatever the size; `rows` is then empty.
    pub every: Option<CountedWork>,
    /// Rows in ascending order of size.
    pub rows: Vec<CountedRow>,
    /// Number of encoder tokens per item, if all items have the same length; `None` if lengths differ, so
    /// that items are encoder tokens.
    pub item_tokens: Option<u32>,
    /// Sample rate that audio rows count in, in Hz; 0 for images.
    pub sample_rate_hz: u32,
    /// Marker tokens around a medium.
    pub marker_tokens: u8,
}

/// Work for media with one size.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CountedRow {
    /// Width and height in pixels; for audio the number of samples, and 0.
    pub size: [u64; 2],
    /// Work; `None` if the processor rejects the size.
    pub work: Option<CountedWork>,
}

/// Work for a medium, without markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CountedWork {
    /// LLM tokens.
    pub tokens: u64,
    /// Sequences with equal lengths that the encoder processes.
    pub items: u64,
    /// Encoder tokens in all sequences.
    pub encoder_tokens: u64,
    /// Query-key pairs if tokens attend to the whole sequence.
    pub pairs: u64,
    /// Query-key pairs within attention windows; `pairs` without windows.
    pub window_pairs: u64,
    /// Padding positions that only the stem computes.
    pub padded_tokens: u64,
}

impl Intern for TokenTable {
    fn pool() -> &'static Pool<Self> {
        static TABLES: Pool<TokenTable> = Pool::new();
        &TABLES
    }
}

impl TokenTable {
    /// Returns the work for an image, markers included.
    ///
    /// # Errors
    /// [`Error::EmptyImage`] if the image has no pixels, [`Error::Uncounted`] if the size has no row or is
    /// rejected by the processor.
    pub fn image(&self, image: ImageSize) -> Result<EncoderWork> {
        require_pixels(image)?;
        let ImageSize { width, height } = image;
        let medium = || format!("image of {width} x {height} pixels");
        self.work([width.into(), height.into()], medium)
    }

    /// Returns the work for a clip, markers included; a clip with 0 frames has none.
    ///
    /// A clip with a different sample rate is looked up by the number of samples after resampling, if that is
    /// a whole number.
    ///
    /// # Errors
    /// [`Error::SampleRate`] if the clip has frames but no sample rate, [`Error::Uncounted`] if the length
    /// has no row.
    pub fn clip(&self, length: AudioLength) -> Result<EncoderWork> {
        let AudioLength { frames, sample_rate_hz } = length;
        if frames == 0 {
            return Ok(EncoderWork::default());
        }
        if sample_rate_hz == 0 {
            return Err(Error::SampleRate { frames });
        }
        let medium = || format!("audio of {frames} frames at {sample_rate_hz} Hz");
        let resampled = u128::from(frames) * u128::from(self.sample_rate_hz);
        let rate = u128::from(sample_rate_hz);
        let samples =
            if resampled.is_multiple_of(rate) { u64::try_from(resampled / rate).ok() } else { None };
        match samples {
            Some(samples) => self.work([samples, 0], medium),
            // No row has such a length, but the work may be the same for all.
            None => self.work([u64::MAX, 0], medium),
        }
    }

    fn work(&self, size: [u64; 2], medium: impl Fn() -> String) -> Result<EncoderWork> {
        let work = if let Some(work) = self.every {
            work
        } else {
            let Ok(row) = self.rows.binary_search_by_key(&size, |row| row.size) else {
                return Err(Error::Uncounted { medium: medium() });
            };
            self.rows[row].work.ok_or_else(|| Error::Rejected { medium: medium() })?
        };
        Ok(EncoderWork {
            items: if self.item_tokens.is_some() { work.items } else { work.encoder_tokens },
            encoder_tokens: work.encoder_tokens,
            tokens: work.tokens.saturating_add(self.marker_tokens.into()),
            attention_pairs: work.pairs,
            window_pairs: work.window_pairs,
            padded_tokens: work.padded_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: CountedWork = CountedWork {
        tokens: 10,
        items: 2,
        encoder_tokens: 40,
        pairs: 800,
        window_pairs: 800,
        padded_tokens: 0,
    };

    fn table(sizes: &[([u64; 2], bool)]) -> TokenTable {
        let row =
            |&(size, is_accepted): &([u64; 2], bool)| CountedRow { size, work: is_accepted.then_some(WORK) };
        TokenTable {
            every: None,
            rows: sizes.iter().map(row).collect(),
            item_tokens: Some(20),
            sample_rate_hz: 16_000,
            marker_tokens: 3,
        }
    }

    #[test]
    fn only_counted_sizes_have_work() {
        let images = table(&[([32, 64], true), ([64, 32], false)]);
        let image = |width, height| images.image(ImageSize { width, height });
        let work = image(32, 64).unwrap();
        assert_eq!((work.items, work.encoder_tokens, work.tokens), (2, 40, 13));
        let rejected = image(64, 32).unwrap_err().to_string();
        assert_eq!(rejected, "image of 64 x 32 pixels is rejected by the model's processor");
        let missing = image(33, 64).unwrap_err().to_string();
        assert!(missing.starts_with("image of 33 x 64 pixels was not counted"), "{missing}");
        assert_eq!(image(0, 64), Err(Error::EmptyImage { width: 0, height: 64 }));
    }

    #[test]
    fn clips_are_looked_up_at_the_rate_of_the_table() {
        let clips = table(&[([16_000, 0], true)]);
        let clip = |frames, sample_rate_hz| clips.clip(AudioLength { frames, sample_rate_hz });
        assert_eq!(clip(16_000, 16_000), clip(48_000, 48_000));
        assert_eq!(clip(0, 0), Ok(EncoderWork::default()));
        assert_eq!(clip(1, 0), Err(Error::SampleRate { frames: 1 }));
        assert!(matches!(clip(16_001, 16_000), Err(Error::Uncounted { .. })));
        assert!(matches!(clip(44_101, 44_100), Err(Error::Uncounted { .. })));
        let every = TokenTable { every: Some(WORK), rows: Vec::new(), item_tokens: None, ..table(&[]) };
        let work = every.clip(AudioLength { frames: 44_101, sample_rate_hz: 44_100 }).unwrap();
        assert_eq!((work.items, work.tokens), (40, 13));
    }
}
