"""A local model hub for vLLM's tests: what they load by name from a hub, made here.

    tests/upstream/hub.py FOLDER

FOLDER gets the layout of the hub client's cache, which is all that is looked at
when HF_HUB_OFFLINE is set. whitelist.toml names the models: each is a copy of a
folder of the clone, with other values in its configuration where a test needs them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
REVISION = "0" * 40


def make(folder: Path, models: dict[str, dict[str, object]]) -> None:
    """Write each model into the cache, again if it is there."""
    for name, model in models.items():
        cache = folder / "hub" / f"models--{name.replace('/', '--')}"
        shutil.rmtree(cache, ignore_errors=True)
        snapshot = cache / "snapshots" / REVISION
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text(REVISION)
        shutil.copytree(PROJECT / str(model["folder"]), snapshot)
        config = json.loads((snapshot / "config.json").read_text()) | dict(model.get("config", {}))
        (snapshot / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    make(Path(sys.argv[1]), tomllib.loads((HERE / "whitelist.toml").read_text())["models"])
