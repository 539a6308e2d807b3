//! Finds models: names, checkpoint directories and the Hugging Face cache.

mod directory;
#[cfg(feature = "processors")]
mod image_processor;
mod registry;

pub use self::directory::ModelDirectory;
#[cfg(feature = "processors")]
pub use self::image_processor::image_processor_from_names;
pub use self::registry::{
    cached_checkpoint, checkpoint_path, model_directory, model_profile, profile_options, read_profile,
    spec_from_names, unknown_name_hint,
};
