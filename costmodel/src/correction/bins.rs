//! Sorts sizes into shape bins, eight per octave of module tokens, by integer arithmetic.

/// Number of bins between a size and its double; a bin's width is at most 1/8 of the bin's first size.
pub const BINS_PER_OCTAVE: u32 = 8;
/// Number of bins; sizes from 2³² on share the last bin.
pub const BINS: usize = 240;

const MANTISSA_BITS: u32 = BINS_PER_OCTAVE.trailing_zeros();

/// Returns the bin for a size: sizes below 16 have a bin each, larger sizes share eight per octave.
#[must_use]
pub fn bin(size: u64) -> usize {
    let size = size.min(u64::from(u32::MAX));
    if size < u64::from(BINS_PER_OCTAVE) {
        return size as usize;
    }
    let exponent = size.ilog2();
    let mantissa = (size >> (exponent - MANTISSA_BITS)) & u64::from(BINS_PER_OCTAVE - 1);
    (BINS_PER_OCTAVE * (exponent - MANTISSA_BITS + 1)) as usize + mantissa as usize
}

/// Returns a bin's size range: the first size, and the first size after it.
///
/// # Panics
/// If `bin` is not below [`BINS`].
#[must_use]
pub fn bin_sizes(bin: usize) -> [u64; 2] {
    assert!(bin < BINS, "bin {bin} of {BINS}");
    let (octave, mantissa) = (bin as u32 / BINS_PER_OCTAVE, bin as u64 % u64::from(BINS_PER_OCTAVE));
    if octave == 0 {
        return [mantissa, mantissa + 1];
    }
    let first = u64::from(BINS_PER_OCTAVE) + mantissa;
    [first << (octave - 1), (first + 1) << (octave - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bins_follow_each_other_without_gaps() {
        let mut end = 0;
        for number in 0..BINS {
            let [first, beyond] = bin_sizes(number);
            assert_eq!(first, end, "{number}");
            assert_eq!((bin(first), bin(beyond - 1)), (number, number));
            end = beyond;
        }
        assert_eq!(end, 1 << 32);
        assert_eq!(bin(u64::MAX), BINS - 1);
    }

    proptest! {
        #[test]
        fn every_size_lies_in_its_bin(size in any::<u32>()) {
            let [first, beyond] = bin_sizes(bin(size.into()));
            prop_assert!((first..beyond).contains(&u64::from(size)));
            prop_assert!(first < 8 || (beyond - first) * 8 <= first);
        }
    }
}
