"""Models with collectives of their own, compiled: the option `wire` decides how they send, and reports say so."""

from __future__ import annotations

import pytest
from gloo import Ranks
from model_ranks import tensor_parallel, train

ERRORS = {"fp32": 2e-6, "bf16": 8e-3, "int8": 2e-2, "int4": 0.4}
SHARES = {"bf16": 0.51, "int8": 0.27, "int4": 0.14}


@pytest.mark.parametrize(("placed", "wires"), [("sharded", ("fp32", "int8")), ("replicated", ("bf16", "int4"))])
def test_a_step_in_every_format(two_ranks: Ranks, placed: str, wires: tuple[str, ...]) -> None:
    plain = two_ranks.run(train, placed, None)
    wide = sum(plain[0]["sent"].values())
    operators = {"all_gather", "reduce_scatter"} if placed == "sharded" else {"all_reduce"}
    assert set(plain[0]["sent"]) == operators and plain[0]["error"] < ERRORS["fp32"]
    for wire in wires:
        for rank, found in enumerate(two_ranks.run(train, placed, wire)):
            assert found["error"] < ERRORS[wire], (wire, found["error"])
            if wire == "fp32":
                assert found["sent"] == plain[rank]["sent"]
                for name, gradient in found["gradients"].items():
                    assert gradient.equal(plain[rank]["gradients"][name])
                continue
            assert found["error"] > ERRORS["fp32"], "the format leaves its mark"
            narrowed = {k: r for k, r in found["planned"].items() if r.startswith(f"sent as {wire}: ")}
            assert set(found["planned"]) == set(found["ran"]) and len(narrowed) >= 3
            assert all(found["ran"][k][0] == f"wire_{wire}" for k in narrowed)
            assert sum(found["sent"].values()) <= SHARES[wire] * wide
            assert "reduce_scatter" not in found["sent"] and "all_reduce" not in found["sent"]
            assert {found["ran"][k][1].rpartition("bucket ")[2] for k in narrowed} <= {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("placed", ["sharded", "replicated"])
def test_inductor_sends_the_same(two_ranks: Ranks, placed: str) -> None:
    eager, fused = (two_ranks.run(train, placed, "int8", executor) for executor in ("eager", "inductor"))
    for one, other in zip(eager, fused, strict=True):
        assert other["sent"] == one["sent"] and other["ran"] == one["ran"]
        assert other["error"] < ERRORS["int8"]


def test_globs_choose_collectives(two_ranks: Ranks) -> None:
    globs = {"*": "bf16", "*|reduce_scatter_tensor|*": "int8", "layers.1*": "fp32", "nothing*": "int4"}
    found = two_ranks.run(train, "sharded", globs)[0]
    planned = found["planned"]
    assert {r.partition(":")[0] for k, r in planned.items() if k.startswith("layers.1|")} == {"stays as written"}
    others = {k: r for k, r in planned.items() if not k.startswith("layers.1|")}
    assert others and all(
        r.startswith("sent as int8" if "reduce_scatter" in k else "sent as bf16") for k, r in others.items()
    )
    assert any("'nothing*' matches no collective" in w for w in found["warnings"])


def test_sizes_that_are_symbols(two_ranks: Ranks) -> None:
    exact, narrow = (two_ranks.run(tensor_parallel, wire)[0] for wire in (None, "int8"))
    assert max(exact) < 1e-5
    assert 1e-4 < min(narrow) <= max(narrow) < 0.03
