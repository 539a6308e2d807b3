//! Replays the fuzz target corpus: inputs that once broke a rule, and seeds that reach deep.

use std::path::{Path, PathBuf};

use dflop_tests::fuzz::{CLI_TARGETS, TARGETS, target};

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

#[test]
fn no_input_of_the_corpus_breaks_a_rule() {
    for (name, run) in TARGETS {
        let directory = corpus().join(name);
        let inputs =
            std::fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let mut count = 0;
        for input in inputs.flatten() {
            run(&std::fs::read(input.path()).expect("the input is there"));
            count += 1;
        }
        assert!(count > 0, "{name} has no corpus");
    }
}

#[test]
fn every_directory_of_the_corpus_belongs_to_a_target() {
    for directory in std::fs::read_dir(corpus()).expect("the corpus is there").flatten() {
        let name = directory.file_name();
        let is_known = |name: &str| target(name).is_some() || CLI_TARGETS.contains(&name);
        assert!(name.to_str().is_some_and(is_known), "{}", directory.path().display());
    }
}

/// Inputs that are created here, because as files they would be large.
#[test]
fn long_inputs_are_refused_in_little_time_and_memory() {
    let run = |name: &str, input: String| target(name).expect("a known target")(input.as_bytes());
    run("pattern", "{0..0}".repeat(60_000));
    run("pattern", format!("{{0..{}9}}", "0".repeat(70_000)));
    let split = |pattern: &str| format!("split_parts:\n  train: ['{pattern}']\n");
    run("energon_split", split(&"{0..0}".repeat(60_000)));
    run("energon_split", split(&format!("{{0..9999999}}{}", "x".repeat(400))));
    run("chat_template", "{% if true %}".repeat(2_000));
    run("json", "[".repeat(100_000));
    run("model_config", format!("{}1{}", "{\"a\":".repeat(120), "}".repeat(120)));
}
