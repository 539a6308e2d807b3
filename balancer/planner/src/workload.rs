//! Sizes samples by work in all modules, and samples global batches for judging all plans.

use dflop_balancer::{Error, Result};
use dflop_costmodel::random::{SplitMix64, seed_from};
use dflop_costmodel::{MediaUnits, SampleUnits};

/// Sampled global batches; every plan is judged on the same batches.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    batches: Vec<Vec<ItemSize>>,
    /// Tokens in the largest sample over all sizes, drawn or not: it will occur.
    pub(super) tokens_max: u64,
    /// Tokens in the smallest sample.
    pub(super) tokens_min: u64,
    /// Maximum number of tokens in a batch.
    pub(super) batch_tokens_max: u64,
    /// Tokens per batch, mean over batches.
    pub(super) batch_tokens: f64,
    /// Media in each encoder.
    media: [MediaTotals; ENCODERS_MAX],
}

/// Media totals over batches in an encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct MediaTotals {
    /// Maximum number of units in a sample.
    pub(super) units_max: u64,
    /// Maximum number of units in a batch.
    pub(super) batch_units_max: u64,
    /// Units per batch, mean over batches.
    pub(super) batch_units: f64,
    /// Query-key pairs in a batch's media, mean over batches.
    pub(super) batch_pairs: f64,
}

impl MediaTotals {
    /// Whether media have native resolution, so that attention depends on each medium.
    pub(super) fn is_native(&self) -> bool {
        self.batch_pairs > 0.0
    }
}

