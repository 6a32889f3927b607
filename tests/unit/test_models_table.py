"""The table of models in the documentation is that of the tests."""

from __future__ import annotations

from pathlib import Path

from tests.integration import zoo

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def test_table() -> None:
    """To make it again: ``python -m tests.integration.zoo``."""
    text = DOCUMENT.read_text()
    assert zoo.table() in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) >= len(zoo.ZOO) + 1


def test_some_of_every_kind_are_in_the_normal_suite() -> None:
    """What differs in its path is tested in every run, not only in the slow one."""
    fast = [entry for entry in zoo.ZOO.values() if not entry.slow]
    for wanted in ("experts", "latent", "recurrent", "modules_because", "plus_one", "quantize"):
        assert any(getattr(entry, wanted) for entry in fast), wanted
    assert any(entry.modules_because is None for entry in fast)
