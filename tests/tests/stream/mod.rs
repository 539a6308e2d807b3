//! Tests the stream loader.

mod delivery;
mod first_epoch;
mod resume;
mod resume_refused;
mod unindexed;
