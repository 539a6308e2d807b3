//! Tests the sample order: mixtures, splits, saved states.

mod global_order;
mod mixture;
mod recorded;
mod saved_state;
mod splits;
