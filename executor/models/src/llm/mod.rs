//! Decoders: Llama 3, Qwen2, Qwen2.5, Qwen3 and Gemma 3, alone or inside a multimodal model.

mod batch;
mod config;
mod embedding;
mod experts;
mod form;
mod head;
mod key_segments;
mod latent;
mod vocabulary;

pub use batch::{IGNORED, TextBatch};
pub use config::{LlmConfig, LlmNames};
pub use embedding::Embedding;
pub use experts::{LlmExpertNames, LlmExperts, MatrixNames};
pub use form::DecoderForm;
pub use head::Head;
pub use latent::LlmLatent;
