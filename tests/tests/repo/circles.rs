//! Holds the circles of files, sets of files that import each other in a loop, at their present number.
//!
//! Imports are those of [`floors`](super::floors), from file to file: a name that a module re-exports is
//! followed to the file that has it. A module that names its submodules hands them on, and imports nothing.
//! `tests/counts/house.py` prints the number for each crate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::floors::{
    FLOORS, declared_modules, find_reexports, inline_paths, module_file, root_file, use_paths, without_tests,
};
use super::source::{root, stripped_code};

/// Crates with circles, and their number. Crates that are not listed have none; no number may grow.
const CIRCLES: [(&str, usize); 3] = [("loader/src", 4), ("bindings/cli/src", 1), ("bindings/python/src", 1)];

#[test]
fn no_crate_has_more_circles_of_files_than_it_had() {
    let mut faults = Vec::new();
    for (source, _) in FLOORS {
        let allowed = CIRCLES.iter().find(|(listed, _)| *listed == source).map_or(0, |(_, number)| *number);
        let found = Files::read(&root().join(source)).circles();
        if found.len() > allowed {
            let shown: Vec<String> = found.iter().map(show).collect();
            faults.push(format!("{source}: at most {allowed} circles are known:\n  {}", shown.join("\n  ")));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn a_circle_is_seen_through_a_reexport() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    std::fs::create_dir(directory.path().join("low")).unwrap();
    write("lib.rs", "mod low; mod high; mod top; pub use high::Tall;");
    write("low/mod.rs", "mod deep; mod flat; pub(crate) use deep::{Deep, Deeper as Lowest};");
    write("low/deep.rs", "use super::flat::g; pub struct Deep; fn f() { crate::Tall::new() }");
    write("low/flat.rs", "#[cfg(test)] mod tests { use super::super::deep::Deep; }\npub fn g() {}");
    write("high.rs", "use crate::low::Deep; pub struct Tall;");
    write("top.rs", "use crate::{high::Tall, low::Deep};");
    let circles = Files::read(directory.path()).circles();
    assert_eq!(circles.iter().map(show).collect::<Vec<_>>(), ["high, low::deep"]);
    write("low/deep.rs", "use super::flat::g; pub struct Deep;");
    assert_eq!(Files::read(directory.path()).circles(), []);
}

fn show(circle: &BTreeSet<Module>) -> String {
    circle.iter().map(|module| module.join("::")).collect::<Vec<_>>().join(", ")
}

/// Path of a module below the root of its crate.
type Module = Vec<String>;

/// The files of a crate by their modules.
#[derive(Default)]
struct Files {
    /// Paths that each file names, absolute.
    named: BTreeMap<Module, Vec<Module>>,
    /// Names that each module re-exports, and their paths.
    reexports: BTreeMap<Module, BTreeMap<String, Module>>,
}

impl Files {
    /// Reads a crate from its root file downwards.
    fn read(source: &Path) -> Self {
        let mut code = BTreeMap::new();
        read_module(source, &root_file(source), Vec::new(), &mut code);
        let mut files = Self::default();
        for (module, text) in &code {
            let paths = use_paths(text).into_iter().chain(inline_paths(text));
            let is_module = |path: &[String]| code.contains_key(path);
            let named = paths.filter_map(|path| absolute(module, &path, &is_module)).collect();
            files.named.insert(module.clone(), named);
            let below = [module.as_slice(), &[]];
            let reexported = find_reexports(text).into_iter().filter_map(|path| {
                let path: Module =
                    path.into_iter().filter(|part| part != "self" && part != "crate").collect();
                let (first, name) = (path.first()?, path.last()?.clone());
                let start =
                    below.iter().find(|start| is_module(&[**start, std::slice::from_ref(first)].concat()))?;
                (path.len() > 1).then(|| (name, [*start, &path].concat()))
            });
            files.reexports.insert(module.clone(), reexported.collect());
        }
        files
    }

    /// Returns the file that has the item of a path: the longest module in it, re-exports followed.
    fn file(&self, path: &[String], steps: usize) -> Option<Module> {
        let module = (0..=path.len()).rev().map(|length| &path[..length]);
        let module = module.into_iter().find(|module| self.named.contains_key(*module))?;
        let rest = &path[module.len()..];
        let target = rest.first().and_then(|name| self.reexports[module].get(name));
        match target.filter(|_| steps > 0) {
            Some(target) => self.file(&[target.as_slice(), &rest[1..]].concat(), steps - 1),
            None => Some(module.to_vec()),
        }
    }

    /// Returns the files that each file imports.
    fn imports(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let imported = |(module, named): (&'_ Module, &Vec<Module>)| -> BTreeSet<Module> {
            let targets = named.iter().filter_map(|path| self.file(path, 8));
            targets.filter(|target| !target.is_empty() && !target.starts_with(module)).collect()
        };
        self.named.iter().map(|entry| (entry.0, imported(entry))).collect()
    }

    /// Returns the sets of files each of which reaches all others.
    fn circles(&self) -> Vec<BTreeSet<Module>> {
        let imports = self.imports();
        let reach = |start: &Module| {
            let (mut seen, mut waiting) = (BTreeSet::new(), vec![start.clone()]);
            while let Some(module) = waiting.pop() {
                let next = imports[&module].iter().filter(|next| seen.insert((*next).clone()));
                waiting.extend(next.cloned().collect::<Vec<_>>());
            }
            seen
        };
        let reached: BTreeMap<&Module, BTreeSet<Module>> =
            imports.keys().map(|module| (*module, reach(module))).collect();
        let circles = reached.iter().map(|(start, ends)| -> BTreeSet<Module> {
            ends.iter().filter(|end| reached[end].contains(*start)).cloned().collect()
        });
        let circles: BTreeSet<BTreeSet<Module>> = circles.filter(|circle| circle.len() > 1).collect();
        circles.into_iter().collect()
    }
}

/// Reads the file of a module, and those of its submodules.
fn read_module(directory: &Path, file: &Path, module: Module, code: &mut BTreeMap<Module, String>) {
    let text = without_tests(&stripped_code(&std::fs::read_to_string(file).unwrap()));
    for name in declared_modules(&text) {
        let inside = module.last().map_or_else(|| directory.to_owned(), |last| directory.join(last));
        read_module(&inside, &module_file(&inside, &name), [module.as_slice(), &[name]].concat(), code);
    }
    code.insert(module, text);
}

/// Returns the absolute path of a path in a module; `None` for names of other crates.
fn absolute(module: &Module, path: &[String], is_module: &dyn Fn(&[String]) -> bool) -> Option<Module> {
    let up = path.iter().filter(|part| *part == "super").count();
    let rest: Module = path.iter().filter(|part| *part != "super" && *part != "self").cloned().collect();
    match path.first()?.as_str() {
        "crate" => Some(rest[1..].to_vec()),
        "self" | "super" => Some([&module[..module.len().saturating_sub(up)], &rest].concat()),
        first => {
            let child = [module.as_slice(), &[first.to_owned()]].concat();
            is_module(&child).then(|| [module.as_slice(), &rest].concat())
        }
    }
}
