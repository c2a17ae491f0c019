"""What CPUs run that torch has no operator for, or none as fast: C++ operators that are compiled once, the packed
weights that they read, and the pass that puts int8 into graphs."""

from __future__ import annotations
