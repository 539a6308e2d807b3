//! Random numbers and permutations for all crates: splitmix64.
//!
//! Equal seeds draw equal numbers on every machine and in every version: no seed comes from a clock, an
//! address or a thread. It is not suitable for secrets.

/// Golden ratio times 2^64, the increment of splitmix64.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number of rounds. Four rounds already produce a pseudorandom permutation for a random round function (Luby
/// and Rackoff, 1988); two more compensate for a round function that is only a good mixer.
const ROUNDS: u64 = 6;

/// Splitmix64 generator.
///
/// # Source
/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
/// constants of Vigna's public-domain `splitmix64.c`.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator from a seed; every seed is equally good.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// Returns a number in `0..end`; `end` is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        // The high half of a product: the bias is below end / 2^64.
        ((u128::from(self.next_u64()) * end as u128) >> 64) as usize
    }

    /// Draws a number uniformly from `0..1`, with the 53 bits in an `f64`.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Skips this many numbers.
    pub fn skip(&mut self, numbers: u64) {
        self.0 = self.0.wrapping_add(GAMMA.wrapping_mul(numbers));
    }

    /// Moves a random choice of `count` elements to the front, in random order (Fisher and Yates).
    pub fn shuffle_front<T>(&mut self, items: &mut [T], count: usize) {
        for front in 0..count.min(items.len()) {
            let other = front + self.below(items.len() - front);
            items.swap(front, other);
        }
    }
}

/// Maps 64 bits to 64 bits that look random, and distinct values to distinct values: the first number that a
/// generator with this seed draws.
#[must_use]
pub const fn mix64(value: u64) -> u64 {
    mix(value.wrapping_add(GAMMA))
}

/// Folds words into a seed, in order.
pub fn seed_from(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(GAMMA, |seed, word| mix(seed ^ word).wrapping_add(GAMMA))
}

/// Run seed, with a separate stream for every kind of random choice.
///
/// # Examples
/// ```
/// use dflop_costmodel::random::Seed;
/// assert_eq!(Seed(7).stream("order"), 7);
/// assert_ne!(Seed(7).stream("transforms"), Seed(7).stream("dropout"));
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Seed(pub u64);

impl Seed {
    /// Streams that equal the seed itself. Draws hash the seed with a position that no other stream has, and
    /// a seed's orders and augmentations stay the same as in earlier versions.
    const OF_THE_SEED: [&str; 5] = ["order", "shards", "buffer", "augment", "weights"];

    /// Returns a stream's seed: `order` of samples, `shards` for their order, `buffer` for the shuffle
    /// buffer, `augment` for images, `weights` for initial weights, `transforms` for user code, or any other
    /// name.
    #[must_use]
    pub fn stream(self, name: &str) -> u64 {
        if Self::OF_THE_SEED.contains(&name) {
            return self.0;
        }
        seed_from([self.0, name.len() as u64].into_iter().chain(name.bytes().map(u64::from)))
    }
}

/// Splitmix64 output function, a bijection on 64 bits.
const fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// A permutation of `0..len` by a seed, computed position by position.
///
/// The permutation is a Feistel network over the smallest even number of bits that covers `len`, walked until
/// it lands inside (cycle walking). No list is created: the millionth position costs as much as the first, so
/// a loader resumes anywhere in constant time.
///
/// # Source
/// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 3 (cycle walking) and
/// section 4 (Feistel). The round function is [`mix64`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// Creates the permutation of `0..len` for `key`.
    #[must_use]
    pub fn new(len: u64, key: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), key }
    }

    /// Returns the image of `position` under the permutation.
    ///
    /// # Panics
    /// If `position` is not below `len`.
    #[must_use]
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.len, "position {position} is outside a permutation of {}", self.len);
        let mut value = position;
        loop {
            value = self.scramble(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn scramble(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let mixed = mix64(right ^ mix64(self.key.wrapping_add(round)));
            (left, right) = (right, left ^ (mixed & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The stream `transforms` for seed 7.
    const RECORDED: u64 = 15_665_087_740_091_934_308;

    #[test]
    fn numbers_are_those_of_the_published_generator() {
        let mut rng = SplitMix64::new(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn numbers_are_skipped_and_mixed_alike() {
        let mut rng = SplitMix64::new(9);
        assert_eq!(rng.next_u64(), mix64(9));
        let third = (rng.next_u64(), rng.next_u64()).1;
        let mut skipped = SplitMix64::new(9);
        skipped.skip(2);
        assert_eq!(skipped.next_u64(), third);
        assert!((0.0..1.0).contains(&skipped.fraction()));
    }

    #[test]
    fn seed_depends_on_the_order_of_words() {
        assert_ne!(seed_from([1, 2]), seed_from([2, 1]));
        assert_ne!(seed_from([0]), seed_from([0, 0]));
    }

    #[test]
    fn streams_of_a_seed_differ_and_never_change() {
        for name in Seed::OF_THE_SEED {
            assert_eq!(Seed(9).stream(name), 9);
        }
        let streams = ["transforms", "transform", ""].map(|name| Seed(9).stream(name));
        assert!(streams[0] != streams[1] && streams[1] != streams[2] && streams[2] != 9);
        assert_ne!(Seed(8).stream("transforms"), streams[0]);
        assert_eq!(Seed(7).stream("transforms"), RECORDED);
    }

    #[test]
    fn shuffle_keeps_every_element() {
        let mut items: Vec<u32> = (0..100).collect();
        SplitMix64::new(7).shuffle_front(&mut items, 100);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn every_position_is_visited_once(len in 1u64..3000, key: u64) {
            let permutation = Permutation::new(len, key);
            let mut seen = vec![false; len as usize];
            for position in 0..len {
                let at = permutation.at(position) as usize;
                prop_assert!(!std::mem::replace(&mut seen[at], true));
            }
        }
    }

    #[test]
    fn the_order_of_a_key_never_changes() {
        let permutation = Permutation::new(10, 7);
        let order: Vec<u64> = (0..10).map(|position| permutation.at(position)).collect();
        assert_eq!(order, [8, 1, 5, 2, 4, 9, 0, 7, 3, 6]);
    }

    #[test]
    fn neighbors_and_fixed_points_are_as_rare_as_in_a_random_permutation() {
        let permutation = Permutation::new(100_000, 1);
        let order: Vec<u64> = (0..100_000).map(|position| permutation.at(position)).collect();
        let successors = order.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        let fixed = order.iter().enumerate().filter(|&(position, &at)| position as u64 == at).count();
        assert!(successors < 8 && fixed < 8, "{successors} successors, {fixed} fixed points");
    }

    #[test]
    fn very_large_domains_work() {
        let permutation = Permutation::new(u64::MAX / 2, 3);
        assert_ne!(permutation.at(0), permutation.at(1));
    }
}
