"""Collects the licenses of all that a wheel contains: the crates of a target and Rust's library.

    python bindings/python/wheels/licenses.py --target x86_64-unknown-linux-gnu --out LICENSES-THIRD-PARTY.txt

Crates are those that cargo links into the package for the target: no build scripts, macros or tests. Every
crate is listed with its version, SPDX expression, origin and texts, which are read from its published
source; equal texts are printed once. A crate without a text gets that of a crate of the same repository, or
the standard text of Apache-2.0 if its expression allows that license. If neither is possible, nothing is
written and the crate is named.
"""

import argparse
import dataclasses
import functools
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "dflop-python"
# Files with conditions or notices, in any directory of a crate.
LICENSE_FILE = re.compile(
    r"(licen[cs]es?|copying|copyright|notice|unlicense|patents)([-_.].*)?", re.IGNORECASE
)
# Directories of a published crate whose files are not compiled into a library.
UNUSED_DIRECTORIES = {"tests", "benches", "examples", "fuzz"}
# Parts of the standard library that the toolchain documents without a text; Linux has none of them.
OTHER_PLATFORMS = {"fortanix-sgx-abi", "vex-sdk"}
WIDTH = 100


class LicenseError(Exception):
    """A license that cannot be found; the message names whose."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A crate, or a part of the standard library, with the texts of its licenses by file name."""

    name: str
    version: str
    spdx: str
    origin: str
    texts: tuple[tuple[str, str], ...]
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


def output(*command: str) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def linked(target: str) -> set[tuple[str, str]]:
    """Returns names and versions of the crates that cargo links into the package for a target."""
    edges = ("--edges", "normal,no-proc-macro", "--no-dedupe")
    layout = ("--prefix", "none", "--format", "{p}")
    tree = output("cargo", "tree", "--locked", "--package", PACKAGE, "--target", target, *edges, *layout)
    crates = set()
    for line in tree.splitlines():
        name, version = line.split()[:2]
        crates.add((name, version.removeprefix("v")))
    return crates


@functools.cache
def published(target: str) -> list[dict]:
    """Returns the metadata of the linked crates that are not the workspace's own, by name."""
    metadata = json.loads(
        output("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
    )
    wanted = linked(target)
    found = [crate for crate in metadata["packages"] if (crate["name"], crate["version"]) in wanted]
    if len(found) != len(wanted):
        missing = wanted - {(crate["name"], crate["version"]) for crate in found}
        raise LicenseError(f"cargo metadata does not describe {sorted(missing)}")
    others = [crate for crate in found if crate["source"] is not None]
    return sorted(others, key=lambda crate: (crate["name"], crate["version"]))


def read_texts(directory: Path) -> tuple[tuple[str, str], ...]:
    """Reads the license files of a crate's source, those of code that it includes among them."""
    texts = []
    for path, directories, files in os.walk(directory):
        directories[:] = sorted(set(directories) - UNUSED_DIRECTORIES)
        for name in sorted(files):
            # Not `license.rs` and the like.
            if LICENSE_FILE.fullmatch(name) and not name.endswith((".rs", ".c", ".h", ".py", ".toml")):
                file = Path(path, name)
                text = file.read_text(encoding="utf-8", errors="replace").strip()
                if text:
                    texts.append((str(file.relative_to(directory)), text))
    return tuple(texts)


def crate_parts(crates: list[dict]) -> list[Part]:
    """Reads the licenses of crates.

    # Errors
    `LicenseError` names all crates for which there is no text or no SPDX expression.
    """
    texts = {crate["id"]: read_texts(Path(crate["manifest_path"]).parent) for crate in crates}
    parts, failed = [], []
    for crate in crates:
        spdx = (crate["license"] or "").replace("/", " OR ")
        found, note = texts[crate["id"]], ""
        if not found:
            found, note = substitute(crate, spdx, crates, texts)
        if not found or not spdx:
            failed.append(f"{crate['name']} {crate['version']} ({spdx or 'no SPDX expression'})")
            continue
        origin = crate["repository"] or crate["homepage"] or "its published crate"
        parts.append(Part(crate["name"], crate["version"], spdx, origin, found, note))
    if failed:
        raise LicenseError(f"no license text for {', '.join(failed)}")
    return parts


def substitute(
    crate: dict, spdx: str, crates: list[dict], texts: dict
) -> tuple[tuple[tuple[str, str], ...], str]:
    """Finds the texts for a crate that was published without; returns them with a note."""
    repository = (crate["repository"] or "").rstrip("/").removesuffix(".git")
    for other in crates:
        same = (other["repository"] or "").rstrip("/").removesuffix(".git") == repository != ""
        if same and texts[other["id"]] and other["license"] == crate["license"]:
            return texts[
                other["id"]
            ], f"published without a text; that of {other['name']}, of the same repository"
    if "Apache-2.0" in re.split(r" OR ", spdx.strip("()")):
        text = (ROOT / "LICENSE-APACHE").read_text(encoding="utf-8").strip()
        authors = f"; authors: {', '.join(crate['authors'])}" if crate["authors"] else ""
        return (("Apache-2.0", text),), f"published without a text; the standard one of Apache-2.0{authors}"
    return (), ""


def standard_library() -> list[Part]:
    """Reads the notices of the Rust standard library from the documents of the toolchain.

    # Errors
    `LicenseError` if the toolchain is without them, or they have another form.
    """
    path = Path(output("rustc", "--print", "sysroot").strip(), "share/doc/rust/COPYRIGHT-library.html")
    if not path.is_file():
        raise LicenseError(f"no notices of the Rust standard library: expected {path}, which rustup installs")
    in_tree, *crates = re.split(r"<h3>\W*([\w-]+)-(\d[\w.+-]*)</h3>", path.read_text(encoding="utf-8"))
    version = output("rustc", "--version").split()[1]
    origin = "https://github.com/rust-lang/rust"
    # Its headings and styles are those of a web page.
    notices = re.sub(
        r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]*>", "", in_tree.partition("<body>")[2]))
    )
    notices = "\n".join(line.strip() for line in notices.splitlines())
    parts = [Part("std", version, "MIT OR Apache-2.0", origin, ((path.name, notices.strip()),))]
    for name, crate_version, body in zip(crates[0::3], crates[1::3], crates[2::3], strict=True):
        spdx = re.search(r"<b>License:</b>(.*?)</p>", body, re.DOTALL)
        files = re.findall(r"<summary><code>(.*?)</code></summary>\s*<pre>(.*?)</pre>", body, re.DOTALL)
        if spdx is None:
            raise LicenseError(f"{path} names no license of {name} {crate_version}")
        if name in OTHER_PLATFORMS:
            continue
        if not files:
            raise LicenseError(f"{path} has no text of {name} {crate_version}")
        texts = tuple((html.unescape(file), html.unescape(text).strip()) for file, text in files)
        note = "a part of the Rust standard library"
        expression = html.unescape(spdx.group(1)).strip().replace("/", " OR ")
        parts.append(Part(name, crate_version, expression, origin, texts, note))
    if len(parts) < 2:
        raise LicenseError(f"{path} has another form than expected: no crates found")
    return parts


