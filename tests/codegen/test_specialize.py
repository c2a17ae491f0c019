from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_kernels import matmul_call, row_max_call, scale_rows_call, scale_rows_kernel

from dsmp.codegen.emission.specialize import specialized_source
from dsmp.codegen.interpreter import interpret
from dsmp.codegen.kernel_call import Config, KernelCall
from dsmp.codegen.kernels.gemm import gemm_call
from dsmp.codegen.kernels.packed_weights import quantize_weight
from dsmp.codegen.kernels.weight_only import weight_only_calls
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS
from dsmp.errors import KernelUnavailableError

SM_90 = TARGETS["sm_90"]
BF16 = torch.bfloat16


def text_of(call: KernelCall, nodes: tuple[str, ...] = ("fc/fprop",)) -> str:
    return specialized_source(call, nodes=nodes, target=SM_90, notes={})


def imported(text: str, folder: Path) -> ModuleType:
    file = folder / "specialized.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(f"specialized_{abs(hash(text))}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def out_of(call: KernelCall) -> torch.Tensor:
    return call.arguments["out_ptr" if "out_ptr" in call.arguments else "out"]


def same_both_ways(call: KernelCall, folder: Path) -> str:
    """The specialised kernel's results are those of the call, to the bit; returns its text."""
    text = text_of(call)
    assert text == text_of(call)
    call.run()
    expected = out_of(call).clone()
    out_of(call).zero_()
    kernel = getattr(imported(text, folder), call.name)
    interpret(kernel, call.grid, {n: call.arguments[n] for n in kernel.arg_names})
    assert torch.equal(expected, out_of(call)) and expected.abs().sum() > 0
    return text


def scale_rows(kind: str, has_scale: bool, has_bias: bool, m: int = 70, n: int = 130) -> KernelCall:
    torch.manual_seed(0)
    scale, bias = torch.randn(m) if has_scale else None, torch.randn(n) if has_bias else None
    return scale_rows_call(torch.randn(m, n), scale, bias, torch.zeros(m, n), kind)


def matmul(split: int = 1, m: int = 70, k: int = 96, n: int = 130) -> KernelCall:
    torch.manual_seed(0)
    return matmul_call(torch.randn(m, k), torch.randn(k, n), torch.zeros(split, m, n), split)


def gemm_bf16(**options: Any) -> KernelCall:
    config = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64}, num_warps=4, num_stages=3)
    return gemm_call(
        meta(300, 512, dtype=BF16), meta(512, 640, dtype=BF16), meta(300, 640, dtype=BF16), config=config, **options
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("kind", ["none", "relu", "exp"])
def test_results_of_an_elementwise_kernel_are_the_same(kind, has_scale, has_bias, tmp_path):
    text = same_both_ways(scale_rows(kind, has_scale, has_bias), tmp_path)
    assert ("scale_ptr" in text) == has_scale and ("bias_ptr" in text) == has_bias
    assert "# one per row" in text or not has_scale
    assert ("# added in fp32" in text) == has_bias and "HAS_BIAS" not in text and "stride_n" not in text


@pytest.mark.parametrize(("split", "k", "n"), [(1, 96, 130), (1, 97, 130), (2, 97, 1), (2, 64, 64)])
def test_results_of_a_product_are_the_same(split, k, n, tmp_path):
    text = same_both_ways(matmul(split, k=k, n=n), tmp_path)
    assert re.search(rf"# Compiled in: (N = 1, )?SPLIT_K = {split}\.\n@triton\.jit", text)
    assert "INTERPRETED" not in text and "SPLIT_K" not in re.sub(r'"""out.*|# Compiled.*', "", text)


@pytest.mark.parametrize("times", [0, 2, 3])
def test_functions_as_constants_and_reductions(times, tmp_path):
    call = row_max_call(torch.randn(5, 130), torch.zeros(5), 2.0, times)
    text = same_both_ways(call, tmp_path)
    assert ("unused" in text) == (times > 2)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 80), st.integers(1, 150), st.sampled_from(["none", "relu", "exp"]), st.booleans(), st.booleans())
def test_any_size_gives_the_same(tmp_path_factory, m, n, kind, has_scale, has_bias):
    same_both_ways(scale_rows(kind, has_scale, has_bias, m, n), tmp_path_factory.mktemp("any"))


