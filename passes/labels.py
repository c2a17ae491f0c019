"""Labels: one text for one way to compute and store a node, the same wherever that way is meant.

    fp8_e4m3:1x128/128x128->bf16
    compute  recipe (activation/weight)  stored result

The recipe is left out where values are not scaled, the stored format where it is the traced one. A node that is no
GEMM computes as traced, so its labels are the traced format or `->bf16`.
"""

from __future__ import annotations

SCORED_ARITHMETIC: tuple[tuple[str, str], ...] = (
    ("tf32", "none"),
    ("bf16", "none"),
    ("fp16", "none"),
    ("fp16", "tensor/tensor"),
    *((f, r) for f in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz")
      for r in ("tensor/tensor", "row/row", "1x128/128x128", "mx32/mx32")),
    ("int8", "row/row"),
    ("int8", "tensor/tensor"),
    ("fp6_e2m3", "mx32/mx32"),
    ("fp6_e3m2", "mx32/mx32"),
    ("fp4_e2m1", "mx32/mx32"),
    ("int4", "1x128/1x128"),
    ("fp16", "wide/none"),
    ("int8", "wide/row"),
    ("int8", "dynamic/row"),
    ("int8", "static/row"),
    ("int4", "wide/1x128"),
)  # fmt: skip
"""Formats and recipes (activation/weight) that every GEMM is scored for."""


def gemm_label(compute: str, recipe: str = "none") -> str:
    """The label of a GEMM's arithmetic; `recipe` in the order activation/weight, whatever the operands' order is."""
    return compute if recipe == "none" else f"{compute}:{recipe}"


def stored_label(output: str) -> str:
    """The label of a result that is rounded to `output` when it is stored."""
    return f"->{output}"


def label(compute: str, recipe: str, output: str, traced: str) -> str:
    """The label of a candidate."""
    if compute == traced and recipe == "none":
        return traced if output == traced else stored_label(output)
    return gemm_label(compute, recipe) + ("" if output == traced else stored_label(output))


def split_label(text: str) -> tuple[str, str]:
    """(label of the arithmetic or "", label of the stored result or "") of a candidate's label."""
    arithmetic, arrow, output = text.partition("->")
    return arithmetic, arrow + output
