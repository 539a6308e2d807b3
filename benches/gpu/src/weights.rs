//! Weights for large models, drawn fast.

use dflop_costmodel::random::SplitMix64;
use dflop_models::weights::{Init, ParameterSpec, Seed, WeightSource};

/// Draws uniform numbers with the requested deviation; for weights whose values only have to be plausible.
pub(crate) struct Uniform(pub(crate) u64);

impl WeightSource for Uniform {
    fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
        let Init::Normal(deviation) = spec.init else { return Seed(self.0).values(spec) };
        let name = spec.name.bytes().fold(self.0, |hash, byte| hash.rotate_left(5) ^ u64::from(byte));
        let mut random = SplitMix64::new(name);
        // a uniform distribution of width w has the deviation w / sqrt(12)
        let width = (deviation * 12.0_f64.sqrt()) as f32;
        let mut number = || ((random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5) * width;
        Ok((0..spec.elements()).map(|_| number()).collect())
    }
}
