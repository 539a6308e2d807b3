//! Model inputs: samples and microbatches as tensors, and the processor that creates them.

mod prepared_sample;
mod processor;

pub use self::prepared_sample::{
    AudioFeatures, Filler, IGNORED, MediaRun, PixelValues, PreparedSample, VideoValues,
};
pub use self::processor::{PrepareError, SampleProcessor, TextCounter};
pub use prepared_sample::{ModelInputs, NamedTensor, TensorValues};
