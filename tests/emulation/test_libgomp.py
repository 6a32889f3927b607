"""Our libgomp executes LSE atomics and no exclusive loads or stores; traced, not read from the file."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.emulation import trace

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="traces programs in the emulator of x86-64 machines"),
    pytest.mark.skipif(bool(trace.missing()), reason=trace.missing() or "complete"),
]

OURS = trace.ROOT / "build" / "site" / "vllm_arm_cpu" / "lib" / "libgomp.so.1"
# The loop calls this; the work is done in gomp_iter_dynamic_next, which is not exported.
NEXT = "GOMP_loop_nonmonotonic_dynamic_next"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace.build(Path(__file__).parent / "dynamic_loop.c", tmp_path_factory.mktemp("program"))


def gomp_iter_dynamic_next(library: trace.Library) -> range:
    """The addresses of the function: what the exported one jumps to."""
    return library.function_around(library.jump_target(NEXT))


@pytest.fixture(scope="module")
def ours(program: Path, tmp_path_factory: pytest.TempPathFactory) -> trace.Trace:
    if not OURS.exists():
        pytest.skip("the package is not installed for this clone (make install)")
    return trace.trace(program, "max,sve128=on,sme=off", tmp_path_factory.mktemp("ours"), OURS)


def test_it_is_ours_that_runs(ours: trace.Trace) -> None:
    """Preloaded under its SONAME, it takes the place of the one that the program needs."""
    assert ours.library.path == OURS


def test_iterations_are_taken_with_one_instruction(ours: trace.Trace) -> None:
    """Each thread adds to the shared counter with an LDADD, no loop of LDXR and STXR around it."""
    function = gomp_iter_dynamic_next(ours.library)
    kinds = ours.kinds(function)
    # A thread sees the end once more than it has iterations; its first one comes from elsewhere.
    assert kinds["ldadd"] >= 98
    assert kinds["exclusive"] == 0


def test_no_exclusives_anywhere(ours: trace.Trace) -> None:
    """Nor in what starts the team, shares the loop and waits at its end."""
    kinds = ours.kinds()
    assert kinds["exclusive"] == 0
    assert kinds["ldadd"] + kinds["lse"] > 100


def test_on_the_oldest_supported_core(program: Path, tmp_path: Path) -> None:
    """Neoverse N1 has LSE, and the library nothing newer that it would die of."""
    if not OURS.exists():
        pytest.skip("the package is not installed for this clone (make install)")
    traced = trace.trace(program, "neoverse-n1", tmp_path, OURS)
    assert traced.kinds(gomp_iter_dynamic_next(traced.library))["ldadd"] >= 98


def test_what_it_replaces(program: Path, tmp_path: Path) -> None:
    """The distribution's libgomp, seen with the same eyes: a call to a helper that chooses at run time."""
    traced = trace.trace(program, "max,sve128=on,sme=off", tmp_path)
    assert traced.library.path != OURS
    assert not traced.kinds(gomp_iter_dynamic_next(traced.library))


def test_exclusives_are_seen(program: Path, tmp_path: Path) -> None:
    """On a CPU without LSE that helper executes LDXR: the tests above would notice it."""
    assert trace.trace(program, "cortex-a72", tmp_path).kinds()["exclusive"] > 100
