"""Compiles every kernel of the CUDA device by NVRTC for four architectures, and checks registers, spills and shared memory.

Needs the compiler's library, which the Python package `nvidia-cuda-nvrtc` brings, and no device. The compiler's report
of each kernel is held against `executor/cuda/tests/budgets/*.toml`; `--record` writes the table anew, with the numbers
of registers rounded up to a multiple of 8. `--print norm` prints the reports of files with `norm` in their names.
"""

import argparse
import ctypes
import pathlib
import re
import sys
import tomllib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "executor/cuda/kernels"
BUDGETS = REPOSITORY / "executor/cuda/tests/budgets"
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
PAIRS = [["X=float", "Y=float"], ["X=bf16", "Y=bf16"], ["X=bf16", "Y=float"]]
SINGLE = [["X=float"], ["X=bf16"]]
WIDE = [pair + [f"WIDTH={width}"] for pair in PAIRS for width in (1, 8)]
HEADS = [[f"HEAD={head}"] for head in (64, 72, 80, 96, 128)]


def with_ranges(macros: list[list[str]]) -> list[list[str]]:
    """Attention with and without ranges of keys."""
    return macros + [definitions + ["RANGES=1"] for definitions in macros]


# Macros that the device compiles each file with.
MACROS = {
    "activation.cu": WIDE,
    "adamw.cu": PAIRS,
    "attention_backward.cu": with_ranges(HEADS),
    "attention_forward.cu": with_ranges(HEADS),
    "attention_general.cu": with_ranges(SINGLE),
    "attention_sinks.cu": SINGLE,
    "bias.cu": PAIRS,
    "clamped_gate.cu": SINGLE,
    "clip.cu": SINGLE,
    "column_sums.cu": PAIRS,
    "copy_ranges.cu": SINGLE + [["X=double"], ["X=u32"]],
    "cross_entropy.cu": [single + [f"WIDTH={width}"] for single in SINGLE for width in (1, 8)],
    "elementwise.cu": WIDE,
    "experts.cu": [pair + [f"SCORES={scores}"] for pair in PAIRS for scores in range(4)],
    "gate.cu": WIDE,
    "gather_scatter.cu": PAIRS,
    "head_norm.cu": SINGLE,
    "head_norm_backward.cu": [pair + [f"WIDTH={width}"] for pair in PAIRS[:2] for width in (1, 8)],
    "latent_heads.cu": [single + [f"INTERLEAVED={pairs}"] for single in SINGLE for pairs in (0, 1)],
    "layer_norm.cu": WIDE,
    "layer_scale.cu": PAIRS,
    "losses.cu": [[]],
    "rms_norm.cu": WIDE,
    "rope.cu": SINGLE,
    "transpose.cu": PAIRS,
    "vocab_parallel_cross_entropy.cu": SINGLE,
}


