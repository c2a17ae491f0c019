"""A small valid profile and device, as TOML, for tests to add to and to break."""

from __future__ import annotations

ARCHITECTURE = """
key = "nv.sm_1"
vendor = "nvidia"
family = "Test"
kind = "gpu"
isa = "sm_1"
unit_kind = "SM"
lanes_per_unit = 64
io_formats = ["fp32", "fp16"]
launch_overhead_s = 7e-6
launch_overhead_source = "assumed"
source = ["none"]
vector = { fp32 = 128 }
matrix = { "fp16@fp32" = 1024 }
efficiency = { compute = 0.8, memory = 0.9, source = "assumed" }
tier.storage = "fp32"
tier.linear = [{ format = "fp16", recipe = "tensor" }, { format = "fp32" }]
tier.conv = [{ format = "fp32" }]
tier.attention = [{ format = "fp32" }]
"""

DEVICE = """
id = "x1"
name = "Test X1"
arch = "nv.sm_1"
segment = "datacenter"
year = 2020
units = 10
vector_clock_mhz = 1000
memory_bytes = 1000000000
memory_type = "HBM"
memory_bandwidth_bytes_per_s = 1e11
tdp_w_per_card = 100
sources.all = ["none"]
confidence.all = "A"
"""
