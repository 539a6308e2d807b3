//! Model inputs: samples and microbatches as tensors, and the processor that creates them.

mod error;
mod filler;
mod model_inputs;
mod prepared_sample;
mod processor;
mod tensors;
mod text_counter;

pub use self::error::PrepareError;
pub use self::filler::Filler;
pub use self::model_inputs::ModelInputs;
pub use self::prepared_sample::{AudioFeatures, IGNORED, MediaRun, PixelValues, PreparedSample, VideoValues};
pub use self::processor::SampleProcessor;
pub use self::tensors::{NamedTensor, TensorValues};
pub use self::text_counter::TextCounter;
