//! Versions of transformers that the families were compared with, as the recordings note them.
//!
//! The table is generated from `tests/golden/versions/`, which `common.run` in `tests/record/` writes (`make
//! docs-update`).

/// `family,version` lines, ordered by family.
const VERSIONS: &str = include_str!("versions.csv");

/// Returns the version of transformers that a family was compared with; `None` without a recording.
pub(super) fn transformers_version(family: &str) -> Option<&'static str> {
    VERSIONS
        .lines()
        .filter_map(|line| line.split_once(','))
        .find(|(of, _)| *of == family)
        .map(|(_, version)| version)
}
