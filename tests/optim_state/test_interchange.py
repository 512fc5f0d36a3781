"""Optimizer states of torch's FSDP1, of FSDP2 and of plain models load here, and ours there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import OptimStateKeyType, load_checkpoint, save_checkpoint
from fsdp_flat.errors import LoadError, OptionError
from tests.state_dict.kit import FULL, LOCAL, ON_DEVICE, OPTIMIZERS, SHARDED, TASKS, groups_of, peer_quiet, save, train
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS, average_gradients
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Model
from tests.support.peer import PeerFSDP, peer_fully_shard
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer, whole_state

PEER = peer_library.StateDictType
# The peer's copies to the CPU alias one another with original parameters; without them they are right.
PEER_OPTIM = {
    FULL: (PEER.FULL_STATE_DICT, peer_library.FullOptimStateDictConfig(offload_to_cpu=False)),
    SHARDED: (PEER.SHARDED_STATE_DICT, peer_library.ShardedOptimStateDictConfig(offload_to_cpu=False)),
    LOCAL: (PEER.LOCAL_STATE_DICT, peer_library.LocalOptimStateDictConfig()),
}
TASK = TASKS["uneven"]


class Even(Model):
    """Every first dim is at least the number of ranks: with a rank without a chunk the peer fails."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 4)


def peer_save(model: Any, optimizer: torch.optim.Optimizer, kind: Any) -> tuple[Any, Any]:
    peer_kind, config = PEER_OPTIM[kind]
    with peer_quiet(), PeerFSDP.state_dict_type(model, peer_kind, None, config):
        return model.state_dict(), PeerFSDP.optim_state_dict(model, optimizer)


def peer_load(model: Any, optimizer: torch.optim.Optimizer, kind: Any, saved: tuple[Any, Any]) -> None:
    peer_kind, config = PEER_OPTIM[kind]
    with peer_quiet(), PeerFSDP.state_dict_type(model, peer_kind, None, config):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(PeerFSDP.optim_state_dict_to_load(model, optimizer, saved[1]))


def our_load(model: Any, optimizer: torch.optim.Optimizer, kind: Any, saved: tuple[Any, Any]) -> None:
    with FSDP.state_dict_type(model, kind, None, ON_DEVICE[kind]):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved[1]))


@ORIG_PARAMS
@pytest.mark.parametrize("optim", ["adamw", "momentum"])
@on_ranks(2)
def test_the_peer_and_we_load_each_others_states_in_every_form(optim: str, use_orig_params: bool) -> None:
    def pair(ours: bool, seed: int) -> tuple[Any, Any]:
        model = (shard if ours else shard_by_peer)(seeded(Even, seed), use_orig_params=use_orig_params)
        return model, OPTIMIZERS[optim](model.parameters())

    # The peer cannot load its own local state dicts with original parameters.
    kinds = [FULL, SHARDED] if use_orig_params else [FULL, SHARDED, LOCAL]
    for kind in kinds:
        model, optimizer = pair(True, 0)
        train(model, optimizer, TASK, range(2))
        saved = save(model, optimizer, kind)
        theirs, their_optimizer = pair(False, 1)
        train(theirs, their_optimizer, TASK, range(1))
        peer_load(theirs, their_optimizer, kind, saved)
        losses, their_losses = (
            train(m, o, TASK, range(2, 4)) for m, o in ((model, optimizer), (theirs, their_optimizer))
        )
        assert_close(their_losses, losses, rtol=1e-5, atol=1e-6, what=f"to the peer: {kind.name}")
        returned = peer_save(theirs, their_optimizer, kind)
        back, back_optimizer = pair(True, 2)
        our_load(back, back_optimizer, kind, returned)
        losses, their_losses = (
            train(m, o, TASK, range(4, 6)) for m, o in ((back, back_optimizer), (theirs, their_optimizer))
        )
        assert_close(losses, their_losses, rtol=1e-5, atol=1e-6, what=f"from the peer: {kind.name}")


@ORIG_PARAMS
@on_ranks(2)
def test_our_optimizer_state_dict_is_the_peers(use_orig_params: bool) -> None:
    states = []
    for wrap, saver in ((shard, save), (shard_by_peer, peer_save)):
        model = wrap(seeded(Even), use_orig_params=use_orig_params)
        optimizer = OPTIMIZERS["adamw"](
            [
                {"params": list(model.module.blocks.parameters()), "lr": 0.01},
                {"params": [*model.module.first.parameters(), *model.module.last.parameters()]}
                if use_orig_params
                else {"params": [model._flat_param]},
            ]
        )
        train(model, optimizer, TASK, range(2))
        states.append(saver(model, optimizer, FULL)[1])
    ours, theirs = states
    assert list(ours["state"]) == list(theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]
    assert_close(ours["state"], theirs["state"], rtol=1e-5, atol=1e-7)


