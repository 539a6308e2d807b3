//! Checks the documents: marks and syntax of snippets, links, lengths, paths, generated parts.
//!
//! Snippets marked `run` are executed by `bindings/cli/tests/cli/documents.rs` and, for Python, by
//! `bindings/python/tests/test_documents.py`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dflop_tests::markdown::{
    Mark, Snippet, anchors, documents, expect_current, links, prose, read, root, snippets, with_generated,
};

use super::floors::FLOORS;
use super::source::NESTED;

/// Things that a snippet may need and a test does not have.
const NEEDS: [&str; 18] = [
    "browser",
    "bucket",
    "checkout",
    "checkpoint",
    "cluster",
    "cmake",
    "datasets",
    "duckdb",
    "gpu",
    "jax",
    "minutes",
    "nasm",
    "network",
    "polars",
    "pyarrow",
    "streaming",
    "torch",
    "tools",
];
/// Languages for output and drawings, which no test reads.
const SHOWN: [&str; 3] = ["text", "mermaid", "csv"];
/// Maximum number of lines in a document, by name.
const LINES_MAX: [(&str, usize); 2] = [("README.md", 150), ("ARCHITECTURE.md", 250)];
/// Maximum number of columns in the changelog.
const CHANGELOG_COLUMNS_MAX: usize = 110;
/// Crates in the code map, in dependency order.
const CRATES: [&str; 6] = ["costmodel", "balancer", "loader", "executor", "bindings/cli", "bindings/python"];

fn all_snippets() -> Vec<(PathBuf, Snippet)> {
    let of = |document: PathBuf| {
        snippets(&read(&document))
            .into_iter()
            .map(move |snippet| (document.clone(), snippet))
            .collect::<Vec<_>>()
    };
    documents().into_iter().flat_map(of).collect()
}

fn place(document: &Path, line: usize) -> String {
    format!("{}:{line}", document.display())
}

/// Returns the fault in a snippet mark.
fn fault(snippet: &Snippet) -> Option<String> {
    let language = snippet.language.as_str();
    match &snippet.mark {
        Mark::Unknown(mark) => {
            Some(format!("`{mark}` is not `run`, `file=NAME`, `from=PATH` or `needs=WHAT`"))
        }
        Mark::Needs(what) => {
            let unknown = what.split(',').find(|what| !NEEDS.contains(what))?;
            Some(format!("`needs={unknown}` is not one of {NEEDS:?}"))
        }
        Mark::Run if !["sh", "python"].contains(&language) => Some(format!("`{language}` cannot run")),
        Mark::None if ["rust", "json"].contains(&language) || SHOWN.contains(&language) => None,
        Mark::None => {
            Some(format!("`{language}` has no mark: `run`, `file=NAME`, `from=PATH` or `needs=WHAT`"))
        }
        Mark::Run | Mark::File(_) | Mark::From(_) => None,
    }
}

