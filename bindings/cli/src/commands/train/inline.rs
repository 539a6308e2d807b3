//! Writes the files of a model that the configuration contains inline.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use super::config::ModelTable;
use crate::failure::Failure;

/// Writes the files into a temporary directory named by their contents, and returns it.
pub(crate) fn write(model: &ModelTable) -> Result<PathBuf, Failure> {
    let documents = [("config.json", &model.config), ("preprocessor_config.json", &model.preprocessor)];
    let text = |document: &serde_json::Value| format!("{document:#}\n");
    let texts = documents.map(|(_, document)| document.as_ref().map(text).unwrap_or_default());
    let name = name_of(&texts.concat());
    let directory = std::env::temp_dir().join(format!("dflop-model-{name}"));
    std::fs::create_dir_all(&directory)?;
    for (name, document) in documents {
        let (path, Some(document)) = (directory.join(name), document) else { continue };
        // All ranks write the same file; renaming keeps it whole for those that already read it.
        let partial = directory.join(format!(".{name}-{}", std::process::id()));
        std::fs::write(&partial, text(document))?;
        std::fs::rename(&partial, &path)?;
    }
    Ok(directory)
}

/// Returns a name for contents: the first 16 digits of their digest.
pub(super) fn name_of(contents: &str) -> String {
    let digest = Sha256::digest(contents.as_bytes());
    let word = digest.iter().take(8).fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    format!("{word:016x}")
}
