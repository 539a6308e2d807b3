//! Reads the repository's Markdown documents: snippets, links, anchors.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Directories without our documents.
const SKIPPED: [&str; 4] = ["target", "venv", "golden", "node_modules"];

/// A fenced code block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snippet {
    /// Line number of the opening fence, from 1.
    pub line: usize,
    /// First word in the info string, such as `sh`; empty if there is none.
    pub language: String,
    /// The rest of the info string.
    pub mark: Mark,
    /// The code, each line ended.
    pub text: String,
}

/// Test action for a snippet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// No mark; only language checks apply: Rust is compiled, JSON is parsed.
    None,
    /// Runs it, in the document directory.
    Run,
    /// Writes it to a file in the document directory.
    File(String),
    /// Checks only the syntax: it needs something that a test does not have.
    Needs(String),
    /// Is a part of this file, relative to the document, which a test runs.
    From(String),
    /// Fails: the mark is not known.
    Unknown(String),
}

impl Mark {
    fn parse(text: &str) -> Self {
        match (text, text.split_once('=')) {
            ("", _) => Self::None,
            ("run", _) => Self::Run,
            (_, Some(("file", name))) => Self::File(name.to_owned()),
            (_, Some(("needs", what))) => Self::Needs(what.to_owned()),
            (_, Some(("from", path))) => Self::From(path.to_owned()),
            _ => Self::Unknown(text.to_owned()),
        }
    }
}

/// Returns the repository root.
///
/// # Panics
/// If the crate is at the root of a file system.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository").to_owned()
}

/// Returns all Markdown files in the repository, relative to the root, in alphabetical order.
///
/// # Panics
/// If a directory cannot be read.
#[must_use]
pub fn documents() -> Vec<PathBuf> {
    let (root, mut found) = (root(), Vec::new());
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory can be read").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() {
                if !name.starts_with('.') && !SKIPPED.contains(&name.as_str()) {
                    directories.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path.strip_prefix(&root).expect("below the root").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Reads a document, named relative to the root.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn read(document: &Path) -> String {
    std::fs::read_to_string(root().join(document))
        .unwrap_or_else(|error| panic!("{}: {error}", document.display()))
}

/// Returns the fenced blocks in a document, in order.
///
/// # Panics
/// If a fenced block is not closed.
#[must_use]
pub fn snippets(document: &str) -> Vec<Snippet> {
    let mut found = Vec::new();
    let mut open: Option<Snippet> = None;
    for (number, line) in document.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(info)) => {
                let (language, mark) = info.trim().split_once(' ').unwrap_or((info.trim(), ""));
                let (language, mark) = (language.to_owned(), Mark::parse(mark.trim()));
                open = Some(Snippet { line: number + 1, language, mark, text: String::new() });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (Some(snippet), None) => {
                snippet.text.push_str(line);
                snippet.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    found
}

/// Returns the lines outside of fenced blocks, with line numbers from 1.
pub fn prose(document: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(document.lines()).filter(move |(_, line)| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_fence && !is_code
    })
}

/// Returns the targets in `[text](target)` and `![text](target)`, with line numbers.
#[must_use]
pub fn links(document: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(document) {
        for part in without_code(line).split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

/// Returns the heading anchors in a document, by GitHub's rule: lower case, blanks to hyphens, punctuation
/// removed.
#[must_use]
pub fn anchors(document: &str) -> BTreeSet<String> {
    let headings = prose(document).filter_map(|(_, line)| line.strip_prefix('#'));
    headings.map(|heading| slug(heading.trim_start_matches('#').trim())).collect()
}

fn slug(heading: &str) -> String {
    let kept = |letter: char| letter.is_alphanumeric() || letter == '-' || letter == '_' || letter == ' ';
    heading
        .to_lowercase()
        .chars()
        .filter(|letter| kept(*letter))
        .map(|letter| if letter == ' ' { '-' } else { letter })
        .collect()
}

/// Blanks out `code` within a line, whose brackets are no links.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    parts.map(|(number, part)| if number % 2 == 0 { part } else { "code" }).collect()
}

/// Replaces the lines between `<!-- NAME -->` and the next `<!-- end -->`; `None` if there are no such
/// markers.
#[must_use]
pub fn with_generated(document: &str, name: &str, generated: &str) -> Option<String> {
    let marker = format!("<!-- {name} -->\n");
    let start = document.find(&marker)? + marker.len();
    let end = start + document[start..].find("<!-- end -->")?;
    Some(format!("{}{generated}{}", &document[..start], &document[end..]))
}

/// Compares a document with the new text, or writes the new text if `UPDATE_DOCS` is set.
///
/// # Panics
/// If the document is stale, with the first lines that differ.
pub fn expect_current(document: &Path, new: &str) {
    let old = read(document);
    if old == new {
        return;
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(root().join(document), new).expect("the document can be written");
        return;
    }
    let old: BTreeSet<&str> = old.lines().collect();
    let added: Vec<&str> = new.lines().filter(|line| !old.contains(line)).collect();
    panic!("{} is stale; `make docs-update` writes:\n{}", document.display(), added.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "# Title: a `b`\n\n[a](b.md#c) `[no](link)` ![d](e.svg)\n\n```sh run\necho [x](y)\n```\n\
                            ```text\nout\n```\n<!-- map -->\nold\n<!-- end -->\n";

    #[test]
    fn snippets_carry_their_line_language_and_mark() {
        let found = snippets(DOCUMENT);
        assert_eq!((found[0].line, found[0].language.as_str(), &found[0].mark), (5, "sh", &Mark::Run));
        assert_eq!((found[0].text.as_str(), &found[1].mark), ("echo [x](y)\n", &Mark::None));
        assert_eq!(Mark::parse("needs=gpu"), Mark::Needs("gpu".into()));
        assert_eq!(Mark::parse("file=a/b.json"), Mark::File("a/b.json".into()));
        assert_eq!(Mark::parse("runs"), Mark::Unknown("runs".into()));
    }

    #[test]
    fn links_in_code_are_none() {
        let targets: Vec<String> = links(DOCUMENT).into_iter().map(|(_, target)| target).collect();
        assert_eq!(targets, ["b.md#c", "e.svg"]);
    }

    #[test]
    fn anchors_are_those_of_github() {
        assert!(anchors(DOCUMENT).contains("title-a-b"));
    }

    #[test]
    fn generated_text_replaces_what_is_between_its_markers() {
        let new = with_generated(DOCUMENT, "map", "new\n").expect("the marker is there");
        assert!(new.contains("<!-- map -->\nnew\n<!-- end -->\n"));
        assert_eq!(with_generated(DOCUMENT, "other", ""), None);
    }
}
