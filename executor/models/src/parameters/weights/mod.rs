//! Loads initial parameter values from a Hugging Face checkpoint or a seed, and writes checkpoints.
//!
//! Parameter specification: name, shape, initialization, and the part that a rank holds.
//!
//! Draws initial values from a seed.
//!
//! Names and shapes are the same as in the files. Some families have been saved under several names over
//! time; `ALIASES` lists equivalent prefixes, and files are written with the first prefix.

mod checkpoint;
mod tensor_shard;

use crate::error::Result;
use dflop_costmodel::random::SplitMix64;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use checkpoint::Checkpoint;
pub use tensor_shard::{AxisPartition, Tensor, TensorShard, TpRank, write};

/// File name for an unsharded checkpoint.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// File name for the index that assigns tensors to files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Equivalent prefixes: the prefix used here, and a second prefix found in files.
const ALIASES: [(&str, &str); 12] = [
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_tower.", "model.vision_tower."),
    ("audio_tower.", "model.audio_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
    ("embeddings.", "vision_model.embeddings."),
    ("encoder.", "vision_model.encoder."),
    ("pre_layrnorm.", "vision_model.pre_layrnorm."),
];

/// Lists the names that a parameter has in checkpoints, the name used here first.
pub fn spellings(name: &str) -> impl Iterator<Item = String> {
    let others = ALIASES
        .iter()
        .filter_map(move |(prefix, other)| name.strip_prefix(prefix).map(|rest| format!("{other}{rest}")));
    std::iter::once(name.to_owned()).chain(others)
}

/// Source of initial parameter values.
pub trait WeightSource {
    /// Returns the values in the part of a parameter on this rank, row-major.
    ///
    /// # Errors
    /// [`crate::Error::MissingTensor`], [`crate::Error::TensorShape`], [`crate::Error::TensorType`] or
    /// [`crate::Error::File`].
    fn values(&self, spec: &ParameterSpec) -> Result<Vec<f32>>;
}

/// Parameter initialization without a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal distribution with this standard deviation.
    Normal(f64),
    /// All ones.
    Ones,
    /// All zeros.
    Zeros,
    /// The same value for all elements.
    Constant(f64),
    /// Whisper positions: sines in the first half of the columns, cosines in the second.
    Sinusoids,
}

/// Parameter as in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint; row-major.
    pub shape: Vec<usize>,
    /// Tensor part that this rank holds.
    pub shard: TensorShard,
    /// Initialization without a checkpoint.
    pub init: Init,
    /// Whether the parameter is trained.
    pub is_trained: bool,
    /// Parameter whose values are shared, for a tied LM head. The sharing parameter has a separate gradient
    /// until [`Parameters::fold_shared_gradients`](crate::parameters::Parameters::fold_shared_gradients).
    pub shares: Option<ParameterId>,
    /// Whether another block also uses the parameter, in this or another stage.
    pub is_tied: bool,
}

impl ParameterSpec {
    /// Returns the number of elements that this rank holds.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.held_shape().iter().product()
    }

    /// Returns the shape of the part that this rank holds.
    #[must_use]
    pub fn held_shape(&self) -> Vec<usize> {
        self.shard.rank_shape(self.shard.tp_rank().rank, &self.shape)
    }

    /// Returns the ranges in the complete tensor that this rank holds, in order.
    #[must_use]
    pub fn spans(&self) -> Vec<Range<usize>> {
        self.shard.rank_spans(self.shard.tp_rank().rank, &self.shape)
    }

    /// Cuts the part for this rank out of a complete tensor: weights, or any tensor with an element per
    /// weight.
    #[must_use]
    pub fn cut_part(&self, whole: &[f32]) -> Vec<f32> {
        self.spans().into_iter().flat_map(|span| whole[span].iter().copied()).collect()
    }

    /// Returns whether sums over the elements on all ranks, such as gradient norms, include the part on this
    /// rank; false if the part is a copy of a part on another rank.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.shard.is_counted()
    }
}

/// Parameter index in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub(crate) usize);

impl ParameterId {
    /// Returns the position among the stage parameters.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

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
    use super::{AxisPartition, TensorShard, TpRank, *};

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
