//! Weighs samples: a mixture whose datasets are the classes, or the equally weighted samples, of one dataset.
//!
//! Draws are then exact as in any mixture: every period of positions has each class as often as the class
//! weight, and the samples in a class are drawn equally often.

use std::collections::BTreeMap;
use std::fmt;

use super::{Mixture, WEIGHT_MAX, WEIGHT_UNITS};
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Largest weight in units.
const UNITS_MAX: u128 = (WEIGHT_MAX * WEIGHT_UNITS) as u128;

/// Sample weight in units of `1 / WEIGHT_UNITS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SampleWeight(u64);

impl fmt::Display for SampleWeight {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "weight {}", self.0 as f64 / WEIGHT_UNITS)
    }
}

impl Mixture {
    /// Draws the classes of a dataset by weight: each class is a dataset in the mixture, named as in
    /// `photos/kite`.
    ///
    /// - `class`: called with runs of sample numbers in the index, returns the class of each sample; must be
    ///   pure and identical on all ranks
    /// - `weights`: weight of each class, relative to the others; without weights, all classes are drawn
    ///   equally often
    ///
    /// # Errors
    /// The function error; [`Error::Config`] if the function returns a wrong number of classes, if there are
    /// more than 4,096 classes, or if the weights do not name exactly the classes.
    ///
    /// # Examples
    /// ```no_run
    /// # use dflop_loader::{Dataset, Mixture};
    /// # fn balanced(animals: Dataset) -> dflop_loader::Result<Mixture> {
    /// let index = animals.index().clone();
    /// let directory = |number: &u64| index.sample(*number).key().split('/').next().unwrap_or("").to_owned();
    /// Mixture::by_class(animals, |numbers| Ok(numbers.iter().map(directory).collect()), None)
    /// # }
    /// ```
    pub fn by_class(
        dataset: impl Into<Dataset>,
        class: impl FnMut(&[u64]) -> Result<Vec<String>>,
        weights: Option<&BTreeMap<String, f64>>,
    ) -> Result<Self> {
        let classes = dataset.into().parts("by_class", class)?;
        if let Some(weights) = weights {
            let is_known = |name: &String| classes.iter().any(|(class, _)| class == name);
            if let Some(unknown) = weights.keys().find(|name| !is_known(name)) {
                return invalid("weights", format!("no sample has the class `{unknown}`"));
            }
        }
        let mut mixture = Self::new();
        for (class, samples) in classes {
            let Some(weight) = weights.map_or(Some(1.0), |weights| weights.get(&class).copied()) else {
                return invalid("weights", format!("class `{class}` has none; 0 leaves it out"));
            };
            mixture = mixture.dataset(samples, weight);
        }
        Ok(mixture)
    }

    /// Draws each sample as often as its weight, relative to the other samples: samples with the same weight
    /// are a dataset in the mixture, named as in `photos/weight 2`. Weights are rounded to four decimals; a
    /// sample with weight 0 is left out.
    ///
    /// - `weight`: called with runs of sample numbers in the index, returns the weight of each sample; must
    ///   be pure and identical on all ranks
    ///
    /// # Errors
    /// The function error; [`Error::Config`] if the function returns a wrong number of weights or more than
    /// 4,096 different weights, if a weight is negative, not finite, or above a million, or if all are 0.
    pub fn by_weight(
        dataset: impl Into<Dataset>,
        mut weight: impl FnMut(&[u64]) -> Result<Vec<f64>>,
    ) -> Result<Self> {
        let weigh = |numbers: &[u64]| -> Result<Vec<SampleWeight>> {
            weight(numbers)?.into_iter().map(checked).collect()
        };
        let mut parts = dataset.into().parts("by_weight", weigh)?;
        parts.retain(|(weight, _)| weight.0 > 0);
        if parts.is_empty() {
            return invalid("by_weight", "the weights of all samples are 0".into());
        }
        // A part is drawn by the weight of all its samples.
        let units = parts.iter().map(|(weight, part)| u128::from(weight.0) * u128::from(part.len()));
        let shares = reduced(units.collect());
        let weighted = parts.into_iter().zip(shares);
        Ok(weighted.fold(Self::new(), |mixture, ((_, part), share)| {
            mixture.dataset(part, share as f64 / WEIGHT_UNITS)
        }))
    }
}

fn invalid<T>(setting: &'static str, reason: String) -> Result<T> {
    Err(Error::Config { setting, reason })
}

fn checked(weight: f64) -> Result<SampleWeight> {
    if !(0.0..=WEIGHT_MAX).contains(&weight) {
        return invalid("by_weight", format!("{weight} is not between 0 and {WEIGHT_MAX}"));
    }
    let units = (weight * WEIGHT_UNITS).round() as u64;
    if units == 0 && weight > 0.0 {
        return invalid("by_weight", format!("{weight} is less than the unit of {}", 1.0 / WEIGHT_UNITS));
    }
    Ok(SampleWeight(units))
}

