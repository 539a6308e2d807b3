//! Finds and reads the source files of the workspace for the tests of this module.

use std::path::{Path, PathBuf};

/// Every crate of the workspace, by its directory.
pub(super) const CRATES: [&str; 8] =
    ["costmodel", "balancer", "loader", "executor", "bindings/cli", "bindings/python", "tests", "benches"];

/// Returns the root of the workspace.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns every file with this extension below a directory of the workspace, sorted.
///
/// Build products, virtual environments and recorded data are left out.
pub(super) fn files(below: &str, extension: &str) -> Vec<PathBuf> {
    const SKIPPED: [&str; 6] = ["target", "venv", "golden", "node_modules", "results", "__pycache__"];
    let mut found = Vec::new();
    let mut directories = vec![root().join(below)];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && !name.starts_with('.') && !SKIPPED.contains(&name.as_str()) {
                directories.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns every Rust file of the workspace.
pub(super) fn rust_files() -> Vec<PathBuf> {
    let found: Vec<PathBuf> = CRATES.iter().flat_map(|name| files(name, "rs")).collect();
    assert!(found.len() > 50, "the tree was found");
    found
}

/// Returns a path relative to the root of the workspace, for messages.
pub(super) fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
