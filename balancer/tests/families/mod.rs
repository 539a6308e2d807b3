//! Generates families of partition problems: costs from realistic global batches, and hard cases.
//!
//! The realistic families follow shapes: texts, images with 1 to 10 tiles, several images, videos with 8 to
//! 32 frames, in given shares. Encoder times are whole tiles, rounded to nanoseconds; LLM times grow a little
//! faster than tokens. All numbers come from the seed.
#![allow(unreachable_pub, reason = "the benches include this file and re-export it")]

use dflop_balancer::Instance;

/// Kind of items in an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// A small encoder and a 7B LLM: both modules matter.
    SmallEncoder,
    /// A 6B encoder and an 8B LLM: the encoder decides, and optima fall on whole tiles.
    LargeEncoder,
    /// A 6B encoder and a 72B LLM.
    LargeLlm,
    /// A small encoder, an audio encoder and a 7B LLM.
    Audio,
    /// A few single items are longer than the mean group.
    Giant,
    /// All items are equal, their number not a multiple of the groups.
    EqualOdd,
    /// Items heavy in one module are light in the other.
    Opposed,
    /// Costs with a heavy tail.
    Pareto,
    /// Pieces of a perfect partition with [`PLANTED_NS`] in every module.
    Planted,
}

/// Optimum of [`Family::Planted`].
pub const PLANTED_NS: u64 = 1_000_000_000;

impl Family {
    /// All families.
    pub const ALL: [Self; 9] = [
        Self::SmallEncoder,
        Self::LargeEncoder,
        Self::LargeLlm,
        Self::Audio,
        Self::Giant,
        Self::EqualOdd,
        Self::Opposed,
        Self::Pareto,
        Self::Planted,
    ];

    /// Families that resemble global batches.
    pub const REALISTIC: [Self; 4] = [Self::SmallEncoder, Self::LargeEncoder, Self::LargeLlm, Self::Audio];

    /// Generates an instance; `items` is at least `groups`, and a multiple for [`Family::Planted`].
    ///
    /// # Panics
    /// If there are fewer items than groups, or no group.
    #[must_use]
    pub fn instance(self, items: usize, groups: usize, seed: u64) -> Instance {
        let mut draws = Draws(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self as u64);
        let rows: Vec<Vec<u64>> = match self {
            Self::SmallEncoder => {
                (0..items).map(|_| sample(&mut draws, [2_914_486.7, 5_000.0], None)).collect()
            }
            Self::LargeEncoder => {
                (0..items).map(|_| sample(&mut draws, [8_372_768.9, 13_500.0], None)).collect()
            }
            Self::LargeLlm => {
                (0..items).map(|_| sample(&mut draws, [22_808_579.6, 76_000.0], None)).collect()
            }
            Self::Audio => {
                (0..items).map(|_| sample(&mut draws, [2_914_486.7, 5_000.0], Some(2_470_000.3))).collect()
            }
            Self::Giant => (0..items).map(|item| giant(&mut draws, item)).collect(),
            Self::EqualOdd => vec![vec![12_345_600; 2]; items - usize::from(items.is_multiple_of(groups))],
            Self::Opposed => (0..items).map(|_| opposed(&mut draws)).collect(),
            Self::Pareto => (0..items).map(|_| pareto(&mut draws)).collect(),
            Self::Planted => planted(&mut draws, items, groups),
        };
        let modules = rows[0].len();
        Instance::new(groups, modules, rows.concat()).expect("every group gets an item")
    }
}

/// Draws a sample, given the nanoseconds per tile, per token and, with an audio module, per second of audio.
fn sample(draws: &mut Draws, [tile_ns, token_ns]: [f64; 2], audio_ns: Option<f64>) -> Vec<u64> {
    const TOKENS_PER_TILE: f64 = 256.0;
    const TOKENS_PER_SECOND: f64 = 25.0;
    let kind = draws.unit();
    let tiles = match kind {
        ..0.2 => 0,
        ..0.65 => draws.between(1, 10),
        ..0.8 => (0..draws.between(2, 8)).map(|_| draws.between(1, 4)).sum(),
        _ => draws.between(8, 32),
    };
    let text = draws.log_normal(if tiles == 0 { 500.0 } else { 180.0 }, 0.8).min(8_000.0);
    let seconds = if audio_ns.is_some() && draws.unit() < 0.35 { 1.0 + 29.0 * draws.unit() } else { 0.0 };
    let tokens = text + tiles as f64 * TOKENS_PER_TILE + seconds * TOKENS_PER_SECOND;
    let llm_ns = token_ns * tokens * (1.0 + tokens / 60_000.0);
    let mut row = vec![(tile_ns * tiles as f64).round() as u64];
    row.extend(audio_ns.map(|audio_ns| (audio_ns * seconds).round() as u64));
    row.push(llm_ns.round() as u64);
    row
}

fn giant(draws: &mut Draws, item: usize) -> Vec<u64> {
    let scale = if item < 4 { 40.0 } else { 1.0 };
    (0..2).map(|_| (scale * draws.log_normal(8e6, 0.4)) as u64).collect()
}

fn opposed(draws: &mut Draws) -> Vec<u64> {
    let (size, share) = (draws.log_normal(1e7, 0.4), draws.unit().powi(3));
    let (large, small) = ((size * (1.0 - share / 2.0)) as u64, (size * share / 2.0) as u64);
    if draws.unit() < 0.5 { vec![large, small] } else { vec![small, large] }
}

fn pareto(draws: &mut Draws) -> Vec<u64> {
    (0..2).map(|_| (1e6 * draws.unit().max(1e-6).powf(-1.0 / 1.5)) as u64).collect()
}

/// Cuts every group's time into random pieces, as many in every module.
fn planted(draws: &mut Draws, items: usize, groups: usize) -> Vec<Vec<u64>> {
    let pieces = items / groups;
    let mut rows = Vec::new();
    for _ in 0..groups {
        let [first, second] = [0, 1].map(|_| {
            let mut cuts: Vec<u64> = (1..pieces).map(|_| draws.next_u64() % PLANTED_NS).collect();
            cuts.extend([0, PLANTED_NS]);
            cuts.sort_unstable();
            cuts.windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>()
        });
        rows.extend(first.into_iter().zip(second).map(|(first, second)| vec![first, second]));
    }
    for last in (1..rows.len()).rev() {
        let other = draws.next_u64() % (last as u64 + 1);
        rows.swap(last, other as usize);
    }
    rows
}

/// A splitmix64 generator with distributions.
struct Draws(u64);

impl Draws {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut state = self.0;
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }

    /// Draws from `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Draws from `least..=most`.
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.next_u64() % (most - least + 1)
    }

    /// Draws a log-normal number with the given median (Box and Muller).
    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        median * (sigma * radius * (std::f64::consts::TAU * self.unit()).cos()).exp()
    }
}