def key(text: str) -> str:
    """Returns what makes texts equal: their words."""
    return " ".join(text.split())


def header(parts: list[Part], target: str) -> Iterable[str]:
    """Describes the document; mentions what some licenses ask to mention."""
    mpl = [part for part in parts if "MPL-2.0" in part.spdx]
    ijg = [part for part in parts if "IJG" in part.spdx]
    yield f"Licenses of the software in this wheel of dflop, built for {target}"
    yield ""
    yield "dflop itself is licensed under MIT or Apache-2.0, at your option: see LICENSE-MIT and"
    yield "LICENSE-APACHE. Its library contains the crates listed here and the Rust standard library. The texts"
    yield "follow the list."
    if ijg:
        yield ""
        yield "This software is based in part on the work of the Independent JPEG Group"
        yield f"({', '.join(part.title for part in ijg)})."
    if mpl:
        yield ""
        yield "Under the Mozilla Public License 2.0 and unchanged. Their source form is available in the repositories"
        yield "named here, and as the published crates of these names and versions, which `cargo vendor` writes to a"
        yield "directory:"
        for part in mpl:
            yield f"    {part.title}: {part.origin}"


def document(parts: list[Part], target: str) -> str:
    """Renders the list of parts, then each text once with the parts that it is of."""
    numbers: dict[str, int] = {}
    texts: list[str] = []
    owners: list[list[str]] = []
    lines = [*header(parts, target), "", "=" * WIDTH, "List", "=" * WIDTH, ""]
    for part in parts:
        used = []
        for file, text in part.texts:
            number = numbers.setdefault(key(text), len(texts))
            if number == len(texts):
                texts.append(text)
                owners.append([])
            owners[number].append(f"{part.title}: {file}")
            used.append(f"[{number + 1}]")
        lines.append(f"{part.title}\n    license: {part.spdx}\n    origin: {part.origin}")
        lines.append(f"    texts: {' '.join(dict.fromkeys(used))}")
        if part.note:
            lines.append(f"    note: {part.note}")
    for number, (text, of) in enumerate(zip(texts, owners, strict=True), start=1):
        lines += [
            "",
            "=" * WIDTH,
            f"[{number}] {of[0]}",
            *(f"    {other}" for other in of[1:]),
            "=" * WIDTH,
            "",
            text,
        ]
    return "\n".join(lines) + "\n"


def write(target: str, out: Path) -> None:
    """Writes the document for a target.

    # Errors
    `LicenseError` if a license is missing; nothing is written then.
    """
    out.write_text(document(crate_parts(published(target)) + standard_library(), target), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", required=True, help="a target of rustc, such as aarch64-unknown-linux-gnu"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        write(arguments.target, arguments.out)
    except LicenseError as error:
        print(f"licenses: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
