//! Decoders: Llama 3, Qwen2, Qwen2.5, Qwen3, Gemma 3 and Llama 4, with or without encoders.

mod batch;
mod config;
mod deepstack;
mod embedding;
mod experts;
mod form;
mod head;
mod key_segments;
mod latent;
mod temperature;
mod vocabulary;

pub use batch::{IGNORED, TextBatch};
pub use config::{LlmConfig, LlmNames};
pub use embedding::Embedding;
pub use experts::{LlmExpertNames, LlmExperts, MatrixNames};
pub use form::DecoderForm;
pub use head::Head;
pub use latent::LlmLatent;
pub use temperature::QueryTemperature;
