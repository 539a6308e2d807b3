//! Compares model inputs with recorded reference values.

mod omni;
mod qwen3_vl;
mod recorded_inputs;
