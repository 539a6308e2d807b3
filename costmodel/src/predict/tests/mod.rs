//! Tests cost models, at a stated rate and on profiles.

mod coverage;
mod profile;
mod rate;
