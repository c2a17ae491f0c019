"""A rank dies in mid-step: the others stop with an error that says so, in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from dying_ranks import serve

from dsmp.compiler.lost_ranks import group_of, is_lost
from dsmp.errors import RankLostError

SECONDS = 20
LOST = "RankLostError"


def survivors(
    store: Path, sizes: dict[str, int], options: dict[str, Any], half: str, how: signal.Signals, victim: int
) -> dict[int, Any]:
    """What the ranks other than the victim raised, by rank."""
    context = mp.get_context("spawn")
    ranks = 1
    for size in sizes.values():
        ranks *= size
    pipes, processes = [], []
    seconds = 5 if how == signal.SIGSTOP else SECONDS
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        arguments = (theirs, str(store / "store"), rank, sizes, options, half, victim, seconds)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(240), f"rank {rank} did not start"
            assert pipe.recv() == "ready"
        time.sleep(1.5)  # by now the others are in a collective
        pid = processes[victim].pid
        assert pid is not None
        os.kill(pid, how)
        found = {}
        for rank, pipe in enumerate(pipes):
            if rank != victim:
                assert pipe.poll(SECONDS + 20), f"rank {rank} is still waiting"
                found[rank] = pipe.recv()
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("half", "how", "options"),
    [
        pytest.param("forward", signal.SIGKILL, {}, marks=pytest.mark.slow),
        pytest.param("backward", signal.SIGKILL, {}, marks=pytest.mark.long),
        pytest.param("backward", signal.SIGKILL, {"wire": "int8"}, marks=pytest.mark.long),
        pytest.param("forward", signal.SIGSTOP, {}, marks=pytest.mark.long),
        pytest.param("forward", signal.SIGKILL, {"executor": "inductor"}, marks=pytest.mark.long),
        pytest.param("backward", signal.SIGKILL, {"executor": "inductor"}, marks=pytest.mark.slow),
    ],
    ids=["forward", "backward", "wire", "stopped", "inductor forward", "inductor backward"],
)
def test_the_other_rank_stops_with_a_clear_error(
    half: str, how: signal.Signals, options: dict[str, Any], tmp_path: Path
) -> None:
    name, text, cause, seconds, dims = survivors(tmp_path, {"dp": 1, "tp": 2}, options, half, how, 1)[0]
    assert name == LOST and cause == "RuntimeError", text
    assert dims == ("tp",) and f"in the {half} pass" in text and "mesh dimension 'tp' (ranks 0, 1)" in text
    assert "checkpoint" in text and ("imed out" if how == signal.SIGSTOP else "Connection closed by peer") in text
    assert seconds < SECONDS


@pytest.mark.long
def test_each_rank_names_the_dimension_along_which_it_lost_another(tmp_path: Path) -> None:
    found = survivors(tmp_path, {"dp": 2, "tp": 2}, {}, "forward", signal.SIGKILL, 3)
    assert {error[0] for error in found.values()} == {LOST}
    # the layers reduce along tp, the loss of all ranks along dp afterwards
    assert {rank: error[4] for rank, error in found.items()} == {0: ("dp",), 1: ("dp",), 2: ("tp",)}


CODE = """
def start(raises):
    buf0 = torch.ops._c10d_functional.all_reduce_.default(arg0, 'sum', 'seven')
    buf1 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf10, 2, 'eight');  x = None
    torch.ops._c10d_functional.wait_tensor.default(buf1); raises()
"""


def test_the_group_is_read_in_the_code_that_raised(tmp_path: Path) -> None:
    class Operators:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any) -> None: ...

    def raises() -> None:
        raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1946. GLHF!")

    file = tmp_path / "generated.py"
    file.write_text(CODE, encoding="utf-8")
    names = {"torch": Operators(), "arg0": 0, "buf10": 0}
    exec(compile(CODE, file, "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names["start"](raises)
    assert is_lost(caught.value) and group_of(caught.value.__traceback__) == "eight"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Connection closed by peer"), False),  # not from a collective
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (dist.DistBackendError("NCCL error: invalid argument"), False),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("recvValue failed"), True),
    ],
    ids=str,
)
def test_other_errors_are_left_alone(error: RuntimeError, lost: bool) -> None:
    assert is_lost(error) is lost


def test_several_dimensions_are_named_where_it_is_not_known_which() -> None:
    error = RankLostError({"dp": [0, 2], "tp": [0, 1]}, "forward", "timed out")
    assert error.dims == ("dp", "tp") and "'dp' (ranks 0, 2) or 'tp' (ranks 0, 1)" in str(error)
