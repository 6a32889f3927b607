"""Which kernel multiplies by a weight: measured once for each shape on the machine that serves, remembered on disk.

Nothing here knows torch or vLLM: candidates are names and calls. A weight is
in memory in one form, so a shape gets one kernel for every number of rows; it
is measured in a few buckets of rows and scored by the geometric mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.arm_cpu.linear")

BUCKETS = (1, 4, 16, 64, 256)
"""Rows of the input that are measured: decode of one and of several requests, prefill."""

BUDGET = 0.25
"""Seconds for one candidate on one shape; the largest buckets are left out where they do not fit."""

MARGIN = 0.05
"""How much faster than a candidate that is preferred another one must be: noise shall not decide."""

_MIN_RUNS, _MAX_RUNS = 3, 9
_FORMAT, _VERSION = "vllm-arm-cpu linear kernels", 1


class LinearKernelError(ValueError):
    """No candidate takes a layer's weight; the message names the layer, its shape and why."""


@dataclass(frozen=True)
class Shape:
    """What a choice is made for: a weight [n, k] of ``dtype``, such as ``bfloat16``."""

    dtype: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.dtype} [{self.n}, {self.k}]"


@dataclass(frozen=True)
class Choice:
    """The kernel of a shape.

    Attributes:
        winner: the candidate's name.
        times: candidate -> median seconds in each of the first buckets; empty when nothing had to be measured.
        refused: candidate -> why it does not take the shape.
        source: how it came about: ``forced``, ``only one``, ``cache`` or ``measured``.
    """

    winner: str
    times: Mapping[str, tuple[float, ...]]
    refused: Mapping[str, str]
    source: str


def measure(run: Callable[[int], None], clock: Callable[[], float], budget: float = BUDGET) -> tuple[float, ...]:
    """Median seconds of ``run(m)`` for each bucket, ascending, as far as the budget goes; the first always."""
    start = clock()
    medians: list[float] = []
    for i, m in enumerate(BUCKETS):
        left = budget - (clock() - start)
        # One warm run, and one that counts, at the least.
        if i > 0 and 2 * medians[-1] * m / BUCKETS[i - 1] > left:
            break
        run(m)
        samples: list[float] = []
        slice_end = clock() + left / (len(BUCKETS) - i)
        while len(samples) < _MIN_RUNS or (len(samples) < _MAX_RUNS and clock() < slice_end):
            begin = clock()
            run(m)
            end = clock()
            samples.append(end - begin)
            if end - start > budget:
                break
        medians.append(statistics.median(samples))
    return tuple(medians)


