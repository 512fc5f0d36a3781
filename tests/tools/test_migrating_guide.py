"""The Python blocks of docs/migrating.md run on two ranks, and leave the models and optimizers that they speak of."""

from __future__ import annotations

import re
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_flat
from tests.site.pages import blocks_in
from tests.support import on_ranks
from tests.support.compare import assert_close, assert_equal
from tests.support.kit import train_on
from tests.support.peer import PeerFSDP, peer_fsdp

GUIDE = Path(__file__).parents[2] / "docs" / "migrating.md"


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))


def build() -> nn.Module:
    """A model with weights of its own each time, the same on every rank."""
    return nn.Sequential(Block(), Block(), nn.Linear(6, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on numbers that depend on the rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    train_on(model, optimizer, [torch.randn(5, 6, generator=generator)])


def written_by_the_peer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train torch's FSDP1 a little and write what the guide reads; the whole states, model and optimizer."""
    model = peer_fsdp(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    full = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with PeerFSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full):
        whole, optim_state = model.state_dict(), PeerFSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "model.pt")
        torch.save(optim_state, folder / "optim.pt")
    sharded = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)
    with PeerFSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *sharded):
        state = {"model": model.state_dict(), "optim": PeerFSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / "sharded")
    return whole, optim_state


def of_a_plain_optimizer(optim_state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The state dict that the plain model's optimizer would have: ids for names."""
    states = {names.index(name): state for name, state in optim_state["state"].items()}
    groups = [{**group, "params": list(range(len(names)))} for group in optim_state["param_groups"]]
    return {"state": states, "param_groups": groups}


def whole_of(state: dict[str, Any]) -> dict[str, Any]:
    """FSDP2's states as whole tensors."""
    return {
        key: value.full_tensor()
        if hasattr(value, "full_tensor")
        else whole_of(value)
        if isinstance(value, dict)
        else value
        for key, value in state.items()
    }


def blocks() -> dict[str, list[str]]:
    """The Python blocks, by the heading that they are under."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]:
        found[section.partition("\n")[0]] = [block.code for block in blocks_in(section, GUIDE)]
    return found


def check_loops(names: dict[str, Any], folder: Path) -> None:
    """Assert that the loop with either ``fully_shard`` has the wrapper's losses, and continues from its file."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(5, 6, generator=generator) for _ in range(8)]
    loops = {"wrapper": names["train"], "ours": names["train_fully_sharded"]}
    peers = {**names, "fully_shard": partial(torch.distributed.fsdp.fully_shard, mesh=names["mesh"])}
    loops["torch's"] = FunctionType(names["train_fully_sharded"].__code__, peers)
    found: dict[str, tuple[list[float], list[float], dict[str, Any]]] = {}
    for kind, loop in loops.items():
        torch.manual_seed(0)
        first = loop(folder / f"{kind}.pt", batches[:4])
        # Every loop goes on from the file of the wrapper's.
        path = folder / f"{kind}_from_wrapper.pt"
        if dist.get_rank() == 0:
            shutil.copy(folder / "wrapper.pt", path)
        dist.barrier()
        found[kind] = first, loop(path, batches[4:]), torch.load(folder / f"{kind}.pt")
    losses, later, state = found["wrapper"]
    assert len(set(losses + later)) == 8
    for kind in ("ours", "torch's"):
        # Clipping adds the squares of the norm in another order, which rounds differently.
        torch.testing.assert_close(found[kind][0], losses, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found[kind][1], later, rtol=1e-4, atol=1e-6)
        assert_close(found[kind][2]["model"], state["model"], rtol=1e-4, atol=1e-6)
        assert_close(found[kind][2]["optimizer"]["state"], state["optimizer"]["state"], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_the_blocks_load_what_fsdp1_wrote_and_hand_it_on_to_fsdp2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")  # ShardedTensor and what reads it are deprecated
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        expected, expected_optim = written_by_the_peer(tmp_path)
        dist.barrier()
        code = blocks()
        names = {
            "Block": Block,
            "build": build,
            "folder": tmp_path,
            "mesh": init_device_mesh("cpu", (2,)),
            "plain_optim_state": of_a_plain_optimizer(expected_optim, [name for name, _ in build().named_parameters()]),
            "torch": torch,
        }

        def run(block: str) -> None:
            exec(compile(block, str(GUIDE), "exec"), names)

        def check(*, model_too: bool = True) -> None:
            model, optimizer = names["model"], names["optimizer"]
            if model_too:
                assert_equal(dict(model.state_dict()), dict(expected))
            found = fsdp_flat.FullyShardedDataParallel.optim_state_dict(model, optimizer)
            assert_equal(found["state"], expected_optim["state"])
            for state in optimizer.state.values():  # so that the next block has something to load
                for value in state.values():
                    value.zero_()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()

        for block in code["From torch's FSDP1"]:
            run(block)
        for block, model_too in zip(code["Checkpoints of FSDP1"], (True, True, False), strict=True):
            run(block)
            check(model_too=model_too)

        run(code["Checkpoints of FSDP1"][0])
        run(code["From torch's FSDP2"][0])
        for block in code["From the wrapper to fully_shard"]:
            run(block)
        step(names["mixed"], names["mixed_optimizer"], 1)
        check_loops(names, tmp_path)
        for block in code["On to FSDP2"]:
            run(block)
            assert isinstance(names["new"], torch.distributed.fsdp.FSDPModule)
            found = whole_of(dict(names["new"].state_dict()))
            assert_close(found, dict(expected), rtol=0, atol=0)
            states = names["sd"].get_optimizer_state_dict(names["new"], names["new_optimizer"])["state"]
            assert_close(whole_of(states), expected_optim["state"], rtol=0, atol=0)
            with torch.no_grad():
                for param in names["new"].parameters():
                    param.zero_()


@on_ranks(2)
def test_local_checkpoints_of_fsdp1_load_into_the_same_wrapping() -> None:
    torch.manual_seed(0)
    plain = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        peer = peer_fsdp(plain, auto_wrap_policy=ModuleWrapPolicy({Block}))
        ours = fsdp_flat.FullyShardedDataParallel(build(), auto_wrap_policy=fsdp_flat.wrap.ModuleWrapPolicy({Block}))
        expected = peer.state_dict()
        with PeerFSDP.state_dict_type(peer, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
            state = peer.state_dict()
        kind = fsdp_flat.StateDictType.LOCAL_STATE_DICT
        with fsdp_flat.FullyShardedDataParallel.state_dict_type(ours, kind):
            ours.load_state_dict(state)
        assert_equal(dict(ours.state_dict()), dict(expected))
