"""Every environment variable of the package, in one table: type, default, meaning.

``envs.VAC_PRELOAD`` reads and checks the variable at that moment. Nothing else
in the package reads ``VAC_*`` from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

PREFIX = "VAC_"

# Read by the project's scripts and tests only; the package ignores them without a warning.
_DEVELOPMENT = ("VAC_TEST_", "VAC_BUILD_", "VAC_ENV_", "VAC_EMULATED_CPU", "VAC_DEMO_MODEL")

# Set by the package for its own child processes, never by a user.
PRELOAD_PROBE = "_VAC_PRELOAD_PROBE"  # results of trying the preload libraries
USER_PRELOAD = "_VAC_USER_PRELOAD"  # LD_PRELOAD as the user had it
THREAD_PLAN = "_VAC_THREAD_PLAN"  # the thread plan that OMP_* was set from
RANK_PLAN = "_VAC_RANK_PLAN"  # where a rank's process and memory belong
RANK_PARENT = "_VAC_RANK_PARENT"  # the process whose main thread has started the rank
LOCAL_ENGINES = "_VAC_LOCAL_ENGINES"  # data-parallel engines on this machine
AFFINITY = "_VAC_AFFINITY"  # CPUs of an API server before it was kept off those that compute

if TYPE_CHECKING:
    VAC_BIND: str | tuple[int, ...] | tuple[tuple[int, ...], ...]
    VAC_BLOCK_UPSTREAM_OPS: bool
    VAC_CACHE_DIR: str
    VAC_DECODER: bool
    VAC_FRONTEND_CORES: int | None
    VAC_HUGE_PAGES: bool
    VAC_INT4: str
    VAC_INT4_KERNEL: str
    VAC_LIBRARY_DIR: str | None
    VAC_LINEAR: str
    VAC_LM_HEAD: str
    VAC_PLUGIN: bool
    VAC_PRELOAD: bool
    VAC_RANK_TIMEOUT: int
    VAC_THREADS: int | None
    VAC_TIER: str
    VAC_TP: str


class EnvError(ValueError):
    """A variable has a value that cannot be used.

    The message names the variable, the value and what is allowed.
    """

    def __init__(self, name: str, value: str, allowed: str) -> None:
        # The three arguments, not the message: so the error survives pickling between processes.
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} cannot be used; allowed: {self.allowed}"


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes:
        default: the text that an unset or empty variable stands for.
        allowed: what values are accepted, for error messages and documents.
        parse: from text to value; raises ValueError for anything else.
    """

    name: str
    default: str
    allowed: str
    meaning: str
    parse: Callable[[str], Any]


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of one variable of the table, parsed; an empty variable counts as unset.

    Args:
        environ: where to look; the process's environment by default.

    Raises:
        EnvError: the value is not among the allowed ones.
        KeyError: there is no such variable in the table.
    """
    variable = _BY_NAME[name]
    text = (os.environ if environ is None else environ).get(name, "").strip() or variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise EnvError(name, text, variable.allowed) from None


def __getattr__(name: str) -> Any:
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return get(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_BY_NAME])


def errors(environ: Mapping[str, str] | None = None) -> list[EnvError]:
    """Every variable whose value cannot be used, in the table's order."""
    found = []
    for variable in VARIABLES:
        try:
            get(variable.name, environ)
        except EnvError as error:
            found.append(error)
    if not found and (get("VAC_INT4", environ), get("VAC_INT4_KERNEL", environ)) == ("w4a16", "kleidiai"):
        found.append(EnvError("VAC_INT4_KERNEL", "kleidiai", "auto or vac where VAC_INT4=w4a16"))
    return found


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names in the environment that start with ``VAC_`` and mean nothing, sorted."""
    names = os.environ if environ is None else environ
    ours = (name for name in names if name.startswith(PREFIX) and not name.startswith(_DEVELOPMENT))
    return sorted(name for name in ours if name not in _BY_NAME)


def unknown_variables_warning(environ: Mapping[str, str] | None = None) -> str | None:
    """One line about all unknown variables with the nearest known names, or None."""
    unknown = unknown_variables(environ)
    if not unknown:
        return None
    import difflib

    parts = []
    for name in unknown:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        parts.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return f"unknown environment variables, ignored: {', '.join(parts)}"


def markdown_table() -> str:
    """The table as Markdown, for ``docs/environment.md``."""
    rows = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for variable in VARIABLES:
        default = f"`{variable.default}`" if variable.default else "not set"
        allowed = variable.allowed.replace("|", "\\|")
        rows.append(f"| `{variable.name}` | {default} | {allowed} | {variable.meaning} |")
    return "\n".join(rows) + "\n"


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Numbers of a list such as ``"0-3,8"``, in the order given, without repetitions.

    Raises:
        ValueError: the text is empty or not a list of numbers and ascending
            ranges below 65536.
    """
    numbers: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        # isdecimal() accepts the digits of every script; int() would, too.
        if not (first.isascii() and first.isdecimal()) or (dash and not (last.isascii() and last.isdecimal())):
            raise ValueError(f"{text!r} is not a list of numbers")
        low, high = int(first), int(last) if dash else int(first)
        if low > high or high >= 65536:
            raise ValueError(f"{part!r} is not an ascending range below 65536")
        numbers.update(dict.fromkeys(range(low, high + 1)))
    return tuple(numbers)


