//! Checks the language in comments, documents and messages: glossary words, sentences with a subject, plain
//! English.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::source::{CRATES, files, root, shown};

/// Words that start a headless question or an elliptic fragment in place of a sentence.
const HEADLESS: [&str; 9] = ["What", "Who", "Whose", "Which", "Where", "How", "Those of", "That of", "As"];

/// Maximum share of documentation blocks that start headless.
const HEADLESS_MAX: f64 = 0.03;

/// Speech verbs, which documents and settings do not have.
const SPEECH: [&str; 3] = ["says", "said", "told"];

/// Maximum number of speech verbs in 1,000 comment lines.
const SPEECH_MAX: f64 = 2.0;

/// Maximum number of columns in a comment line.
const COLUMNS_MAX: usize = 110;

/// Punctuation around a word that does not belong to it.
const PUNCTUATION: &str = ".,;:()[]*_\"'";

/// Words that plain English uses rarely, with the maximum number per 1,000 words.
struct RareWords {
    words: &'static [&'static str],
    comments_max: f64,
    documents_max: f64,
}

/// Genitive chains and pronouns in place of nouns.
const RARE_WORDS: [RareWords; 3] = [
    RareWords { words: &["of"], comments_max: 35.0, documents_max: 25.0 },
    RareWords { words: &["its", "their"], comments_max: 5.0, documents_max: 5.0 },
    RareWords { words: &["one", "those", "others", "another"], comments_max: 8.0, documents_max: 8.0 },
];

#[test]
fn documentation_starts_with_the_thing_it_describes() {
    for name in CRATES {
        let mut blocks = 0;
        let mut headless = Vec::new();
        for path in files(name, "rs") {
            for block in doc_blocks(&read(&path)) {
                blocks += 1;
                if is_headless(&block) {
                    headless.push(format!("{}: {}", shown(&path), block.lines().next().unwrap_or_default()));
                }
            }
        }
        let share = headless.len() as f64 / f64::from(blocks.max(1));
        assert!(share < HEADLESS_MAX, "{name}: {share:.3} of {blocks} blocks\n{}", headless.join("\n"));
    }
}

#[test]
fn comments_do_not_speak() {
    for name in CRATES {
        let mut lines = 0;
        let mut found = Vec::new();
        for path in files(name, "rs") {
            for comment in read(&path).lines().filter_map(comment_text) {
                lines += 1;
                if SPEECH.iter().any(|verb| has_word(comment, verb)) {
                    found.push(format!("{}: {comment}", shown(&path)));
                }
            }
        }
        let rate = 1000.0 * found.len() as f64 / f64::from(lines.max(1));
        assert!(rate < SPEECH_MAX, "{name}: {rate:.1} in 1,000 lines\n{}", found.join("\n"));
    }
}

#[test]
fn comments_fit_the_width() {
    let mut long = Vec::new();
    for path in CRATES.iter().flat_map(|name| files(name, "rs")) {
        let mut is_code = false;
        for line in read(&path).lines() {
            let Some(comment) = comment_text(line).map(|comment| comment.trim_start_matches(['/', '!', ' ']))
            else {
                is_code = false;
                continue;
            };
            is_code ^= comment.starts_with("```");
            // Rows of tables cannot be broken, and code has a formatter of its own.
            if !is_code && !comment.starts_with('|') && line.chars().count() > COLUMNS_MAX {
                long.push(format!("{}: {line}", shown(&path)));
            }
        }
    }
    assert!(long.is_empty(), "over {COLUMNS_MAX} columns:\n{}", long.join("\n"));
}

#[test]
fn the_words_of_the_glossary_are_used() {
    let glossary = read(&root().join("docs/glossary.md"));
    let refused = refused_words(&glossary);
    assert!(refused.len() >= 10, "the column *not* was found: {refused:?}");
    let mut faults = Vec::new();
    let code = CRATES.iter().flat_map(|name| files(name, "rs")).chain(files("bindings/python", "py"));
    for path in code.filter(|path| !path.ends_with("repo/words.rs")) {
        for (at, line) in read(&path).lines().enumerate() {
            for text in comment_text(line).into_iter().chain(messages(line)) {
                // Names of settings are spelled as the interfaces are.
                note(&mut faults, &refused, &path, at, &markdown_prose(text));
            }
        }
    }
    for path in files(".", "md").iter().filter(|path| !path.ends_with("glossary.md")) {
        for (at, line) in markdown_prose(&read(path)).lines().enumerate() {
            note(&mut faults, &refused, path, at, line);
        }
    }
    assert!(faults.is_empty(), "docs/glossary.md has other words:\n{}", faults.join("\n"));
}

