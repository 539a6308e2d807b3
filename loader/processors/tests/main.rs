//! Model inputs against recorded truth.

mod omni;
mod qwen3_vl;
mod recorded_inputs;