def scores(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Candidate -> geometric mean of its times over the buckets that all were measured in."""
    shared = min(len(medians) for medians in times.values())
    # A clock may be too coarse to see a small kernel.
    return {
        name: math.exp(statistics.fmean(math.log(max(t, 1e-9)) for t in medians[:shared]))
        for name, medians in times.items()
    }


def fastest(times: Mapping[str, Sequence[float]]) -> str:
    """The first candidate, in the mapping's order, that no other beats by more than ``MARGIN``."""
    score = scores(times)
    best = min(score.values())
    return next(name for name in times if score[name] <= best * (1 + MARGIN))


class ChoiceCache:
    """Measured choices in one JSON file, shared by all processes of a user.

    A file that is damaged or of another format counts as empty, and is
    replaced by the next choice that is stored. Several processes may read and
    write at once: writers take turns, and a reader sees the old file or the
    new one.
    """

    def __init__(self, directory: Path, environment: Sequence[str]) -> None:
        """``environment``: what else a time depends on, such as CPU, threads and versions."""
        self.path = directory / "linear.json"
        self._environment = tuple(environment)
        self._warned = False

    def get(self, shape: Shape, candidates: Sequence[str]) -> tuple[str, dict[str, tuple[float, ...]]] | None:
        """Winner and times, if exactly these candidates were measured on this shape."""
        entry = self._read().get(self._key(shape))
        if entry is None or sorted(entry["times"]) != sorted(candidates):
            return None
        return entry["winner"], {name: tuple(entry["times"][name]) for name in candidates}

    def put(self, shape: Shape, winner: str, times: Mapping[str, Sequence[float]]) -> None:
        """Add a choice to the file; a directory that cannot be written costs one warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._turn():
                choices = self._read()
                choices[self._key(shape)] = {"winner": winner, "times": {k: list(v) for k, v in times.items()}}
                self._replace({"format": _FORMAT, "version": _VERSION, "choices": choices})
        except OSError as error:
            if not self._warned:
                logger.warning("linear layers: choices are not kept: %s (VAC_CACHE_DIR names another place)", error)
            self._warned = True

    def _key(self, shape: Shape) -> str:
        return " | ".join((*self._environment, str(shape)))

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            return {}
        choices = content.get("choices")
        if not isinstance(choices, dict):
            return {}
        return {key: entry for key, entry in choices.items() if _is_choice(entry)}

    def _replace(self, content: dict[str, Any]) -> None:
        handle, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
        try:
            with open(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with open(self.path.with_suffix(".lock"), "w") as lock:
            # A file system without locks: a choice that two processes store at once may be lost, and is made again.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _is_choice(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("times"), dict) or not entry["times"]:
        return False
    return entry.get("winner") in entry["times"] and all(
        isinstance(medians, list) and medians and all(type(t) in (int, float) and t >= 0 for t in medians)
        for medians in entry["times"].values()
    )


class Tuner:
    """Makes one choice for each shape.

    Args:
        candidates: names, the preferred first.
        forced: the only one to use, or ``auto``.
        cache: where measured choices are kept, or None.
        clock: seconds, monotonic.
        setting: the variable that forces one, for errors.
    """

    def __init__(
        self,
        candidates: Sequence[str],
        forced: str = "auto",
        cache: ChoiceCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
        setting: str = "VAC_LINEAR",
    ) -> None:
        self._setting = setting
        self._candidates = tuple(candidates)
        self._forced = forced
        self._cache = cache
        self._clock = clock
        self._choices: dict[tuple[Shape, tuple[str, ...]], Choice] = {}

    def choose(
        self,
        layer: str,
        shape: Shape,
        refused: Mapping[str, str],
        prepare: Callable[[str], Callable[[int], None]],
    ) -> Choice:
        """The kernel of one layer.

        Args:
            layer: its name, for errors.
            refused: candidate -> why it does not take this weight.
            prepare: candidate -> a call that multiplies m rows by the weight. The call is dropped before the next
                candidate is prepared, so one packed weight at a time is in memory.

        Raises:
            LinearKernelError: the forced candidate refuses, or all do.
        """
        possible = tuple(name for name in self._candidates if name not in refused)
        if self._forced != "auto":
            if self._forced not in possible:
                reason = refused.get(self._forced, "there is no such kernel")
                raise LinearKernelError(
                    f"{self._setting}={self._forced} cannot run the linear layer {layer}, {shape}: {reason}. "
                    f"Possible here: auto, {', '.join(possible)}"
                )
            return Choice(self._forced, {}, refused, "forced")
        if not possible:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise LinearKernelError(f"no kernel for the linear layer {layer}, {shape}: {reasons}")
        key = (shape, possible)
        if key not in self._choices:
            self._choices[key] = self._decide(shape, possible, refused, prepare)
        return self._choices[key]

    def _decide(
        self,
        shape: Shape,
        possible: tuple[str, ...],
        refused: Mapping[str, str],
        prepare: Callable[[str], Callable[[int], None]],
    ) -> Choice:
        if len(possible) == 1:
            return Choice(possible[0], {}, refused, "only one")
        kept = self._cache.get(shape, possible) if self._cache else None
        if kept:
            return Choice(*kept, refused, "cache")
        times = {name: measure(prepare(name), self._clock) for name in possible}
        winner = fastest(times)
        if self._cache:
            self._cache.put(shape, winner, times)
        return Choice(winner, times, refused, "measured")


@dataclass(frozen=True)
class Row:
    """One line of the table: a shape, how many layers have it, the choice, bytes of all their weights in memory."""

    shape: Shape
    layers: int
    choice: Choice
    nbytes: int


def table(rows: Sequence[Row]) -> str:
    """A line per shape: layers, microseconds per bucket and candidate, winner, MiB in memory; then the refusals."""
    names = list(dict.fromkeys(name for row in rows for name in row.choice.times))
    head = ["weight", "layers", *(f"{name} [us]" for name in names), "kernel", "MiB"]
    cells = [head]
    for row in sorted(rows, key=lambda row: -row.nbytes):
        times = ["/".join(_microseconds(t) for t in row.choice.times.get(name, ())) or "-" for name in names]
        kernel = f"{row.choice.winner} ({row.choice.source})"
        cells.append([str(row.shape), str(row.layers), *times, kernel, f"{row.nbytes / 2**20:.1f}"])
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    refusals = dict.fromkeys(f"not {name}: {reason}" for row in rows for name, reason in row.choice.refused.items())
    title = "linear layers"
    if names:
        title += f" (medians for {', '.join(map(str, BUCKETS))} rows, as far as measured)"
    return "\n".join([f"{title}:", *lines, *refusals])


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"
