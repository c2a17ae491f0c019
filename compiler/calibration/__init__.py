"""`dsmp hardware calibrate`: measures the running machine and writes what it found into an overlay file."""

from __future__ import annotations
