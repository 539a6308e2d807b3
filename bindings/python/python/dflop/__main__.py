"""The command line: ``python -m dflop``, and the console script ``dflop``."""

import signal
import sys

from dflop import _native


def main() -> int:
    """Runs the command that the arguments of this process ask for and returns the exit status.

    0 is done, 1 is failed, 2 is misuse, 75 is a rank that ended because of another.
    """
    # No Python code runs while a command does, so nobody would see what Python's own handler takes note of.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.cli(sys.argv[1:], program=[sys.executable, *_flags(), "-m", "dflop"])


def _flags() -> list[str]:
    """Flags with which the interpreter finds this package where it was found now.

    A console script does not look for packages in the current directory, ``-m`` does unless it is told not to.
    """
    if sys.flags.isolated:
        return ["-I"]
    is_module = __name__ == "__main__"
    return [] if is_module and not sys.flags.safe_path else ["-P"]


if __name__ == "__main__":
    sys.exit(main())
