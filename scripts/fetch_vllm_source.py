"""Unpacks the source distribution of vLLM that a lock names into FOLDER, once its hash is that of the lock.

scripts/fetch_vllm_source.py LOCK FOLDER
"""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
import tempfile
from pathlib import Path

import fetch_vllm_tests


def main() -> None:
    lock, destination = map(Path, sys.argv[1:])
    text = lock.read_text()
    (version,) = re.findall(r"^vllm==(\S+)", text, re.M)
    expected = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as directory:
        archive = Path(fetch_vllm_tests.download(version, directory))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest not in expected:
            raise SystemExit(f"error: {archive.name} has the hash {digest}, which is not in {lock}")
        with tarfile.open(archive) as content:
            content.extractall(directory, filter="data")
        (unpacked,) = (path for path in Path(directory).iterdir() if path.is_dir())
        unpacked.rename(destination)


if __name__ == "__main__":
    main()
