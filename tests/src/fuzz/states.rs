//! Saved states, instances and profiles.

use dflop_balancer::Instance;
use dflop_costmodel::Profile;
use dflop_loader::{LoaderState, StreamState};

use super::with_text;

/// Reads the state of a balanced run; it reads the same after it is written.
pub(super) fn loader_state(bytes: &[u8]) {
    if let Ok(state) = serde_json::from_slice::<LoaderState>(bytes) {
        let written = serde_json::to_vec(&state).expect("a state can be written");
        assert_eq!(serde_json::from_slice::<LoaderState>(&written).expect("it was written"), state);
    }
}

/// Reads a stream state; it reads the same after it is written.
pub(super) fn stream_state(bytes: &[u8]) {
    if let Ok(state) = serde_json::from_slice::<StreamState>(bytes) {
        let written = serde_json::to_vec(&state).expect("a state can be written");
        assert_eq!(serde_json::from_slice::<StreamState>(&written).expect("it was written"), state);
    }
}

/// Reads a partition problem.
pub(super) fn instance(bytes: &[u8]) {
    with_text(bytes, |text| drop(Instance::from_json(text)));
}

/// Reads a measured profile.
pub(super) fn profile(bytes: &[u8]) {
    with_text(bytes, |text| drop(Profile::parse([("fuzz.csv", text)])));
}
