//! Tests cost models, at a stated rate and on profiles.

mod profile;
mod rate;
