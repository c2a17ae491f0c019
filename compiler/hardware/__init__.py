"""`dsmp hardware`: the database on a terminal and as JSON. Loads no torch, except to detect the running device."""

from __future__ import annotations
