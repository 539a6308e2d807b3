//! Decoders: Llama 3, Qwen2, Qwen2.5, Qwen3, Gemma 3 and Llama 4, with or without encoders.

mod batch;
mod config;
mod embedding;
mod head;
mod key_segments;
mod temperature;

pub use batch::{IGNORED, TextBatch};
pub use config::{DecoderForm, LlmConfig, LlmExpertNames, LlmExperts, LlmLatent, LlmNames, MatrixNames};
pub use embedding::Embedding;
pub use head::Head;
pub use temperature::QueryTemperature;
