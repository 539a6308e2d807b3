//! Finds and reads the workspace source files for the tests in this module.

use std::path::{Path, PathBuf};

/// Every crate of the workspace, by its directory.
pub(super) const CRATES: [&str; 9] = [
    "costmodel",
    "balancer",
    "loader",
    "executor",
    "bindings/cli",
    "bindings/python",
    "bindings/rust",
    "tests",
    "benches",
];

/// Crates nested in the directory of the crate that they are parts of.
pub(super) const NESTED: [&str; 10] = [
    "balancer/planner",
    "loader/import",
    "loader/samples",
    "loader/processors",
    "executor/comm",
    "executor/cuda",
    "executor/device",
    "executor/models",
    "executor/testing",
    "loader/synthetic",
];

/// Returns the workspace root.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns every file with this extension below a workspace directory, sorted.
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

/// Returns every Rust file in the workspace.
pub(super) fn rust_files() -> Vec<PathBuf> {
    let found: Vec<PathBuf> = CRATES.iter().flat_map(|name| files(name, "rs")).collect();
    assert!(found.len() > 50, "the tree was found");
    found
}

/// Returns all kernels and sources in C++.
pub(super) fn kernel_files() -> Vec<PathBuf> {
    let of = |name: &&str| {
        ["cu", "cuh", "cpp", "h"].into_iter().flat_map(|kind| files(name, kind)).collect::<Vec<_>>()
    };
    let found: Vec<PathBuf> = CRATES.iter().flat_map(of).collect();
    assert!(found.len() > 20, "the tree was found");
    found
}

/// Returns a path relative to the workspace root, for messages.
pub(super) fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// Returns Rust code with comments removed and literals emptied.
pub(super) fn stripped_code(text: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = raw_string(rest).filter(|_| !ends_with_word(&code)) {
            length
        } else if next == '"' {
            quoted(rest, '"')
        } else if next == '\'' && is_character(rest) {
            quoted(rest, '\'')
        } else {
            code.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        };
        rest = &rest[skipped..];
        code.push(' ');
    }
    code
}

/// Returns the length of the raw string literal at the start of a text.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix("r").or_else(|| text.strip_prefix("br"))?;
    let level = hashes.bytes().take_while(|next| *next == b'#').count();
    let body = hashes[level..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(level));
    let prefix = text.len() - body.len();
    Some(body.find(&end).map_or(text.len(), |at| prefix + at + end.len()))
}

fn ends_with_word(code: &str) -> bool {
    code.chars().next_back().is_some_and(|last| last.is_alphanumeric() || last == '_')
}

/// Returns whether a single quote starts a character, not a lifetime.
fn is_character(text: &str) -> bool {
    let mut inside = text.chars().skip(1);
    match inside.next() {
        Some('\\') => true,
        Some(_) => inside.next() == Some('\''),
        None => false,
    }
}

/// Returns the length of the literal at the start of a text, both quotes included.
fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|(_, next)| {
        let ends = *next == quote && !is_escaped;
        is_escaped = *next == '\\' && !is_escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}
