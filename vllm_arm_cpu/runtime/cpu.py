"""What the CPU is and what it can do, asked from the kernel at run time.

The tier follows the same rule as ``csrc/common/cpu.cc``; it is needed here
before the native library may be loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_arm_cpu import envs

# Lowest first; the position is the rank, and the value of enum vac_tier.
TIERS = ("none", "dotprod", "bf16_i8mm")


@dataclass(frozen=True)
class CpuInfo:
    """One machine's CPU; on machines with several core types, that of the first core.

    Attributes:
        machine: as ``uname -m`` says, ``"aarch64"`` on all that can run kernels.
        implementer, part: fields of MIDR_EL1, None where the kernel tells neither.
        name: the core's name such as ``"Neoverse V2"``, or what is known of it.
        features: names out of ``FEATURES``, in that order.
        tier: the highest of ``TIERS`` that the CPU can run.
    """

    machine: str
    implementer: int | None
    part: int | None
    name: str
    features: tuple[str, ...]
    tier: str


def detect(root: str | Path = "/", machine: str | None = None, hwcaps: tuple[int, int] | None = None) -> CpuInfo:
    """Describe the CPU; never fails, what is not known stays empty.

    Args:
        root: where /proc and /sys are looked up. With another root than ``/``
            the features come from its cpuinfo, not from this process.
        machine: instead of this machine's.
        hwcaps: AT_HWCAP and AT_HWCAP2, instead of this process's.
    """
    root = Path(root)
    machine = machine or os.uname().machine
    implementer, part = _midr(root)
    features: tuple[str, ...] = ()
    # The bits of AT_HWCAP mean something else on every architecture.
    if machine == "aarch64":
        if hwcaps is None and root == Path("/"):
            hwcaps = _hwcaps()
        features = _features_from_hwcaps(*hwcaps) if hwcaps else _features_from_cpuinfo(root)
    return CpuInfo(machine, implementer, part, _name(implementer, part), features, tier_of(features))


def tier_of(features: tuple[str, ...]) -> str:
    """The highest tier whose instructions are all among ``features``."""
    have = set(features)
    if have >= {"lse", "fp16", "dotprod", "fhm", "bf16", "i8mm"}:
        return "bf16_i8mm"
    return "dotprod" if have >= {"lse", "fp16", "dotprod"} else "none"


def select_tier(info: CpuInfo, wanted: str | None = None) -> str:
    """The tier to run: the CPU's best, or what VAC_TIER asks for.

    Raises:
        EnvError: VAC_TIER is above what the CPU can run.
    """
    wanted = envs.VAC_TIER if wanted is None else wanted
    if wanted == "auto":
        return info.tier
    if TIERS.index(wanted) > TIERS.index(info.tier):
        allowed = [tier for tier in TIERS[1:] if TIERS.index(tier) <= TIERS.index(info.tier)]
        raise envs.EnvError("VAC_TIER", wanted, f"auto{''.join(f', {tier}' for tier in allowed)} on this CPU")
    return wanted


# Feature -> (bits of AT_HWCAP, bits of AT_HWCAP2, names in /proc/cpuinfo). All must be there.
_FEATURES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "lse": (1 << 8, 0, ("atomics",)),
    "fp16": (1 << 9 | 1 << 10, 0, ("fphp", "asimdhp")),
    "dotprod": (1 << 20, 0, ("asimddp",)),
    "fhm": (1 << 23, 0, ("asimdfhm",)),
    "bf16": (0, 1 << 14, ("bf16",)),
    "i8mm": (0, 1 << 13, ("i8mm",)),
    "sve": (1 << 22, 0, ("sve",)),
    "sve2": (0, 1 << 1, ("sve2",)),
    "sme2": (0, 1 << 37, ("sme2",)),
}
FEATURES = tuple(_FEATURES)


def _features_from_hwcaps(cap: int, cap2: int) -> tuple[str, ...]:
    return tuple(name for name, (bits, bits2, _) in _FEATURES.items() if cap & bits == bits and cap2 & bits2 == bits2)


def _features_from_cpuinfo(root: Path) -> tuple[str, ...]:
    match = re.search(r"^Features\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    have = set(match.group(1).split()) if match else set()
    return tuple(name for name, (_, _, names) in _FEATURES.items() if have.issuperset(names))


def _hwcaps() -> tuple[int, int] | None:
    import ctypes

    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return None
    getauxval.argtypes = [ctypes.c_ulong]
    getauxval.restype = ctypes.c_ulong
    return getauxval(16), getauxval(26)  # AT_HWCAP, AT_HWCAP2


def _midr(root: Path) -> tuple[int | None, int | None]:
    cpus = root / "sys/devices/system/cpu"
    # Offline cores have no readable register, so the first that answers counts.
    try:
        names = sorted((entry.name for entry in cpus.glob("cpu[0-9]*")), key=lambda name: int(name[3:]))
    except (OSError, ValueError):
        names = []
    for name in names:
        text = _read(cpus / name / "regs/identification/midr_el1").strip()
        if text:
            try:
                midr = int(text, 16)
            except ValueError:
                continue
            return midr >> 24 & 0xFF, midr >> 4 & 0xFFF
    text = _read(root / "proc/cpuinfo")
    implementer = re.search(r"^CPU implementer\s*:\s*(0x[0-9a-fA-F]+)", text, re.MULTILINE)
    part = re.search(r"^CPU part\s*:\s*(0x[0-9a-fA-F]+)", text, re.MULTILINE)
    return int(implementer.group(1), 16) if implementer else None, int(part.group(1), 16) if part else None


def _name(implementer: int | None, part: int | None) -> str:
    if implementer is None or part is None:
        return "unknown"
    known = _PARTS.get((implementer, part))
    return known or f"{_IMPLEMENTERS.get(implementer, f'implementer {implementer:#04x}')} part {part:#05x}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_IMPLEMENTERS = {
    0x41: "Arm",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0x70: "Phytium",
    0xC0: "Ampere",
}

# Server cores, and what is found in developers' boards and virtual machines.
_PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD0D): "Cortex-A77",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD44): "Cortex-X1",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4A): "Neoverse E1",
    (0x41, 0xD4B): "Cortex-A78C",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD83): "Neoverse V3AE",
    (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD8E): "Neoverse N3",
    (0x42, 0x516): "ThunderX2",
    (0x43, 0x0AF): "ThunderX2",
    (0x46, 0x001): "A64FX",
    (0x48, 0xD01): "Kunpeng 920 (TSV110)",
    (0x48, 0xD02): "HiSilicon HIP09",
    (0x48, 0xD06): "HiSilicon HIP12",
    (0x4E, 0x004): "NVIDIA Carmel",
    (0x4E, 0x010): "NVIDIA Olympus",
    (0x6D, 0xD49): "Azure Cobalt 100 (Neoverse N2)",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1A",
    (0xC0, 0xAC5): "Ampere-1B",
}
