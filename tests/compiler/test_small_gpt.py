"""The demonstration model: causal, trainable, and fed with real text."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, demo_model, small_gpt_batch, train_small_gpt
from dsmp.errors import InputSpecError, InvalidOptionError


@pytest.fixture(autouse=True)
def _seeded_on_one_thread() -> Iterator[None]:
    """One thread: operations this small wait for other threads longer than they compute."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_fresh_model_knows_nothing() -> None:
    model, (ids, targets) = demo_model()
    loss = model(ids, targets)
    assert loss.shape == () and loss.dtype == torch.float32
    assert abs(loss.item() - math.log(256)) < 0.1


def test_training_lowers_the_loss_on_text_it_has_not_seen() -> None:
    model = SmallGpt(SmallGptConfig(layers=2))
    held_out = small_gpt_batch(batch=16, held_out=True)
    before = model(*held_out).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = train_small_gpt(model, optimizer, steps=40, batch=4, context=64)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.9
    assert model(*held_out).item() < before - 1.9


def test_training_twice_gives_the_same_losses() -> None:
    def losses() -> list[float]:
        torch.manual_seed(1)
        model = SmallGpt(SmallGptConfig(layers=1, context=32))
        return train_small_gpt(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, context=32, batch=2)

    assert losses() == losses()


def test_attention_is_causal() -> None:
    model = SmallGpt(SmallGptConfig(layers=2)).eval()
    ids, _ = small_gpt_batch(batch=1, context=64)
    changed = ids.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 256
    first, second = model.logits(ids), model.logits(changed)
    assert torch.allclose(first[:, :40], second[:, :40], atol=1e-6)
    assert not torch.allclose(first[:, 40], second[:, 40], atol=1e-3)


def test_every_parameter_gets_a_gradient_and_the_head_is_untied() -> None:
    model, batch = demo_model()
    model(*batch).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []
    assert model.head.weight is not model.token_embedding.weight


def test_all_gemm_dimensions_are_multiples_of_the_block() -> None:
    linears = [m for m in SmallGpt().modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 4 * 4 + 1
    assert all(size % 128 == 0 for m in linears for size in m.weight.shape)


def test_residual_projections_start_smaller() -> None:
    blocks = SmallGpt(SmallGptConfig(layers=8)).blocks
    assert blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_batches_are_windows_of_real_text() -> None:
    ids, targets = small_gpt_batch(batch=3, context=50, seed=7)
    assert ids.shape == targets.shape == (3, 50) and ids.dtype == targets.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    text = bytes(small_gpt_batch(batch=20, context=400)[0].flatten().tolist()).decode("utf-8", "replace")
    assert text.count(" the ") > 20
    again, _ = small_gpt_batch(batch=3, context=50, seed=7)
    other, _ = small_gpt_batch(batch=3, context=50, seed=8)
    assert torch.equal(ids, again) and not torch.equal(ids, other)


def test_held_out_text_is_not_in_the_training_part() -> None:
    train, held_out = (
        {bytes(row) for row in small_gpt_batch(batch=60_000, context=80, held_out=part)[0].tolist()}
        for part in (False, True)
    )
    # a few sentences do occur twice in the manual; whole sections must not
    assert len(train & held_out) < 0.002 * len(held_out)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"d_model": 100}, "'d_model'"),
        ({"vocab_size": 0}, "'vocab_size'"),
        ({"heads": 3}, "divisor"),
        ({"layers": 0}, "'layers'"),
        ({"context": -1}, "'context'"),
    ],
)
def test_sizes_that_do_not_fit(sizes, says) -> None:
    with pytest.raises(InvalidOptionError, match=says):
        SmallGptConfig(**sizes)


def test_batches_that_cannot_be_cut() -> None:
    with pytest.raises(InvalidOptionError, match="'batch'"):
        small_gpt_batch(batch=0)
    with pytest.raises(InvalidOptionError, match="'context'"):
        small_gpt_batch(context=10**9)


def test_rows_longer_than_the_context() -> None:
    with pytest.raises(InputSpecError, match="context is 16"):
        SmallGpt(SmallGptConfig(context=16, layers=1))(*small_gpt_batch(batch=1, context=17))
