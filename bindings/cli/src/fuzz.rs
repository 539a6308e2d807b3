//! Fuzz targets for the files that only the command reads. No part of the interface.

use std::path::PathBuf;
use std::sync::LazyLock;

use dflop_costmodel::{MediaUnits, ModelSpec};
use dflop_executor::run::RunConfig;
use dflop_loader::settings::MixtureSettings;
use dflop_planner::ItemSize;

use crate::commands::plan;

/// Target name and function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets, in alphabetical order.
pub const TARGETS: &[Target] =
    &[("links", links), ("mixture", mixture), ("shapes", shapes), ("train_config", train_config)];

/// Returns the path to a file in this process that holds the bytes.
fn temporary_file(bytes: &[u8]) -> PathBuf {
    static PLACE: LazyLock<tempfile::TempDir> =
        LazyLock::new(|| tempfile::tempdir().expect("a temporary directory"));
    let path = PLACE.path().join(format!("{:?}", std::thread::current().id()));
    std::fs::write(&path, bytes).expect("the file is written");
    path
}

fn links(bytes: &[u8]) {
    let _links = plan::samples::read(&temporary_file(bytes));
}

fn mixture(bytes: &[u8]) {
    let _mixture: Result<MixtureSettings, _> = serde_json::from_slice(bytes);
}

fn shapes(bytes: &[u8]) {
    let path = temporary_file(bytes);
    for model in ["internvl3-8b", "qwen2.5-vl-7b", "omni-7b"] {
        let spec = ModelSpec::preset(model).expect("a preset");
        if let Ok(sizes) = plan::shapes::read(&path, &spec) {
            let is_media = |media: MediaUnits| media.pairs <= u64::from(media.units).pow(2);
            let is_size =
                |size: &ItemSize| size.tokens > 0 && [0, 1].iter().all(|at| is_media(size.media(*at)));
            assert!(!sizes.is_empty() && sizes.iter().all(is_size));
        }
    }
}

fn train_config(bytes: &[u8]) {
    if let Ok(config) = RunConfig::read(&temporary_file(bytes)) {
        let _checked = config.check();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::TARGETS;

    #[test]
    fn no_input_of_the_corpus_breaks_a_rule() {
        let names: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, dflop_tests::fuzz::CLI_TARGETS);
        for (name, run) in TARGETS {
            let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(name);
            let mut inputs = 0;
            for input in std::fs::read_dir(corpus).expect("there is a corpus").flatten() {
                run(&std::fs::read(input.path()).expect("the input is there"));
                inputs += 1;
            }
            assert!(inputs > 0, "{name} has no corpus");
        }
    }
}