def format_cpu_list(numbers: tuple[int, ...] | list[int]) -> str:
    """The shortest list that names the same set: ``(0, 1, 2, 8)`` is ``"0-2,8"``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def _parse_bool(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _parse_choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _parse_directory(text: str) -> str | None:
    if not text:
        return None
    if not os.path.isdir(text):
        raise ValueError(text)
    return text


def _parse_new_directory(text: str) -> str:
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(text)
    return path


def _parse_threads(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 4096:
        raise ValueError(text)
    return int(text)


def _parse_seconds(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 3600:
        raise ValueError(text)
    return int(text)


def _parse_cores(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) > 64:
        raise ValueError(text)
    return int(text)


def _parse_bind(text: str) -> str | tuple[int, ...] | tuple[tuple[int, ...], ...]:
    if text in ("auto", "none"):
        return text
    lists = tuple(parse_cpu_list(part) for part in text.split("|"))
    if len(set().union(*lists)) < sum(map(len, lists)):
        raise ValueError("a CPU is in two lists")
    return lists[0] if len(lists) == 1 else lists


_BOOL = "1 or 0 (also true/false, yes/no, on/off)"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        "VAC_PLUGIN",
        "1",
        _BOOL,
        "0: step aside, vLLM runs as if this package were not installed.",
        _parse_bool,
    ),
    Variable(
        "VAC_PRELOAD",
        "1",
        _BOOL,
        "Preload mimalloc and the libgomp with LSE atomics into the processes that vLLM starts.",
        _parse_bool,
    ),
    Variable(
        "VAC_THREADS",
        "auto",
        "auto, or a number from 1 to 4096 and no more than the CPUs that this process may use",
        "Compute threads of the engine. auto: one per physical core that the process may use, less those set aside "
        "for the API server, within the cgroup's CPU quota.",
        _parse_threads,
    ),
    Variable(
        "VAC_BIND",
        "auto",
        "auto, none, or a list of CPUs such as 0-31,64 that this process may use; for several ranks one list each, "
        "without a CPU in common, such as 0-31|32-63",
        "CPUs of the compute threads, one thread on each in the order given. auto: one per physical core, ranks on "
        "NUMA nodes of their own. none: the threads are not pinned.",
        _parse_bind,
    ),
    Variable(
        "VAC_TP",
        "",
        "auto, or not set",
        "auto: `vllm serve` without --tensor-parallel-size starts one rank per NUMA node. The model's number of "
        "heads must be divisible by it.",
        _parse_choice("", "auto"),
    ),
    Variable(
        "VAC_RANK_TIMEOUT",
        "5",
        "seconds, from 1 to 3600",
        "How long a tensor-parallel rank waits in the middle of a step for another one that lives but does not come, "
        "before the engine ends with a message that names it. A rank whose process has ended is noticed at once.",
        _parse_seconds,
    ),
    Variable(
        "VAC_FRONTEND_CORES",
        "auto",
        "auto, or a number from 0 to 64 and less than the cores that this process may use",
        "Cores set aside for the API server, which is kept off those that compute. auto: one of 16 or more, unless "
        "VAC_THREADS or VAC_BIND choose what computes; with VAC_BIND the API server runs on what the list leaves.",
        _parse_cores,
    ),
    Variable(
        "VAC_HUGE_PAGES",
        "1",
        _BOOL,
        "Ask for transparent huge pages for weights and KV cache.",
        _parse_bool,
    ),
    Variable(
        "VAC_LINEAR",
        "auto",
        "auto, vac, onednn or torch",
        "Kernels of the dense linear layers. auto: the fastest for each shape, measured at the first start; vac: this "
        "package's; onednn: vLLM's compiled operators, where they are installed; torch: what torch does by itself.",
        _parse_choice("auto", "vac", "onednn", "torch"),
    ),
    Variable(
        "VAC_DECODER",
        "1",
        _BOOL,
        "Run decoder layers of Llama's family as native op lists, and ordinary steps the short way. 0: as vLLM wrote "
        "them, module by module.",
        _parse_bool,
    ),
    Variable(
        "VAC_INT4",
        "w4a8",
        "w4a8 or w4a16",
        "How layers with 4-bit weights multiply, whatever the checkpoint was made for. w4a8: activations are rounded "
        "to 8 bits, a scale for each token; w4a16: they stay as they are, slower and more exact.",
        _parse_choice("w4a8", "w4a16"),
    ),
    Variable(
        "VAC_INT4_KERNEL",
        "auto",
        "auto, vac or kleidiai (with VAC_INT4=w4a8)",
        "Kernels of those layers. auto: the fastest for each shape, measured at the first start; vac: this package's; "
        "kleidiai: KleidiAI's, out of torch's library.",
        _parse_choice("auto", "vac", "kleidiai"),
    ),
    Variable(
        "VAC_LM_HEAD",
        "bf16",
        "bf16 or int8",
        "The output layer (lm_head). bf16: as in the checkpoint; int8: rounded to 8 bits when it is loaded, half the "
        "memory traffic. A table that is tied to it stays as it is, for lookups.",
        _parse_choice("bf16", "int8"),
    ),
    Variable(
        "VAC_CACHE_DIR",
        "~/.cache/vllm-arm-cpu/tuning",
        "a directory, made when something is kept in it",
        "Where measured choices of kernels are kept from start to start.",
        _parse_new_directory,
    ),
    Variable(
        "VAC_TIER",
        "auto",
        "auto, dotprod or bf16_i8mm, and no higher than the CPU's own",
        "Instruction set of the kernels. A value below the CPU's best is for tests.",
        _parse_choice("auto", "dotprod", "bf16_i8mm"),
    ),
    Variable(
        "VAC_BLOCK_UPSTREAM_OPS",
        "0",
        _BOOL,
        "1: act as if vLLM's own compiled operators (vllm._C) were absent, for tests.",
        _parse_bool,
    ),
    Variable(
        "VAC_LIBRARY_DIR",
        "",
        "an existing directory",
        "Where libvac.so, its headers and the preload libraries lie, instead of inside the package; for development.",
        _parse_directory,
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
