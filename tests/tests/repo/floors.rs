//! Holds the floor plan: inside a crate a room imports only rooms below it, so that no two rooms need each
//! other.
//!
//! A *room* is a top-level module in a crate. [`FLOORS`] lists the rooms in every crate from the ground up.
//! Imports are `use` declarations and paths that start with `crate`, `super` or `self`; test code is left
//! out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::source::{root, shown, stripped_code};

/// The source directory and rooms of each crate, from the ground up.
pub(super) const FLOORS: [(&str, &[&str]); 16] = [
    (
        "costmodel/src",
        &[
            "error",
            "quantiles",
            "random",
            "interned",
            "curve",
            "tokens",
            "model",
            "flops",
            "frozen",
            "profile",
            "measure",
            "correction",
            "memory",
            "predict",
            "dataset_statistics",
        ],
    ),
    (
        "balancer/src",
        &[
            "budget",
            "error",
            "instance",
            "digest",
            "partition",
            "schedule",
            "simulate",
            "pipeline",
            "context",
        ],
    ),
    (
        "balancer/planner/src",
        &[
            "cluster",
            "workload",
            "costs",
            "space",
            "problem",
            "data_parallel",
            "score",
            "report",
            "search",
            "compare",
            "refine",
            "explain",
            "suggestion",
            "plan",
        ],
    ),
    (
        "loader/src",
        &[
            "error", "files", "flow", "store", "shard", "index", "dataset", "order", "plan", "fetch",
            "decode", "deliver", "write", "model", "settings",
        ],
    ),
    (
        "loader/import/src",
        &[
            "record",
            "row",
            "options",
            "packer",
            "columnar",
            "tables",
            "directory",
            "document",
            "source",
            "pack",
            "parts",
            "in_place",
        ],
    ),
    ("loader/samples/src", &["error", "file", "media", "sample", "inputs"]),
    ("loader/processors/src", &["image", "audio", "tensors", "message", "family", "chat", "preparer"]),
    (
        "executor/src",
        &["error", "step_record", "pipeline", "inputs", "optimizer", "profile", "checkpoint", "train", "run"],
    ),
    (
        "executor/comm/src",
        &[
            "dtype",
            "error",
            "sync",
            "message",
            "api",
            "endpoint",
            "communicator",
            "conformance",
            "rendezvous",
            "threads",
            "tcp",
            "fuzz",
            "launch",
        ],
    ),
    (
        "executor/cuda/src",
        &["cudnn", "error", "libraries", "driver", "compiler", "blas", "attention", "device", "nccl", "ops"],
    ),
    (
        "executor/device/src",
        &["error", "runtime", "segments", "comm", "cpu", "ops", "conformance", "deferred"],
    ),
    (
        "executor/models/src",
        &["error", "parameters", "block", "layers", "encoder", "llm", "families", "stage"],
    ),
    (
        "executor/testing/src",
        &["device", "claim", "hooked", "conformance", "parity", "tensor_parallel", "pipeline", "training"],
    ),
    ("bindings/cli/src", &["failure", "output", "args", "report", "view", "commands", "fuzz"]),
    ("loader/synthetic/src", &["draws", "images", "speech", "sample"]),
    (
        "bindings/python/src",
        &[
            "error",
            "logging",
            "arrays",
            "convert",
            "runtime",
            "tokenizer",
            "table",
            "other_stores",
            "dataset",
            "model",
            "measure",
            "transform",
            "image",
            "cost",
            "filter",
            "schedule",
            "loader",
            "balanced",
            "balance",
            "cli",
            "train",
            "tasks",
        ],
    ),
];