impl Workload {
    /// Draws `batches` global batches with `global_batch` samples: the sizes in random order, repeatedly.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no sizes or no batches, a sample has no tokens, or a sample has more
    /// query-key pairs than the patches allow.
    pub fn draw(sizes: &[ItemSize], global_batch: u32, batches: usize, seed: u64) -> Result<Self> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        if sizes.is_empty() {
            return invalid("shapes", "expected at least one".to_owned());
        }
        if let Some(at) = sizes.iter().position(|size| size.tokens == 0) {
            return invalid("shapes", format!("sample {at} has no tokens"));
        }
        let has_too_many_pairs = |size: &ItemSize| {
            size.all_media().iter().any(|media| media.pairs > u64::from(media.units).pow(2))
        };
        if let Some(at) = sizes.iter().position(has_too_many_pairs) {
            return invalid("shapes", format!("sample {at} has more query-key pairs than its patches make"));
        }
        if global_batch == 0 || batches == 0 {
            return invalid("global_batch", "a batch has at least one sample".to_owned());
        }
        let mut order: Vec<u32> = (0..sizes.len() as u32).collect();
        let mut rng = SplitMix64::new(seed_from([seed, sizes.len() as u64, u64::from(global_batch)]));
        let mut next = order.len();
        let mut draw = || {
            // A new permutation per pass over the sizes, so that all occur equally often.
            if next == order.len() {
                rng.shuffle_front(&mut order, sizes.len());
                next = 0;
            }
            next += 1;
            sizes[order[next - 1] as usize]
        };
        let mut batch = || {
            let mut batch: Vec<ItemSize> = (0..global_batch).map(|_| draw()).collect();
            // Largest first: greedy balancing is LPT in this order.
            batch.sort_unstable_by_key(|size| std::cmp::Reverse((size.tokens, *size.all_media())));
            batch
        };
        let drawn = (0..batches).map(|_| batch()).collect();
        Ok(Self::of(drawn, sizes))
    }

    fn of(batches: Vec<Vec<ItemSize>>, sizes: &[ItemSize]) -> Self {
        let tokens = |batch: &Vec<ItemSize>| batch.iter().map(|item| u64::from(item.tokens)).sum::<u64>();
        let count = batches.len() as f64;
        let mut media = [MediaTotals::default(); ENCODERS_MAX];
        for (encoder, totals) in media.iter_mut().enumerate() {
            let units = |size: &ItemSize| u64::from(size.media(encoder).units);
            let of_batches = || batches.iter().map(|batch| batch.iter().map(units).sum::<u64>());
            let pairs = batches.iter().flatten().map(|item| item.media(encoder).pairs as f64);
            *totals = MediaTotals {
                units_max: sizes.iter().map(units).max().unwrap_or(0),
                batch_units_max: of_batches().max().unwrap_or(0),
                batch_units: of_batches().sum::<u64>() as f64 / count,
                batch_pairs: pairs.sum::<f64>() / count,
            };
        }
        Self {
            tokens_max: sizes.iter().map(|size| u64::from(size.tokens)).max().unwrap_or(0),
            tokens_min: u64::from(sizes.iter().map(|size| size.tokens).min().unwrap_or(1)),
            batch_tokens_max: batches.iter().map(tokens).max().unwrap_or(0),
            batch_tokens: batches.iter().map(tokens).sum::<u64>() as f64 / count,
            media,
            batches,
        }
    }

    /// Returns the batches, each with the longest sample first.
    #[must_use]
    pub fn batches(&self) -> &[Vec<ItemSize>] {
        &self.batches
    }

    /// Returns a batch's index; `None` for samples that are only part of a batch.
    pub(super) fn position(&self, batch: &[ItemSize]) -> Option<usize> {
        self.batches.iter().position(|known| std::ptr::eq(known.as_slice(), batch))
    }

    /// Returns the media totals in an encoder.
    pub(super) fn media(&self, encoder: usize) -> &MediaTotals {
        &self.media[encoder]
    }

    /// Whether any media have native resolution.
    pub(super) fn is_native(&self) -> bool {
        self.media.iter().any(MediaTotals::is_native)
    }

    /// Returns the number of batches that tell plans with this global batch apart: 50, or fewer for more than
    /// 2,048 samples.
    #[must_use]
    pub const fn enough_batches(global_batch: u32) -> usize {
        let alike = BATCHES_MAX * NOISY_SAMPLES / if global_batch == 0 { 1 } else { global_batch as usize };
        if alike < BATCHES_MIN {
            BATCHES_MIN
        } else if alike > BATCHES_MAX {
            BATCHES_MAX
        } else {
            alike
        }
    }

    /// Returns how many batches tell plans apart as well as `count` batches of [`NOISY_SAMPLES`] do, at most
    /// `count` and the drawn ones: the noise falls with the number of samples.
    pub(super) fn batches_like(&self, count: usize) -> usize {
        let alike = count * NOISY_SAMPLES / self.global_batch().max(1) as usize;
        alike.clamp(1, count).min(self.batches.len())
    }

    /// Returns the noise of a comparison on a few batches, as a share of that with [`VERY_NOISY_SAMPLES`] in
    /// a batch.
    pub(super) fn noise(&self) -> f64 {
        let samples = f64::from(self.global_batch());
        (VERY_NOISY_SAMPLES / samples).sqrt().clamp(NOISE_MIN, 1.0)
    }

    /// Whether batches are so small that the search's estimates say little, and more is tried.
    pub(super) fn has_few_samples(&self) -> bool {
        self.batches[0].len() <= FEW_SAMPLES
    }

    /// Returns the factor to the shortest time that the searches found, up to which the plans of another
    /// placement or expert-parallel degree are balanced as in a run: that shortens steps by a few percent,
    /// and by more if samples are few or memory is tight.
    pub(super) fn worth_refining(&self, is_tight: bool) -> f64 {
        let noise = if is_tight { 1.0 } else { self.noise().max(WORTH_REFINING_NOISE_MIN) };
        1.0 + WORTH_REFINING * noise
    }

    /// Returns the samples per batch.
    pub(super) fn global_batch(&self) -> u32 {
        self.batches[0].len() as u32
    }
}

/// Minimum and maximum number of batches that plans are judged on by default.
const BATCHES_MIN: usize = 4;
const BATCHES_MAX: usize = 50;

/// Number of samples in a batch above which fewer batches are enough to compare plans.
const NOISY_SAMPLES: usize = 2048;

/// Number of samples in a batch up to which comparisons are as noisy as the margins assume.
const VERY_NOISY_SAMPLES: f64 = 64.0;
/// Noise that is left in large batches, from balancing.
const NOISE_MIN: f64 = 0.3;

/// Share of the step time by which refining may shorten steps with few samples, and the noise below which the
/// share stays.
const WORTH_REFINING: f64 = 0.25;
const WORTH_REFINING_NOISE_MIN: f64 = 0.6;

/// Maximum number of samples in a small batch.
const FEW_SAMPLES: usize = 32;

