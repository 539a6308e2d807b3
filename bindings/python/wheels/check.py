"""Checks the contents of a wheel: tags, licenses, and a library that runs where the tag promises.

    python bindings/python/wheels/check.py --target x86_64-unknown-linux-gnu target/wheels/dflop-0.1.0-….whl

Needs auditwheel and abi3audit, second opinions on the C library and on the stable ABI of Python.
"""

import argparse
import email
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import licenses
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# The oldest C library, and the libraries that are part of it.
GLIBC = (2, 17)
SYSTEM_LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|libgcc_s|ld-linux-[\w-]+)\.so\.\d+")
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LICENSES = ("LICENSE-APACHE", "LICENSE-MIT", "LICENSES-THIRD-PARTY.txt")


class CheckError(Exception):
    """What is wrong with a wheel."""


def expect(is_met: bool, message: str) -> None:
    """Raises `CheckError` if a condition is not met."""
    if not is_met:
        raise CheckError(message)


def machine_directories() -> dict[str, str]:
    """Returns directories of this machine, which a wheel must not name, with their names in it."""
    cargo_home = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    sources = {str(path): "crates" for path in sorted(Path(cargo_home, "registry/src").glob("*"))}
    return sources | {str(licenses.ROOT): "dflop"}


def check_tags(wheel: Path, architecture: str) -> None:
    """Checks the file name: the stable ABI of 3.11, and the oldest C library."""
    python, abi, platforms = wheel.name.removesuffix(".whl").split("-")[-3:]
    # Two names of one platform, in any order.
    wanted = {f"manylinux_2_17_{architecture}", f"manylinux2014_{architecture}"}
    expect(
        (python, abi, set(platforms.split("."))) == ("cp311", "abi3", wanted),
        f"the name {wheel.name} does not have the tags cp311-abi3-{'.'.join(sorted(wanted))}",
    )


def check_licenses(wheel: zipfile.ZipFile, target: str) -> None:
    """Checks that all license files are there and declared, and list each linked crate with its texts."""
    names = set(wheel.namelist())
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    declared = email.message_from_bytes(wheel.read(f"{info}/METADATA")).get_all("License-File") or []
    expect(sorted(declared) == sorted(LICENSES), f"METADATA declares {declared}, expected {list(LICENSES)}")
    for name in declared:
        expect(f"{info}/licenses/{name}" in names, f"{info}/licenses/{name} is declared and missing")
    document = wheel.read(f"{info}/licenses/{LICENSES[2]}").decode()
    for crate in licenses.published(target):
        spdx = (crate["license"] or "").replace("/", " OR ")
        title = re.escape(f"{crate['name']} {crate['version']}")
        entry = rf"^{title}\n    license: {re.escape(spdx)}\n.*\n    texts: "
        listed = re.search(rf"{entry}((?:\[\d+\] ?)+)$", document, re.MULTILINE)
        expect(
            listed is not None,
            f"{LICENSES[2]} does not list {crate['name']} {crate['version']} with its license",
        )
        for number in listed.group(1).split():
            expect(f"\n{number} " in document, f"{LICENSES[2]} has no text {number} of {crate['name']}")
    expect("based in part on the work of the Independent JPEG Group" in document, "no mention of the IJG")


def check_library(content: bytes, architecture: str) -> None:
    """Checks the machine of a library, the libraries that it needs, and the versions of their symbols."""
    library = ELFFile(io.BytesIO(content))
    expect(
        library.header.e_machine == MACHINES[architecture], f"the library is for {library.header.e_machine}"
    )
    dynamic = library.get_section_by_name(".dynamic")
    needed = [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]
    others = [name for name in needed if not SYSTEM_LIBRARIES.fullmatch(name)]
    expect(not others, f"the library needs {others}, which are no part of a system")
    expect(library.get_section_by_name(".debug_info") is None, "the library has debug information")
    newest = (0,)
    for section in library.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    number = version.name.removeprefix("GLIBC_")
                    if number != version.name:
                        newest = max(newest, tuple(map(int, number.split("."))))
    expect((0,) < newest <= GLIBC, f"the library needs glibc {newest}, the tag promises {GLIBC}")


def check_contents(wheel: zipfile.ZipFile, architecture: str) -> None:
    """Checks the library, and that no file names a directory of this machine."""
    libraries = [name for name in wheel.namelist() if name.endswith(".so")]
    expect(libraries == ["dflop/_native.abi3.so"], f"expected one library, found {libraries}")
    check_library(wheel.read(libraries[0]), architecture)
    for name in wheel.namelist():
        content = wheel.read(name)
        for directory in machine_directories():
            expect(
                directory.encode() not in content, f"{name} names {directory}, a directory of this machine"
            )


def second_opinions(wheel: Path) -> None:
    """Runs auditwheel and abi3audit."""
    programs = Path(sys.executable).parent
    shown = subprocess.run(
        [programs / "auditwheel", "show", wheel], capture_output=True, text=True, check=False
    )
    expect(
        shown.returncode == 0 and re.search(r'"manylinux_2_(5|12|17)_', shown.stdout) is not None,
        f"auditwheel does not find {wheel.name} fit for manylinux_2_17:\n{shown.stdout}{shown.stderr}",
    )
    audited = subprocess.run(
        [programs / "abi3audit", "--strict", wheel], capture_output=True, text=True, check=False
    )
    expect(audited.returncode == 0, f"abi3audit refuses {wheel.name}:\n{audited.stdout}{audited.stderr}")


def check(path: Path, target: str) -> None:
    """Checks a wheel that was built for a target of rustc.

    # Errors
    `CheckError` with the first thing that is wrong.
    """
    architecture = target.partition("-")[0]
    expect(architecture in MACHINES, f"no wheels are made for {target}")
    check_tags(path, architecture)
    with zipfile.ZipFile(path) as wheel:
        check_licenses(wheel, target)
        check_contents(wheel, architecture)
    second_opinions(path)
    print(
        f"checked {path.name}: {path.stat().st_size / 1e6:.1f} MB, "
        f"licenses of {len(licenses.published(target))} crates"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--target", required=True, help="the target of rustc that it was built for")
    arguments = parser.parse_args()
    try:
        check(arguments.wheel, arguments.target)
    except CheckError as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
