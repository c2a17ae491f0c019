"""Running `dsmp hardware` in tests, and a data file of its own for it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from dsmp.compiler.cli import app

# A device with one of everything that `show` has to say something of.
OWN = """
[[architecture]]
key = "nv.test"
vendor = "nvidia"
family = "Test"
kind = "gpu"
isa = "sm_199"
unit_kind = "SM"
lanes_per_unit = 128
scratchpad_bytes_per_unit = 233472
sparsity_factor = 2
fp8_flavour = "ocp"
io_formats = ["fp32", "fp16", "bf16", "int8"]
flushes_denormals = ["bf16"]
launch_overhead_s = 5e-6
launch_overhead_source = "a guess"
toolchain = "needs a compiler of its own"
source = ["the manual of the test unit"]
vector = { "fp32@fp32" = 256 }
matrix = { "bf16@fp32" = 1024, "fp8_e4m3@fp32" = 2048, "int8@int32" = 2048 }

[architecture.accumulation.fp8_e4m3]
effective_mantissa_bits = 13
promote_every_k = 128

[architecture.limits.fp8_e4m3]
op_classes = ["linear"]
reason = "nothing else was built"

[architecture.refusals]
int4 = "it was left out"

[architecture.efficiency]
compute = 0.8
memory = 0.9
compute_by_format = { fp8_e4m3 = 0.7 }
source = "assumed"

[architecture.tier]
storage = "bf16"
linear = [{ format = "fp8_e4m3", recipe = "1x128/128x128" }, { format = "bf16" }, { format = "fp32" }]
conv = [{ format = "bf16" }, { format = "fp32" }]
attention = [{ format = "bf16" }, { format = "fp32" }]

[[device]]
id = "test-100"
name = "Test 100"
arch = "nv.test"
segment = "workstation"
aliases = ["T-One-Hundred"]
detect_names = ["NVIDIA Test 100"]
year = 2030
units = 100
cores = 12800
logical_devices = 2
vector_clock_mhz = 2000
matrix_clock_mhz = 1000
memory_bytes = 68719476736
memory_type = "HBM9"
memory_bandwidth_bytes_per_s = 3352e9
l2_bytes = 52428800
interconnect = { kind = "TestLink", bidirectional_bytes_per_s = 900e9 }
tdp_w_per_card = 750
stated_vector_tflops_per_card = { fp32 = 102.4 }
stated_matrix_tflops_per_card = { "bf16@fp32" = 206, "int8@int32" = 450 }
note = "It exists in this test only."

[device.known_disagreements]
"matrix.int8@int32" = "the sheet says so"

[device.sources]
all = ["the sheet"]
clocks = ["a photograph of the sheet", "the sheet"]

[device.confidence]
all = "A"
clocks = "B"
power = "C"
"""


def run(*arguments):
    return CliRunner().invoke(app, ["hardware", *map(str, arguments)])


def data_of(*arguments):
    """What a command prints as JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error_of(*arguments) -> str:
    """The one line on standard error that a failed command leaves."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line
