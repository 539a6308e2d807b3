//! Permutes `0..len` by a seed, position by position.
//!
//! The permutation is a Feistel network over the smallest even number of bits that covers `len`, walked until
//! it lands inside (cycle walking). No list is created: the millionth position costs as much as the first, so
//! a loader resumes anywhere in constant time.
//!
//! # Source
//! Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 3 (cycle walking) and
//! section 4 (Feistel). The round function is [`mix64`].

use dflop_costmodel::random::mix64;

/// Number of rounds. Four rounds already produce a pseudorandom permutation for a random round function (Luby
/// and Rackoff, 1988); two more compensate for a round function that is only a good mixer.
const ROUNDS: u64 = 6;

/// A permutation of `0..len`.
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