/// Maximum number of encoders in a planned model.
pub(super) const ENCODERS_MAX: usize = 4;

/// Sample size in all modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ItemSize {
    /// Media in each encoder, in model order; 0 for missing encoders.
    media: [MediaUnits; ENCODERS_MAX],
    /// Tokens in the LLM, at least 1.
    pub tokens: u32,
}

impl ItemSize {
    /// Returns the size for a sample without media.
    #[must_use]
    pub const fn from_text(tokens: u32) -> Self {
        Self { media: [MediaUnits::from_tiles(0, 0); ENCODERS_MAX], tokens }
    }

    /// Returns a sample size for a model with a single encoder and fixed-size tiles or windows.
    #[must_use]
    pub const fn from_tiles(tiles: u32, tokens: u32) -> Self {
        let mut size = Self::from_text(tokens);
        size.media[0] = MediaUnits::from_tiles(tiles, if tiles > 0 { 1 } else { 0 });
        size
    }

    /// Returns the size for a sample with media in some encoders.
    ///
    /// - `media`: units in each encoder, in model order
    ///
    /// # Errors
    /// [`Error::Config`] for more encoders than plans support.
    pub fn from_media(media: &[MediaUnits], tokens: u32) -> Result<Self> {
        let mut size = Self::from_text(tokens);
        let Some(own) = size.media.get_mut(..media.len()) else {
            return Err(too_many_encoders(media.len()));
        };
        own.copy_from_slice(media);
        Ok(size)
    }

    /// Returns the media in an encoder.
    #[must_use]
    pub fn media(&self, encoder: usize) -> MediaUnits {
        self.media.get(encoder).copied().unwrap_or_default()
    }

    /// Returns the media in all encoders.
    pub(super) fn all_media(&self) -> &[MediaUnits; ENCODERS_MAX] {
        &self.media
    }
}

impl TryFrom<SampleUnits> for ItemSize {
    type Error = Error;

    fn try_from(SampleUnits { encoders, tokens }: SampleUnits) -> Result<Self> {
        Self::from_media(&encoders, tokens)
    }
}

/// Returns the error for a model with this many encoders.
pub(super) fn too_many_encoders(encoders: usize) -> Error {
    let reason =
        format!("plans are made for 1 to {ENCODERS_MAX} encoders and an LLM, got {encoders} encoders");
    Error::Config { setting: "encoders", reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::MediaUnits;

    #[test]
    fn every_size_comes_as_often_as_every_other() {
        let sizes: Vec<ItemSize> = (1..=10).map(|tokens| ItemSize::from_tiles(tokens % 3, tokens)).collect();
        let workload = Workload::draw(&sizes, 4, 5, 7).unwrap();
        let mut seen: Vec<u32> = workload.batches().concat().iter().map(|item| item.tokens).collect();
        seen.sort_unstable();
        assert_eq!(seen, (1..=10).flat_map(|tokens| [tokens; 2]).collect::<Vec<u32>>());
        assert!((workload.batch_tokens - 22.0).abs() < 1e-12);
        assert_eq!((workload.tokens_min, workload.tokens_max), (1, 10));
        assert_eq!((workload.media(0).units_max, workload.media(1)), (2, &MediaTotals::default()));
        assert_eq!(workload, Workload::draw(&sizes, 4, 5, 7).unwrap());
        assert_ne!(workload, Workload::draw(&sizes, 4, 5, 8).unwrap());
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        let size = ItemSize::from_tiles(1, 0);
        assert!(Workload::draw(&[], 4, 5, 0).is_err());
        let error = Workload::draw(&[ItemSize::from_tiles(1, 3), size], 4, 5, 0).unwrap_err();
        assert_eq!(error.to_string(), "invalid `shapes`: sample 1 has no tokens");
        assert!(Workload::draw(&[ItemSize::from_tiles(1, 3)], 0, 5, 0).is_err());
        let size = |pairs| ItemSize::from_media(&[MediaUnits { units: 8, pairs, media: 1 }], 3).unwrap();
        let native = |pairs| Workload::draw(&[size(pairs)], 1, 1, 0);
        assert!(native(64).is_ok_and(|workload| workload.is_native()));
        let error = native(65).unwrap_err().to_string();
        assert_eq!(error, "invalid `shapes`: sample 0 has more query-key pairs than its patches make");
    }
}
