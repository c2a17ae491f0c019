"""Kernels of a plan as readable, self-contained source files."""

from __future__ import annotations
