//! Holds the floor plan: inside a crate a room imports only rooms below it, so that no two rooms need each other.
//!
//! A *room* is a top-level module of a crate. [`FLOORS`] lists the rooms of every crate from the ground up.
//! Imports are `use` declarations and paths that start with `crate`, `super` or `self`; test code is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

use super::source::root;

/// The source directory of each crate and its rooms, from the ground up.
pub(super) const FLOORS: [(&str, &[&str]); 6] = [
    ("costmodel/src", &[]),
    ("balancer/src", &[]),
    ("loader/src", &[]),
    ("executor/src", &[]),
    ("bindings/cli/src", &[]),
    ("bindings/python/src", &[]),
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

#[test]
fn the_floor_plan_sees_upward_imports() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    write("lib.rs", "mod low; mod high; pub use high::Tall;\n#[cfg(test)] mod tests;");
    write("low.rs", "use crate::{Tall, low};\nfn f() { super::high::g() }");
    write("high.rs", "#[cfg(test)] mod tests { use crate::low; }\npub struct Tall; pub fn g() {}");
    write("tests.rs", "use crate::low;");
    let house = House::read(directory.path());
    assert_eq!(house.rooms, BTreeSet::from(["high".to_owned(), "low".to_owned()]));
    let arrows: Vec<_> = house.imports.keys().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    assert_eq!(arrows, [("low", "high")]);
}

/// The rooms of a crate and the imports between them.
#[derive(Default)]
struct House {
    rooms: BTreeSet<String>,
    /// Importing and imported room, with one place where it happens.
    imports: BTreeMap<(String, String), String>,
    /// Items that the root of the crate re-exports, and their rooms.
    reexports: BTreeMap<String, String>,
}

impl House {
    /// Reads a crate from its root file downwards, following `mod` declarations.
    fn read(source: &Path) -> Self {
        let mut house = Self::default();
        let file =
            ["lib.rs", "main.rs"].map(|name| source.join(name)).into_iter().find(|path| path.is_file());
        let items = parse(&file.expect("a crate has a root file"));
        for item in &items {
            if let Item::Mod(module) = item
                && !is_test(&module.attrs)
            {
                house.rooms.insert(module.ident.to_string());
            }
        }
        for item in &items {
            let Item::Use(import) = item else { continue };
            for path in paths_of(&import.tree) {
                let path: Vec<String> =
                    path.into_iter().skip_while(|part| part == "crate" || part == "self").collect();
                if let [room, .., name] = path.as_slice()
                    && house.rooms.contains(room)
                {
                    house.reexports.insert(name.clone(), room.clone());
                }
            }
        }
        for item in items {
            if let Item::Mod(module) = item {
                house.read_module(source, &[], module);
            }
        }
        house
    }

    /// Reads a module: its own text, or the file that it names below `directory`.
    fn read_module(&mut self, directory: &Path, parents: &[String], module: ItemMod) {
        if is_test(&module.attrs) {
            return;
        }
        let name = module.ident.to_string();
        let own = [parents, &[name.clone()]].concat();
        let inside = directory.join(&name);
        let (items, place) = match module.content {
            Some((_, items)) => (items, directory.to_owned()),
            None => {
                let files = [directory.join(format!("{name}.rs")), inside.join("mod.rs")];
                let file: PathBuf =
                    files.into_iter().find(|path| path.is_file()).expect("a module has a file");
                (parse(&file), file)
            }
        };
        for item in items {
            match item {
                Item::Mod(module) => self.read_module(&inside, &own, module),
                item => {
                    let mut paths = Paths::default();
                    paths.visit_item(&item);
                    for path in paths.found {
                        self.note(&own, &path, &place);
                    }
                }
            }
        }
    }

    /// Records an import, if it leaves its room.
    fn note(&mut self, own: &[String], path: &[String], place: &Path) {
        let (first, rest) = path.split_first().expect("a path has a part");
        let target: Vec<String> = match first.as_str() {
            "crate" => rest.to_vec(),
            "self" => [own, rest].concat(),
            "super" => {
                let up = path.iter().take_while(|part| *part == "super").count();
                [&own[..own.len().saturating_sub(up)], &path[up..]].concat()
            }
            _ => return,
        };
        let Some(name) = target.first() else { return };
        let Some(room) = self.rooms.get(name).or_else(|| self.reexports.get(name)).cloned() else { return };
        if room != own[0] {
            let example = format!("{}: {}", super::source::shown(place), path.join("::"));
            self.imports.entry((own[0].clone(), room)).or_insert(example);
        }
    }
}

/// Collects the paths of imports and of other code.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        self.found.extend(paths_of(&import.tree));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.found.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        syn::visit::visit_path(self, path);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Const(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        _ => &[],
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && matches!(&attribute.meta, syn::Meta::List(list)
                if list.tokens.to_string() == "test" || list.tokens.to_string().starts_with("all (test"))
    })
}

fn parse(path: &Path) -> Vec<Item> {
    let text = std::fs::read_to_string(path).unwrap();
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())).items
}

/// Expands a `use` tree to its paths.
fn paths_of(tree: &UseTree) -> Vec<Vec<String>> {
    let below = |name: String, tree: &UseTree| {
        paths_of(tree).into_iter().map(|path| [vec![name.clone()], path].concat()).collect()
    };
    match tree {
        UseTree::Path(path) => below(path.ident.to_string(), &path.tree),
        UseTree::Name(name) => vec![vec![name.ident.to_string()]],
        UseTree::Rename(name) => vec![vec![name.ident.to_string()]],
        UseTree::Glob(_) => vec![vec!["*".to_owned()]],
        UseTree::Group(group) => group.items.iter().flat_map(paths_of).collect(),
    }
}
