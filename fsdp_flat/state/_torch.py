"""Resolves names of torch.distributed that moved between torch 2.8 and 2.15."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["root_mesh"]


def root_mesh(mesh: DeviceMesh) -> Any:
    """Return the mesh that ``mesh`` was sliced from, or ``mesh`` itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)
