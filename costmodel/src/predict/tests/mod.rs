//! Tests cost models, at a stated rate and on profiles.

mod coverage;
mod device_preset;
mod layer_times;
mod profile;
mod rate;
