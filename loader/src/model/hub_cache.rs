//! Finds checkpoints in the Hugging Face client cache; nothing is fetched.
//!
//! # Source
//! The layout: Hugging Face Hub documentation, "Understand caching": `models--ORG--NAME/refs/main` names the
//! commit, `snapshots/COMMIT/` has the files. The directory: `HF_HUB_CACHE`, else `HF_HOME/hub`, else
//! `~/.cache/huggingface/hub`.

use crate::store::file;
use std::path::{Path, PathBuf};

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
