//! Fuzz targets: every parser for external bytes, under rules that must hold for any bytes.
//!
//! A target receives bytes and panics if a rule is broken. `make fuzz` runs a target under libFuzzer; a test
//! replays the corpus. In addition to "no panic, no large allocation, no long wait", targets compare two ways
//! to the same answer.

mod archives;
mod checkpoints;
mod media;
mod models;
mod names;
mod states;

/// Name and function of a target.
pub type Target = (&'static str, fn(&[u8]));

/// All targets, in alphabetical order.
pub const TARGETS: &[Target] = &[
    ("audio", media::audio),
    ("chat_template", models::chat_template),
    ("checkpoint", checkpoints::checkpoint),
    ("controls", dflop_executor::comm::fuzz::controls),
    ("document", media::document),
    ("energon_split", names::energon_split),
    ("frames", dflop_executor::comm::fuzz::messages),
    ("handshake", dflop_executor::comm::fuzz::greeting),
    ("image", media::image),
    ("index", archives::index),
    ("instance", states::instance),
    ("json", media::json),
    ("loader_state", states::loader_state),
    ("model_config", models::model_config),
    ("npy", media::npy),
    ("pack", names::pack),
    ("pattern", names::pattern),
    ("preprocessor", models::preprocessor),
    ("profile", states::profile),
    ("ranged", archives::ranged),
    ("requests", dflop_executor::comm::fuzz::requests),
    ("safetensors", checkpoints::safetensors),
    ("shard", archives::shard),
    ("shard_list", names::shard_list),
    ("splits", names::splits),
    ("stream_state", states::stream_state),
    ("tar", archives::tar),
    ("tokenizer", models::tokenizer),
];

/// Names of the `dflop-cli` targets; `dflop-cli` replays the corpus for them.
pub const CLI_TARGETS: &[&str] = &["links", "mixture", "shapes", "train_config"];

/// Finds a target by name.
#[must_use]
pub fn target(name: &str) -> Option<fn(&[u8])> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, run)| *run)
}

/// Calls `use_text` if the bytes are UTF-8.
fn with_text(bytes: &[u8], use_text: impl FnOnce(&str)) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        use_text(text);
    }
}
