"""Measurements: `python -m bench.NAME` from the repository's root prints a table of ratios measured in one run."""

from __future__ import annotations
