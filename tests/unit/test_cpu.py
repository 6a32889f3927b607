"""vllm_arm_cpu.runtime.cpu: names, features, tiers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit import machines
from vllm_arm_cpu.envs import EnvError
from vllm_arm_cpu.runtime import cpu

# AT_HWCAP and AT_HWCAP2 in the manner of real machines.
A72 = (0x8FF, 0)
N1 = (0x1FFFFF, 0)
V1 = (0x7FFFFFFF, 0x60E5)
V2 = (0xFFFFFFFF, 0x3E7FF)


def info(hwcaps: tuple[int, int], root: Path, machine: str = "aarch64") -> cpu.CpuInfo:
    return cpu.detect(root, machine=machine, hwcaps=hwcaps)


@pytest.mark.parametrize(
    ("hwcaps", "tier"), [(A72, "none"), (N1, "dotprod"), (V1, "bf16_i8mm"), (V2, "bf16_i8mm"), ((0, 0), "none")]
)
def test_tier_from_hwcaps(hwcaps: tuple[int, int], tier: str, tmp_path: Path) -> None:
    assert info(hwcaps, tmp_path).tier == tier


def test_tier_needs_every_feature() -> None:
    full = ("lse", "fp16", "dotprod", "fhm", "bf16", "i8mm")
    assert cpu.tier_of(full) == "bf16_i8mm"
    for missing in full:
        expected = "dotprod" if missing in ("fhm", "bf16", "i8mm") else "none"
        assert cpu.tier_of(tuple(name for name in full if name != missing)) == expected


def test_both_half_precision_bits_are_needed(tmp_path: Path) -> None:
    assert "fp16" not in info((1 << 9, 0), tmp_path).features
    assert "fp16" not in info((1 << 10, 0), tmp_path).features
    assert "fp16" in info((3 << 9, 0), tmp_path).features


def test_sme2_lies_in_the_upper_half(tmp_path: Path) -> None:
    assert info((0, 1 << 37), tmp_path).features == ("sme2",)


def test_other_architectures_have_no_features(tmp_path: Path) -> None:
    # The same bits mean something else there.
    found = info(V2, tmp_path, machine="x86_64")
    assert (found.features, found.tier, found.machine) == ((), "none", "x86_64")


@pytest.mark.parametrize(
    ("midr", "name"),
    [
        (0x410FD4F0, "Neoverse V2"),
        (0x411FD401, "Neoverse V1"),
        (0x410FD490, "Neoverse N2"),
        (0x413FD0C1, "Neoverse N1"),
        (0x410FD840, "Neoverse V3"),
        (0x410FD083, "Cortex-A72"),
        (0x481FD010, "Kunpeng 920 (TSV110)"),
        (0xC00FAC30, "Ampere-1"),
        (0x410FEEE0, "Arm part 0xeee"),
        (0x990FD010, "implementer 0x99 part 0xd01"),
    ],
)
def test_names(midr: int, name: str, tmp_path: Path) -> None:
    machine = machines.without_numa()
    machine.midr = midr
    found = cpu.detect(machines.write(machine, tmp_path), machine="aarch64")
    assert found.name == name
    assert (found.implementer, found.part) == (midr >> 24, midr >> 4 & 0xFFF)


def test_cpuinfo_serves_without_midr(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nFeatures\t: fp asimd atomics fphp asimdhp asimddp asimdfhm sve bf16 i8mm\n"
        "CPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    )
    found = cpu.detect(tmp_path, machine="aarch64")
    assert found.name == "Neoverse V1"
    assert found.features == ("lse", "fp16", "dotprod", "fhm", "bf16", "i8mm", "sve")
    assert found.tier == "bf16_i8mm"


def test_offline_cores_have_no_register(tmp_path: Path) -> None:
    machine = machines.without_numa()
    machine.offline = [0, 1]
    assert cpu.detect(machines.write(machine, tmp_path), machine="aarch64").name == "Neoverse V2"


def test_empty_root(tmp_path: Path) -> None:
    found = cpu.detect(tmp_path, machine="aarch64")
    assert found == cpu.CpuInfo("aarch64", None, None, "unknown", (), "none")


def test_select_tier(tmp_path: Path) -> None:
    new, old = info(V2, tmp_path), info(N1, tmp_path)
    assert cpu.select_tier(new, "auto") == "bf16_i8mm"
    assert cpu.select_tier(new, "dotprod") == "dotprod"
    assert cpu.select_tier(old, "auto") == "dotprod"
    with pytest.raises(EnvError, match="VAC_TIER='bf16_i8mm' cannot be used; allowed: auto, dotprod on this CPU"):
        cpu.select_tier(old, "bf16_i8mm")
    with pytest.raises(EnvError, match="allowed: auto on this CPU"):
        cpu.select_tier(info(A72, tmp_path), "dotprod")


@pytest.mark.skipif(os.uname().machine != "aarch64", reason="asks the running CPU")
def test_agrees_with_the_native_library() -> None:
    library = pytest.importorskip("vllm_arm_cpu.native.library")
    try:
        lib = library.load()
    except library.LibraryError as error:
        pytest.skip(str(error))
    found = cpu.detect()
    assert cpu.TIERS[lib.vac_cpu_tier()] == found.tier
    bits = dict(zip(("lse", "fp16", "dotprod", "fhm", "bf16", "i8mm", "sve", "sve2", "sme2"), range(9), strict=True))
    assert lib.vac_cpu_features() == sum(1 << bits[name] for name in found.features)