#[test]
fn doc_comments_are_plain_english() {
    let mut faults = Vec::new();
    for (name, paths) in crates() {
        let texts: Vec<(String, String)> =
            paths.iter().map(|path| (shown(path), doc_prose(&read(path)))).collect();
        faults.extend(rare_word_faults(&name, &texts, |rare| rare.comments_max));
    }
    assert!(faults.is_empty(), "CONTRIBUTING.md, Words, has the rules:\n{}", faults.join("\n"));
}

#[test]
fn documents_are_plain_english() {
    let pages = files("docs", "md");
    let texts: Vec<(String, String)> = pages
        .iter()
        .filter(|path| !path.ends_with("reference/cli.md"))
        .map(|path| (shown(path), document_prose(&read(path))))
        .collect();
    assert!(texts.len() > 20, "the documents were found");
    let faults = rare_word_faults("docs", &texts, |rare| rare.documents_max);
    assert!(faults.is_empty(), "CONTRIBUTING.md, Words, has the rules:\n{}", faults.join("\n"));
}

#[test]
fn function_names_have_no_of_at_either_end() {
    let mut found = Vec::new();
    for path in crates().into_values().flatten() {
        for (at, line) in read(&path).lines().enumerate() {
            let name = function_name(line).filter(|name| name.starts_with("of_") || name.ends_with("_of"));
            found.extend(name.map(|name| format!("{}:{}: `{name}`", shown(&path), at + 1)));
        }
    }
    assert!(found.is_empty(), "`from_x`, `for_x` or `x_bytes` instead:\n{}", found.join("\n"));
}

#[test]
fn the_word_checks_can_fail() {
    assert!(is_headless("What it costs."));
    assert!(is_headless("As said of the trait."));
    assert!(!is_headless("What does it cost? More than it did."));
    assert!(!is_headless("Assigns samples.") && !is_headless("Whether it fits."));
    let text = "/// One\n/// block.\nfn f() {}\n    //! Two.\n// no block\n";
    assert_eq!(doc_blocks(text), ["One\nblock.", "Two."]);
    assert!(has_word("as Said here", "said") && !has_word("unsaid", "said"));
    assert_eq!(messages(r#"f("no folder here", "folder")"#), ["no folder here"]);
    assert_eq!(refused_words("| a | b | `folder`, `big folder` |\n| `x` | y | |"), ["folder", "big folder"]);
    assert_eq!(markdown_prose("a `folder`\n```\nfolder\n```\nb"), "a \n\n\n\nb\n");
    assert_eq!(doc_prose("/// a of b\n/// ```\n/// of\n/// ```\nfn f() {}\n//! its\n"), " a of b\n its\n");
    assert_eq!(document_prose("of\n```sh\nof\n```\n"), "of\n");
    assert_eq!(count("Bytes (of) `of` Of, often", &["of"]), 2);
    let texts = [("good.rs".to_owned(), "word ".repeat(90)), ("bad.rs".to_owned(), "of ".repeat(10))];
    let faults = rare_word_faults("crate", &texts, |rare| rare.comments_max);
    assert_eq!(
        faults,
        ["crate: 100.0 of in 1,000 words, at most 35; worst: bad.rs 10 in 10, good.rs 0 in 90"]
    );
    assert_eq!(function_name("    pub(crate) fn shape_text(&self) {"), Some("shape_text"));
    assert_eq!(function_name("// fn shape_text"), None);
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the Rust files of every crate by crate directory, without nested crates.
fn crates() -> BTreeMap<String, Vec<PathBuf>> {
    let manifests = files(".", "toml").into_iter().filter(|path| path.ends_with("Cargo.toml"));
    let directories: Vec<PathBuf> =
        manifests.filter_map(|path| path.parent().map(Path::to_path_buf)).collect();
    let mut crates: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for path in files(".", "rs") {
        let around = directories.iter().filter(|directory| path.starts_with(directory));
        if let Some(directory) = around.max_by_key(|directory| directory.components().count()) {
            crates.entry(shown(directory)).or_default().push(path);
        }
    }
    assert!(crates.len() > 10, "the crates were found");
    crates
}

/// Returns a message for each kind of rare word that is too frequent in texts, with the three worst files.
///
/// A text is a pair of file name and prose.
fn rare_word_faults(name: &str, texts: &[(String, String)], limit: fn(&RareWords) -> f64) -> Vec<String> {
    let mut faults = Vec::new();
    for rare in &RARE_WORDS {
        let max = limit(rare);
        let mut counts: Vec<(usize, usize, &str)> = texts
            .iter()
            .map(|(file, prose)| (count(prose, rare.words), prose.split_whitespace().count(), file.as_str()))
            .collect();
        let found: usize = counts.iter().map(|(found, _, _)| found).sum();
        let words: usize = counts.iter().map(|(_, words, _)| words).sum();
        // Rounded up, so that a single word does not fail a small crate.
        if found as f64 > (max * words as f64 / 1000.0).ceil() {
            let rate = 1000.0 * found as f64 / words as f64;
            let excess = |counts: &(usize, usize, &str)| counts.0 as f64 - max * counts.1 as f64 / 1000.0;
            counts.sort_by(|left, right| excess(right).total_cmp(&excess(left)));
            let worst: Vec<String> = counts
                .iter()
                .take(3)
                .map(|(found, words, file)| format!("{file} {found} in {words}"))
                .collect();
            faults.push(format!(
                "{name}: {rate:.1} {} in 1,000 words, at most {max}; worst: {}",
                rare.words.join("/"),
                worst.join(", ")
            ));
        }
    }
    faults
}

/// Returns how often words occur in prose, in any case and without punctuation.
fn count(prose: &str, words: &[&str]) -> usize {
    let is_counted = |word: &&str| {
        let word = word.trim_matches(|letter: char| PUNCTUATION.contains(letter)).to_lowercase();
        words.contains(&word.as_str())
    };
    prose.split_whitespace().filter(is_counted).count()
}

/// Returns the prose in the doc comments of a Rust file, without fenced code.
fn doc_prose(text: &str) -> String {
    let content = |line: &str| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::to_owned)
    };
    without_fences(text.lines().map(content))
}

/// Returns the prose in a Markdown document, with inline code and without fenced code.
fn document_prose(text: &str) -> String {
    without_fences(text.lines().map(|line| Some(line.to_owned())))
}

/// Joins lines without fenced code; a missing line ends a fence.
fn without_fences(lines: impl Iterator<Item = Option<String>>) -> String {
    let mut prose = String::new();
    let mut is_code = false;
    for line in lines {
        let Some(line) = line else {
            is_code = false;
            continue;
        };
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.push_str(&line);
            prose.push('\n');
        }
    }
    prose
}

