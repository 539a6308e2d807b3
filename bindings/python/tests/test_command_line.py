"""Tests the command line as `python -m dflop` and as the script `dflop`."""

import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unittest
from pathlib import Path

import dflop

MODULE = [sys.executable, "-m", "dflop"]
SCRIPT = [str(Path(sysconfig.get_path("scripts"), "dflop"))]
VERSION = f"dflop {dflop.__version__}\n"
EXAMPLE = Path(__file__).resolve().parents[3] / "executor/examples/train-cpu.toml"
# Longer than anything here takes on a busy machine.
PATIENCE_SECONDS = 120


def archive(samples: int) -> bytes:
    """Writes a shard of this many samples of one text."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for sample in range(samples):
            text = f"the text of sample {sample}".encode()
            member = tarfile.TarInfo(f"{sample:06}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return shard.getvalue()


class InFolder(unittest.TestCase):
    """Test case whose commands run in an empty directory per test."""

    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        # Files that a command caches or generates are deleted with the test.
        self.environment = os.environ | {"TMPDIR": directory.name, "XDG_CACHE_HOME": directory.name}

    def run_program(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            args,
            check=False,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def dflop(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run_program(*MODULE, *args)

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*MODULE, *args], cwd=self.directory, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe
        )

        def end() -> None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()

        self.addCleanup(end)
        return process


class Commands(InFolder):
    def test_module_and_script_say_the_version(self) -> None:
        for program in (MODULE, SCRIPT):
            ran = self.run_program(*program, "--version")
            self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, VERSION, ""))

    def test_help_that_was_asked_for_is_output(self) -> None:
        ran = self.dflop("stream", "--help")
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertIn("Usage: dflop stream", ran.stdout)

    def test_without_a_command_help_is_an_error(self) -> None:
        ran = self.dflop()
        self.assertEqual((ran.returncode, ran.stdout), (2, ""))
        self.assertIn("Usage: dflop <COMMAND>", ran.stderr)

    def test_an_unknown_command_is_misuse_and_is_named(self) -> None:
        ran = self.dflop("balances")
        self.assertEqual((ran.returncode, ran.stdout), (2, ""))
        self.assertIn("'balances'", ran.stderr)

    def test_a_command_that_fails_names_the_file(self) -> None:
        ran = self.dflop("list", "missing.tar")
        self.assertEqual((ran.returncode, ran.stdout), (1, ""))
        self.assertIn("missing.tar", ran.stderr)

    def test_an_archive_is_indexed_and_streamed(self) -> None:
        (self.directory / "a.tar").write_bytes(archive(samples=5))
        indexed = self.dflop("index", "a.tar", "--json")
        self.assertEqual((indexed.returncode, json.loads(indexed.stdout)["samples"]), (0, 5), indexed.stderr)
        streamed = self.dflop("stream", "a.tar", "--decode", "raw", "--json")
        self.assertEqual(
            (streamed.returncode, json.loads(streamed.stdout)["samples"]), (0, 5), streamed.stderr
        )

    def test_a_file_name_that_is_no_text_is_found(self) -> None:
        name = os.fsdecode(b"a\xff.tar")
        (self.directory / name).write_bytes(archive(samples=1))
        ran = self.dflop("train", name)
        self.assertNotIn("No such file", ran.stderr)
        self.assertEqual(ran.returncode, 2, ran.stderr)


class Endings(InFolder):
    def test_ctrl_c_ends_a_command_that_waits(self) -> None:
        process = self.start("stream", "-", "--decode", "raw")
        assert process.stdin is not None
        # More than a pipe holds, so the command is reading when this returns, and waits for more.
        process.stdin.write(archive(samples=1000)[: 1 << 19])
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(PATIENCE_SECONDS), -signal.SIGINT)

    def test_an_interrupt_that_was_ignored_stays_ignored(self) -> None:
        code = (
            "import signal, sys; from dflop.__main__ import main; signal.signal(signal.SIGINT, signal.SIG_IGN);"
            "status = main(); print(signal.getsignal(signal.SIGINT).name); sys.exit(status)"
        )
        ran = self.run_program(sys.executable, "-c", code, "--version")
        self.assertEqual((ran.returncode, ran.stdout), (0, f"{VERSION}SIG_IGN\n"), ran.stderr)

    def test_a_reader_that_leaves_ends_the_command_silently(self) -> None:
        (self.directory / "a.tar").write_bytes(archive(samples=4000))
        process = self.start("list", "a.tar", "--json")
        assert process.stdout is not None and process.stderr is not None
        self.assertIn(b"000000", process.stdout.readline())
        process.stdout.close()
        self.assertEqual((process.wait(PATIENCE_SECONDS), process.stderr.read()), (0, b""))


class InProcess(InFolder):
    def test_commands_follow_one_another_in_one_process(self) -> None:
        code = (
            "from dflop._native import cli\n"
            "for args in (['--version'], ['train', 'missing.toml'], ['train', 'missing.toml'], ['--version']):\n"
            "    print(cli(args, program=['unused']), flush=True)"
        )
        ran = self.run_program(sys.executable, "-c", code)
        self.assertEqual((ran.returncode, ran.stdout), (0, f"{VERSION}0\n1\n1\n{VERSION}0\n"), ran.stderr)

    def test_other_threads_go_on_while_a_command_runs(self) -> None:
        (self.directory / "a.tar").write_bytes(archive(samples=5))
        os.mkfifo(self.directory / "fifo")
        # The command reads data that another thread writes after its start.
        code = (
            "import pathlib, threading\n"
            "from dflop._native import cli\n"
            "write = lambda: pathlib.Path('fifo').write_bytes(pathlib.Path('a.tar').read_bytes())\n"
            "threading.Timer(0.2, write).start()\n"
            "cli(['stream', 'pipe:cat fifo', '--set', 'store.allow=pipe', '--decode', 'raw', '--json'], program=['unused'])"
        )
        ran = self.run_program(sys.executable, "-c", code)
        self.assertEqual(json.loads(ran.stdout)["samples"], 5, ran.stderr)

    def test_a_program_without_a_name_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "`program` is empty"):
            dflop._native.cli(["--version"], program=[])


class Ranks(InFolder):
    """`dflop train` starts its ranks as processes of this interpreter."""

    def steps(self, program: list[str]) -> list[int]:
        # The search path is not needed.
        self.environment["PATH"] = ""
        ran = self.run_program(*program, "train", str(EXAMPLE), "--steps", "2", "--json")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return [json.loads(line)["step"] for line in ran.stdout.splitlines()]

    def test_a_module_starts_its_ranks(self) -> None:
        self.assertEqual(self.steps(MODULE), [0, 1])

    def test_ranks_of_a_script_are_of_the_same_package(self) -> None:
        # A directory of this name belongs to the user; the package is not searched there.
        (self.directory / "dflop").mkdir()
        (self.directory / "dflop/__init__.py").write_text("raise ImportError('another package')\n")
        self.assertEqual(self.steps(SCRIPT), [0, 1])

    def test_ctrl_c_ends_a_run_with_its_ranks_in_order(self) -> None:
        process = self.start("train", str(EXAMPLE), "--json")
        assert process.stdout is not None and process.stderr is not None
        self.assertIn(b'"step":0', process.stdout.readline())
        process.send_signal(signal.SIGINT)
        # The ranks hold the other ends of these pipes, which close when no rank is left.
        stderr = process.stderr.read().decode()
        self.assertEqual(process.wait(PATIENCE_SECONDS), 130, stderr)
        self.assertIn("stopped by SIGINT after step", stderr)

    def test_a_wrong_number_of_ranks_is_misuse(self) -> None:
        ran = self.dflop("train", str(EXAMPLE), "--local-ranks", "7")
        self.assertEqual((ran.returncode, ran.stdout), (2, ""))
        self.assertIn("--local-ranks 7", ran.stderr)


if __name__ == "__main__":
    unittest.main()
