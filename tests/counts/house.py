"""Counts what makes the code large or hard to find one's way in: lines, files, rooms, circles, options, words.

    python3 tests/counts/house.py [CHECKOUT]

Product code is what `src` folders hold without unit tests; lines are those with code. A *room* is a top-level module of a
crate, a *circle* a set of files that import each other in a loop.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

FRAGMENT_LINES = 60
TEST_FILE = re.compile(
    r"#\[cfg\((?:all\()?test[^\n]*\n(?:\s*#\[[^\n]*\n)*\s*(?:pub(?:\([^)]*\))? )?(?:mod|use) [^;{]*;"
)
TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?test[^\n]*\n(?:\s*#\[[^\n]*\n)*\s*mod \w+ \{")
USE = re.compile(r"\b(?:pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", re.DOTALL)
INLINE = re.compile(r"\b((?:crate|super)(?:::\w+)+)")
MODULE = re.compile(r"^\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+);", re.MULTILINE)


def crates(root: Path) -> list[Path]:
    """Returns the directories of all crates of the repository."""
    found = (path.parent for path in root.rglob("Cargo.toml") if not {"target", "venv"} & set(path.parts))
    return sorted(path for path in found if (path / "src").is_dir())


def code_of(text: str) -> str:
    """Returns a source without comments and without the test module at its end."""
    text = TEST_FILE.sub("", re.sub(r"//[^\n]*", "", text))
    found = TEST_MODULE.search(text)
    return text[: found.start()] if found else text


def lines_of(code: str) -> int:
    return sum(1 for line in code.splitlines() if line.strip())


def is_test_file(path: Path) -> bool:
    return path.name == "tests.rs" or "tests" in path.parts


def test_files(source: Path) -> set[Path]:
    """Returns the files of modules that only tests compile."""
    found: set[Path] = set()
    for path in source.rglob("*.rs"):
        is_root = path.name in ("lib.rs", "main.rs", "mod.rs")
        below = path.parent if is_root else path.with_suffix("")
        for item in TEST_FILE.finditer(re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))):
            for name in re.findall(r"\bmod (\w+);", item[0]):
                found |= {below / f"{name}.rs", *(below / name).rglob("*.rs")}
    return found


def leaves(tree: str) -> Iterable[str]:
    """Splits a `use` tree into paths."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        yield re.sub(r"\s+as\s+\w+", "", tree)
        return
    prefix, inside, depth, start = tree[:brace], tree[brace + 1 : tree.rfind("}")], 0, 0
    for at, character in enumerate(inside + ","):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            part = inside[start:at].strip()
            if part:
                yield from (prefix + leaf for leaf in leaves(part))
            start = at + 1


class Crate:
    """Modules of one crate, their files, and the imports between files."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.files: dict[tuple[str, ...], Path] = {}
        self.code: dict[tuple[str, ...], str] = {}
        root = next((path for name in ("lib.rs", "main.rs") if (path := source / name).is_file()), None)
        if root:
            self._read((), root)
        self.reexports = {module: self._reexports(module) for module in self.files}

    def _read(self, module: tuple[str, ...], file: Path) -> None:
        code = code_of(file.read_text(encoding="utf-8"))
        self.files[module], self.code[module] = file, code
        below = self.source.joinpath(*module)
        for name in MODULE.findall(code):
            for child in (below / f"{name}.rs", below / name / "mod.rs"):
                if child.is_file() and not is_test_file(child):
                    self._read((*module, name), child)

    def _paths(self, module: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
        code = self.code[module]
        paths = [leaf for tree in USE.findall(code) for leaf in leaves(tree)] + INLINE.findall(code)
        for path in paths:
            parts = tuple(re.sub(r"\s", "", path).split("::"))
            if parts[0] == "crate":
                yield parts[1:]
            elif parts[0] in ("self", "super"):
                up = sum(1 for part in parts if part == "super")
                rest = tuple(part for part in parts if part not in ("self", "super"))
                yield (*module[: len(module) - up], *rest)
            elif (*module, parts[0]) in self.files:
                yield (*module, *parts)

    def _reexports(self, module: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        found = {}
        for tree in re.findall(r"\bpub(?:\([^)]*\))?\s+use\s+([^;]+);", self.code[module]):
            for leaf in leaves(tree):
                parts = [
                    part for part in re.sub(r"\s", "", leaf).split("::") if part not in ("self", "crate")
                ]
                if len(parts) > 1:
                    for start in (module, ()):
                        if (*start, parts[0]) in self.files:
                            found[parts[-1]] = (*start, *parts)
                            break
        return found

    def _file(self, path: tuple[str, ...], steps: int = 8) -> tuple[str, ...] | None:
        for length in range(len(path), -1, -1):
            module = path[:length]
            if module in self.files:
                target = self.reexports[module].get(path[length]) if length < len(path) else None
                if target and steps:
                    return self._file((*target, *path[length + 1 :]), steps - 1)
                return module
        return None

    def arrows(self) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Returns importing and imported module, files only."""
        found = set()
        for module in self.files:
            for path in self._paths(module):
                target = self._file(path)
                # A parent that names its child hands it on, and imports nothing.
                if target not in (None, module, ()) and target[: len(module)] != module:
                    found.add((module, target))
        return found

    def rooms(self) -> set[str]:
        return {module[0] for module in self.files if module}


