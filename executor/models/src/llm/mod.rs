//! Decoders: Llama 3, Qwen2 and Qwen2.5, alone or inside a multimodal model.

mod batch;
mod config;
mod embedding;
mod experts;
mod head;
mod latent;
mod vocabulary;

pub use batch::{IGNORED, TextBatch};
pub use config::{LlmConfig, LlmNames};
pub use embedding::Embedding;
pub use experts::{LlmExpertNames, LlmExperts, MatrixNames};
pub use head::Head;
pub use latent::LlmLatent;
