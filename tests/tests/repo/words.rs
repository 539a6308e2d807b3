//! Holds the language in comments, documents and messages: the words in the glossary, sentences with a
//! subject.

use std::path::Path;

use super::source::{CRATES, files, root, shown};

/// Words that start a headless question or an elliptic fragment in place of a sentence.
const HEADLESS: [&str; 9] = ["What", "Who", "Whose", "Which", "Where", "How", "Those of", "That of", "As"];

/// Maximum fraction of documentation blocks that start headless.
const HEADLESS_MAX: f64 = 0.03;

/// Verbs of speech, which documents and settings do not have.
const SPEECH: [&str; 3] = ["says", "said", "told"];

/// Maximum number of verbs of speech in 1,000 comment lines.
const SPEECH_MAX: f64 = 2.0;

/// Maximum number of columns in a comment line.
const COLUMNS_MAX: usize = 110;

#[test]
fn documentation_starts_with_the_thing_it_describes() {
    for name in CRATES {
        let mut blocks = 0;
        let mut headless = Vec::new();
        for path in files(name, "rs") {
            for block in blocks_of(&read(&path)) {
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
            for comment in read(&path).lines().filter_map(comment_of) {
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
            let Some(comment) = comment_of(line).map(|comment| comment.trim_start_matches(['/', '!', ' ']))
            else {
                is_code = false;
                continue;
            };
            is_code ^= comment.starts_with("```");
            // Table rows cannot be broken, and code has a separate formatter.
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
            for text in comment_of(line).into_iter().chain(messages_of(line)) {
                // Setting names are spelled as in the interfaces.
                note(&mut faults, &refused, &path, at, &prose_of(text));
            }
        }
    }
    for path in files(".", "md").iter().filter(|path| !path.ends_with("glossary.md")) {
        for (at, line) in prose_of(&read(path)).lines().enumerate() {
            note(&mut faults, &refused, path, at, line);
        }
    }
    assert!(faults.is_empty(), "docs/glossary.md has other words:\n{}", faults.join("\n"));
}

#[test]
fn the_checks_of_words_can_fail() {
    assert!(is_headless("What it costs."));
    assert!(is_headless("As said of the trait."));
    assert!(!is_headless("What does it cost? More than it did."));
    assert!(!is_headless("Assigns samples.") && !is_headless("Whether it fits."));
    let text = "/// One\n/// block.\nfn f() {}\n    //! Two.\n// no block\n";
    assert_eq!(blocks_of(text), ["One\nblock.", "Two."]);
    assert!(has_word("as Said here", "said") && !has_word("unsaid", "said"));
    assert_eq!(messages_of(r#"f("no folder here", "folder")"#), ["no folder here"]);
    assert_eq!(refused_words("| a | b | `folder`, `big folder` |\n| `x` | y | |"), ["folder", "big folder"]);
    assert_eq!(prose_of("a `folder`\n```\nfolder\n```\nb"), "a \n\n\n\nb\n");
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the text in a comment line.
fn comment_of(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("//").or_else(|| line.strip_prefix("# "))
}

/// Returns the documentation blocks in a file, without comment markers.
fn blocks_of(text: &str) -> Vec<String> {
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

/// Returns whether a block starts with a question word and the first sentence is not a question.
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

/// Returns the string literals in a line that read like text: several words.
fn messages_of(line: &str) -> Vec<&str> {
    let literals = line.split('"').skip(1).step_by(2);
    literals.filter(|literal| literal.trim().contains(' ') && !literal.contains(['{', '='])).collect()
}

/// Returns the words in backticks in the glossary's last column.
fn refused_words(glossary: &str) -> Vec<String> {
    let rows = glossary.lines().filter(|line| line.starts_with('|'));
    let columns = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    columns.flat_map(|column| column.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// Returns Markdown without code.
fn prose_of(markdown: &str) -> String {
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
