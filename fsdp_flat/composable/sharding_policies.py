"""Defines the option classes of ``fully_shard``, with the names and fields of FSDP2's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_flat.errors import OptionError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Holds the dtypes of a unit. Sharded parameters and their gradients keep the parameters' own dtype.

    Attributes:
        param_dtype: dtype of unsharded parameters, and so of compute; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None is ``param_dtype``.
        output_dtype: dtype to which floating-point outputs of the forward are cast; None leaves them.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class DataParallelMeshDims:
    """Names the data-parallel dims of a mesh over which the parameters are DTensors already.

    Attributes:
        shard: the dim to shard over, or several, which are flattened into one.
        replicate: the dim to replicate over, or several.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check that a dim is named.

        Raises:
            OptionError: none is.
        """
        if self.shard is None and self.replicate is None:
            raise OptionError("DataParallelMeshDims needs a dim to shard over, or one to replicate over; got neither.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Return the dims to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Return the dims to replicate over."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass
class OffloadPolicy:
    """Stands for no offloading; its subclass :class:`CPUOffloadPolicy` offloads."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keeps sharded parameters, gradients and so the optimizer's states in host memory.

    Attributes:
        pin_memory: accepted; host memory of an accelerator's shards is always pinned.
    """

    pin_memory: bool = True
