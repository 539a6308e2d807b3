//! Writes the model files that the configuration contains inline.

use std::path::Path;

use super::cache_directory::CacheDirectory;
use super::config::ModelTable;
use crate::Result;

/// Name of the model file directory, in the cached directory.
pub(super) const MODEL: &str = "model";

/// Writes the files into a directory that is kept, unless it exists.
pub(super) fn write(model: &ModelTable) -> Result<CacheDirectory> {
    // Everything that the files depend on.
    let contents = format!("{:?} {:?}", model.config, model.preprocessor);
    CacheDirectory::open_or_make("model", &contents, |directory| write_files(&directory.join(MODEL), model))
}

/// Writes the inline documents into a new directory.
pub(super) fn write_files(directory: &Path, model: &ModelTable) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    let documents = [("config.json", &model.config), ("preprocessor_config.json", &model.preprocessor)];
    for (name, document) in documents {
        if let Some(document) = document {
            std::fs::write(directory.join(name), format!("{document:#}\n"))?;
        }
    }
    Ok(())
}
