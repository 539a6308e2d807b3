//! Model inputs: samples and microbatches as tensors, and the processor that creates them.

mod prepared_sample;
mod processor;
mod tensors;

pub use self::prepared_sample::{
    AudioFeatures, Filler, IGNORED, MediaRun, PixelValues, PreparedSample, VideoValues,
};
pub use self::processor::{PrepareError, SampleProcessor, TextCounter};
pub use self::tensors::{ModelInputs, NamedTensor, TensorValues};
