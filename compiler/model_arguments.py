"""Checks of what every way to run a model on several devices is called with: a module, a mesh, whole numbers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InvalidOptionError


def check_module(model: Any) -> None:
    """Raise InvalidOptionError for a model that is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise InvalidOptionError("model", model, "an nn.Module")


def check_device_mesh(mesh: Any) -> None:
    """Raise InvalidOptionError for a mesh that is no DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise InvalidOptionError(
            "mesh", mesh, "a DeviceMesh, such as init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'tp'))"
        )


def check_positive(name: str, value: Any) -> None:
    """Raise InvalidOptionError for a value that is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOptionError(name, value, "a positive integer")
