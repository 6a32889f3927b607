"""What KleidiAI's kernels take, and what is said where they are not there."""

import importlib.machinery
from pathlib import Path

import pytest

from vllm_arm_cpu.native import kleidiai
from vllm_arm_cpu.runtime import cpu


@pytest.fixture(autouse=True)
def forgotten() -> None:
    kleidiai._bind.cache_clear()


def put_torch(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let torch be found in ``folder``, or nowhere."""

    def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
        assert name == "torch"
        if folder is None:
            return None
        spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


def put_features(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    info = cpu.CpuInfo("aarch64", None, None, "unknown", features, "none")
    monkeypatch.setattr(cpu, "detect", lambda: info)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    put_features(monkeypatch, "dotprod", "bf16")
    put_torch(monkeypatch, None)
    found = kleidiai.status()
    assert not found.usable
    assert found.library is None
    assert found.features == ("dotprod", "bf16")
    with pytest.raises(kleidiai.KleidiAIError, match="was not found"):
        kleidiai.table()


def test_an_old_cpu_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    put_features(monkeypatch, "fp16")
    put_torch(monkeypatch, None)
    assert kleidiai.status().error == "this CPU has no dot product instructions"


def test_a_damaged_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_features(monkeypatch, "dotprod")
    put_torch(monkeypatch, tmp_path)
    assert kleidiai.library_path() is None
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libtorch_cpu.so"
    library.write_bytes(b"not a library")
    assert kleidiai.library_path() == library
    found = kleidiai.status()
    assert found.library == str(library)
    assert found.error is not None
    assert "cannot be loaded" in found.error


def test_refusals() -> None:
    assert kleidiai.refusal(8, 64, 0) is None
    assert kleidiai.refusal(8, 64, 32, scale_dtype="bf16") is None
    assert kleidiai.refusal(8, 64, 0, scale_dtype="f16") is None
    for reason, found in (
        ("zero points", kleidiai.refusal(8, 64, 32, zero_points=True)),
        ("odd", kleidiai.refusal(8, 63, 0)),
        ("empty", kleidiai.refusal(0, 64, 0)),
        ("multiple of 32", kleidiai.refusal(8, 96, 64)),
        ("multiple of 32", kleidiai.refusal(8, 96, 48)),
        ("only bf16", kleidiai.refusal(8, 64, 32, scale_dtype="f16")),
    ):
        assert found is not None
        assert reason in found
