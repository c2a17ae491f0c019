"""From an FX graph to decisions, and from decisions to a legal FX graph."""

from __future__ import annotations
