"""Builds libvac.so with CMake and puts the native libraries into the wheel.

Natively on aarch64 nothing needs to be set. To cross-compile from x86-64, set
VAC_BUILD_SYSROOT to an arm64 Debian root with libc6-dev; ``make wheel`` does.
VAC_BUILD_LIBS names a folder with libgomp.so.1 (LSE) and libmimalloc.so to be
shipped; a source distribution carries them in ``prebuilt/``.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PREBUILT = ("libgomp.so.1", "libmimalloc.so")
# glibc 2.34 is where libpthread and libdl became part of libc; Debian 12,
# Ubuntu 22.04, RHEL 9 and Amazon Linux 2023 have it.
PLATFORM_TAG = "manylinux_2_34_aarch64"


class BuildNative(build_py):
    """Copies the Python files, then builds and adds the native ones."""

    def run(self) -> None:
        super().run()
        package = Path(self.build_lib) / "vllm_arm_cpu"
        library = package / "lib"
        library.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._build_libvac(), library / "libvac.so")
        shutil.copytree(HERE / "csrc" / "include" / "vac", package / "include" / "vac", dirs_exist_ok=True)
        prebuilt = Path(os.environ.get("VAC_BUILD_LIBS", HERE / "prebuilt"))
        for name in PREBUILT:
            if (prebuilt / name).is_file():
                shutil.copy2(prebuilt / name, library / name)
            else:
                self.warn(f"{name} not found in {prebuilt}: this wheel will not preload it")

    def _build_libvac(self) -> Path:
        sysroot = os.environ.get("VAC_BUILD_SYSROOT")
        build_dir = HERE / "build" / ("cross" if sysroot else "native")
        options = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DVAC_VERSION={self.distribution.get_version()}",
        ]
        if sysroot:
            options += [
                f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'csrc' / 'cmake' / 'aarch64-linux-gnu.cmake'}",
                f"-DVAC_SYSROOT={sysroot}",
                f"-DVAC_LIBGOMP={sysroot}/usr/lib/aarch64-linux-gnu/libgomp.so.1",
            ]
        elif platform.machine() != "aarch64":
            sys.exit(
                "vllm-arm-cpu is for aarch64: install it on an Arm server. To build its wheel on "
                f"{platform.machine()}, run `make wheel` in a checkout."
            )
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(["cmake", *generator, "-S", str(HERE / "csrc"), "-B", str(build_dir), *options], check=True)
        subprocess.run(["cmake", "--build", str(build_dir), "--parallel"], check=True)
        return build_dir / "libvac.so"


class Wheel(bdist_wheel):
    """Tags the wheel: any Python 3 (cffi's ABI mode), aarch64 only."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM_TAG


class Native(Distribution):
    """Says that the wheel holds native files, so that they go to platlib."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=Native, cmdclass={"build_py": BuildNative, "bdist_wheel": Wheel})
