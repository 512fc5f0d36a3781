"""Devices that tests run on, and how a sharded model and its plain copy train on them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support.beside import NEAR, WIDTH, Beside
from tests.support.kit import batch
from tests.support.models import Block, Stack

NO_ACCELERATOR = "no accelerator"
# What a test needs to run on an accelerator; also those of other folders may use it.
ON_ACCELERATOR = (pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason=NO_ACCELERATOR))
# Models of the kit are too small to keep a GPU busy: these are the factors by which rows and widths grow there.
FACTOR = {"cpu": 1, "accelerator": 64}


def kind_id(value: object) -> str | None:
    """Make ids of kinds of parameters readable."""
    return {True: "orig", False: "flat"}[value] if isinstance(value, bool) else None


def on_devices(names: str, accelerator: Sequence[Any], cpu: Sequence[Any], ids: Any = None) -> pytest.MarkDecorator:
    """Parametrise a test by ``where`` and ``names``: every case on the accelerator, the few of ``cpu`` on the CPU too.

    Args:
        names: arguments of the test beside ``where``, as pytest takes them; none for an empty string.
        accelerator: their values, one case each, tuples where there are several names.
        cpu: those of the cases that also run on the CPU.
        ids: makes the id of a value.
    """
    cases = []
    for where, values, marks in (("cpu", cpu, ()), ("accelerator", accelerator, ON_ACCELERATOR)):
        for value in values:
            row = value if isinstance(value, tuple) else (value,)
            text = "-".join([where, *(_id_of(part, ids) for part in row)])
            cases.append(pytest.param(where, *row, marks=marks, id=text))
    return pytest.mark.parametrize(", ".join(filter(None, ["where", names])), cases)


def _id_of(value: Any, ids: Any) -> str:
    made = None if ids is None else ids(value)
    return str(made if made is not None else getattr(value, "name", getattr(value, "__name__", value)))


def compute_device(where: str) -> torch.device:
    """Return the device that ``where`` stands for, ready to compute: the CPU, or the first accelerator.

    Ranks share the accelerator.
    """
    if where == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, 0)
    torch.accelerator.set_device_index(0)
    torch.empty(1, device=device)
    return device


def forbid_waits(device: torch.device) -> AbstractContextManager[None]:
    """Raise inside the block where the host waits for a CUDA device; does nothing for other devices."""
    return _NoWaits() if device.type == "cuda" else nullcontext()


class _NoWaits(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode", category=UserWarning)
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


class Recomputed(nn.Module):
    """A first layer and blocks whose activations are computed anew in backward."""

    def __init__(self, width: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Trainer(Beside):
    """A sharded model beside its plain copy on one device in float32; ranks share an accelerator over gloo.

    Args:
        where: ``"cpu"`` or ``"accelerator"``.
        module: builds the model from its width; three blocks of the kit between two layers if absent.
        kwargs: the wrapper's arguments, and further ones of :class:`Beside`.
    """

    def __init__(self, where: str, module: Any = None, *, use_orig_params: bool = False, **kwargs: Any) -> None:
        self.device = compute_device(where)
        self._factor = FACTOR[where]
        with self.device:
            built = (Stack(width=WIDTH * self._factor) if module is None else module(WIDTH * self._factor)).float()
        # Matrix products of another shape may be summed in another order.
        kwargs.setdefault("tolerance", NEAR if where == "cpu" else {"atol": 1e-5, "rtol": 1e-4})
        front = "originals" if use_orig_params else "flat"
        super().__init__(built, front, batch=self._rows, dtype=torch.float32, device_id=self.device, **kwargs)

    def _rows(self, rank: int, step: int) -> torch.Tensor:
        """Return the kit's rows of a rank, repeated to the width of the model."""
        return batch(rank, step).to(self.device).repeat(self._factor, self._factor)

    def _compare(self, front: str, actual: dict[str, Any], expected: dict[str, Any], *rest: Any) -> None:
        # Offloaded shards and gradients are on the host.
        on_host = (pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values) for values in (actual, expected))
        super()._compare(front, *on_host, *rest)


def low_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Take the mean square of the output in bf16; a plain model takes its fp32 parameters through a cast."""
    rows = x.bfloat16()
    if isinstance(model, FSDP):
        return model(rows).float().pow(2).mean()
    low = {name: param.bfloat16() for name, param in model.named_parameters()}
    return functional_call(model, low, (rows,)).float().pow(2).mean()
