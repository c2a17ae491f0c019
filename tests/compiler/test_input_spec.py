"""SPEC: grammar, values, and every mistake."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsmp.compiler.input_spec import (
    GRAMMAR,
    TensorSpec,
    check_call,
    make_inputs,
    make_tensor,
    name_positional,
    parse_tensor_spec,
)
from dsmp.errors import InputSpecError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@st.composite
def specs(draw: st.DrawFn, largest: int = 10**6) -> TensorSpec:
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, torch.bool]))
    shape = tuple(draw(st.lists(st.integers(1, largest), max_size=5)))
    upper = None
    if dtype in INTEGERS:
        limit = torch.iinfo(dtype).max + (dtype != torch.int64)
        upper = draw(st.none() | st.integers(1, limit))
    name = draw(st.none() | st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True))
    return TensorSpec(dtype, shape, upper, name)


@given(specs())
def test_text_of_a_spec_reads_back_as_the_same_spec(spec: TensorSpec) -> None:
    assert parse_tensor_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("float32[8,3,224,224]", TensorSpec(torch.float32, (8, 3, 224, 224), None, None)),
        ("int64[1,2048]<32000", TensorSpec(torch.int64, (1, 2048), 32000, None)),
        ("input_ids=int64[1,128]<32000", TensorSpec(torch.int64, (1, 128), 32000, "input_ids")),
        (" mask = bool[ 2 , 3 ] ", TensorSpec(torch.bool, (2, 3), None, "mask")),
        ("bfloat16[]", TensorSpec(torch.bfloat16, (), None, None)),
        ("uint8[4]<256", TensorSpec(torch.uint8, (4,), 256, None)),
    ],
)
def test_documented_forms(text: str, spec: TensorSpec) -> None:
    assert parse_tensor_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", GRAMMAR),
        ("float32", GRAMMAR),
        ("float32(1,2)", GRAMMAR),
        ("float32[1,2", GRAMMAR),
        ("float32[1,2]x", GRAMMAR),
        ("int64[1]<", GRAMMAR),
        ("float32[1,,2]", "''"),
        ("float32[1,2,]", "''"),
        ("float32[N,2]", "'N'"),
        ("float32[1.5]", "'1.5'"),
        ("float32[" + "9" * 30 + "]", GRAMMAR),
        ("float32[0,2]", "dimension 0"),
        ("float32[-1]", "dimension -1"),
        ("flaot32[1]", "float32"),
        ("complex64[1]", "Known: float64"),
        ("float32[1]<3", "only integers"),
        ("bool[1]<2", "only integers"),
        ("int64[1]<0", "out of range"),
        ("int64[1]<-4", "out of range"),
        ("int8[1]<129", "allowed: 1 to 128"),
        ("int64[1]<9223372036854775808", "out of range"),
        ("1x=float32[1]", "identifier"),
    ],
)
def test_malformed_specs_are_explained(text: str, says: str) -> None:
    with pytest.raises(InputSpecError) as caught:
        parse_tensor_spec(text)
    assert says in str(caught.value)


@given(specs(largest=6), st.integers(0, 2**32))
def test_made_tensors_keep_dtype_shape_and_range(spec: TensorSpec, seed: int) -> None:
    made = make_tensor(spec, "cpu", torch.Generator().manual_seed(seed))
    assert (made.dtype, tuple(made.shape)) == (spec.dtype, spec.shape)
    if spec.dtype in INTEGERS:
        assert made.min() >= 0
        assert int(made.max()) < (2 if spec.upper is None else spec.upper)


def test_values_are_spread_and_reproducible() -> None:
    def draw(text: str, seed: int) -> torch.Tensor:
        return make_tensor(parse_tensor_spec(text), "cpu", torch.Generator().manual_seed(seed))

    floats, integers, coins = draw("float32[10000]", 1), draw("uint8[10000]<256", 1), draw("bool[10000]", 1)
    assert abs(floats.mean()) < 0.05 and abs(floats.std() - 1) < 0.05
    assert integers.min() == 0 and integers.max() == 255
    assert 0.45 < coins.float().mean() < 0.55
    assert torch.equal(floats, draw("float32[10000]", 1))
    assert not torch.equal(floats, draw("float32[10000]", 2))


def test_meta_tensors_use_no_memory_and_no_random_numbers() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    made = make_tensor(parse_tensor_spec("float32[1000000,1000000]"), "meta", generator)
    assert made.is_meta and made.shape == (10**6, 10**6)
    assert torch.equal(before, generator.get_state())


def test_a_tensor_beyond_the_memory_is_an_input_error() -> None:
    with pytest.raises(InputSpecError, match="smaller shape"):
        make_tensor(parse_tensor_spec("float32[1000000000,1000000000]"), "cpu", None)


def test_inputs_are_split_into_positional_and_named() -> None:
    texts = ["float32[2]", "b=int64[3]<5", "bool[4]"]
    args, kwargs = make_inputs(map(parse_tensor_spec, texts), "cpu", 0)
    assert [tuple(a.shape) for a in args] == [(2,), (4,)]
    assert list(kwargs) == ["b"] and kwargs["b"].shape == (3,)
    with pytest.raises(InputSpecError, match="'b' is given twice"):
        make_inputs([parse_tensor_spec("b=int64[3]<5")] * 2, "cpu", 0)


class TwoInputs(nn.Module):
    def forward(self, x, *, scale=None):
        return x if scale is None else x * scale


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [((), {}, "'x'"), ((1, 2), {}, "too many positional"), ((1,), {"scales": 2}, "'scales'")],
)
def test_inputs_that_forward_does_not_take(args, kwargs, says) -> None:
    check_call(TwoInputs(), (1,), {"scale": 2})
    with pytest.raises(InputSpecError) as caught:
        check_call(TwoInputs(), args, kwargs)
    assert says in str(caught.value) and "TwoInputs.forward(x, *, scale=None)" in str(caught.value)


def test_positional_specs_take_the_names_of_forward() -> None:
    module = TwoInputs()
    named = name_positional([parse_tensor_spec("float32[2]"), parse_tensor_spec("scale=float32[1]")], module)
    assert {name: str(spec) for name, spec in named.items()} == {"x": "x=float32[2]", "scale": "scale=float32[1]"}
    for texts, says in [
        (["scal=float32[1]"], "Did you mean scale"),
        (["float32[1]", "x=float32[1]"], "given twice"),
        (["float32[1]"] * 3, "at most 2"),
    ]:
        with pytest.raises(InputSpecError, match=says):
            name_positional([parse_tensor_spec(t) for t in texts], module)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.complex64, None), (torch.float32, "not a name"), (torch.float8_e4m3fn, None)]
)
def test_specs_built_in_code_are_checked_too(dtype, name) -> None:
    with pytest.raises(InputSpecError):
        TensorSpec(dtype, (1,), None, name)
