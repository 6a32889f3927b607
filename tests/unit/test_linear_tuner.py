"""Choosing a kernel for a shape: what is measured, what wins, what is kept on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_arm_cpu.layers import linear_tuner
from vllm_arm_cpu.layers.linear_tuner import (
    BUCKETS,
    BUDGET,
    Choice,
    ChoiceCache,
    LinearKernelError,
    Row,
    Shape,
    Tuner,
    fastest,
    measure,
    table,
)

SHAPE = Shape("bfloat16", 4096, 14336)
ORDER = ("vac", "onednn", "torch")


class FakeMachine:
    """Kernels that take a fixed time per call and row, on a clock that nothing else moves."""

    def __init__(self, **seconds: tuple[float, float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.calls: dict[str, list[int]] = {name: [] for name in seconds}
        self.alive = 0
        self.most_alive = 0

    def clock(self) -> float:
        return self.now

    def prepare(self, name: str) -> Callable[[int], None]:
        machine = self

        class Kernel:
            def __init__(self) -> None:
                machine.alive += 1
                machine.most_alive = max(machine.most_alive, machine.alive)

            def __del__(self) -> None:
                machine.alive -= 1

            def __call__(self, m: int) -> None:
                machine.calls[name].append(m)
                fixed, per_row = machine.seconds[name]
                machine.now += fixed + per_row * m

        return Kernel()


def tuner(machine: FakeMachine, forced: str = "auto", cache: ChoiceCache | None = None) -> Tuner:
    return Tuner(ORDER, forced, cache, machine.clock)


def test_fastest_wins() -> None:
    machine = FakeMachine(vac=(1e-5, 1e-6), torch=(1e-4, 1e-6), onednn=(2e-6, 1e-7))
    choice = tuner(machine).choose("layer", SHAPE, {}, machine.prepare)
    assert (choice.winner, choice.source) == ("onednn", "measured")
    assert {len(medians) for medians in choice.times.values()} == {len(BUCKETS)}
    assert choice.times["vac"] == pytest.approx([1e-5 + 1e-6 * m for m in BUCKETS])
    assert machine.most_alive == 1, "one packed weight at a time"


def test_geometric_mean_weighs_buckets_alike() -> None:
    # Twice as fast in four buckets, three times as slow in the one that takes longest.
    times = {"vac": (2e-6, 2e-6, 2e-6, 2e-6, 1e-3), "torch": (1e-6, 1e-6, 1e-6, 1e-6, 3e-3)}
    assert fastest(times) == "torch"


def test_preferred_wins_a_draw() -> None:
    assert fastest({"vac": (1.04,), "torch": (1.0,)}) == "vac"
    assert fastest({"vac": (1.06,), "torch": (1.0,)}) == "torch"
    assert fastest({"vac": (0.0,), "torch": (0.0,)}) == "vac"


def test_only_shared_buckets_count() -> None:
    assert fastest({"vac": (2e-6, 1e-6, 1e-9), "torch": (1e-6,)}) == "torch"


def test_budget_bounds_the_time() -> None:
    machine = FakeMachine(vac=(0.0, 1e-3))
    medians = measure(machine.prepare("vac"), machine.clock)
    # Rows 1, 4 and 16 fit; warm and timed runs of 64 would take it beyond.
    assert len(medians) == 3
    assert machine.now < 1.2 * BUDGET


def test_first_bucket_is_measured_whatever_it_takes() -> None:
    machine = FakeMachine(vac=(100.0, 0.0))
    assert measure(machine.prepare("vac"), machine.clock) == (100.0,)
    assert len(machine.calls["vac"]) == 2


def test_a_tiny_layer_takes_little_time() -> None:
    machine = FakeMachine(vac=(1e-6, 1e-8))
    measure(machine.prepare("vac"), machine.clock)
    assert len(machine.calls["vac"]) <= 10 * len(BUCKETS)


def test_median_ignores_an_outlier() -> None:
    times = iter([0.0] + [0.05] + [0.001] * 100)
    now = 0.0

    def run(m: int) -> None:
        nonlocal now
        now += next(times)

    assert measure(run, lambda: now)[0] == pytest.approx(0.001)


def test_nothing_is_measured_when_one_is_possible() -> None:
    machine = FakeMachine(vac=(1, 1), onednn=(1, 1), torch=(1, 1))
    choice = tuner(machine).choose("layer", SHAPE, {"vac": "why", "onednn": "not there"}, machine.prepare)
    assert (choice.winner, choice.source, machine.now) == ("torch", "only one", 0)


def test_a_shape_is_measured_once() -> None:
    machine = FakeMachine(vac=(1e-5, 0), onednn=(1e-4, 0), torch=(1e-4, 0))
    chooser = tuner(machine)
    first = chooser.choose("a", SHAPE, {}, machine.prepare)
    elapsed = machine.now
    assert chooser.choose("b", SHAPE, {}, machine.prepare) is first
    assert machine.now == elapsed
    chooser.choose("c", Shape("bfloat16", 1, 1), {}, machine.prepare)
    assert machine.now > elapsed
    # Another set of candidates is another question.
    chooser.choose("tied", SHAPE, {"vac": "why"}, machine.prepare)
    assert chooser.choose("a", SHAPE, {}, machine.prepare) is first


def test_forced() -> None:
    machine = FakeMachine(vac=(1, 1), torch=(0, 0))
    choice = tuner(machine, "vac").choose("layer", SHAPE, {}, machine.prepare)
    assert (choice.winner, choice.source, machine.now) == ("vac", "forced", 0)


def test_forced_and_refused_is_named() -> None:
    machine = FakeMachine()
    with pytest.raises(LinearKernelError) as caught:
        tuner(machine, "onednn").choose(
            "model.layers.0.mlp.down_proj", SHAPE, {"onednn": "not loaded"}, machine.prepare
        )
    for part in (
        "VAC_LINEAR=onednn",
        "model.layers.0.mlp.down_proj",
        "bfloat16 [4096, 14336]",
        "not loaded",
        "vac, torch",
    ):
        assert part in str(caught.value)


def test_all_refused_is_named() -> None:
    with pytest.raises(LinearKernelError, match=r"head, bfloat16 .*vac: a; onednn: b; torch: c"):
        tuner(FakeMachine()).choose("head", SHAPE, {"vac": "a", "onednn": "b", "torch": "c"}, FakeMachine().prepare)


def measured(
    directory: Path, environment: tuple[str, ...] = ("V2", "64 threads"), **seconds: tuple[float, float]
) -> Choice:
    """A choice by a tuner that knows only what is on disk."""
    machine = FakeMachine(**seconds)
    cache = ChoiceCache(directory, environment)
    refused = {name: "absent" for name in ORDER if name not in seconds}
    return tuner(machine, cache=cache).choose("layer", SHAPE, refused, machine.prepare)


def test_cache_is_read_by_the_next_start(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "when needed"
    first = measured(directory, vac=(1e-5, 1e-6), torch=(1e-4, 1e-6))
    assert first.source == "measured"
    again = measured(directory, vac=(1, 0), torch=(0, 0))
    assert (again.source, again.winner) == ("cache", "vac")
    assert again.times == first.times


def test_cache_is_for_one_environment_and_one_set_of_candidates(tmp_path: Path) -> None:
    measured(tmp_path, vac=(1e-5, 0), torch=(1e-4, 0))
    assert measured(tmp_path, ("V2", "32 threads"), vac=(1e-5, 0), torch=(1e-4, 0)).source == "measured"
    assert measured(tmp_path, vac=(1e-5, 0), torch=(1e-4, 0), onednn=(1e-6, 0)).winner == "onednn"
    # The other environments' choices are still there.
    assert measured(tmp_path, ("V2", "32 threads"), vac=(1, 0), torch=(1e-9, 0)).source == "cache"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"{",
        b"[" * 100000,
        b"[]",
        b"null",
        b'{"format": "something else", "version": 1, "choices": {}}',
        b'{"format": "vllm-arm-cpu linear kernels", "version": 2, "choices": {}}',
        b'{"format": "vllm-arm-cpu linear kernels", "version": 1}',
        b'{"format": "vllm-arm-cpu linear kernels", "version": 1, "choices": [1]}',
    ],
)
def test_damaged_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "linear.json").write_bytes(content)
    assert measured(tmp_path, vac=(1e-5, 0), torch=(1e-4, 0)).source == "measured"
    assert measured(tmp_path, vac=(1, 0), torch=(0, 0)).source == "cache"
    assert len(json.loads((tmp_path / "linear.json").read_text())["choices"]) == 1


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"winner": "gone", "times": {"vac": [1.0], "torch": [1.0]}},
        {"winner": "vac", "times": {"vac": [], "torch": [1.0]}},
        {"winner": "vac", "times": {"vac": ["1"], "torch": [1.0]}},
        {"winner": "vac", "times": {"vac": [-1], "torch": [1.0]}},
        {"winner": "vac", "times": []},
        {"winner": "vac"},
    ],
)
def test_damaged_entry_is_measured_again(tmp_path: Path, entry: object) -> None:
    measured(tmp_path, vac=(1e-5, 0), torch=(1e-4, 0))
    content = json.loads((tmp_path / "linear.json").read_text())
    content["choices"] = dict.fromkeys(content["choices"], entry)
    (tmp_path / "linear.json").write_text(json.dumps(content))
    assert measured(tmp_path, vac=(1e-4, 0), torch=(1e-5, 0)).winner == "torch"


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert measured(tmp_path / "file" / "below", vac=(1e-5, 0), torch=(1e-4, 0)).winner == "vac"
    assert "VAC_CACHE_DIR" in caplog.text


WRITER = """
import sys
from pathlib import Path
from vllm_arm_cpu.layers.linear_tuner import ChoiceCache, Shape
cache = ChoiceCache(Path(sys.argv[1]), ("V2",))
for i in range(20):
    shape = Shape("bfloat16", i, int(sys.argv[2]))
    cache.put(shape, "vac", {"vac": [1e-3], "torch": [2e-3]})
    assert cache.get(shape, ("vac", "torch")) == ("vac", {"vac": (1e-3,), "torch": (2e-3,)}), i
