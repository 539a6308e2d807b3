//! Draws initial values from a seed.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Init, ParameterSpec, WeightSource};
use crate::error::Result;
use dflop_costmodel::random::SplitMix64;

/// Number of elements that a thread draws at a time: a few milliseconds of work.
const CHUNK: usize = 1 << 18;
/// Maximum number of threads that draw.
const THREADS_MAX: usize = 16;

/// Draws values from a seed and the parameter name. Every stage that has the parameter draws the same values
/// on every machine, and a rank with a part of the parameter draws the values in that part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub u64);

impl WeightSource for Seed {
    fn values(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        let elements = spec.elements();
        Ok(match spec.init {
            Init::Zeros => vec![0.0; elements],
            Init::Ones => vec![1.0; elements],
            Init::Constant(value) => vec![value as f32; elements],
            Init::Sinusoids => spec.cut_part(&sinusoids(&spec.shape)),
            Init::Normal(deviation) => {
                // by name, not by order, so that every division into stages draws the same values
                let state = xxh3_64_with_seed(spec.name.as_bytes(), self.0);
                let mut values = vec![0.0; elements];
                draw(state, deviation, &spec.spans(), &mut values);
                values
            }
        })
    }
}

/// Draws spans from a series, on all cores if there are many elements; the values do not depend on the number
/// of threads.
fn draw(state: u64, deviation: f64, spans: &[Range<usize>], values: &mut [f32]) {
    let (mut chunks, mut rest) = (Vec::new(), values);
    for span in spans {
        let (mut own, after) = rest.split_at_mut(span.len());
        rest = after;
        let mut start = span.start;
        while !own.is_empty() {
            let (chunk, left) = own.split_at_mut(own.len().min(CHUNK));
            own = left;
            let end = start + chunk.len();
            chunks.push((start..end, chunk));
            start = end;
        }
    }
    let elements: usize = spans.iter().map(ExactSizeIterator::len).sum();
    let cores = available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (elements / CHUNK).min(cores).min(THREADS_MAX);
    let chunks = Mutex::new(chunks.into_iter());
    let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((elements, values)) = next() {
            normal(state, deviation, elements, values);
        }
    };
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(work)));
        work();
    });
}

/// Computes elements from an infinite series of normal numbers; each pair uses two generator outputs.
///
/// # Source
/// Box, Muller: "A Note on the Generation of Random Normal Deviates", 1958; the generator is `SplitMix64`
/// (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014).
fn normal(state: u64, deviation: f64, elements: Range<usize>, values: &mut [f32]) {
    let mut rng = SplitMix64::new(state);
    rng.skip(2 * (elements.start / 2) as u64);
    for pair in elements.start / 2..elements.end.div_ceil(2) {
        // `1 - u` is above 0, so that the logarithm is finite
        let (first, second) = (1.0 - rng.fraction(), rng.fraction());
        let radius = deviation * (-2.0 * libm::log(first)).sqrt();
        let (sin, cos) = libm::sincos(2.0 * std::f64::consts::PI * second);
        let both = [(radius * cos) as f32, (radius * sin) as f32];
        for (place, value) in (2 * pair..).zip(both).filter(|(place, _)| elements.contains(place)) {
            values[place - elements.start] = value;
        }
    }
}

/// Computes sinusoids from the angles `position / 10000^(column / (half - 1))`.
pub(crate) fn sinusoids(shape: &[usize]) -> Vec<f32> {
    let [positions, columns] = shape else { return vec![0.0; shape.iter().product()] };
    let half = columns / 2;
    let step = libm::log(10_000.0) / (half.max(2) - 1) as f64;
    let mut values = vec![0.0; positions * columns];
    for (position, row) in values.chunks_mut((*columns).max(1)).enumerate() {
        for column in 0..half {
            let (sin, cos) = libm::sincos(position as f64 * libm::exp(-step * column as f64));
            (row[column], row[half + column]) = (sin as f32, cos as f32);
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::super::{AxisPartition, TensorShard, TpRank};
    use super::*;

    #[test]
    fn values_are_normal_and_depend_on_the_name() {
        let spec = |name: &str| ParameterSpec {
            name: name.to_owned(),
            shape: vec![100, 301],
            shard: TensorShard::default(),
            init: Init::Normal(0.5),
            is_trained: true,
            shares: None,
            is_tied: false,
        };
        let values = Seed(1).values(&spec("a")).unwrap();
        let moment =
            |power: i32| values.iter().map(|value| f64::from(*value).powi(power)).sum::<f64>() / 30_100.0;
        assert!(
            moment(1).abs() < 0.01
                && (moment(2) - 0.25).abs() < 0.01
                && (moment(4) - 3.0 / 16.0).abs() < 0.02
        );
        assert_eq!(values, Seed(1).values(&spec("a")).unwrap());
        assert_ne!(values, Seed(2).values(&spec("a")).unwrap());
        assert_ne!(values, Seed(1).values(&spec("b")).unwrap());
        assert_eq!(values[..2], [-0.313_302_96, -0.435_311_73]);
        for axis in [0, 1] {
            for rank in 0..3 {
                let parts = AxisPartition::even([100, 301][axis], 3);
                let shard = TensorShard::cut(TpRank { rank, size: 3 }, axis, &parts);
                let part = ParameterSpec { shard, ..spec("a") };
                assert_eq!(Seed(1).values(&part).unwrap(), part.cut_part(&values));
            }
        }
    }
    #[test]
    fn threads_draw_what_one_draws() {
        // Chunks end inside pairs, and spans start there.
        let spans = [3..2 * CHUNK + 6, 5 * CHUNK + 1..6 * CHUNK + 2];
        let count: usize = spans.iter().map(ExactSizeIterator::len).sum();
        let (mut together, mut alone) = (vec![0.0; count], vec![0.0; count]);
        draw(9, 0.5, &spans, &mut together);
        let (first, second) = alone.split_at_mut(spans[0].len());
        normal(9, 0.5, spans[0].clone(), first);
        normal(9, 0.5, spans[1].clone(), second);
        assert_eq!(together, alone);
    }
}
