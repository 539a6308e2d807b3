//! Runs the shell snippets in the documents, and keeps the option tables as the commands print them.
//!
//! Each document has a separate directory with small shards, a tokenizer and the other files that snippets
//! name; snippets run in order. `dflop_tests::markdown` explains the marks.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::markdown::{Mark, documents, expect_current, read, root, snippets, with_generated};
use dflop_tests::media::jpeg;

use crate::command::dflop;

/// Shard directories that snippets name, each with the number of shards.
const SHARDS: [(&str, usize); 4] = [("shards", 2), ("dflop-demo/shards", 2), ("photos", 1), ("clips", 1)];
const SAMPLES_PER_SHARD: usize = 64;
/// Shows the last lines from a failed snippet's output.
const SHOWN_BYTES: usize = 2_000;

fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the directory can be written");
    for entry in std::fs::read_dir(from).expect("the directory can be read").flatten() {
        if entry.path().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("a file can be copied");
        }
    }
}

/// Creates the directory in which a document's snippets run.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path();
    for (name, shards) in SHARDS {
        let made = TempDataset::new(shards, SAMPLES_PER_SHARD, Compression::Plain);
        copy_files(made.directory(), &path.join(name));
    }
    copy_files(&root().join("tests/golden/model_inputs/chatml"), &path.join("Qwen2.5-VL-7B-Instruct"));
    copy_files(&root().join("costmodel/profiles"), &path.join("profiles"));
    copy_files(&root().join("bindings/cli/examples"), path);
    copy_files(&root().join("tests/golden/data_in"), path);
    let files = path.join("files");
    std::fs::create_dir(&files).expect("the directory can be written");
    for number in 0..4 {
        std::fs::write(files.join(format!("kite-{number}.jpg")), jpeg(64, 48, number))
            .expect("it can be written");
        std::fs::write(files.join(format!("kite-{number}.txt")), "a red kite").expect("it can be written");
    }
    let problem = r#"{"name": "six", "n": 6, "m": 2, "c": 1, "d": [[9], [1], [5], [3], [7], [6]]}"#;
    std::fs::write(path.join("instance.json"), problem).expect("it can be written");
    directory
}

/// Search path on which the name finds this command first.
fn path_with_dflop() -> std::ffi::OsString {
    let binary = Path::new(env!("CARGO_BIN_EXE_dflop"));
    let own = binary.parent().expect("the command is in a directory").to_owned();
    let others = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(own).chain(std::env::split_paths(&others)))
        .expect("paths can be joined")
}

/// Runs the snippets in a document in order; returns the faults.
fn run(document: &Path) -> Vec<String> {
    let snippets = snippets(&read(document));
    let is_run =
        |snippet: &dflop_tests::markdown::Snippet| snippet.language == "sh" && snippet.mark == Mark::Run;
    if !snippets.iter().any(is_run) {
        return Vec::new();
    }
    let (directory, home) = (directory(), tempfile::tempdir().expect("a temporary directory"));
    let mut faults = Vec::new();
    for snippet in snippets {
        if let Mark::File(name) = &snippet.mark {
            std::fs::write(directory.path().join(name), &snippet.text).expect("the file can be written");
        }
        if !is_run(&snippet) {
            continue;
        }
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &snippet.text])
            .current_dir(directory.path())
            .env("PATH", path_with_dflop())
            .env("HOME", home.path())
            .env("XDG_CACHE_HOME", home.path())
            .stdin(Stdio::null())
            .output()
            .expect("bash starts");
        if !output.status.success() {
            let text = [output.stdout, output.stderr].concat();
            let shown = String::from_utf8_lossy(&text[text.len().saturating_sub(SHOWN_BYTES)..]).into_owned();
            faults.push(format!("{}:{}: {}\n{shown}", document.display(), snippet.line, output.status));
        }
    }
    faults
}

#[test]
fn shell_snippets_of_the_documents_run() {
    let documents = documents();
    let faults: Vec<String> = std::thread::scope(|scope| {
        let runs: Vec<_> = documents.iter().map(|document| scope.spawn(|| run(document))).collect();
        runs.into_iter().flat_map(|run| run.join().expect("no panic")).collect()
    });
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_reference_lists_every_command_and_its_options() {
    let document = Path::new("docs/reference/cli.md");
    let mut text = read(document);
    for command in commands() {
        let help = dflop(&[&command, "-h"]).stdout;
        let name = format!("options of {command}");
        text = with_generated(&text, &name, &options(&help)).unwrap_or_else(|| panic!("no marker `{name}`"));
    }
    expect_current(&PathBuf::from(document), &text);
}

#[test]
fn the_versions_of_the_families_are_those_of_the_recordings() {
    let mut lines: Vec<String> = Vec::new();
    for file in
        std::fs::read_dir(root().join("tests/golden/versions")).expect("the directory can be read").flatten()
    {
        let text = std::fs::read_to_string(file.path()).expect("it can be read");
        let versions: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        let family = file.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()).expect("a name");
        lines.push(format!("{family},{}\n", versions["transformers"].as_str().expect("a version")));
    }
    lines.sort();
    expect_current(Path::new("bindings/cli/src/commands/models/versions.csv"), &lines.concat());
}

#[test]
fn the_document_of_the_models_is_current() {
    let document = Path::new("docs/models.md");
    let listed: serde_json::Value =
        serde_json::from_str(&dflop(&["models", "--json"]).stdout).expect("it is JSON");
    let mut table = "| family | `model_type` | presets | levels | lacks | transformers |\n".to_owned();
    table += "| --- | --- | --- | --- | --- | --- |\n";
    for row in listed["families"].as_array().expect("a list") {
        let text = |key: &str| row[key].as_str().unwrap_or_default().replace('|', "\\|");
        let names = |key: &str| {
            let names = row[key].as_array().into_iter().flatten().filter_map(|name| name.as_str());
            names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        };
        let list = |names: &serde_json::Value| {
            let names = names.as_array().into_iter().flatten().filter_map(|name| name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        let because = |lack: &serde_json::Value| {
            let [level, because] = ["level", "because"].map(|key| lack[key].as_str().unwrap_or_default());
            format!("{level}: {because}").replace('|', "\\|")
        };
        let lacks: Vec<String> = row["lacks"].as_array().into_iter().flatten().map(because).collect();
        let cells = [
            format!("`{}`", text("family")),
            names("model_types"),
            names("presets"),
            list(&row["levels"]),
            lacks.join("; "),
            text("transformers"),
        ];
        writeln!(table, "| {} |", cells.join(" | ")).expect("a string can be written");
    }
    let text = with_generated(&read(document), "families", &table).expect("no marker `families`");
    expect_current(document, &text);
}

/// All command names, as the program lists them.
pub(crate) fn commands() -> Vec<String> {
    let help = dflop(&["-h"]).stdout;
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = list.take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// The arguments and options in a short help as a table.
fn options(help: &str) -> String {
    let mut table = "| argument or option | meaning |\n| --- | --- |\n".to_owned();
    for line in help.lines().skip_while(|line| !line.ends_with(':')) {
        let Some((name, meaning)) = line.trim_start().split_once("  ") else { continue };
        let is_known = ["-h, --help", "-V, --version"].contains(&name);
        if line.starts_with("  ") && !is_known {
            let cell = |text: &str| text.trim().replace('|', "\\|");
            writeln!(table, "| `{}` | {} |", cell(name), cell(meaning)).expect("a string can be written");
        }
    }
    table
}