def test_a_gemm_with_epilogue_gives_the_same(tmp_path):
    torch.manual_seed(0)
    config = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64})
    call = gemm_call(torch.randn(70, 100), torch.randn(100, 90), torch.zeros(70, 90), config=config,
                     bias=torch.randn(90), residual=torch.randn(70, 90), activation="gelu_tanh")  # fmt: skip
    same_both_ways(call, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_only_product_gives_the_same(bits, tmp_path):
    torch.manual_seed(0)
    packed, scale = quantize_weight(torch.randn(40, 150), bits, 32)
    config = Config(blocks={"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "UNROLL": 2, "SPLIT_K": 2})
    calls = weight_only_calls(torch.randn(3, 150), packed, scale, torch.zeros(3, 40), group=32, config=config,
                              bias=torch.randn(40), activation="relu")  # fmt: skip
    calls[0].arguments["out"].zero_()
    for call in calls:
        same_both_ways(call, tmp_path)


def test_no_constexpr_parameter_is_left():
    for call in (scale_rows("relu", True, True), matmul(2), gemm_bf16(activation="gelu")):
        tree = ast.parse(text_of(call))
        annotations = [a.annotation for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for a in f.args.args]
        assert not any(a is not None and "constexpr" in ast.unparse(a) for a in annotations)
        defined = {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}
        for function in (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name != "launch"):
            parameters = {a.arg for a in function.args.args}
            read = {n.id for s in function.body for n in ast.walk(s) if isinstance(n, ast.Name)}
            assert parameters <= read, "a parameter that nothing reads"
        called = {c.func.id for c in ast.walk(tree) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
        assert defined - called <= {"launch", call.name}


def test_decisions_by_element_type_are_taken():
    text = text_of(gemm_bf16())
    assert ".dtype" not in text and "float8" not in text and "if " not in text.split('"""')[-1]
    assert "narrow(result)" in text and "result.to(tl.bfloat16)" in text.replace("clamped", "result")


def test_what_a_run_decides_stays(tmp_path):
    text = text_of(matmul())
    assert "for start in range(split * BLOCK_K, K, BLOCK_K):" in text
    assert "# the last step may stick out" not in text
    assert "# the last step may stick out" in text_of(matmul(k=97))


def test_tiles_are_named_constants():
    text = text_of(matmul())
    assert "BLOCK_M = tl.constexpr(32)\nBLOCK_N = tl.constexpr(64)\nBLOCK_K = tl.constexpr(32)\n" in text
    assert "_rows_block_m(" in text and "_rows_block_n(" in text


def launched(call: KernelCall, folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and keywords with which the specialised file launches."""
    module = imported(text_of(call), folder)
    names = getattr(module, call.name).arg_names
    seen: list[Any] = []

    class Recorder:
        def __getitem__(self, grid):
            def record(*args: Any, **options: Any) -> None:
                assert all(a is call.arguments[n] for a, n in zip(args, names, strict=True))
                seen.extend((grid, options))

            return record

    setattr(module, call.name, Recorder())
    wanted = module.launch.__code__.co_varnames[: module.launch.__code__.co_argcount]
    module.launch(**{n: call.grid if n == "grid" else call.arguments[n] for n in wanted})
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("call", "has_grid"),
    [(scale_rows("relu", True, True), True), (matmul(), True), (matmul(2), True), (matmul(m=5), False),
     (row_max_call(torch.randn(5, 130), torch.zeros(5), 2.0, 2), False), (gemm_bf16(), True)],
)  # fmt: skip
def test_launch_runs_the_same_grid(call, has_grid, tmp_path):
    grid, options = launched(call, tmp_path)
    assert tuple(grid) == call.grid
    assert options == {"num_warps": call.config.num_warps, "num_stages": call.config.num_stages}
    assert ("grid: tuple" in text_of(call)) != has_grid


def test_options_of_the_backend_are_passed(tmp_path):
    call = matmul_call(meta(64, 64, dtype=torch.float32), meta(64, 64, dtype=torch.float32),
                       meta(1, 64, 64, dtype=torch.float32), waves_per_eu=2)  # fmt: skip
    assert launched(call, tmp_path)[1]["waves_per_eu"] == 2


def test_a_docstring_that_states_another_grid_is_refused():
    call = scale_rows("relu", True, True)
    wrong = KernelCall(name=call.name, kernel=scale_rows_kernel, arguments=call.arguments, constants=call.constants,
                       grid=(7, 7), config=call.config)  # fmt: skip
    with pytest.raises(KernelUnavailableError, match="says that its grid is"):
        text_of(wrong)


def test_a_static_assertion_that_fails_is_an_error():
    with pytest.raises(KernelUnavailableError, match="_activated does not allow"):
        text_of(scale_rows("tanh", True, True))


FORBIDDEN = object()


@triton.jit
def _reads_an_object(x_ptr):
    tl.store(x_ptr, FORBIDDEN)


def test_objects_without_text_are_an_error():
    call = KernelCall(name="k", kernel=_reads_an_object, arguments={"x_ptr": torch.zeros(1)}, constants={}, grid=(1,),
                      config=Config(blocks={}))  # fmt: skip
    with pytest.raises(KernelUnavailableError, match="FORBIDDEN"):
        text_of(call)


@triton.jit
def _reassigns(x_ptr, n, step, TIMES: tl.constexpr):
    """Adds TIMES + n + step, by way of its parameters."""
    TIMES = TIMES + 1
    n += TIMES
    step = step + n
    tl.store(x_ptr, step - 1)


def test_parameters_that_are_assigned_stay_right(tmp_path):
    out = torch.zeros(1)
    call = KernelCall(name="k", kernel=_reassigns, arguments={"x_ptr": out, "n": 1, "step": 1},
                      constants={"TIMES": 3}, grid=(1,), config=Config(blocks={}))  # fmt: skip
    kernel = imported(text_of(call), tmp_path).k
    assert kernel.arg_names == ["x_ptr", "n", "step"]
    interpret(kernel, (1,), call.arguments)
    assert out.item() == 5


@triton.jit
def _moves_a_pointer(x_ptr, more_ptr, out_ptr):
    offset = tl.program_id(0)
    if more_ptr is not None:
        more_ptr += offset
    value = tl.load(x_ptr + offset)
    if more_ptr is not None:
        value += tl.load(more_ptr)
    tl.store(out_ptr + offset, value)


@pytest.mark.parametrize("more", [None, torch.arange(4.0)])
def test_an_assignment_in_a_dead_branch_is_none(more, tmp_path):
    call = KernelCall(name="k", kernel=_moves_a_pointer, constants={}, grid=(4,), config=Config(blocks={}),
                      arguments={"x_ptr": torch.ones(4), "more_ptr": more, "out_ptr": torch.zeros(4)})  # fmt: skip
    text = same_both_ways(call, tmp_path)
    assert "is not None" not in text and ("more_ptr" in text) == (more is not None)


def test_header_folds_many_nodes():
    text = text_of(matmul(), nodes=tuple(f"layers.{i}.fc/fprop" for i in range(40)))
    assert "Nodes (40): layers.0.fc/fprop" in text and "and 34 more." in text and "layers.39" not in text
    assert 'quotes """' not in specialized_source(matmul(), nodes=[], target=SM_90, notes={"Why": 'quotes """ \\'})
    compile(specialized_source(matmul(), nodes=[], target=SM_90, notes={"Why": 'quotes """ \\'}), "x", "exec")


def samples() -> dict[str, KernelCall]:
    return {
        "scale_rows.py": scale_rows("relu", False, True),
        "matmul_split.py": matmul(2, k=97),
        "gemm_bf16.py": gemm_bf16(bias=meta(640, dtype=BF16), activation="gelu"),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_golden(name, golden):
    text = specialized_source(samples()[name], nodes=["fc/fprop"], target=SM_90, notes={"Error": "2.1e-3 of the norm"})
    golden(name, text)


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff is not installed")
def test_texts_are_formatted(tmp_path):
    for name, call in samples().items():
        (tmp_path / name).write_text(text_of(call))
    done = subprocess.run(["ruff", "format", "--isolated", "--line-length", "120", "--diff", tmp_path],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("isa", ["sm_80", "gfx942"])
def test_compiled_code_is_the_same(isa, tmp_path):
    config = Config(blocks={"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=2)
    call = gemm_call(meta(256, 256, dtype=BF16), meta(256, 256, dtype=BF16), meta(256, 256, dtype=BF16), config=config,
                     bias=meta(256, dtype=BF16))  # fmt: skip
    kernel = getattr(imported(text_of(call), tmp_path), call.name)
    special = KernelCall(name=call.name, kernel=kernel, arguments={n: call.arguments[n] for n in kernel.arg_names},
                         constants={}, grid=call.grid, config=call.config)  # fmt: skip
    before, after = compile_call(call, TARGETS[isa]), compile_call(special, TARGETS[isa])
    assert before.code == after.code and before.shared_bytes == after.shared_bytes
