"""The command ``vllm-arm-cpu``: ``doctor`` and ``bench``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

_USAGE = """\
usage: vllm-arm-cpu COMMAND [OPTION...]

commands:
  doctor [--json]   show what vLLM will run with on this machine, and what is wrong with it
  bench             measure the kernels on this machine

options:
  -h, --help        show this text; after a command, that command's
  --version         show the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 good, 1 something is wrong, 2 a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments else ""
    if name in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if name == "--version":
        print(_version())
        return 0
    if name not in ("doctor", "bench"):
        complaint = f"vllm-arm-cpu: unknown command {name!r}\n" if name else ""
        print(complaint + _USAGE, end="", file=sys.stderr)
        return 2
    command = _command(name)
    if command is None:
        print(f"vllm-arm-cpu: {name} is not part of this installation", file=sys.stderr)
        return 2
    return command(arguments)


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """``main`` of the module that a command lives in, None when the module is not there."""
    module_name = f"vllm_arm_cpu.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is missing inside the command is a fault to be seen, not an absent command.
        if error.name != module_name:
            raise
        return None
    command: Callable[[Sequence[str]], int] = module.main
    return command


def _version() -> str:
    try:
        return metadata.version("vllm-arm-cpu")
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
