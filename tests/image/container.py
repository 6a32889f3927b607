"""Runs the built image's file system as a container's runtime would, in namespaces of its own.

Stricter than a runtime's defaults: the root is read-only, only /tmp, /dev/shm
and /cache are writable, the process has no capability and can gain none. What
the image's configuration says (user, environment, entry point) is taken from it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.server import Server

COMMON = Path(__file__).parents[2] / "scripts" / "common.sh"

# Runs in fresh mount, pid, ipc and uts namespaces; $root, $stage, $cache, $cgroup, $user, $group are set.
INSIDE = """
source "$common"
mount --make-rprivate /
mount --bind "$root" "$stage"
mount -o remount,bind,ro "$stage"
mount -t proc proc "$stage/proc"
mount -t tmpfs -o mode=755 tmpfs "$stage/dev"
for node in null zero full random urandom; do
    touch "$stage/dev/$node"; mount --bind "/dev/$node" "$stage/dev/$node"
done
ln -s /proc/self/fd "$stage/dev/fd"
mkdir "$stage/dev/shm"; mount -t tmpfs -o mode=1777,size=1g tmpfs "$stage/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$stage/tmp"
mount --bind "$cache" "$stage/cache"
if [ "$HOST_ARCH" = aarch64 ]; then
    mount --rbind /sys "$stage/sys"
else
    describe_cpu neoverse-v2
    export QEMU_CPU=$qemu
    mount -t tmpfs -o mode=755 tmpfs "$stage/sys"
    fake_machine "$stage/sys" "$stage/dev/cpuinfo" "$(nproc --all)"
    mount --bind "$stage/dev/cpuinfo" "$stage/proc/cpuinfo"
    mkdir -p "$stage/sys/fs/cgroup"
    mount --rbind /sys/fs/cgroup "$stage/sys/fs/cgroup"
fi
IFS=: read -ra limits <<<"$cgroups"
for limit in "${limits[@]}"; do echo $$ >"$limit/cgroup.procs"; done
# Capabilities that changing root and user takes end with the change.
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+sys_chroot,+setuid,+setgid \\
    chroot --userspec="$user:$group" --groups="$group" "$stage" \\
    /usr/bin/env -i ${QEMU_CPU:+QEMU_CPU="$QEMU_CPU"} "${environment[@]}" \\
    /bin/sh -c 'cd "$0" && exec "$@"' "$directory" "$@"
"""


@dataclass(frozen=True)
class Image:
    """The image that was built: its unpacked file system, and its configuration as an engine reads it."""

    root: Path
    config: dict[str, Any]
    architecture: str

    @classmethod
    def read(cls, root: Path, inspected: Path) -> Image:
        """From the mounted file system and the output of ``buildah inspect``."""
        document = json.loads(inspected.read_text())["Docker"]
        return cls(root, document["config"], document["architecture"])

    def user(self) -> tuple[int, int]:
        """Numbers of the user and its group."""
        name = self.config["User"].partition(":")[0]
        for line in (self.root / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if name in (fields[0], fields[2]):
                return int(fields[2]), int(fields[3])
        raise AssertionError(f"the image has no user {name!r}")


@dataclass(frozen=True)
class Limits:
    """A control group with a memory limit and a CPU quota; made in the hierarchies of version 1 or 2."""

    folders: tuple[Path, ...]

    ROOT = Path("/sys/fs/cgroup")

    @classmethod
    def create(cls, memory: int, cpus: float) -> Limits:
        """Raises OSError where this process may not make one."""
        name = f"vllm-arm-cpu-test-{os.getpid()}"
        unified = (cls.ROOT / "cgroup.controllers").exists()
        if unified:
            (cls.ROOT / "cgroup.subtree_control").write_text("+cpu +memory")
        folders = [cls.ROOT / name] if unified else [cls.ROOT / kind / name for kind in ("memory", "cpu")]
        for folder in folders:
            folder.mkdir()
        limits = cls(tuple(folders))
        limits._write("memory.max" if unified else "memory.limit_in_bytes", str(memory))
        limits.set_cpus(cpus)
        return limits

    def set_cpus(self, cpus: float) -> None:
        """Change the CPU quota."""
        quota = round(cpus * 100_000)
        if (self.folders[0] / "cpu.max").exists():
            self._write("cpu.max", f"{quota} 100000")
        else:
            self._write("cpu.cfs_quota_us", str(quota))

    def remove(self) -> None:
        """Once its processes have ended."""
        for folder in self.folders:
            folder.rmdir()

    def _write(self, name: str, value: str) -> None:
        path = next(folder / name for folder in self.folders if (folder / name).exists())
        path.write_text(value)


@dataclass
class Container:
    """How to run commands in the image.

    Attributes:
        cache: becomes /cache; owned by the image's user.
        stage: an empty folder to mount it on.
        environ: on top of the image's environment, as ``docker run -e``.
    """

    image: Image
    cache: Path
    stage: Path
    limits: Limits | None = None
    environ: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs ``arguments`` in a container of their own as its first process."""
        user, group = self.image.user()
        # As an engine does: HOME is the image's, and nothing of this machine's environment comes in.
        environment = [*self.image.config["Env"], *(f"{name}={value}" for name, value in self.environ.items())]
        values = {
            "common": COMMON,
            "root": self.image.root,
            "stage": self.stage,
            "cache": self.cache,
            "cgroups": ":".join(map(str, self.limits.folders)) if self.limits else "",
            "user": user,
            "group": group,
            "directory": self.image.config.get("WorkingDir") or "/",
        }
        settings = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
        settings += f"environment=({shlex.join(environment)})\n"
        namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        return [*namespaces, "bash", "-c", settings + INSIDE, "bash", *arguments]

    def run(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends."""
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=timeout)


class ContainerServer(Server):
    """The image's entry point as a server."""

    def __init__(self, container: Container, directory: Path, model: str, *arguments: str) -> None:
        super().__init__(directory, None, *arguments)
        served = [model, *self._command[3:]]
        self._command = container.command(*container.image.config["Entrypoint"], *served)

    @property
    def first_process(self) -> int:
        """The container's first process, as this machine numbers it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def terminate(self) -> None:
        """As ``docker stop``."""
        os.kill(self.first_process, 15)


EMULATED = platform.machine() != "aarch64"