def circles(arrows: set[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[set[tuple[str, ...]]]:
    """Returns the strongly connected sets of more than one file."""
    after: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for start, end in arrows:
        after.setdefault(start, set()).add(end)

    def reach(start: tuple[str, ...]) -> set[tuple[str, ...]]:
        seen, waiting = set(), [start]
        while waiting:
            for end in after.get(waiting.pop(), ()):
                if end not in seen:
                    seen.add(end)
                    waiting.append(end)
        return seen

    reached = {start: reach(start) for start in after}
    found: list[set[tuple[str, ...]]] = []
    for start, ends in reached.items():
        circle = {end for end in ends if start in reached.get(end, ())}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def settings(root: Path) -> dict[str, int]:
    """Counts the settings on the path of a balanced loader in Python."""
    counts = {}
    tree = ast.parse((root / "bindings/python/python/dflop/settings.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.dump(item) for item in node.decorator_list
        ):
            counts[node.name] = sum(isinstance(item, ast.AnnAssign) for item in node.body)
    stub = ast.parse((root / "bindings/python/python/dflop/_native.pyi").read_text(encoding="utf-8"))
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and node.name in (
            "BalancedLoader",
            "Dataset",
            "CostModel",
            "Augment",
        ):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__"):
                    counts[node.name] = len(item.args.args) - 1 + len(item.args.kwonlyargs)
    return counts


def words(paths: Iterable[Path]) -> tuple[int, int]:
    """Counts words and "of" in doc comments or prose, without fenced code."""
    total = count = 0
    for path in paths:
        is_code, fence = path.suffix == ".rs", False
        for line in path.read_text(encoding="utf-8").splitlines():
            if is_code:
                found = re.match(r"\s*//[/!] ?(.*)", line)
                if not found:
                    fence = False
                    continue
                line = found[1]
            if line.strip().startswith("```"):
                fence = not fence
            elif not fence:
                found_words = line.split()
                total += len(found_words)
                count += sum(word.strip(".,;:()[]*_\"'").lower() == "of" for word in found_words)
    return total, count


def count_crate(directory: Path, root: Path) -> dict[str, object]:
    tested = test_files(directory / "src")
    files = [
        path
        for path in (directory / "src").rglob("*.rs")
        if not is_test_file(path.relative_to(directory)) and path not in tested
    ]
    lines = [lines_of(code_of(path.read_text(encoding="utf-8"))) for path in files]
    crate = Crate(directory / "src")
    arrows = crate.arrows()
    rooms = {(start[0], end[0]) for start, end in arrows if start and start[0] != end[0]}
    nested = [path for path in crates(root) if path != directory and directory in path.parents]
    own = (path for path in directory.rglob("*.rs") if not any(other in path.parents for other in nested))
    total, of = words(path for path in own if "target" not in path.parts)
    tests = directory / "tests"
    return {
        "files": len(files),
        "lines": sum(lines),
        "fragments": sum(count < FRAGMENT_LINES for count in lines),
        "rooms": len(crate.rooms()),
        "arrows": len(rooms),
        "circles": len(circles(arrows)),
        "binaries": len(list(tests.glob("*.rs"))) + len(list(tests.glob("*/main.rs")))
        if tests.is_dir()
        else 0,
        "of/1000": round(1000 * of / max(total, 1), 1),
    }


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    rows = {str(path.relative_to(root)): count_crate(path, root) for path in crates(root)}
    names = list(next(iter(rows.values())))
    print(f"{'crate':32}" + "".join(f"{name:>11}" for name in names))
    for name, row in rows.items():
        print(f"{name:32}" + "".join(f"{row[key]!s:>11}" for key in names))
    sums = {key: sum(float(str(row[key])) for row in rows.values()) for key in names[:-1]}
    print(f"{'sum':32}" + "".join(f"{sums[key]:>11.0f}" for key in names[:-1]))
    reference = (root / "docs/reference/cli.md").read_text(encoding="utf-8")
    print("option rows in docs/reference/cli.md:", len(re.findall(r"^\| `-", reference, re.MULTILINE)))
    found = settings(root)
    print("settings of a balanced loader in Python:", sum(found.values()), found)
    total, of = words(path for path in (root / "docs").rglob("*.md") if path.name != "cli.md")
    print(f"docs: {total} words, {1000 * of / total:.1f} `of` per 1,000")
    print("CHANGELOG.md:", len((root / "CHANGELOG.md").read_text(encoding="utf-8").split()), "words")


if __name__ == "__main__":
    main()
