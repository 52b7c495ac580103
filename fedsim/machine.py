# SPDX-License-Identifier: Apache-2.0
"""What this machine has."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """The bytes of memory that this process may have at most: the machine's, its container's, or its own limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in map(Path, _LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdecimal() else []
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        limits.append(max(0, own - _address_space()))
    return min(limits)


def _address_space() -> int:
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if file.is_file() else 0
