"""From a legal graph to something that runs."""

from __future__ import annotations
