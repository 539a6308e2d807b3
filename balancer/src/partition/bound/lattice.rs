//! Lower bound from whole tiles: times that are multiples of a unit.
//!
//! An encoder that works tile by tile takes (whole tiles) x (a unit), rounded to nanoseconds. Assign every
//! item a whole number of units: some group has at least the mean number, rounded up, and every unit takes at
//! least the smallest ratio between an item's time and its units. **That holds for any unit and any
//! numbers**, so the unit may be guessed; the ratio subtracts rounding from the bound.
//!
//! The unit is a real number of nanoseconds: Euclid's algorithm on reals finds it, then every time narrows it
//! in turn. If times have no common unit, simple fractions of the shortest time are tried.

/// Tolerance for a multiple of the unit, nanoseconds: rounding is off by at most a half.
const ROUNDING_NS: f64 = 0.6;
/// Tolerance if the unit is itself off by its share of that, and a little more.
const SLACK_NS: f64 = 2.0;
/// Share of the divisor below which Euclid's algorithm treats a remainder as zero: errors add up.
const NONE_SHARE: f64 = 1.0 / 64.0;
/// Share of the mean load below which a unit gains nothing.
const UNIT_SHARE_MIN: f64 = 1.0 / (1 << 20) as f64;
/// Largest divisor of the shortest time that is tried if times have no common unit.
const PARTS_MAX: u64 = 4;

/// Returns the largest lattice bound over the tried units, or 0.
pub(super) fn lattice(times: &[u64], groups: usize) -> u64 {
    let Some(shortest) = times.iter().copied().filter(|time| *time > 0).min() else { return 0 };
    let total: u128 = times.iter().map(|time| u128::from(*time)).sum();
    let unit_min = total as f64 / groups as f64 * UNIT_SHARE_MIN;
    if let Some(unit) = common_unit(times, shortest, unit_min) {
        return unit_bound(times, groups, unit);
    }
    let parts = (1..=PARTS_MAX).map(|parts| shortest as f64 / parts as f64);
    parts.map(|unit| unit_bound(times, groups, unit)).max().unwrap_or(0)
}

/// Finds the largest unit that divides all times except for rounding, at least `unit_min`.
fn common_unit(times: &[u64], shortest: u64, unit_min: f64) -> Option<f64> {
    let mut guess = shortest as f64;
    for &time in times {
        let found = common_divisor(time as f64, guess, unit_min)?;
        // The remainders of Euclid's algorithm have added up errors, the lengths that it began with have not.
        let narrowed = |unit: f64, length: f64| length / (length / unit).round().max(1.0);
        guess = narrowed(narrowed(found, guess), (time as f64).max(guess));
    }
    let mut distinct: Vec<u64> = times.iter().copied().filter(|time| *time > 0).collect();
    distinct.sort_unstable();
    distinct.dedup();
    // In ascending order: a time fixes its number of units only if shorter times have narrowed the unit
    // enough.
    let (mut least, mut most) = (0.0_f64, f64::INFINITY);
    for time in distinct.into_iter().map(|time| time as f64) {
        let unit = if least > 0.0 { f64::midpoint(least, most) } else { guess };
        let count = (time / unit).round().max(1.0);
        least = least.max((time - ROUNDING_NS) / count);
        most = most.min((time + ROUNDING_NS) / count);
        if least > most {
            return None;
        }
    }
    Some(f64::midpoint(least, most))
}

/// Runs Euclid's algorithm on lengths that are a little off; `None` once the divisor is too short.
fn common_divisor(mut length: f64, mut divisor: f64, divisor_min: f64) -> Option<f64> {
    loop {
        if divisor < divisor_min.max(2.0 * ROUNDING_NS / NONE_SHARE) {
            return None;
        }
        let rest = (length - (length / divisor).round() * divisor).abs();
        if rest <= divisor * NONE_SHARE {
            return Some(divisor);
        }
        (length, divisor) = (divisor, rest);
    }
}

