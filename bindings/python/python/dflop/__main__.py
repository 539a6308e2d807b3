"""The command line: ``python -m dflop``, and the console script ``dflop``."""

import signal
import sys

from dflop import _native


def main() -> int:
    """Runs the command in the arguments of this process and returns the exit status.

    0 is success, 1 failure, 2 misuse, 75 a rank that ended because another rank failed.
    """
    # Python's handler only sets a flag, and no Python code runs during a command that would check it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    if arguments[:1] == ["describe"] and not {"-h", "--help"} & set(arguments):
        from dflop._description import command

        options = command.parse(arguments[1:])
        status = command.run(options)
        if status != 0:
            return status
        # What the description has, as other commands read it.
        arguments = ["models", f"--model={options.out}"]
    return _native.cli(arguments, program=[sys.executable, *_flags(), "-m", "dflop"])


def _flags() -> list[str]:
    """Returns the flags with which another interpreter finds this package in the same place.

    A console script does not look for packages in the current directory; ``-m`` does, unless ``-P`` is given.
    """
    if sys.flags.isolated:
        return ["-I"]
    is_module = __name__ == "__main__"
    return [] if is_module and not sys.flags.safe_path else ["-P"]


if __name__ == "__main__":
    sys.exit(main())
