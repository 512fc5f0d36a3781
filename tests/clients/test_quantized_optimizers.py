"""Optimizers with states in 8 bits or fewer: trained on shards, saved, and resumed at another number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.errors import UnsupportedError
from tests.support import assert_equal, on_ranks
from tests.support.transport import rank_device

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own, of what they do not find on a CPU
# By class, its module, and arguments by which the states of every weight here are quantized, on each rank.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam8bit": ("torchao.optim", {"block_size": 64}),
    "AdamW8bit": ("torchao.optim", {"block_size": 64}),
    "AdamW4bit": ("torchao.optim", {"block_size": 64}),
    "AdamWFp8": ("torchao.optim", {"block_size": 64}),
    "bnb.Adam8bit": ("bitsandbytes.optim", {"min_8bit_size": 256}),
    "bnb.AdamW8bit": ("bitsandbytes.optim", {"min_8bit_size": 256}),
    "bnb.PagedAdamW8bit": ("bitsandbytes.optim", {"min_8bit_size": 256}),
    "bnb.Lion8bit": ("bitsandbytes.optim", {"min_8bit_size": 256}),
}
# A rounding of each state by the width of its codes, as a part of the largest magnitude of a block.
ROUNDING = {"AdamW4bit": 0.2, "AdamWFp8": 0.1}
EVERY = [
    (side, kind)
    for kind, (module, _) in KINDS.items()
    for side in ("originals", "flat", "fully_shard")
    if side != "fully_shard" or module != "bitsandbytes.optim"
]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let torchao's update run as it is: compiling it takes minutes on a CPU and changes no state's form."""
    adam = importlib.import_module("torchao.optim.adam")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(adam.torch, "compile", lambda function, **_: function)
        yield


def mesh_of(num_ranks: int) -> DeviceMesh:
    """Return a mesh of this rank and others, as many as given; of four ranks there may be two such meshes."""
    whole = init_device_mesh(rank_device().type, (4 // num_ranks, num_ranks), mesh_dim_names=("others", "own"))
    return whole["own"]


def sharded(side: str, mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False))
    if side != "fully_shard":
        return FSDP(model, process_group=mesh.get_group(), use_orig_params=side == "originals")
    return fully_shard(model, mesh=mesh)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    module, arguments = KINDS[kind]
    made: torch.optim.Optimizer = getattr(importlib.import_module(module), kind.rpartition(".")[2])(
        model.parameters(), lr=1e-2, **arguments
    )
    return made


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs[:, :128]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        rows = FSDP.optim_state_dict(model, optimizer)["state"]
    return {
        fqn: {name: each for name, each in row.items() if isinstance(each, torch.Tensor)} for fqn, row in rows.items()
    }


def is_quantized(row: dict[str, Any]) -> bool:
    locals_ = [getattr(each, "_local_tensor", each) for each in row.values()]
    return any(hasattr(each, "__tensor_flatten__") or getattr(each, "dtype", None) == torch.uint8 for each in locals_)


@pytest.mark.parametrize(("side", "kind"), EVERY)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1)])
@on_ranks(4)
def test_training_goes_on_at_another_number_of_ranks(
    side: str, kind: str, before: int, after: int, tmp_path: Path
) -> None:
    with uncompiled():
        model = sharded(side, mesh_of(before))
        optimizer = optimizer_of(kind, model)
        trained(model, optimizer, 0, 1, 2)
        assert all(map(is_quantized, optimizer.state.values()))
        save_checkpoint(tmp_path / f"saved{dist.get_rank() // before}", model, optimizer)
        dist.barrier()
        again = sharded(side, mesh_of(after), seed=1)
        loaded = optimizer_of(kind, again)
        load_checkpoint(tmp_path / "saved0", again, loaded)
        assert all(map(is_quantized, loaded.state.values()))
        found, saved = states_of(again, loaded), states_of(model, optimizer)
        for fqn, row in saved.items():
            for name, value in row.items():
                if value.dim() == 0:
                    assert_equal(found[fqn][name], value)
                else:
                    largest = value.abs().max()
                    assert (found[fqn][name] - value).abs().max() <= ROUNDING.get(kind, 0.02) * largest
        going_on, resumed = trained(model, optimizer, 3, 4, 5), trained(again, loaded, 3, 4, 5)
        assert going_on[0] == pytest.approx(resumed[0], rel=1e-5)
        assert going_on[-1] == pytest.approx(resumed[-1], rel=0.05)


@pytest.mark.parametrize("kind", [kind for kind, (module, _) in KINDS.items() if module == "bitsandbytes.optim"])
@on_ranks(4)
def test_optimizers_of_bitsandbytes_are_refused_by_name_on_dtensors(kind: str) -> None:
    """torch's fully_shard raises in the midst of the step, about an operator that mixes tensors and DTensors."""
    model = sharded("fully_shard", mesh_of(4))
    with pytest.raises(UnsupportedError, match=rf"{kind[4:]} of bitsandbytes takes no DTensors.*torchao\.optim"):
        trained(model, optimizer_of(kind, model), 0)
