"""The image that scripts/image_test.sh has built, and a server in it that the tests share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import MODEL
from tests.image.container import Container, ContainerServer, Image, Limits

START_TIMEOUT = 900
"""Seconds until the server must be ready; emulated it takes some 3 minutes."""

MEMORY = 12 << 30
"""The container's memory limit in bytes."""


@pytest.fixture(scope="session")
def image() -> Image:
    """VAC_TEST_IMAGE is its mounted file system, VAC_TEST_IMAGE_INSPECTED a file with its configuration."""
    return Image.read(Path(os.environ["VAC_TEST_IMAGE"]), Path(os.environ["VAC_TEST_IMAGE_INSPECTED"]))


@pytest.fixture(scope="session")
def limits() -> Iterator[Limits | None]:
    """A control group, None where this machine lets us make none: in a container that is not privileged."""
    try:
        limits = Limits.create(MEMORY, cpus=1)
    except OSError as error:
        print(f"no control group: {error}")
        yield None
        return
    yield limits
    limits.remove()


@pytest.fixture(scope="session")
def container(image: Image, limits: Limits | None, tmp_path_factory: pytest.TempPathFactory) -> Container:
    cache = tmp_path_factory.mktemp("cache")
    shutil.copytree(MODEL, cache / "model")
    user, group = image.user()
    for path in (cache, *cache.rglob("*")):
        os.chown(path, user, group)
    return Container(image, cache, tmp_path_factory.mktemp("stage"), limits)


@pytest.fixture(scope="session")
def server(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerServer]:
    """Ready to be asked; the quota of one CPU that other tests run with is lifted."""
    if container.limits is not None:
        container.limits.set_cpus(os.cpu_count() or 1)
    server = ContainerServer(container, tmp_path_factory.mktemp("server"), "/cache/model")
    try:
        server.start()
        print(f"ready after {server.wait_until_ready(START_TIMEOUT):.0f} s")
        yield server
    finally:
        server.kill()
