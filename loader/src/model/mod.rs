//! Finds models: names, checkpoint directories and the Hugging Face cache.

mod directory;
mod hub_cache;
mod registry;

pub use self::directory::ModelDirectory;
pub use self::hub_cache::cached_checkpoint;
pub use self::registry::{
    checkpoint_path, image_processor_of, profile_options, read_profile, spec_of, unknown_name_hint,
};
