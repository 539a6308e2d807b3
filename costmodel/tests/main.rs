//! Predictions against recorded truth: tokens, FLOPs, parameters, profiles.

mod committed_profiles;
mod flops;
mod head;
mod image_families;
mod llm_flops;
mod omni;
mod tokens;
