//! Tests the stream loader.

mod dealt;
mod delivery;
mod first_epoch;
mod resume;
mod resume_refused;
mod shared_settings;
mod unindexed;
