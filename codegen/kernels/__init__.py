"""Families of Triton kernels: each turns tensors and a configuration into a launch (`codegen/kernel_call.py`)."""

from __future__ import annotations