/// Divides shares by the greatest common divisor; if the largest is still above the largest weight, all are
/// rounded, to at least 1.
fn reduced(shares: Vec<u128>) -> Vec<u64> {
    let divisor = shares.iter().copied().reduce(common_divisor).unwrap_or(1).max(1);
    let most = shares.iter().copied().max().unwrap_or(1) / divisor;
    let fitted = |share: u128| {
        let share = share / divisor;
        if most <= UNITS_MAX { share } else { (share * UNITS_MAX / most).max(1) }
    };
    shares.into_iter().map(|share| fitted(share) as u64).collect()
}

fn common_divisor(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Index, IndexOptions};
    use crate::order::RunBuilder;
    use std::sync::Arc;

    /// Creates a dataset with two classes, six crows and three kites.
    fn animals(directory: &std::path::Path) -> Dataset {
        let shards = directory.join("animals");
        let mut writer = crate::write::ShardWriter::builder(&shards).build().unwrap();
        for number in 0..9 {
            let class = if number < 6 { "crow" } else { "kite" };
            writer.write(&format!("{class}/{number}"), &[("txt", b"a bird".as_slice())]).unwrap();
        }
        writer.finish().unwrap();
        let shards = crate::shard::expand_shards(&[shards.to_str().unwrap()]).unwrap();
        Dataset::from(Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap()))
    }

    fn class(dataset: &Dataset, number: u64) -> String {
        dataset.index().sample(number).key().split('/').next().unwrap().to_owned()
    }

    #[test]
    fn classes_are_datasets_with_their_names_and_weights() {
        let directory = tempfile::tempdir().unwrap();
        let all = animals(directory.path());
        let by_class = |weights: Option<&[(&str, f64)]>| {
            let weights: Option<BTreeMap<String, f64>> = weights.map(|weights| {
                weights.iter().map(|(class, weight)| ((*class).to_owned(), *weight)).collect()
            });
            let classes = |numbers: &[u64]| Ok(numbers.iter().map(|&number| class(&all, number)).collect());
            Mixture::by_class(all.clone(), classes, weights.as_ref())
        };
        let mixture = by_class(Some(&[("crow", 1.0), ("kite", 3.0)])).unwrap();
        let named: Vec<_> =
            mixture.datasets().iter().map(|set| (set.name().to_string(), set.len())).collect();
        assert_eq!(named, [("animals/crow".to_owned(), 6), ("animals/kite".to_owned(), 3)]);
        assert_eq!(mixture.weights, [1.0, 3.0]);
        assert_eq!(by_class(None).unwrap().weights, [1.0, 1.0]);
        let refused = |weights: &[(&str, f64)]| by_class(Some(weights)).unwrap_err().to_string();
        assert!(refused(&[("crow", 1.0)]).contains("class `kite` has none"));
        assert!(refused(&[("crow", 1.0), ("kite", 1.0), ("lake", 1.0)]).contains("class `lake`"));
    }

    #[test]
    fn samples_are_drawn_exactly_as_often_as_their_weights() {
        let directory = tempfile::tempdir().unwrap();
        let all = animals(directory.path());
        let weight = |number: u64| if number == 0 { 0.0 } else { [0.5, 2.0][number as usize % 2] };
        let weights = |numbers: &[u64]| Ok(numbers.iter().map(|&number| weight(number)).collect());
        let mixture = Mixture::by_weight(all.clone(), weights).unwrap();
        assert_eq!(mixture.datasets().iter().map(Dataset::len).collect::<Vec<_>>(), [4, 4]);
        assert_eq!(mixture.weights, [1.0, 4.0].map(|share: f64| share / WEIGHT_UNITS));
        let run = RunBuilder { global_batch: 20, ..RunBuilder::new(mixture) }.build().unwrap();
        let mut draws = [0; 9];
        for drawn in (0..4).flat_map(|step| run.steps.samples(step).unwrap()) {
            draws[drawn.sample as usize] += 1;
        }
        // Four periods of 5 positions in each step, and 16 draws of 4 samples with weight 2.
        assert_eq!(draws, [0, 16, 4, 16, 4, 16, 4, 16, 4]);
        let refused = |value: f64| {
            let weights = |numbers: &[u64]| Ok(vec![value; numbers.len()]);
            Mixture::by_weight(all.clone(), weights).unwrap_err().to_string()
        };
        for (value, reason) in
            [(0.0, "are 0"), (-1.0, "not between"), (f64::NAN, "not between"), (1e-5, "unit")]
        {
            assert!(refused(value).contains(reason), "{}", refused(value));
        }
        let short = Mixture::by_weight(all.clone(), |_| Ok(vec![1.0])).unwrap_err().to_string();
        assert!(short.contains("it returned 1 values for 9 samples"), "{short}");
    }

    #[test]
    fn large_shares_are_rounded_and_small_ones_stay_exact() {
        assert_eq!(reduced(vec![30, 20, 50]), [3, 2, 5]);
        let huge = reduced(vec![1, 3 * UNITS_MAX, UNITS_MAX + 1]);
        assert_eq!(huge[1], UNITS_MAX as u64);
        assert_eq!((huge[0], huge[2]), (1, UNITS_MAX as u64 / 3));
    }
}
