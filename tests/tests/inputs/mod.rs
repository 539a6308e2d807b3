//! Tests model inputs against recorded processors.

mod every_microbatch;
mod media_inputs;
mod media_truth;
mod model_inputs;
mod own_family;
mod own_processor;
mod processors;
mod slices;
mod video_inputs;
