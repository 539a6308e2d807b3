//! Tests the stream loader.

mod delivery;
mod drawn;
mod first_epoch;
mod resume;
mod resume_refused;
mod shared_settings;
mod unindexed;
