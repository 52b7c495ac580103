# SPDX-License-Identifier: Apache-2.0
"""Freed memory stays with the process.

glibc gives every large buffer back to the operating system as soon as it is freed, and takes it again, page by page and
filled with zeros, for the next step: this can cost more than the mathematics. Raising its two thresholds, once for the
process, keeps up to 1 GiB of what was freed for the next step.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory; does nothing, and returns False, with any other C library."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
