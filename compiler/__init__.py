"""What users touch: capture, torch.compile backend, report, command line."""

from __future__ import annotations
