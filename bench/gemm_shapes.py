"""The GEMMs of a forward pass of known models, and rows of a table from measured times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.table import Row
from dsmp.hardware_db.capability import Device

ROW_BASELINE = "torch mm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """y [tokens, n] = x [tokens, k] @ w [n, k]^T of one linear layer; queries, keys and values and gate and up are one
    product each, as they are served and trained."""

    model: str
    layer: str
    n: int
    k: int

    @property
    def text(self) -> str:
        return f"{self.model} {self.layer} {self.n}x{self.k}"

    def flops(self, tokens: int) -> int:
        """Additions and multiplications."""
        return 2 * tokens * self.n * self.k


def _llama(model: str, hidden: int, inner: int, kv: int) -> tuple[Shape, ...]:
    layers = {
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate+up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    return tuple(Shape(model=model, layer=name, n=n, k=k) for name, (n, k) in layers.items())


# Sizes: config.json of meta-llama/Llama-3.1-8B and -70B (8 heads of keys and values of 128 each) and of
# deepseek-ai/DeepSeek-V3: hidden 7168, q_lora 1536, kv_lora 512, 128 heads of 128 + 64 (rope) and values of 128, inner
# 18432, experts 2048. The down projections of queries and of keys and values are one product of 1536 + 512 + 64.
_DEEPSEEK = {
    "qkv down": (1536 + 512 + 64, 7168),
    "q up": (128 * (128 + 64), 1536),
    "kv up": (128 * (128 + 128), 512),
    "o": (7168, 128 * 128),
    "gate+up": (2 * 18432, 7168),
    "down": (7168, 18432),
    "expert gate+up": (2 * 2048, 7168),
    "expert down": (7168, 2048),
}
SHAPES: dict[str, tuple[Shape, ...]] = {
    "llama-8b": _llama("llama-8b", 4096, 14336, 1024),
    "llama-70b": _llama("llama-70b", 8192, 28672, 1024),
    "deepseek-v3": tuple(Shape(model="deepseek-v3", layer=name, n=n, k=k) for name, (n, k) in _DEEPSEEK.items()),
}


def shapes_of(names: Iterable[str]) -> list[Shape]:
    """The shapes of models. Raises KeyError for a model that is not in SHAPES."""
    return [shape for name in names for shape in SHAPES[name]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What one implementation took for a shape.

    format: that is multiplied in, with its recipe, such as `fp8_e4m3 row`. ms: the product of operands that are in the
    format; quantise_ms: bringing both operands, x and w in bf16, into it. choice: the configuration and how many were
    tried.
    """

    implementation: str
    format: str
    ms: float
    quantise_ms: float = 0.0
    choice: str = ""

    @property
    def with_quantise_ms(self) -> float:
        return self.ms + self.quantise_ms


def rows_of(shape: Shape, tokens: int, timings: Iterable[Timing], device: Device) -> list[Row]:
    """The rows of a shape: TFLOPS, the share of the device's peak in the format, speed-ups over the baseline."""
    found = list(timings)
    base = next(t for t in found if t.implementation == ROW_BASELINE)
    rows: list[Row] = []
    for timing in found:
        rate = shape.flops(tokens) / (1e-3 * timing.ms)
        rows.append(
            {
                "shape": shape.text,
                "implementation": timing.implementation,
                "format": timing.format,
                "ms": timing.ms,
                "ms with quantise": timing.with_quantise_ms,
                "TFLOPS": rate / 1e12,
                "% of peak": 100 * rate / device.peak(timing.format.split()[0]),
                "x torch bf16": base.ms / timing.ms,
                "x with quantise": base.ms / timing.with_quantise_ms,
                "choice": timing.choice,
            }
        )
    return rows
