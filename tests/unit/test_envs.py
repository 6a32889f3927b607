"""vllm_arm_cpu.envs: every variable is typed, checked and documented."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from vllm_arm_cpu import envs


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert envs.VAC_PLUGIN is True
    assert envs.VAC_PRELOAD is True
    assert envs.VAC_HUGE_PAGES is True
    assert envs.VAC_BLOCK_UPSTREAM_OPS is False
    assert envs.VAC_THREADS is None
    assert envs.VAC_BIND == "auto"
    assert envs.VAC_FRONTEND_CORES is None
    assert envs.VAC_LINEAR == "auto"
    assert (envs.VAC_INT4, envs.VAC_INT4_KERNEL, envs.VAC_LM_HEAD) == ("w4a8", "auto", "bf16")
    assert envs.VAC_CACHE_DIR.endswith("/.cache/vllm-arm-cpu/tuning")
    assert envs.VAC_TIER == "auto"
    assert envs.VAC_LIBRARY_DIR is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("VAC_PRELOAD", "0", False),
        ("VAC_PRELOAD", "Off", False),
        ("VAC_PRELOAD", " true ", True),
        ("VAC_PRELOAD", "", True),
        ("VAC_THREADS", "12", 12),
        ("VAC_THREADS", "auto", None),
        ("VAC_BIND", "0-3,8", (0, 1, 2, 3, 8)),
        ("VAC_BIND", "8,0-1,0", (8, 0, 1)),
        ("VAC_BIND", "none", "none"),
        ("VAC_FRONTEND_CORES", "auto", None),
        ("VAC_FRONTEND_CORES", "0", 0),
        ("VAC_TIER", "dotprod", "dotprod"),
        ("VAC_LINEAR", "torch", "torch"),
        ("VAC_LINEAR", "onednn", "onednn"),
        ("VAC_INT4", "w4a16", "w4a16"),
        ("VAC_INT4_KERNEL", "kleidiai", "kleidiai"),
        ("VAC_LM_HEAD", "int8", "int8"),
        ("VAC_CACHE_DIR", "/nonexistent/yet", "/nonexistent/yet"),
        ("VAC_LIBRARY_DIR", "/", "/"),
    ],
)
def test_values(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(name, text)
    assert getattr(envs, name) == value
    assert envs.get(name, {name: text}) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VAC_PLUGIN", "maybe"),
        ("VAC_INT4", "W4A8"),
        ("VAC_INT4_KERNEL", "onednn"),
        ("VAC_LM_HEAD", "int4"),
        ("VAC_PRELOAD", "2"),
        ("VAC_THREADS", "0"),
        ("VAC_THREADS", "-1"),
        ("VAC_THREADS", "1.5"),
        ("VAC_THREADS", "100000"),
        ("VAC_THREADS", "²"),
        ("VAC_BIND", "a-b"),
        ("VAC_BIND", "3-1"),
        ("VAC_BIND", "0-"),
        ("VAC_BIND", "0,,1"),
        ("VAC_BIND", "0-99999999999"),
        ("VAC_TIER", "sve2"),
        ("VAC_LINEAR", "mkl"),
        ("VAC_CACHE_DIR", "/dev/null"),
        ("VAC_LIBRARY_DIR", "/nonexistent"),
    ],
)
def test_nonsense_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(envs.EnvError) as caught:
        getattr(envs, name)
    message = str(caught.value)
    assert name in message
    assert repr(text) in message
    assert "allowed: " in message
    assert isinstance(caught.value, ValueError)
    # It crosses process borders inside vLLM.
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    assert [error.name for error in envs.errors()] == [name]


def test_settings_that_exclude_each_other() -> None:
    (error,) = envs.errors({"VAC_INT4": "w4a16", "VAC_INT4_KERNEL": "kleidiai"})
    assert str(error) == "VAC_INT4_KERNEL='kleidiai' cannot be used; allowed: auto or vac where VAC_INT4=w4a16"
    for kernel in ("auto", "vac"):
        assert envs.errors({"VAC_INT4": "w4a16", "VAC_INT4_KERNEL": kernel}) == []


def test_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="VAC_NONSENSE"):
        envs.VAC_NONSENSE  # noqa: B018
    assert "VAC_TIER" in dir(envs)


def test_unknown_variables() -> None:
    environ = {
        "VAC_TREADS": "4",
        "VAC_TIER": "auto",
        "VAC_TEST_SLOW": "1",
        envs.THREAD_PLAN: "",
        "HOME": "/",
        "VAC_ZZZ": "",
    }
    assert envs.unknown_variables(environ) == ["VAC_TREADS", "VAC_ZZZ"]
    warning = envs.unknown_variables_warning(environ)
    assert warning is not None
    assert "VAC_TREADS (did you mean VAC_THREADS?)" in warning
    assert "VAC_ZZZ" in warning
    assert envs.unknown_variables_warning({"VAC_TIER": "auto"}) is None


def test_documents_hold_the_table() -> None:
    document = Path(__file__).parents[2] / "docs" / "environment.md"
    assert envs.markdown_table() in document.read_text(), "docs/environment.md: paste envs.markdown_table()"


def test_nothing_else_reads_our_variables() -> None:
    package = Path(envs.__file__).parent
    reads = re.compile(r"""(environ(\.get\(|\[)|getenv\()["']VAC_""")
    assert [path.name for path in package.rglob("*.py") if reads.search(path.read_text())] == []


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "0,2,4-5"])
def test_cpu_lists_round_trip(text: str) -> None:
    assert envs.format_cpu_list(envs.parse_cpu_list(text)) == text


def test_format_sorts_and_merges() -> None:
    assert envs.format_cpu_list([3, 1, 2, 2, 9]) == "1-3,9"
    assert envs.format_cpu_list([]) == ""
