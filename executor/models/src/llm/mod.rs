//! Decoders: Llama 3, Qwen2 and Qwen2.5, alone or inside a multimodal model.

mod batch;
mod config;
mod deepstack;
mod embedding;
mod head;
mod vocabulary;

pub use batch::{IGNORED, TextBatch};
pub use config::{LlmConfig, LlmNames};
pub use embedding::Embedding;
pub use head::Head;