class Compiler:
    """NVRTC, through its C interface."""

    def __init__(self, library: pathlib.Path) -> None:
        # the compiler opens this one by its name alone
        self.builtins = [ctypes.CDLL(str(path)) for path in library.parent.glob("libnvrtc-builtins.so.*")]
        self.nvrtc = ctypes.CDLL(str(library))
        headers = sorted(KERNELS.glob("*.cuh"))
        self.names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
        self.texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check("nvrtcVersion", self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def check(self, call: str, status: int) -> None:
        if status != 0:
            raise SystemExit(f"{call} failed with status {status}")

    def report(self, file: str, macros: list[str], architecture: str) -> list[dict]:
        """Returns the resources of every kernel of a file."""
        program = ctypes.c_void_p()
        source = (KERNELS / file).read_bytes()
        arguments = (source, file.encode(), len(self.names), self.texts, self.names)
        self.check("nvrtcCreateProgram", self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), *arguments))
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
        options = [option.encode() for option in options + [f"-D{macro}" for macro in macros]]
        status = self.nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.check("nvrtcGetProgramLogSize", self.nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self.check("nvrtcGetProgramLog", self.nvrtc.nvrtcGetProgramLog(program, log))
        text = log.value.decode()
        if status != 0:
            raise SystemExit(f"could not compile {file} with {macros} for {architecture}:\n{text}")
        self.check("nvrtcGetCUBINSize", self.nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        if size.value == 0:
            raise SystemExit(f"{file}: no machine code for {architecture}")
        return [resources(kernel) for kernel in re.split(r"Compiling entry function ", text)[1:]]


def resources(report: str) -> dict:
    """Reads the compiler's report of one kernel."""
    number = lambda pattern: sum(int(found) for found in re.findall(pattern, report))
    return {
        "kernel": re.match(r"'(\w+)'", report)[1],
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill (?:stores|loads)"),
        "shared_bytes": number(r"(\d+) bytes smem"),
    }


def find_library(folder: pathlib.Path | None) -> pathlib.Path | None:
    """Returns the compiler's library: in a folder, or of the package of this Python."""
    folders = [folder] if folder else [pathlib.Path(path, "nvidia/cu13/lib") for path in sys.path if path]
    found = [path / "libnvrtc.so.13" for path in folders if (path / "libnvrtc.so.13").is_file()]
    return found[0] if found else None


def rows(compiler: Compiler, part: str = "") -> list[tuple]:
    """Compiles kernels of files with this part of a name: file, macros, architecture, and the resources of a kernel."""
    files = sorted(path.name for path in KERNELS.glob("*.cu"))
    if files != sorted(MACROS):
        raise SystemExit(f"this script has no macros for {sorted(set(files) ^ set(MACROS))}")
    return [
        (file, " ".join(macros), architecture, kernel)
        for file in files
        if part in file
        for macros in MACROS[file]
        for architecture in ARCHITECTURES
        for kernel in compiler.report(file, macros, architecture)
    ]


def record(measured: list[tuple], version: str) -> None:
    """Writes one line per kernel: most registers on each architecture."""
    by_kernel: dict[tuple, dict] = {}
    for file, macros, architecture, kernel in measured:
        place = by_kernel.setdefault((file, macros, kernel["kernel"]), {"shared": kernel["shared_bytes"]})
        place[architecture] = -(-kernel["registers"] // 8) * 8
    lines = [f"# Resources that kernels may use, by the report of NVRTC {version}: most registers by architecture, and",
             "# static shared memory in bytes. None may spill. `make test-kernels` checks it."]
    for (file, macros, kernel), budget in by_kernel.items():
        registers = ", ".join(f"{architecture} = {budget[architecture]}" for architecture in ARCHITECTURES)
        lines += ["", "[[kernel]]", f'name = "{kernel}"', f'file = "{file}"', f'macros = "{macros}"',
                  f"registers = {{ {registers} }}", f"shared_bytes = {budget['shared']}"]
    BUDGETS.mkdir(exist_ok=True)
    (BUDGETS / "kernels.toml").write_text("\n".join(lines) + "\n")


def exceeded(measured: list[tuple]) -> list[str]:
    """Returns what is over its budget, or has none."""
    table = tomllib.loads((BUDGETS / "kernels.toml").read_text())["kernel"]
    budgets = {(budget["file"], budget["macros"], budget["name"]): budget for budget in table}
    failures = []
    for file, macros, architecture, kernel in measured:
        name = f"{kernel['kernel']} ({file}, {macros}, {architecture})"
        budget = budgets.get((file, macros, kernel["kernel"]))
        if budget is None:
            failures.append(f"{name}: no budget; `--record` writes one")
            continue
        if kernel["spill_bytes"]:
            failures.append(f"{name}: {kernel['spill_bytes']} bytes spilled")
        if kernel["registers"] > budget["registers"][architecture]:
            failures.append(f"{name}: {kernel['registers']} registers, at most {budget['registers'][architecture]}")
        if kernel["shared_bytes"] > budget["shared_bytes"]:
            failures.append(f"{name}: {kernel['shared_bytes']} bytes shared, at most {budget['shared_bytes']}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library-dir", type=pathlib.Path, help="folder of libnvrtc.so.13; default: this Python's packages")
    parser.add_argument("--record", action="store_true", help="write the table of budgets")
    parser.add_argument("--print", metavar="PART", help="print reports of files with this part of a name, and check nothing")
    arguments = parser.parse_args()
    library = find_library(arguments.library_dir)
    if library is None:
        print("skipped: no libnvrtc.so.13; install nvidia-cuda-nvrtc, or name its folder by --library-dir")
        return 0
    compiler = Compiler(library)
    if arguments.print:
        for file, macros, architecture, kernel in rows(compiler, arguments.print):
            figures = f"{kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled"
            shared = f"{kernel['shared_bytes']} bytes of shared memory"
            print(f"{architecture} {file} {macros}: {kernel['kernel']}: {figures}, {shared}")
        return 0
    measured = rows(compiler)
    if arguments.record:
        record(measured, compiler.version())
    failures = exceeded(measured)
    print("\n".join(failures) or f"{len(measured)} kernels are within their budgets, by NVRTC {compiler.version()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