#[test]
fn every_snippet_states_how_it_is_tested() {
    let faults = all_snippets().into_iter().filter_map(|(document, snippet)| {
        fault(&snippet).map(|fault| format!("{}: {fault}", place(&document, snippet.line)))
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn snippets_from_a_file_are_parts_of_it() {
    let mut count = 0;
    for (document, snippet) in all_snippets() {
        let Mark::From(path) = &snippet.mark else { continue };
        let file = document.parent().expect("a document is in a directory").join(path);
        let at = place(&document, snippet.line);
        assert!(read(&file).contains(&snippet.text), "{at}: not a part of {}", file.display());
        count += 1;
    }
    assert!(count > 0, "there are snippets from files");
}

#[test]
fn shell_snippets_have_valid_syntax() {
    for (document, snippet) in all_snippets().iter().filter(|(_, snippet)| snippet.language == "sh") {
        let mut bash = Command::new("bash")
            .arg("-n")
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("bash starts");
        bash.stdin.take().expect("a pipe").write_all(snippet.text.as_bytes()).expect("bash reads");
        let output = bash.wait_with_output().expect("bash ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", place(document, snippet.line));
    }
}

#[test]
fn scripts_beside_the_documents_have_valid_syntax() {
    let entries = std::fs::read_dir(root().join("docs/multi-node")).expect("the directory is there");
    let mut scripts: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    scripts.retain(|path| path.extension().is_some_and(|end| end == "sh" || end == "sbatch"));
    assert!(!scripts.is_empty(), "there are scripts");
    for script in scripts {
        let output = Command::new("bash").arg("-n").arg(&script).output().expect("bash starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {stderr}", script.display());
    }
}

#[test]
fn json_snippets_are_valid() {
    for (document, snippet) in all_snippets().iter().filter(|(_, snippet)| snippet.language == "json") {
        let parsed = serde_json::from_str::<serde_json::Value>(&snippet.text);
        assert!(parsed.is_ok(), "{}: {parsed:?}", place(document, snippet.line));
    }
}

#[test]
fn documents_with_rust_snippets_are_compiled() {
    let compiled = std::fs::read_to_string(root().join("tests/src/lib.rs")).expect("the file is there");
    for (document, snippet) in all_snippets().iter().filter(|(_, snippet)| snippet.language == "rust") {
        let name = format!("../../{}\"", document.display());
        let place = place(document, snippet.line);
        assert!(compiled.contains(&name), "{place}: `tests/src/lib.rs` does not include the document");
    }
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for document in documents() {
        let text = read(&document);
        for (line, target) in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let directory = document.parent().expect("a file has a directory");
            let file =
                if path.is_empty() { root().join(&document) } else { root().join(directory).join(path) };
            let is_found = file.exists()
                && (anchor.is_empty()
                    || std::fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor)));
            if !is_found {
                broken.push(format!("{}: {target}", place(&document, line)));
            }
        }
    }
    assert!(broken.is_empty(), "links lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn paths_in_documents_exist() {
    let roots =
        ["tests/", "benches/", "costmodel/", "balancer/", "loader/", "executor/", "bindings/", "docs/"];
    let is_path = |code: &str| {
        roots.iter().any(|root| code.starts_with(root))
            && !code.contains([' ', '*', '{', '<', '='])
            && (code.ends_with('/') || Path::new(code).extension().is_some())
    };
    let mut missing = Vec::new();
    for document in documents() {
        if document.ends_with("CHANGELOG.md") {
            continue; // names what was there once
        }
        let text = read(&document);
        let bases = [root(), root().join(document.parent().expect("a file has a directory"))];
        let is_missing = |code: &str| !bases.iter().any(|base| base.join(code).exists());
        for (line, prose) in prose(&text) {
            let codes = prose.split('`').skip(1).step_by(2);
            for code in codes.filter(|code| is_path(code) && is_missing(code)) {
                missing.push(format!("{}: {code}", place(&document, line)));
            }
        }
    }
    assert!(missing.is_empty(), "paths that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn documents_that_are_read_first_are_short() {
    for (name, lines_max) in LINES_MAX {
        let lines = read(Path::new(name)).lines().count();
        assert!(lines <= lines_max, "{name} has {lines} lines, at most {lines_max} are allowed");
    }
}

#[test]
fn the_changelog_is_one_list_under_each_heading() {
    let text = read(Path::new("CHANGELOG.md"));
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in (1..).zip(&lines) {
        let columns = line.chars().count();
        assert!(columns <= CHANGELOG_COLUMNS_MAX, "CHANGELOG.md:{number} has {columns} columns");
    }
    for (number, around) in (2..).zip(lines.windows(3)) {
        let is_item = |line: &str| line.starts_with("- ") || line.starts_with("  ");
        let is_gap = is_item(around[0]) && around[1].is_empty() && is_item(around[2]);
        assert!(!is_gap, "CHANGELOG.md:{number} cuts a list");
    }
    let headings = lines.iter().filter_map(|line| line.strip_prefix("### "));
    for heading in headings {
        assert!(
            ["Added", "Changed", "Fixed", "Removed"].contains(&heading),
            "`{heading}` is not a heading here"
        );
    }
}

/// Error messages that the guide explains, each a heading in backticks with `…` for variable parts.
#[test]
fn messages_in_the_troubleshooting_guide_are_those_of_the_code() {
    let mut sources = String::new();
    for name in CRATES.into_iter().chain(NESTED) {
        append_sources(&root().join(name).join("src"), &mut sources);
    }
    append_sources(&root().join("bindings/python/python"), &mut sources);
    // A message may be cut into lines that end with a backslash.
    let joined: Vec<&str> = sources.split("\\\n").map(str::trim_start).collect();
    let sources = joined.concat();
    let guide = read(Path::new("docs/troubleshooting.md"));
    let headings =
        prose(&guide).filter_map(|(line, text)| Some((line, text.strip_prefix("### `")?.strip_suffix('`')?)));
    let mut count = 0;
    for (line, message) in headings {
        count += 1;
        for part in message
            .split('…')
            .flat_map(|part| part.split("`, `"))
            .map(str::trim)
            .filter(|part| part.len() > 3)
        {
            assert!(sources.contains(part), "docs/troubleshooting.md:{line}: no message has `{part}`");
        }
    }
    assert!(count > 10, "the guide explains messages");
}

fn append_sources(directory: &Path, sources: &mut String) {
    for entry in std::fs::read_dir(directory).expect("a directory can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            append_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            sources.push_str(&std::fs::read_to_string(path).expect("a file can be read"));
        }
    }
}

#[test]
fn the_code_map_is_current() {
    let document = Path::new("ARCHITECTURE.md");
    let mut text = read(document);
    for name in CRATES {
        text = with_code_map(&text, name);
    }
    expect_current(document, &text);
    for name in NESTED {
        let document = Path::new(name).join("README.md");
        expect_current(&document, &with_code_map(&read(&document), name));
    }
}

fn with_code_map(text: &str, name: &str) -> String {
    let marker = format!("code map of {name}");
    // The page for a nested crate is in the crate directory.
    let links = if NESTED.contains(&name) { "src".to_owned() } else { format!("{name}/src") };
    with_generated(text, &marker, &code_map(name, &links)).unwrap_or_else(|| panic!("no marker `{marker}`"))
}

/// Returns a table with a crate's rooms from the ground up, each with the first line of the room's
/// documentation.
fn code_map(name: &str, links: &str) -> String {
    let source = format!("{name}/src");
    let (_, rooms) = FLOORS.iter().find(|(crate_source, _)| *crate_source == source).expect("a listed crate");
    let mut table = "| room | does |\n| --- | --- |\n".to_owned();
    for room in *rooms {
        let places =
            [(format!("{room}/"), format!("{room}/mod.rs")), (format!("{room}.rs"), format!("{room}.rs"))];
        let (shown, file) = places
            .into_iter()
            .find(|(_, file)| root().join(&source).join(file).is_file())
            .unwrap_or_else(|| panic!("{source}: there is no room `{room}`"));
        let text = read(&Path::new(&source).join(file));
        let does = without_links(&first_sentence(&text)).replace('|', "\\|");
        table.extend([format!("| [`{shown}`]({links}/{shown}) | {does} |\n")]);
    }
    table
}

/// Returns the first sentence of a file's documentation, without the full stop.
fn first_sentence(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//! "));
    let paragraph = lines.collect::<Vec<_>>().join(" ");
    let sentence = paragraph.split_once(". ").map_or(paragraph.as_str(), |(first, _)| first);
    sentence.trim_end_matches('.').to_owned()
}

/// Replaces rustdoc links, [`name`], by the names.
fn without_links(text: &str) -> String {
    text.replace("[`", "`").replace("`]", "`")
}

#[test]
fn every_document_is_in_the_navigation_of_the_site() {
    let navigation = read(Path::new("docs/site/zensical.toml"));
    let of_site = |document: &PathBuf| document.starts_with("docs") && !document.starts_with("docs/site");
    let missing: Vec<PathBuf> = documents()
        .into_iter()
        .filter(of_site)
        .filter(|document| {
            let page = document.strip_prefix("docs").expect("it is below").display().to_string();
            !navigation.contains(&format!("\"{page}\""))
        })
        .collect();
    assert!(missing.is_empty(), "docs/site/zensical.toml lacks {missing:?}");
}
