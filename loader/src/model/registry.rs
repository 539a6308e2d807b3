//! Resolves the names that users assign to models and profiles.
//!
//! A model is a preset, a checkpoint directory, a name in the Hugging Face cache, a description as a file or
//! as JSON text, or a combination: a language model with encoders such as CLIP, `SigLIP` or Whisper.
//!
//! Names in the Hugging Face client cache are looked up there; nothing is fetched.
//!
//! # Source
//! The layout: Hugging Face Hub documentation, "Understand caching": `models--ORG--NAME/refs/main` names the
//! commit, `snapshots/COMMIT/` has the files. The directory: `HF_HUB_CACHE`, else `HF_HOME/hub`, else
//! `~/.cache/huggingface/hub`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use dflop_costmodel::config::PartialModelSpec;
use dflop_costmodel::profile::Profile;
use dflop_costmodel::{ModelSpec, Module, ProfileOptions};

use super::directory::ModelDirectory;
use crate::error::{Error, Result, StorageError};
use crate::store::file;

/// Returns the model for a single name, or the model that multiple parts form together.
///
/// # Errors
/// [`Error::Model`] if a name is neither a preset nor a directory, with the known presets, or if the parts do
/// not form a model; [`Error::Storage`] and [`Error::Config`] if a directory cannot be read.
pub fn spec_from_names<S: AsRef<str>>(names: &[S]) -> Result<ModelSpec> {
    if let [name] = names {
        return match model_directory(name.as_ref())? {
            Some(directory) => directory.spec(),
            None => ModelSpec::preset(name.as_ref()).map_err(Error::Model),
        };
    }
    let part = |name: &S| match model_directory(name.as_ref())? {
        Some(directory) => directory.part(),
        None => ModelSpec::preset(name.as_ref()).map(PartialModelSpec::from).map_err(Error::Model),
    };
    let parts = names.iter().map(part).collect::<Result<Vec<PartialModelSpec>>>()?;
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    ModelSpec::compose(&names.join("+"), &parts).map_err(Error::Model)
}

/// Describes valid alternatives for a name that is not a preset, for messages.
#[must_use]
pub fn unknown_name_hint(name: &str) -> String {
    let is_path = name.starts_with(['/', '.', '~']) || name.ends_with('/') || name.matches('/').count() > 1;
    if is_path {
        return "and there is no such directory".to_owned();
    }
    if name.contains('/') {
        return format!("and it is not in the Hugging Face cache: `hf download {name}` downloads it");
    }
    "or the directory of a checkpoint with its `config.json`, or a description".to_owned()
}

/// Finds the checkpoint for a name; `None` for a preset, which takes precedence over a directory with the
/// same name, and for a name that does not exist.
#[must_use]
pub fn checkpoint_path(name: &str) -> Option<PathBuf> {
    if ModelSpec::preset_names().contains(&name) {
        return None;
    }
    let path = PathBuf::from(name);
    if path.exists() { Some(path) } else { cached_checkpoint(name) }
}

/// Reads the files for a name: a checkpoint, or a description; `None` for a preset and an unknown name.
///
/// # Errors
/// The errors of [`ModelDirectory::open`] and [`ModelDirectory::described`].
pub fn model_directory(name: &str) -> Result<Option<ModelDirectory>> {
    if name.starts_with('{') {
        return ModelDirectory::described(name).map(Some);
    }
    checkpoint_path(name).map(ModelDirectory::open).transpose()
}

/// Reads a profile: a CSV file, or all `.csv` files in a directory in name order.
///
/// # Errors
/// [`Error::Storage`] if it cannot be read, or if there is no such file in the directory; [`Error::Model`] if
/// the files are not a profile, or not a single profile.
pub fn read_profile(path: &Path) -> Result<Profile> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |source| Error::Storage(StorageError::File { path, source })
    };
    let mut paths = vec![path.to_owned()];
    let is_directory = path.is_dir();
    if is_directory {
        let entries = std::fs::read_dir(path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
        paths = entries.map_err(failed(path))?.into_iter().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "csv"));
        paths.sort();
        if paths.is_empty() {
            let source = std::io::Error::new(ErrorKind::NotFound, "no profile, there is no .csv file");
            return Err(failed(path)(source));
        }
    }
    let mut files = Vec::new();
    for path in paths {
        let read = if is_directory { file::read_text } else { file::read_named_text };
        let text = read(&path).map_err(failed(&path))?;
        files.push((path.display().to_string(), text));
    }
    Profile::parse(files.iter().map(|(name, text)| (name.as_str(), text.as_str()))).map_err(Error::Model)
}