class TwoNames(nn.Module):
    """A module that is registered under two names, as in open_flamingo."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first = nn.ModuleList([wrap(nn.Linear(4, 4))])
        self.layers = nn.ModuleList([nn.Sequential(self.first[0])])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[0](x)


@ORIG_PARAMS
@pytest.mark.filterwarnings("ignore:FlatParameter is being traversed more than once")
@pytest.mark.parametrize("has_root", [False, True], ids=["below a plain root", "below a wrapped root"])
@on_ranks(2)
def test_states_of_a_unit_under_two_names_have_the_peers_names_and_load_under_either(
    has_root: bool, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    def trained(ours: bool) -> tuple[Any, Any]:
        def wrap(module: nn.Module) -> nn.Module:
            return (shard if ours else shard_by_peer)(module, by_blocks=False, use_orig_params=use_orig_params)

        torch.manual_seed(0)
        model = TwoNames(wrap)
        model = wrap(model) if has_root else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
        optimizer.step()
        return model, optimizer

    def loaded(given: Any) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
        return FSDP.optim_state_dict(model, optimizer)

    (model, optimizer), (peer, peer_optimizer) = trained(True), trained(False)
    ours, theirs = FSDP.optim_state_dict(model, optimizer), peer_save(peer, peer_optimizer, FULL)[1]
    assert list(ours["state"]) == list(theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]
    peer_load(peer, peer_optimizer, FULL, (model.state_dict(), ours))
    names = list(model.state_dict())
    assert len(names) == 4
    for saved in (names[:2], names[2:]):
        renamed = dict(zip(ours["param_groups"][0]["params"], saved, strict=True))
        other = {
            "state": {renamed[name]: row for name, row in ours["state"].items()},
            "param_groups": [{**ours["param_groups"][0], "params": saved}],
        }
        assert_equal(loaded(other), ours)
        numbers = FSDP.rekey_optim_state_dict(other, OptimStateKeyType.PARAM_ID, TwoNames(lambda module: module))
        assert sorted(numbers["state"]) == [0, 1]
    save_checkpoint(tmp_path, model, optimizer)
    fresh, fresh_optimizer = trained(True)
    fresh_optimizer.state.clear()
    load_checkpoint(tmp_path, fresh, fresh_optimizer)
    assert_equal(FSDP.optim_state_dict(fresh, fresh_optimizer), ours)


@ORIG_PARAMS
@on_ranks(2)
def test_a_plain_optimizers_state_goes_both_ways(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    plain = seeded()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)

    def plain_steps(steps: range) -> None:
        for step in steps:
            square_loss(plain, batch(rank, step)).backward()
            average_gradients(plain)
            plain_optimizer.step()
            plain_optimizer.zero_grad()

    plain_steps(range(2))
    model = shard(seeded(seed=1), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model.load_state_dict(plain.state_dict())
    named = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, named))
    train(model, optimizer, TASK, range(2, 4))
    plain_steps(range(2, 4))
    assert_close(whole_state(model), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    back = FSDP.rekey_optim_state_dict(FSDP.optim_state_dict(model, optimizer), OptimStateKeyType.PARAM_ID, plain)
    assert_close(back["state"], plain_optimizer.state_dict()["state"], rtol=1e-4, atol=1e-6)
    plain_optimizer.load_state_dict(back)


@on_ranks(2)
def test_states_in_another_order_and_positions_for_names_are_refused() -> None:
    plain, model = seeded(), shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters())
    shuffled = torch.optim.AdamW(list(plain.parameters())[::-1])
    square_loss(plain, batch(0)).backward()
    shuffled.step()
    state = shuffled.state_dict()
    with pytest.raises(OptionError, match=r"State 'exp_avg' at position 0 has shape .* another order of parameters"):
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain)
    with pytest.raises(OptionError, match=r"keyed by positions, 0 the first; expected names.*rekey_optim_state_dict"):
        FSDP.optim_state_dict_to_load(model, optimizer, state)
    named = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, plain, optim=shuffled)
    named["state"]["first.weight"]["exp_avg"] = torch.ones(4, 4)
    with pytest.raises(LoadError, match=r"State 'exp_avg' of 'first\.weight' has shape \(4, 4\); expected \(5, 3\)"):
        FSDP.optim_state_dict_to_load(model, optimizer, named)


@pytest.mark.parametrize("use_orig_params", [True], ids=["orig"])
@on_ranks(2)
def test_fsdp2_and_we_read_each_others_checkpoints(use_orig_params: bool, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def second(seed: int) -> tuple[Any, Any]:
        model = seeded(Even, seed)
        for child in model.modules():
            if isinstance(child, BufferedBlock):
                peer_fully_shard(child, mesh=mesh)
        peer_fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def first(seed: int) -> tuple[Any, Any]:
        model = shard(seeded(Even, seed), device_mesh=mesh, use_orig_params=use_orig_params)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def written(model: Any, optimizer: Any, name: str) -> None:
        if isinstance(model, FSDP):
            state, states = save(model, optimizer, SHARDED)
        else:
            state, states = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optim": states}, checkpoint_id=tmp_path / name)

    def read(model: Any, optimizer: Any, name: str) -> None:
        train(model, optimizer, TASK, range(1))
        if isinstance(model, FSDP):
            state, states = save(model, optimizer, SHARDED)
            dcp.load({"model": state, "optim": states}, checkpoint_id=tmp_path / name)
            our_load(model, optimizer, SHARDED, (state, states))
        else:
            state, states = get_state_dict(model, optimizer)
            dcp.load({"model": state, "optim": states}, checkpoint_id=tmp_path / name)
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=states)

    for make, other in ((first, second), (second, first)):
        model, optimizer = make(0)
        train(model, optimizer, TASK, range(2))
        written(model, optimizer, make.__name__)
        losses = train(model, optimizer, TASK, range(2, 4))
        reader, reader_optimizer = other(1)
        read(reader, reader_optimizer, make.__name__)
        assert_close(train(reader, reader_optimizer, TASK, range(2, 4)), losses, rtol=1e-5, atol=1e-6)
    dist.barrier()


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_states_that_torch_reads_as_shards_over_all_ranks_load_under_every_strategy(
    strategy: str, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    model, other = (shard(seeded(seed=seed), strategy, use_orig_params=use_orig_params) for seed in range(2))
    optimizer, other_optimizer = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, other))
    train(model, optimizer, TASK, range(2))
    with peer_quiet():
        state, states = save(model, optimizer, SHARDED)
        dcp.save({"model": state, "optim": states}, checkpoint_id=tmp_path)
        found = load_sharded_optimizer_state_dict(state, "optim", dcp.FileSystemReader(tmp_path))["optim"]
        kinds = {type(row["exp_avg"]) for row in found["state"].values()}
        assert kinds == {ShardedTensor}
        with FSDP.state_dict_type(other, SHARDED):
            other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, found))
    assert_equal(save(other, other_optimizer, FULL)[1], save(model, optimizer, FULL)[1])


@on_ranks(4)
def test_shards_over_all_ranks_are_refused_where_a_shard_group_is_smaller(rank: int) -> None:
    model = shard(seeded(), "HYBRID_SHARD", use_orig_params=True, **groups_of("HYBRID_SHARD"))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with peer_quiet():
        whole = shard(seeded(), use_orig_params=True)
        other = OPTIMIZERS["adamw"](whole.parameters())
        train(whole, other, TASK, range(1))
        states = save(whole, other, SHARDED)[1]
        with (
            FSDP.state_dict_type(model, SHARDED),
            pytest.raises(LoadError, match="its shard group has 2 rank") as caught,
        ):
            FSDP.optim_state_dict_to_load(model, optimizer, states)
    assert "torch.distributed.checkpoint, which reshards" in str(caught.value)


@ORIG_PARAMS
@on_ranks(2)
def test_the_older_methods_agree_with_the_newer(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, TASK, range(2))
    expected = optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is an older form of", category=FutureWarning)
        full = FSDP.full_optim_state_dict(model, optimizer)
        dst_all = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        assert bool(full) == (rank == 0)
        loaded = [
            FSDP.scatter_full_optim_state_dict(full if rank == 0 else None, model, optim=optimizer),
            FSDP.shard_full_optim_state_dict(dst_all, model, optim=optimizer),
            FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
        ]
    padding = 0 if use_orig_params else None
    for state in loaded:
        for key, row in expected["state"].items():
            for name, value in row.items():
                got = state["state"][key][name]
                assert got.shape == value.shape
                assert padding is None or torch.equal(got, value), name
    optimizer.load_state_dict(loaded[0])
    with pytest.warns(FutureWarning, match="full_optim_state_dict is an older form of optim_state_dict"):
        again = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_equal(again, dst_all)
