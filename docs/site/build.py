"""Builds the documentation site: pages of the documents, pages of the API, and the search index.

    python docs/site/build.py --native target/debug/lib_native.so --out target/site [--rustdoc target/doc]

``make site`` calls it. Any warning is an error: a link, an anchor or a reference that leads nowhere, a
document without a place in the navigation, a public name without a page.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import api_names
import api_pages
import page
import themed_image
from repository import DOCUMENTS, GENERATOR, PACKAGE, documents

CONFIGURATION = GENERATOR / "zensical.toml"
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"(<td\b[^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
COLOR = re.compile(r"\x1b\[[\d;]*m")
# The navigation needs whole addresses for what is no page; they become relative ones, for a site on any host.
RUST_ADDRESS = "https://dflop.github.io/dflop/rust/"
RUST_PAGE = "rust/dflop_loader/index.html"


def main() -> int:
    """Builds the site; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds the documentation site.")
    parser.add_argument("--native", type=Path, required=True, help="the compiled part of the Python package")
    parser.add_argument("--out", type=Path, required=True, help="directory of the site, which is replaced")
    parser.add_argument(
        "--rustdoc", type=Path, help="directory that `cargo doc` has written, which is copied"
    )
    options = parser.parse_args()
    work = options.out.resolve().parent / "site-work"
    try:
        package = staged_package(options.native, work)
        sys.path.insert(0, str(package))
        places = staged_pages(work / "pages", package)
        check_navigation(places)
        built = generate(work, package)
    except (page.PageError, api_names.ApiError, SiteError) as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    relate_rust_links(built)
    label_cells(built)
    if options.rustdoc:
        shutil.copytree(options.rustdoc, built / "rust", dirs_exist_ok=True)
    else:
        write_rust_page(built)
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.move(built, options.out)
    print(f"site: {len(places)} pages in {options.out}")
    return 0


class SiteError(Exception):
    """The site cannot be built; the message has the reason."""


def staged_package(native: Path, work: Path) -> Path:
    """Copies the Python package with its compiled part; returns the directory to import it from."""
    if not native.is_file():
        raise SiteError(f"there is no {native}: `cargo build -p dflop-python` makes it")
    shutil.rmtree(work, ignore_errors=True)
    package = work / "package"
    shutil.copytree(PACKAGE, package / "dflop", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(native, package / "dflop/_native.abi3.so")
    return package


def staged_pages(pages: Path, package: Path) -> list[Path]:
    """Writes the source of every page; returns their places."""
    places = [page.written(document, pages) for document in documents()]
    for drawing in DOCUMENTS.rglob("*.svg"):
        place = pages / drawing.relative_to(DOCUMENTS)
        if GENERATOR in drawing.parents:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawing, place)
        if themed_image.is_themed(drawing):
            themed_image.write_variants(drawing, place.parent)
    shutil.copytree(GENERATOR / "assets", pages / "assets")
    shutil.copytree(GENERATOR / "overrides", pages.parent / "overrides")
    return places + api_pages.write(pages, package)


def check_navigation(places: list[Path]) -> None:
    """Compares the navigation with the pages.

    Raises:
        SiteError: a page has no place in the navigation, or an entry has no page.
    """
    listed = set(_entries(tomllib.loads(CONFIGURATION.read_text(encoding="utf-8"))["project"]["nav"]))
    staged = {place.as_posix() for place in places}
    if listed != staged:
        raise SiteError(
            f"the navigation in {CONFIGURATION} and the pages differ in {sorted(listed ^ staged)}"
        )


def _entries(nav: object) -> list[str]:
    """Files of a navigation, at any depth; addresses are left out."""
    if isinstance(nav, str):
        return [] if nav.startswith(("http", "rust/", "/")) else [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [entry for part in parts for entry in _entries(part)]


def generate(work: Path, package: Path) -> Path:
    """Runs the generator; returns the directory of the site.

    Raises:
        SiteError: there are warnings.
    """
    configuration = CONFIGURATION.read_text(encoding="utf-8").replace("PACKAGE", package.as_posix())
    (work / "zensical.toml").write_text(
        configuration.replace("GENERATOR", GENERATOR.as_posix()), encoding="utf-8"
    )
    paths = [str(package), str(GENERATOR), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, check=False, cwd=work, env=environment, capture_output=True, text=True)
    output = COLOR.sub("", done.stdout + done.stderr)
    if done.returncode or "warning" in output.lower():
        raise SiteError(f"the generator has warnings:\n{output}")
    return work / "html"


def relate_rust_links(site: Path) -> None:
    """Makes the links to the Rust documentation relative to each page."""
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        up = "../" * (len(file.relative_to(site).parts) - 1)
        file.write_text(text.replace(f'"{RUST_ADDRESS}', f'"{up}rust/'), encoding="utf-8")


def label_cells(site: Path) -> None:
    """Gives every table cell the heading of its column, which pages show beside the cell on a phone."""
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        file.write_text(TABLE.sub(lambda found: labeled(found[0]), text), encoding="utf-8")


def labeled(table: str) -> str:
    """Adds `data-label` to the cells of a table without classes, and makes one element of their contents."""
    labels = [html.escape(html.unescape(TAG.sub("", head))) for head in HEAD.findall(table)]

    def row(found: re.Match[str]) -> str:
        names = iter(labels)

        def cell(found: re.Match[str]) -> str:
            contents = f"<span>{found[2]}</span>" if found[2].strip() else ""
            return f'{found[1]} data-label="{next(names, "")}">{contents}</td>'

        return CELL.sub(cell, found[0])

    return ROW.sub(row, table)


def write_rust_page(site: Path) -> None:
    """Writes a page in place of the Rust documentation, which leads to the crates on the code host."""
    target = site / RUST_PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "This site was built without the Rust documentation: <code>make site RUSTDOC=1</code> includes it."
    target.write_text(f"<!doctype html><title>dflop for Rust</title><p>{text}</p>\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