/// Returns the name of the function that a line of code declares.
fn function_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let (before, after) = line.split_once("fn ")?;
    let is_declaration = !line.starts_with("//") && (before.is_empty() || before.ends_with(' '));
    let name = after.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next();
    name.filter(|_| is_declaration)
}

/// Returns the text of a line that is a comment.
fn comment_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("//").or_else(|| line.strip_prefix("# "))
}

/// Returns the documentation blocks of a file, without their markers.
fn doc_blocks(text: &str) -> Vec<String> {
    let mut blocks: Vec<(&str, Vec<&str>)> = Vec::new();
    let mut last = None;
    for line in text.lines().map(str::trim_start) {
        let marker = ["///", "//!"].into_iter().find(|marker| line.starts_with(marker));
        if let Some(marker) = marker {
            let content = line[marker.len()..].trim();
            match blocks.last_mut() {
                Some(block) if last == Some(marker) => block.1.push(content),
                _ => blocks.push((marker, vec![content])),
            }
        }
        last = marker;
    }
    blocks.into_iter().map(|(_, lines)| lines.join("\n")).collect()
}

/// Returns whether a block starts with a question word and its first sentence is not a question.
fn is_headless(block: &str) -> bool {
    let starts = HEADLESS.iter().any(|word| {
        block.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric()))
    });
    let end = block.find(['.', '?', '!', ':']);
    starts && end.is_none_or(|end| !block[end..].starts_with('?'))
}

fn has_word(text: &str, word: &str) -> bool {
    let text = text.to_lowercase();
    text.match_indices(word).any(|(at, _)| {
        let is_letter = |next: Option<char>| next.is_some_and(|next| next.is_alphanumeric() || next == '_');
        !is_letter(text[..at].chars().next_back()) && !is_letter(text[at + word.len()..].chars().next())
    })
}

/// Returns the string literals of a line that read like text: several words.
fn messages(line: &str) -> Vec<&str> {
    let literals = line.split('"').skip(1).step_by(2);
    literals.filter(|literal| literal.trim().contains(' ') && !literal.contains(['{', '='])).collect()
}

/// Returns the words in backticks of the glossary's last column.
fn refused_words(glossary: &str) -> Vec<String> {
    let rows = glossary.lines().filter(|line| line.starts_with('|'));
    let columns = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    columns.flat_map(|column| column.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// Returns Markdown without code.
fn markdown_prose(markdown: &str) -> String {
    let mut prose = String::new();
    let mut is_code = false;
    for line in markdown.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.extend(line.split('`').step_by(2));
        }
        prose.push('\n');
    }
    prose
}

fn note(faults: &mut Vec<String>, refused: &[String], path: &Path, at: usize, text: &str) {
    let word = refused.iter().find(|word| has_word(text, word));
    faults.extend(word.map(|word| format!("{}:{}: `{word}`: {}", shown(path), at + 1, text.trim())));
}
