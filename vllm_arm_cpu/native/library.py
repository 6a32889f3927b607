"""Load ``libvac.so`` and declare its C ABI to cffi.

The public headers in ``csrc/include/vac/`` are the single source of truth:
the build copies them beside the library, and the very same text is parsed
here, so a prototype cannot drift from its definition.
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import Any

import cffi

from vllm_arm_cpu import envs

_PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY_PATH = _PACKAGE / "lib" / "libvac.so"
HEADER_DIR = _PACKAGE / "include" / "vac"
# Order matters only for base.h, which declares what the others use.
_FIRST_HEADER = "base.h"
_EM_AARCH64 = 183

ffi = cffi.FFI()


class LibraryError(RuntimeError):
    """``libvac.so`` or its headers cannot be used; the message says why."""


def c_declarations(header_text: str) -> str:
    """Reduce a C header to what ``cffi.FFI.cdef`` accepts.

    Comments and preprocessor lines go, and so does the C++ guard around
    ``extern "C"``.
    """
    text = re.sub(r"/\*.*?\*/", "", header_text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


def _check_elf(library: Path) -> None:
    """Refuse a file that the dynamic loader would die on (SIGBUS beyond a truncated file's end)."""
    with library.open("rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        raise LibraryError(f"{library} is damaged (no 64-bit ELF header): reinstall vllm-arm-cpu")
    (machine,) = struct.unpack_from("<H", header, 18)
    if machine != _EM_AARCH64:
        raise LibraryError(f"{library} is for another machine (ELF machine {machine}, not aarch64)")
    (sections,) = struct.unpack_from("<Q", header, 40)
    entry_size, count = struct.unpack_from("<HH", header, 58)
    # The section table lies at the end of the file.
    if sections + entry_size * count > size:
        raise LibraryError(f"{library} is damaged ({size} bytes, cut off): reinstall vllm-arm-cpu")


@functools.cache
def load() -> Any:
    """Return the cffi library object of ``libvac.so``, loaded once per process.

    Raises:
        LibraryError: the file is missing, truncated or made for another
            machine, or its headers are missing.
    """
    directory = envs.VAC_LIBRARY_DIR
    library = Path(directory) / "libvac.so" if directory else LIBRARY_PATH
    headers = Path(directory) / "include" / "vac" if directory else HEADER_DIR
    if not library.is_file():
        raise LibraryError(f"{library} does not exist: reinstall vllm-arm-cpu from its aarch64 wheel")
    names = sorted(headers.glob("*.h"), key=lambda path: (path.name != _FIRST_HEADER, path.name))
    if not names:
        raise LibraryError(f"no C headers in {headers}: reinstall vllm-arm-cpu from its aarch64 wheel")
    for name in names:
        # Asked again after a failure, the same declarations come again.
        ffi.cdef(c_declarations(name.read_text()), override=True)
    _check_elf(library)
    try:
        lib = ffi.dlopen(str(library))
    except OSError as error:
        raise LibraryError(f"{library} cannot be loaded: {error}") from error
    try:
        # A function is looked up when it is first used: in the middle of a request, if not here.
        for symbol in dir(lib):
            getattr(lib, symbol)
    except AttributeError as error:
        raise LibraryError(f"{library} is not of the same version as its headers: {error}") from error
    tier = envs.VAC_TIER
    if tier != "auto" and lib.vac_set_tier(getattr(lib, f"VAC_TIER_{tier.upper()}")) != 0:
        raise LibraryError(f"VAC_TIER={tier}: this CPU does not have its instructions")
    return lib
