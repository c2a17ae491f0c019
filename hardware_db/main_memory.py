"""How much main memory this process may use: what is installed, or less if a container is limited."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_bytes() -> int:
    """Installed memory or the tightest limit on this process's control groups; 0 where neither can be read."""
    groups = _read(Path("/proc/self/cgroup"))
    return min((n for n in (_installed_bytes(), *group_limits(groups, _ROOT)) if n > 0), default=0)


def group_limits(groups: str, root: Path) -> Iterator[int]:
    """The memory limits, in bytes, on the control groups of /proc/self/cgroup and all above them (version 2's
    `memory.max`, version 1's `memory.limit_in_bytes`)."""
    for line in groups.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for place in (group, *group.parents):
            if (limit := _read(folder / place / name).strip()).isdigit():
                yield int(limit)


def _installed_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