#[test]
fn rooms_import_only_rooms_below_them() {
    let mut faults = Vec::new();
    for (source, floors) in FLOORS {
        let house = House::read(&root().join(source));
        let listed: BTreeSet<&str> = floors.iter().copied().collect();
        let found: BTreeSet<&str> = house.rooms.iter().map(String::as_str).collect();
        assert_eq!(listed, found, "{source}: FLOORS lists the rooms that the crate has");
        let floor = |room: &str| floors.iter().position(|listed| *listed == room).unwrap();
        for ((from, to), example) in &house.imports {
            if floor(to) > floor(from) {
                faults.push(format!("{source}: `{from}` imports `{to}`, which lies above it: {example}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Crates whose rooms import through the root, and how often. No number may grow.
const THROUGH_ROOT: [(&str, usize); 1] = [("executor/src", 40)];

#[test]
fn rooms_import_from_rooms_not_through_the_root() {
    let mut faults = Vec::new();
    for (source, _) in FLOORS {
        let allowed = THROUGH_ROOT.iter().find(|(listed, _)| *listed == source).map_or(0, |(_, most)| *most);
        let found = House::read(&root().join(source)).through_root;
        if found.len() > allowed {
            let count = found.len();
            let shown = found.into_iter().collect::<Vec<_>>().join("\n  ");
            faults.push(format!("{source}: {count} imports, {allowed} are known; name the room:\n  {shown}"));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_floor_plan_sees_upward_imports() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    write(
        "lib.rs",
        "mod low; mod high; pub use high::Tall;\n#[path = \"../far.rs\"]\npub mod far;\n#[cfg(test)] mod tests;",
    );
    write("low.rs", "use crate::{Tall, low};\nfn f() { super::high::g() }");
    write("high.rs", "#[cfg(test)] mod tests { use crate::low; }\npub struct Tall; pub fn g() {}");
    write("tests.rs", "use crate::low;");
    let house = House::read(directory.path());
    assert_eq!(house.rooms, BTreeSet::from(["high".to_owned(), "low".to_owned()]));
    let arrows: Vec<_> = house.imports.keys().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    assert_eq!(arrows, [("low", "high")]);
    let through_root: Vec<&String> = house.through_root.iter().collect();
    assert!(matches!(*through_root, [one] if one.ends_with("low.rs: crate::Tall")), "{through_root:?}");
}

/// Rooms in a crate and the imports between them.
#[derive(Default)]
struct House {
    rooms: BTreeSet<String>,
    /// Importing and imported room, with one place where it happens.
    imports: BTreeMap<(String, String), String>,
    /// Items that the crate root re-exports, with the rooms.
    reexports: BTreeMap<String, String>,
    /// Imports of such items from the root, by place.
    through_root: BTreeSet<String>,
}

impl House {
    /// Reads a crate from the root file downwards, following `mod` declarations.
    fn read(source: &Path) -> Self {
        let mut house = Self::default();
        let code = without_tests(&stripped_code(&read(&root_file(source))));
        house.rooms = declared_modules(&code).into_iter().collect();
        for path in use_paths(&code) {
            let path: Vec<String> =
                path.into_iter().skip_while(|part| part == "crate" || part == "self").collect();
            if let [room, .., name] = path.as_slice()
                && house.rooms.contains(room)
            {
                house.reexports.insert(name.clone(), room.clone());
            }
        }
        for module in declared_modules(&code) {
            house.read_module(source, &[], &module);
        }
        house
    }

    /// Reads the module file below `directory`, and the submodule files.
    fn read_module(&mut self, directory: &Path, parents: &[String], name: &str) {
        let own = [parents, &[name.to_owned()]].concat();
        let inside = directory.join(name);
        let file = module_file(directory, name);
        let code = without_tests(&stripped_code(&read(&file)));
        for path in use_paths(&code).into_iter().chain(inline_paths(&code)) {
            self.note(&own, &path, &file);
        }
        for module in declared_modules(&code) {
            self.read_module(&inside, &own, &module);
        }
    }

    /// Records an import, if it leaves the room.
    fn note(&mut self, own: &[String], path: &[String], place: &Path) {
        let up = path.iter().take_while(|part| *part == "super").count();
        let target = match path.first().map(String::as_str) {
            Some("crate") => path[1..].to_vec(),
            Some("super") => [&own[..own.len().saturating_sub(up)], &path[up..]].concat(),
            _ => return,
        };
        let Some(name) = target.first() else { return };
        let is_room = self.rooms.contains(name);
        let Some(room) = self.rooms.get(name).or_else(|| self.reexports.get(name)).cloned() else { return };
        if !is_room {
            self.through_root.insert(format!("{}: {}", shown(place), path.join("::")));
        }
        if room != own[0] {
            let example = format!("{}: {}", shown(place), path.join("::"));
            self.imports.entry((own[0].clone(), room)).or_insert(example);
        }
    }
}

/// Returns the root file of a crate.
pub(super) fn root_file(source: &Path) -> PathBuf {
    let files = ["lib.rs", "main.rs"].map(|name| source.join(name));
    files.into_iter().find(|path| path.is_file()).expect("a crate has a root file")
}

/// Returns the file of a module that is declared in the module of a directory.
pub(super) fn module_file(directory: &Path, name: &str) -> PathBuf {
    let files = [directory.join(format!("{name}.rs")), directory.join(name).join("mod.rs")];
    files.into_iter().find(|path| path.is_file()).expect("a module has a file")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns code without the items that only tests compile.
pub(super) fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(at) = ["#[cfg(test)]", "#[cfg(all(test"].iter().filter_map(|start| rest.find(start)).min()
    {
        kept.push_str(&rest[..at]);
        let item = at + rest[at..].find(']').map_or(0, |end| end + 1);
        // The item ends at the semicolon or at the closing brace.
        let mut depth = 0;
        let end = rest[item..].find(|next| {
            depth += i32::from(['(', '[', '{'].contains(&next)) - i32::from([')', ']', '}'].contains(&next));
            depth == 0 && (next == ';' || next == '}')
        });
        rest = end.map_or("", |end| &rest[item + end + 1..]);
    }
    kept + rest
}

/// Returns the modules that code declares in files of their own. A module with a path is left out: its file
/// is shared with another crate.
pub(super) fn declared_modules(code: &str) -> Vec<String> {
    let words: Vec<&str> = code.split_whitespace().collect();
    let is_shared = |at: usize| {
        let attributes = words[..at].iter().rev().take_while(|word| !word.ends_with([';', '}']));
        attributes.into_iter().any(|word| word.starts_with("#[path"))
    };
    let declared = words.windows(2).enumerate();
    let declared = declared.filter(|(_, pair)| pair[0] == "mod" && pair[1].ends_with(';'));
    let own = declared.filter(|(at, _)| !is_shared(*at));
    own.map(|(_, pair)| pair[1].trim_end_matches(';').to_owned()).collect()
}

/// Returns the paths of all `use` declarations, groups expanded.
pub(super) fn use_paths(code: &str) -> Vec<Vec<String>> {
    find_uses(code, |_| true)
}

/// Returns the paths of all `use` declarations that are visible outside of their module.
pub(super) fn find_reexports(code: &str) -> Vec<Vec<String>> {
    find_uses(code, |before| {
        let scope = before.rfind("pub(").map(|at| &before[at..]);
        before.ends_with("pub") || scope.is_some_and(|scope| scope.find(')') == Some(scope.len() - 1))
    })
}

/// Returns the paths of the `use` declarations that follow accepted code.
fn find_uses(code: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let is_word =
            code[..at].chars().next_back().is_none_or(|last| !last.is_alphanumeric() && last != '_');
        let is_wanted = is_word && is_wanted(code[..at].trim_end());
        if let (true, Some(end)) = (is_wanted, code[at..].find(';')) {
            found.extend(expand(&code[at + 4..at + end]));
        }
    }
    found
}

/// Expands a `use` tree to paths.
fn expand(tree: &str) -> Vec<Vec<String>> {
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.split("::").map(|part| part.trim().to_owned()).collect()];
    };
    let prefix: Vec<String> =
        tree[..open].split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect();
    let inside = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let mut depth = 0;
    let members = inside.split(|next: char| {
        depth += i32::from(next == '{') - i32::from(next == '}');
        next == ',' && depth == 0
    });
    let members = members.filter(|member| !member.trim().is_empty()).flat_map(expand);
    members.map(|path| [prefix.clone(), path].concat()).collect()
}

/// Returns the paths outside of `use` declarations that start with `crate` or `super`.
pub(super) fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let is_path = |next: char| next.is_alphanumeric() || next == '_' || next == ':';
    let paths = code.split(|next| !is_path(next)).filter(|path| path.contains("::"));
    let paths = paths.filter(|path| path.starts_with("crate::") || path.starts_with("super::"));
    paths.map(|path| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()).collect()
}
