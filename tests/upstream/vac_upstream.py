"""pytest plugin for vLLM's own tests: which of them run, on our platform and kernels.

It lies on PYTHONPATH and is loaded with -p; whitelist.toml beside it says what
runs and why the rest does not.
"""

from __future__ import annotations

import collections
import fnmatch
import os
import re
import tomllib
import weakref
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import vac_cpu_attention
import vac_cpu_linear
import vac_cpu_sampling

WHITELIST = tomllib.loads(Path(__file__).with_name("whitelist.toml").read_text())
EMULATED = "VAC_EMULATED_CPU" in os.environ
_left_out: collections.Counter[str] = collections.Counter()


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as ``"0.33.0+empty"``."""
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2])


def of_this_version(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are about the vLLM that is installed."""
    here = release(metadata.version("vllm"))
    return [
        entry
        for entry in entries
        if release(entry.get("since", "0.0")) <= here and ("before" not in entry or here < release(entry["before"]))
    ]


RUN = {entry["file"]: entry for entry in of_this_version(WHITELIST["run"])}
LEFT_OUT = [pattern for entry in of_this_version(WHITELIST["left_out"]) for pattern in entry["files"]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite",
        choices=("normal", "whole"),
        default="whole",
        help="the normal suite's cases, or all; under emulation no more than whitelist.toml says",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The platform under test must be ours: no test would notice another one."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    from vllm_arm_cpu import compat, layers
    from vllm_arm_cpu.platform import ArmCpuPlatform

    assert type(current_platform) is ArmCpuPlatform, f"vLLM runs on {type(current_platform).__name__}"
    # What the worker does before it builds a model: layers and samplers that tests make are ours.
    layers.register()
    compat.apply()
    current_platform.register_triton_kernel_overrides()
    # What a model class can do is asked in a process of its own, for the sake of GPUs: a minute under emulation.
    registry._run_in_subprocess = lambda function: function()
    for operators in (vac_cpu_attention, vac_cpu_linear, vac_cpu_sampling):
        operators.install()
    check_complete(config.rootpath)
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        config.args = [str(config.rootpath / file) for file in RUN]


def check_complete(root: Path) -> None:
    """Each file in the folders that whitelist.toml covers is run, or left out with a reason; no entry is stale."""
    files = {
        str(path.relative_to(root)) for folder in WHITELIST["folders"] for path in (root / folder).rglob("test_*.py")
    } | {file for file in RUN if (root / file).exists()}
    missing = sorted(file for file in files - set(RUN) if not any(fnmatch.fnmatch(file, p) for p in LEFT_OUT))
    stale = sorted({*RUN} - files) + [pattern for pattern in LEFT_OUT if not fnmatch.filter(files, pattern)]
    if missing or stale:
        raise pytest.UsageError(
            f"whitelist.toml does not say what becomes of {missing}, and names what vLLM no longer has: {stale}"
        )


def left_out(entry: dict[str, Any], matches: Callable[[str], bool]) -> str | None:
    """Why a pattern of `left_out` takes a case out on this machine, or None."""
    if not matches(entry["cases"]):
        return None
    if entry.get("emulated", False) and not EMULATED:
        return None
    cores = entry.get("cores", 0)
    if cores and len(os.sched_getaffinity(0)) >= cores:
        return None
    reason = entry["reason"]
    return f"{reason}: {cores} cores and more" if cores else reason


def case_of(item: pytest.Item) -> tuple[str, str]:
    """File and case of an item, such as ``("tests/v1/core/test_output.py", "test_a[1]")``."""
    file, _, case = item.nodeid.partition("::")
    return file[file.index("tests/") :] if "tests/" in file else file, case


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what whitelist.toml leaves out; each of its patterns must match something."""
    suite = config.getoption("--suite")
    patterns = {
        (file, pattern): 0
        for file, entry in RUN.items()
        for pattern in (
            *(out["cases"] for out in of_this_version(entry.get("left_out", []))),
            *entry.get("normal", ()),
            *entry.get("emulated", ()),
            *entry.get("unskip", ()),
        )
    }

    def matches(pattern: str) -> bool:
        found = re.search(pattern, case) is not None
        patterns[file, pattern] += found
        return found

    kept, dropped, files = [], [], set()
    for item in items:
        file, case = case_of(item)
        if file not in RUN:
            raise pytest.UsageError(f"{file} is not in whitelist.toml")
        files.add(file)
        entry = RUN[file]
        reasons = [reason for out in of_this_version(entry.get("left_out", [])) if (reason := left_out(out, matches))]
        normal = "normal" not in entry or any([matches(pattern) for pattern in entry["normal"]])
        emulated = "emulated" not in entry or any([matches(pattern) for pattern in entry["emulated"]])
        # It takes a second under emulation, and ends the engines of fixtures of a module, which are in this process.
        item.add_marker("skip_global_cleanup")
        if any([matches(pattern) for pattern in entry.get("unskip", ())]):
            item.own_markers = [marker for marker in item.own_markers if marker.name != "skipif"]
        if not reasons and suite == "whole" and EMULATED and not normal and not emulated:
            reasons = ["takes too long under emulation: runs on an Arm machine"]
        if reasons:
            _left_out[f"{file}: {reasons[0]}"] += 1
            dropped.append(item)
        elif suite == "normal" and not normal:
            dropped.append(item)
        else:
            kept.append(item)
            vac_cpu_attention.prepare(item)
    # A single case was asked for: the other patterns have nothing to match.
    if not any("::" in argument for argument in config.args):
        stale = [f"{file}: {pattern}" for (file, pattern), count in patterns.items() if not count and file in files]
        if stale:
            raise pytest.UsageError("patterns of whitelist.toml that match no case: " + "; ".join(stale))
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was left out, as skipped tests are named."""
    for reason, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin without the default device that a test before has set: transformers would want accelerate for it."""
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _forget_caches() -> Any:
    """Caches of a test go with it."""
    yield
    vac_cpu_attention.forget()


_engines: list[weakref.ref[Any]] = []
"""Those that the test that runs has made, not its fixtures."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """End a test's engines with it, also where the traceback of a failure keeps them.

    vLLM's tests leave that to the process that an engine has there. Here it is this one, and
    an engine that is collected later takes the process groups of the next one with it.
    """
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine.llm_engine import LLMEngine

    original = LLMEngine.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _engines.append(weakref.ref(self))
        original(self, *args, **kwargs)

    LLMEngine.__init__ = init
    try:
        return (yield)
    finally:
        LLMEngine.__init__ = original
        if _engines:
            for reference in _engines:
                engine = reference()
                if engine is not None and hasattr(engine, "engine_core"):
                    engine.engine_core.shutdown()
            _engines.clear()
            cleanup_dist_env_and_memory()
