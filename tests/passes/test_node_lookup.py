"""Which node a user means: key, module path, glob or beginning; and what is said where it is none or several."""

from __future__ import annotations

import pytest
from plan_samples import HEAD, priced_plan, traced_plan

from dsmp.errors import AmbiguousKeyError, UnknownKeyError
from dsmp.passes.node_lookup import find_decision

PLAN = priced_plan(12, 1e5)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (HEAD, HEAD),
        ("head", HEAD),
        ("layers.1.attn.q", "layers.1.attn.q|fprop|linear|0"),
        ("*.3.attn.q", "layers.3.attn.q|fprop|linear|0"),
        ("layers.3.up|*", "layers.3.up|fprop|linear|0"),
        ("layers.10.at*|sdpa|*", "layers.10.attn|fprop|sdpa|0"),
        ("layers.10.attn.o", "layers.10.attn.out|fprop|linear|0"),
        ("layers.10.attn|fprop|view|2", "layers.10.attn|fprop|view|2"),
        ("embed|", "embed|fprop|embedding|0"),
        # views and one GEMM: the GEMM is meant
        ("layers.10.attn", "layers.10.attn|fprop|sdpa|0"),
    ],
)
def test_finds_one(text: str, key: str) -> None:
    assert find_decision(PLAN, text).key == key


def test_unknown() -> None:
    with pytest.raises(UnknownKeyError, match=r"'layers\.3\.attn\.w'.*Did you mean .*'layers\.\d+\.attn\.\w+\|fprop"):
        find_decision(PLAN, "layers.3.attn.w")
    with pytest.raises(UnknownKeyError, match=r"Did you mean .*'layers\.1\.up\|fprop\|linear\|0'"):
        find_decision(PLAN, "layers.1.up|fprop|linear|7")
    with pytest.raises(UnknownKeyError, match=r"fqn\|phase\|op\|ordinal, for example 'embed\|"):
        find_decision(PLAN, "zzzzzzzzzz")
    with pytest.raises(UnknownKeyError, match="empty"):
        find_decision(traced_plan([], None), "a")


def test_ambiguous() -> None:
    with pytest.raises(AmbiguousKeyError, match=r"fits 12 nodes.*layers\.0\.up\|fprop.* and 4 more"):
        find_decision(PLAN, "*.up")
    with pytest.raises(AmbiguousKeyError, match=r"fits 3 nodes.*\|add\|0, .*\|gelu\|0"):
        find_decision(PLAN, "layers.0")
    with pytest.raises(AmbiguousKeyError, match="Name one"):
        find_decision(PLAN, "layers.10.attn|fprop|view")