/// Computes the bound for a unit; 0 if the times are too far from multiples to gain anything.
fn unit_bound(times: &[u64], groups: usize, unit: f64) -> u64 {
    let (mut total, mut lost) = (0_u64, 0.0);
    let lost_max = unit * groups as f64;
    // The smallest ratio, time / count, as a fraction.
    let mut worst = (u64::MAX, 1);
    for &time in times {
        let count = ((time as f64 + SLACK_NS) / unit).floor();
        lost += time as f64 - count * unit;
        if !(lost < lost_max && count < u64::MAX as f64) {
            return 0;
        }
        let count = count as u64;
        total = total.saturating_add(count);
        if u128::from(time) * u128::from(worst.1) < u128::from(worst.0) * u128::from(count) {
            worst = (time, count);
        }
    }
    let of_slowest = u128::from(total.div_ceil(groups as u64));
    let bound = (of_slowest * u128::from(worst.0)).div_ceil(u128::from(worst.1));
    u64::try_from(bound).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rounds multiples of a unit to nanoseconds.
    fn tiles(unit: f64, counts: &[u64]) -> Vec<u64> {
        counts.iter().map(|count| (*count as f64 * unit).round() as u64).collect()
    }

    #[test]
    fn multiples_of_a_tile_are_bound_by_their_number() {
        // Seven tiles in two groups: one group has four.
        assert_eq!(lattice(&[10_000, 10_000, 10_000, 20_000, 20_000], 2), 40_000);
        // The same with tiles of 1000.4, rounded, and of 999.6: four take 4 * 999.5 at least.
        assert_eq!(lattice(&[1000, 1000, 1000, 2001, 2001], 2), 4000);
        assert_eq!(lattice(&[1000, 1000, 1000, 1999, 1999], 2), 3998);
    }

    #[test]
    fn a_unit_that_no_item_has_alone_is_found() {
        // 3 + 5 + 7 + 10 tiles in two groups: one group has 13, for any unit.
        let times = tiles(8_372_768.9, &[3, 5, 7, 10]);
        let found = lattice(&times, 2) as f64;
        assert!(found <= 13.0 * 8_372_768.9 + 1.0 && found > 13.0 * 8_372_768.9 - 13.0, "{found}");
    }

    #[test]
    fn errors_of_remainders_do_not_hide_a_unit() {
        let times = tiles(2_503.648_243_5, &[15, 36, 16]);
        let found = common_unit(&times, times[0], 0.0).unwrap();
        assert!((found - 2_503.648_243_5).abs() < 0.02, "{found}");
    }

    #[test]
    fn times_without_a_unit_have_none() {
        let times: Vec<u64> = (1..500).map(|i| 1_000_000 + i * i * 7919 % 9_999_991).collect();
        assert_eq!(common_unit(&times, 1_000_000, 100.0), None);
    }

    #[test]
    fn zeros_have_no_lattice() {
        assert_eq!(lattice(&[0, 0], 1), 0);
    }

    proptest! {
        #[test]
        fn a_rounded_unit_is_recovered(
            unit in 1_000.0..50_000_000.0_f64,
            counts in prop::collection::vec(1..40_u64, 2..200),
            groups in 1..20_usize,
        ) {
            let common = counts.iter().fold(0, |left, right| gcd(left, *right));
            let counts: Vec<u64> = counts.iter().map(|count| count / common).collect();
            let times = tiles(unit, &counts);
            let shortest = *times.iter().min().unwrap();
            let found = common_unit(&times, shortest, 0.0).unwrap();
            let longest = *counts.iter().max().unwrap() as f64;
            prop_assert!((found - unit).abs() * longest <= 2.0 * ROUNDING_NS, "{found} {unit}");
            let slowest = counts.iter().sum::<u64>().div_ceil(groups as u64) as f64;
            let bound = lattice(&times, groups) as f64;
            prop_assert!(bound <= slowest * (unit + 0.6) + 1.0 && bound >= slowest * (unit - 0.6));
        }
    }

    fn gcd(left: u64, right: u64) -> u64 {
        if right == 0 { left } else { gcd(right, left % right) }
    }
}
