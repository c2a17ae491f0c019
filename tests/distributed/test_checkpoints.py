"""Checkpoints of whole models in sharded modules and back, through torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import LEARNING_RATE, load_and_save, other_weights, stop_and_go_on, train
from gloo import Ranks
from rank_programs import model, step, tokens

pytestmark = pytest.mark.slow  # real processes

TOLERANCE = 1e-5
CASES = {
    "tensor": ({"tp": 2}, {}, False, False),
    "zero 3": ({"dp": 2}, {"zero": 3}, False, False),
    "tied": ({"tp": 2}, {}, True, False),
    "meta, tensor": ({"tp": 2}, {}, False, True),
    "meta, zero 3": ({"dp": 2}, {"zero": 3}, False, True),
    "meta, tied": ({"dp": 2}, {"zero": 3}, True, True),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long) if "tied" in c or c == "meta, tensor" else c for c in CASES]
)
def test_a_checkpoint_of_the_whole_model_and_back(case: str, two_ranks: Ranks, tmp_path: Path) -> None:
    sizes, options, tied, meta = CASES[case]
    whole = other_weights(model(tied=tied))
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)
    ranks = two_ranks.run(load_and_save, sizes, options, tmp_path / "whole", tmp_path / "sharded", tied, meta)
    back = model(tied=tied)
    state = back.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "sharded", no_dist=True)
    back.load_state_dict(state)
    before = whole.state_dict()
    assert not torch.equal(before["head.weight"], model(tied=tied).head.weight)
    assert all(torch.equal(v, before[n]) for n, v in back.state_dict().items())
    wanted = step(whole, *tokens())
    for found in ranks:
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.abs(found[name] - value).max() < TOLERANCE * np.abs(value).max(), name


def test_training_goes_on_on_another_mesh(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(stop_and_go_on, {"tp": 2}, {"dp": 2}, tmp_path)
    whole = model()
    wanted = train(whole, tokens(), torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE), 4)
    assert wanted[-1] < wanted[0]
    for losses in found:
        assert losses == pytest.approx(wanted, rel=1e-5)
