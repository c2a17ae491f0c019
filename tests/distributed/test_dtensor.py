"""Users' own DTensor code through the backend: exact as written, within a format's error where one is asked for."""

from __future__ import annotations

import pytest
import torch
from dtensor_ranks import train, two_encodings
from gloo import Ranks

pytestmark = pytest.mark.slow  # real processes

EXACT = 1e-5
OPERATORS = {"tensor parallel": {"all_reduce"}, "SimpleFSDP": {"all_gather", "reduce_scatter"}}


@pytest.mark.parametrize("style", OPERATORS)
def test_a_step_as_written_and_in_int8(style: str, two_ranks: Ranks) -> None:
    plain, exact, narrow = (two_ranks.run(train, style, wire) for wire in (None, "fp32", "int8"))
    for written, same, found in zip(plain, exact, narrow, strict=True):
        assert set(written["sent"]) == OPERATORS[style] and max(written["errors"]) < EXACT
        assert same["sent"] == written["sent"] and same["errors"] == written["errors"]
        assert EXACT < max(found["errors"]) < 4e-2
        assert set(found["sent"]) == {"all_gather", "all_to_all"}
        assert sum(found["sent"].values()) < 0.27 * sum(written["sent"].values())
        reduced = [k for k, text in found["planned"].items() if text.startswith("sent as int8: ")]
        assert len(reduced) >= 3 and all(found["ran"][k] == "wire_int8" for k in reduced)


@pytest.mark.long
@pytest.mark.parametrize("style", OPERATORS)
def test_products_have_the_keys_of_the_model_in_one_process(style: str, two_ranks: Ranks) -> None:
    for found in two_ranks.run(train, style, None):
        assert found["keys"] == found["plain"] and len(found["keys"]) == 11


@pytest.mark.long
@pytest.mark.parametrize("style", OPERATORS)
def test_inductor_sends_the_same(style: str, two_ranks: Ranks) -> None:
    eager, fused = (two_ranks.run(train, style, "int8", executor) for executor in ("eager", "inductor"))
    for one, other in zip(eager, fused, strict=True):
        assert other["sent"] == one["sent"] and other["keys"] == one["keys"] and max(other["errors"]) < 4e-2


def test_what_compress_gradients_sends_is_not_encoded_again(two_ranks: Ranks) -> None:
    alone, both = (two_ranks.run(two_encodings, "int4", wire) for wire in (None, "int8"))
    for (sent, gradients, _), (again, same, ran) in zip(alone, both, strict=True):
        assert sent == again and set(ran) <= {"torch"}
        assert all(torch.equal(same[n], g) for n, g in gradients.items())


def test_what_compress_gradients_leaves_in_fp32_follows_the_option(two_ranks: Ranks) -> None:
    for sent, _, ran in two_ranks.run(two_encodings, "fp32", "int8"):
        assert set(sent) >= {"all_gather", "all_to_all"} and "wire_int8" in ran
