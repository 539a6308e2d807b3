//! Model inputs: samples and microbatches as tensors, and the processor that creates them.

mod processor;

pub use self::processor::{PrepareError, SampleProcessor, TextCounter};
pub use processor::{
    AudioFeatures, Filler, IGNORED, MediaRun, ModelInputs, NamedTensor, PixelValues, PreparedSample,
    TensorValues, VideoValues,
};