"""


def test_processes_that_warm_up_at_once_keep_all_choices(tmp_path: Path) -> None:
    root = Path(linear_tuner.__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(k)], cwd=root, env={"PYTHONPATH": str(root)})
        for k in range(3)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    cache = ChoiceCache(tmp_path, ("V2",))
    assert all(cache.get(Shape("bfloat16", i, k), ("vac", "torch")) for i in range(20) for k in range(3))
    assert {path.name for path in tmp_path.iterdir()} == {"linear.json", "linear.lock"}, "no temporary file left"


def test_table() -> None:
    rows = [
        Row(Shape("bfloat16", 256, 256), 1, Choice("torch", {}, {"vac": "no kernel"}, "only one"), 131072),
        Row(SHAPE, 32, Choice("vac", {"vac": (1.234e-5, 2e-4), "torch": (3e-5, 1)}, {}, "measured"), 3 << 30),
    ]
    assert table(rows).splitlines() == [
        "linear layers (medians for 1, 4, 16, 64, 256 rows, as far as measured):",
        "weight                  layers  vac [us]  torch [us]  kernel            MiB",
        "bfloat16 [4096, 14336]  32      12.3/200  30/1000000  vac (measured)    3072.0",
        "bfloat16 [256, 256]     1       -         -           torch (only one)  0.1",
        "not vac: no kernel",
    ]


def test_torch_is_not_needed() -> None:
    script = "import sys, vllm_arm_cpu.layers.linear_tuner; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    root = Path(linear_tuner.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)
