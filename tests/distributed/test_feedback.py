"""Error feedback among two ranks: the error of a mean gradient falls as 1 / n, in eager mode and compiled."""

from __future__ import annotations

import pytest
import torch
from feedback_ranks import after_a_nan, errors_of_means, mistakes, net, resumed
from gloo import Ranks

from dsmp.codegen.feedback import compress_gradients
from dsmp.errors import FeedbackError, InvalidWireFormatError

STEPS = 16


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        ("int4", None),
        ("topk:0.3", None),
        ("int4", {"executor": "eager", "wire": "int8"}),  # the option leaves payloads alone
        pytest.param("int4", {"executor": "inductor"}, marks=pytest.mark.slow),
    ],
)
def test_the_error_falls_as_one_over_n(two_ranks: Ranks, wire: str, options: dict[str, str] | None) -> None:
    ranks = two_ranks.run(errors_of_means, wire, STEPS, options)
    errors = ranks[0]["errors"]
    assert errors[0] > 0.02, "a single step has the error of the format"
    # what n steps sent is off by a residual that does not grow: n * error stays below the largest residual
    largest = (2 if wire == "int4" else 4) * errors[0]  # top-k gets round to every value in some 1 / 0.3 steps
    for n, error in enumerate(errors, start=1):
        assert n * error <= largest, (n, errors)
    assert errors[-1] < errors[0] / 4
    assert ranks[1]["errors"] == errors
    for name, gradient in ranks[0]["gradients"].items():
        assert torch.equal(gradient, ranks[1]["gradients"][name]), "all ranks have the same mean"


def test_residuals_are_part_of_the_state(two_ranks: Ranks) -> None:
    state = two_ranks.run(errors_of_means, "int4", 2, None)
    for rank in state:
        names = rank["state"]
        assert set(names) - set(net().state_dict()) == {
            f"{owner}._dsmp_ef_{part}weight" for owner in ("up", "down") for part in ("", "owner_")
        } | {f"up._dsmp_ef_{part}bias" for part in ("", "owner_")}
        assert names["up._dsmp_ef_weight"].shape == (65, 33) and names["up._dsmp_ef_owner_bias"].shape == (33,)
        assert names["up._dsmp_ef_weight"].any()
    assert not torch.equal(*(rank["state"]["up._dsmp_ef_weight"] for rank in state)), "each rank has its own"
    assert all(map(all, two_ranks.run(resumed, 3)))


def test_a_step_that_is_not_finite_is_seen_and_forgotten(two_ranks: Ranks) -> None:
    for seen, clean, worst in two_ranks.run(after_a_nan):
        assert seen and clean and worst < 0.03


def test_mistakes_have_remedies(two_ranks: Ranks) -> None:
    again, frozen, wrapped, sharded = two_ranks.run(mistakes)[0]
    assert all(m.startswith("FeedbackError: ") for m in (again, frozen, wrapped, sharded))
    assert "are DTensors" in sharded
    assert "compressed already" in again and "requires_grad" in frozen and "pass the module inside it" in wrapped
    with pytest.raises(FeedbackError, match="init_process_group"):
        compress_gradients(net())


def test_arguments_of_the_wrong_kind_are_refused(fake_mesh):
    mesh = fake_mesh(dp=2)
    with pytest.raises(FeedbackError, match=r"group is DeviceMesh.*get_group"):
        compress_gradients(net(), mesh)
    with pytest.raises(FeedbackError, match=r"module is .*nn.Module"):
        compress_gradients(len)
    with pytest.raises(InvalidWireFormatError, match="format 8 is not possible"):
        compress_gradients(net(), wire=8)
