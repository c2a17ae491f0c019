"""What a sharded module says when another rank has died: one error of ours in place of each backend's own words.

Backends notice at different moments: gloo when the peer's connection closes or the timeout of the process group has
passed, as an error of the collective's wait; NCCL by its watchdog, which may end the process before any Python code
hears of it.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankLostError
from .sharded_execution import Compiled, Halves

Half = Literal["forward", "backward"]

_OPERATORS = "torch.ops._c10d_functional."
# What gloo, the stores and NCCL say of peers that are gone; they also raise for shapes or dtypes that do not agree.
_GONE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|closed by (?:peer|remote)|read error|write error"
    r"|timed out|timeout|remote process exited|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*")
_NAME = re.compile(r"\(\s*(\w+)")
_GROUP = re.compile(r"'([^']*)'(?!.*')")


def watched(halves: Halves, mesh: DeviceMesh) -> Halves:
    """The halves of a graph over this mesh, raising RankLostError where torch.distributed reports a peer as gone."""
    backward = halves.backward and _watched(halves.backward, mesh, "backward")
    return replace(halves, forward=_watched(halves.forward, mesh, "forward"), backward=backward)


def _watched(run: Compiled, mesh: DeviceMesh, half: Half) -> Callable[[list[Any]], Sequence[Any]]:
    def call(inputs: list[Any]) -> Sequence[Any]:
        try:
            return run(inputs)
        except RuntimeError as error:  # torch's own errors of distributed code derive from it
            if not is_lost(error):
                raise
            raise RankLostError(_dims(mesh, group_of(error.__traceback__)), half, _said(error)) from error

    return call


def is_lost(error: RuntimeError) -> bool:
    """Whether an error says that a peer is gone: a network error, or a backend's words from inside a collective."""
    if isinstance(error, dist.DistNetworkError):
        return True
    said = _GONE.search(str(error)) is not None
    return said and (isinstance(error, dist.DistError) or bool(_collective_frame(error.__traceback__)))


def group_of(traceback: TracebackType | None) -> str | None:
    """The name of the group whose collective raised, read in the generated code that called it; None if not there.

    The line that raised starts the collective, which names the group, or waits for a value that an earlier line gave to
    one or got from one.
    """
    frame = _collective_frame(traceback)
    if frame is None:
        return None
    lines, at = frame
    waited = _NAME.search(lines[at].partition(_OPERATORS)[2])
    for line in reversed(lines[: at + 1]):
        started = _OPERATORS in line and f"{_OPERATORS}wait_tensor" not in line
        if started and (line is lines[at] or (waited and re.search(rf"\b{waited[1]}\b", line))):
            found = _GROUP.search(line)
            return found[1] if found else None
    return None


def _collective_frame(traceback: TracebackType | None) -> tuple[list[str], int] | None:
    """The source of the innermost frame that called a collective, and the place of the line in it."""
    found = None
    while traceback is not None:
        code, at = traceback.tb_frame.f_code, traceback.tb_lineno - 1
        lines = linecache.getlines(code.co_filename, traceback.tb_frame.f_globals)
        if at < len(lines) and _OPERATORS in lines[at]:
            found = lines, at
        traceback = traceback.tb_next
    return found


def _dims(mesh: DeviceMesh, group: str | None) -> dict[str, list[int]]:
    """The ranks along the mesh dimension with this group; along all of more than one rank where it is not known."""
    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    known = {n: g for n, g in groups.items() if g.group_name == group}
    return {n: dist.get_process_group_ranks(g) for n, g in (known or groups).items() if g.size() > 1 or n in known}


def _said(error: RuntimeError) -> str:
    """The first sentence of what a backend said, without the place in its source."""
    return _SOURCE.sub("", str(error).strip()).partition(". ")[0].partition("\n")[0].rstrip(".")
