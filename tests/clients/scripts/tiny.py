"""A tiny language model, its data, and what the scripts print."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class TinyLayer(nn.Module):
    """A residual layer with odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tiny(nn.Module):
    """A language model with two layers."""

    def __init__(self, vocabulary: int = 13, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(TinyLayer(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean next-token loss."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def tokens(rows: int = 64, length: int = 7, vocabulary: int = 13) -> torch.Tensor:
    """Return the same token ids on every rank, (row, position)."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(7))


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full state dict of a wrapped model on rank 0, and nothing on others. Every rank must call this."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        return model.state_dict()


def show_units(model: nn.Module) -> None:
    """Print how many units the model has, and whose they are."""
    units = [module for module in model.modules() if isinstance(module, (FSDP, FSDPModule))]
    kind: Any = FSDP if isinstance(units[0], FSDP) else FSDPModule
    print(f"units {len(units)} of {kind.__module__.partition('.')[0]}", flush=True)


def show(label: str, name: object, *values: float | torch.Tensor) -> None:
    """Print numbers with all their digits, on a line that starts with their name."""
    print(label, name, *(repr(float(value)) for value in values), flush=True)


def show_weights(state_dict: dict[str, torch.Tensor]) -> None:
    """Print the norm of each entry of a full state dict."""
    for name, value in state_dict.items():
        show("weights", name, value.float().norm())