/// Reads a model profile: a path, as [`read_profile`] reads it, or the name of a profile that is included in
/// dflop ([`Profile::shipped`]), where there is no such path.
///
/// # Errors
/// The errors of [`read_profile`]; [`Error::Model`] with the measured models if the included profile has no
/// times for this model.
pub fn model_profile(path: &Path, spec: &ModelSpec) -> Result<Profile> {
    let name = path.to_str().filter(|_| !path.exists());
    let shipped = name.map(|name| Profile::shipped(name, spec)).transpose().map_err(Error::Model)?;
    match shipped.flatten() {
        Some(profile) => Ok(profile),
        None => read_profile(path),
    }
}

/// Returns the options for reading a profile.
///
/// - `tp`: tensor-parallel degrees of the encoders and of the LLM; the default is 1 each
/// - `is_checked`: whether to reject a profile that does not predict the held-out microbatches
///
/// # Errors
/// [`Error::Config`] for a degree of zero.
pub fn profile_options(tp: Option<[u32; 2]>, is_checked: bool) -> Result<ProfileOptions> {
    let [encoders, llm] = tp.unwrap_or([1, 1]);
    if encoders == 0 || llm == 0 {
        return Err(Error::Config { setting: "profile_tp", reason: "must be at least 1".into() });
    }
    let options = ProfileOptions::default().tp(Module::Vision, encoders).tp(Module::Audio, encoders);
    let options = options.tp(Module::Llm, llm);
    Ok(if is_checked { options } else { options.unchecked() })
}

/// Finds the directory for a checkpoint such as `Qwen/Qwen2.5-VL-7B-Instruct` in the user's cache; `None` if
/// it was not downloaded, or if `name` does not have the form `ORG/NAME`.
#[must_use]
pub fn cached_checkpoint(name: &str) -> Option<PathBuf> {
    cached_in(&hub_directory()?, name)
}

/// Returns the cache directory.
fn hub_directory() -> Option<PathBuf> {
    let directory = |variable: &str| std::env::var_os(variable).map(PathBuf::from);
    let home = || directory("XDG_CACHE_HOME").or_else(|| Some(directory("HOME")?.join(".cache")));
    directory("HF_HUB_CACHE")
        .or_else(|| Some(directory("HF_HOME")?.join("hub")))
        .or_else(|| Some(home()?.join("huggingface/hub")))
}

fn cached_in(hub: &Path, name: &str) -> Option<PathBuf> {
    let is_part = |part: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !part.is_empty() && part.bytes().all(is_plain) && !part.starts_with('.')
    };
    let parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 2 || !parts.iter().all(|part| is_part(part)) {
        return None;
    }
    let checkpoint = hub.join(format!("models--{}", parts.join("--")));
    let commit = file::read_text(&checkpoint.join("refs/main")).ok()?;
    let snapshot = checkpoint.join("snapshots").join(commit.trim());
    (is_part(commit.trim()) && snapshot.is_dir()).then_some(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_downloaded_checkpoint_is_found_by_its_name() {
        let hub = tempfile::tempdir().unwrap();
        let checkpoint = hub.path().join("models--org--model-1.5");
        std::fs::create_dir_all(checkpoint.join("snapshots/abc123")).unwrap();
        std::fs::create_dir_all(checkpoint.join("refs")).unwrap();
        std::fs::write(checkpoint.join("refs/main"), "abc123\n").unwrap();
        let found = cached_in(hub.path(), "org/model-1.5");
        assert_eq!(found, Some(checkpoint.join("snapshots/abc123")));
        for name in ["org/other", "org", "", "org/", "a/b/c", "../org/model-1.5", "org/.."] {
            assert_eq!(cached_in(hub.path(), name), None, "{name}");
        }
        std::fs::write(checkpoint.join("refs/main"), "../../../..").unwrap();
        assert_eq!(cached_in(hub.path(), "org/model-1.5"), None);
    }
}
