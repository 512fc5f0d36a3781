"""Parameters of several meshes in one call of fully_shard, as torchtitan shards experts beside the rest of a block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import describe, load_checkpoint, save_checkpoint, unshard_for, unwrap
from fsdp_flat.composable import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    trace,
)
from fsdp_flat.core import units_of
from tests.collectives.test_numbers_of_collectives import in_backward, numbers, trace_of_torch
from tests.strategies.test_placements import assert_same_placements
from tests.support import on_ranks
from tests.support.beside import assert_idle, average_gradients, grads_of
from tests.support.experts import NUM_TOKENS, WIDTH, Meshes, clip, needs_mesh_infos
from tests.support.kit import batch, seeded, square_loss
from tests.support.models import Moe, MoeBlock
from tests.support.peer import peer_fully_shard

pytestmark = needs_mesh_infos


def inputs(step: int) -> torch.Tensor:
    """Return this rank's tokens of a step."""
    return batch(dist.get_rank(), step, WIDTH, NUM_TOKENS)


def train(model: Any, steps: range = range(3), *, accumulates: bool = False) -> torch.Tensor:
    """Train, with clipped gradients; return losses and norms. The last gradients stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in steps:
        optimizer.zero_grad()
        if accumulates:
            model.set_requires_gradient_sync(False)
            square_loss(model, inputs(100 + step)).backward()
            model.set_requires_gradient_sync(True)
        loss = square_loss(model, inputs(step))
        loss.backward()
        found += [loss.item(), clip(model.parameters(), 0.5)]
        optimizer.step()
    return torch.tensor(found)  # compared with the tolerance of the dtype in which they were computed


def both(meshes: Meshes, **kwargs: Any) -> tuple[Any, Any]:
    """Return a model sharded by the library, and by torch."""
    plain = seeded(Moe)
    return tuple(meshes.shard(copy.deepcopy(plain), shard, **kwargs) for shard in (fully_shard, peer_fully_shard))


def assert_same(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(grads_of(ours), grads_of(theirs), **tolerance)
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(other, DTensor)
        assert one.placements == other.placements, name
        assert one.device_mesh == other.device_mesh, name
        torch.testing.assert_close(one.to_local(), other.to_local(), **tolerance)


def meshes_of(num_ranks: int, kind: str) -> Meshes:
    """Create meshes with the experts divided between two ranks, or on all; replicated too; or sharded on dim 1."""
    if kind == "hybrid":
        return Meshes.of(num_ranks, num_ranks // 2, hybrid=True)
    return Meshes.of(num_ranks, {"two": 2, "all": num_ranks, "columns": 2}[kind], dim=int(kind == "columns"))


KINDS = pytest.mark.parametrize("kind", ["two", "all", "hybrid", "columns"])
RESHARDS = pytest.mark.parametrize("reshards", [None, True, False, 1])


# -- training ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@KINDS
@RESHARDS
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.filterwarnings("ignore:.*reshard_after_forward=1")
def test_training_equals_torchs(kind: str, reshards: Any, accumulates: bool, num_ranks: int) -> None:
    ours, theirs = both(meshes_of(num_ranks, kind), reshard_after_forward=reshards)
    assert_same_placements(ours, theirs)
    expected = train(theirs, accumulates=accumulates)
    torch.testing.assert_close(train(ours, accumulates=accumulates), expected)
    assert_same(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_idle(ours)


@on_ranks(2, 4)
@KINDS
def test_mixed_precision_equals_torchs(kind: str, num_ranks: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ours, theirs = both(meshes_of(num_ranks, kind), mp_policy=policy)
    torch.testing.assert_close(train(ours), train(theirs), atol=1e-3, rtol=1e-3)
    assert_same(ours, theirs, atol=1e-2, rtol=1e-2)


@on_ranks(2, 4)
@KINDS
def test_with_one_divide_factor_training_equals_a_replica_with_all_experts(kind: str, num_ranks: int) -> None:
    # By default gradients are averaged over a parameter's own mesh, as in torch: those of experts over fewer ranks.
    plain = seeded(Moe)
    model = meshes_of(num_ranks, kind).shard(copy.deepcopy(plain), fully_shard)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(num_ranks)
    for step in range(2):
        for each in (plain, model):
            square_loss(each, inputs(step)).backward()
        average_gradients(plain)
        torch.testing.assert_close(grads_of(model), grads_of(plain))
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    torch.testing.assert_close(
        {name: each.full_tensor() for name, each in model.state_dict().items()}, plain.state_dict()
    )


@on_ranks(4)
@pytest.mark.parametrize("way", ["checkpointed", "list", "outermost"])
def test_other_shapes_of_units_train_as_torchs(way: str) -> None:
    meshes = Meshes.of(4, 2)

    def shard(model: Any, fully_shard: Callable[..., Any]) -> Any:
        if way == "checkpointed":
            apply_activation_checkpointing(meshes.shard(model, fully_shard), check_fn=_is_block)
            return model
        kwargs: Any = {"mesh": meshes.dense, "shard_placement_fn": meshes.split(model)}
        if way == "list":
            fully_shard(list(model.blocks), **kwargs)
        return fully_shard(model, **kwargs)

    plain = seeded(Moe)
    ours, theirs = (shard(copy.deepcopy(plain), each) for each in (fully_shard, peer_fully_shard))
    for reshards in (None, True, False):
        for model in (ours, theirs) if reshards is not None else ():
            model.set_reshard_after_forward(reshards)
        torch.testing.assert_close(train(ours), train(theirs))
        assert_same(ours, theirs, atol=1e-5, rtol=1e-5)
        assert_idle(ours)
    if way == "outermost":
        assert all(unit.is_sharded for unit in units_of(ours))


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, MoeBlock)


# -- order ------------------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("reshards", [None, True, False])
@pytest.mark.parametrize("lists", [False, True])
def test_the_numbers_and_the_order_of_collectives_are_those_of_torch(reshards: Any, lists: bool) -> None:
    ours, theirs = both(Meshes.of(4, 2), reshard_after_forward=reshards)
    ours.set_backend_collectives()
    for model in (ours, theirs) if lists else ():
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
    for step in range(3):
        assert numbers(ours, step, NUM_TOKENS) == numbers(theirs, step, NUM_TOKENS)
    assert_same(ours, theirs)
    with trace(ours) as own:
        square_loss(ours, inputs(3)).backward()
    with trace_of_torch() as other:
        square_loss(theirs, inputs(3)).backward()
    found = [(event, name.removesuffix(" (efsdp)")) for event, name in own]
    expected = [(event, name or "Moe") for event, name in other]
    # A unit of ours has the parameters of all its meshes, where torch has a group of parameters for each.
    gathered = [("unshard", name) for event, name in found if event == "all_gather"]
    assert gathered == [each for each in expected if each[0] == "unshard"]
    kept = [each for each in found if each[0] in ("unshard", "reshard", "post_backward")]
    assert list(dict.fromkeys(in_backward(kept))) == list(dict.fromkeys(in_backward(expected)))


@on_ranks(4)
def test_the_trace_names_the_mesh_of_experts() -> None:
    meshes = Meshes.of(4, 2)
    model = meshes.shard(seeded(Moe), fully_shard)
    with trace(model) as events:
        square_loss(model, inputs(0)).backward()
    names = [name for event, name in events if event == "reduce_scatter"]
    assert names == ["blocks.1", "blocks.1", "blocks.0", "blocks.0", "Moe"]
    gathered = [name for event, name in events if event == "all_gather"]
    assert gathered[1:3] == ["blocks.0", "blocks.0 (efsdp)"]
    assert "blocks.0 (efsdp)" in str(describe(model))
    nameless = init_device_mesh("cpu", (2, 2))
    info = _fsdp_common.HSDPMeshInfo(nameless, shard_mesh_dim=1, replicate_mesh_dim=0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(block, shard_placement_fn=lambda each: _fsdp_common.ShardPlacementResult(None, info))
    assert [handle.comm.name for handle in units_of(block)[0].param_groups] == ["Sequential (mesh of 2 x 2)"]


# -- methods of a module with several units ---------------------------------------------------------------------------


@on_ranks(4)
def test_methods_of_a_module_are_for_its_parameters_on_all_meshes() -> None:
    model = Meshes.of(4, 2).shard(seeded(Moe), fully_shard)
    train(model, range(1))
    block: Any = model.blocks[0]
    units = units_of(block)
    assert [handle.comm.name for unit in units for handle in unit.param_groups] == ["blocks.0", "blocks.0 (efsdp)"]
    handle = block.unshard(async_op=True)
    assert not any(unit.is_sharded or unit.is_unsharded for unit in units)
    handle.wait()
    assert all(unit.is_unsharded for unit in units)
    block.reshard()
    assert all(unit.is_sharded for unit in units)
    block.unshard()
    assert all(unit.is_unsharded for unit in units)
    block.set_reshard_after_forward(False)
    block.set_unshard_in_backward(True)
    block.set_gradient_divide_factor(2.0)
    block.set_requires_gradient_sync(True)
    block.set_allocate_memory_from_process_group_for_comm(False)
    block.set_separate_reduce_scatter_group()
    for unit in units:
        assert unit.control.reshard_after_forward is False
        assert unit.policy.divide_factor == 2.0
        assert all(handle.comm.choice.reduce_group is not None for handle in unit.param_groups)
    block.set_unshard_in_backward(False)
    assert not any(unit.control.unshard_in_backward for unit in units)
    block.set_unshard_in_backward(True)
    block.reshard()
    train(model, range(1))
    for set_it in (block.set_all_reduce_hook, block.set_custom_all_gather, block.set_custom_reduce_scatter):
        # As by torch: one object cannot know which mesh it is called for.
        with pytest.raises(ValueError, match=r"parameters of unit 'blocks\.0' are on 2, by its shard_placement_fn"):
            set_it(lambda *args: None)
    state = fully_shard.state(block)
    assert len(state._fsdp_param_groups) == 2
    assert len(state._state_ctx.all_states) == 3


@on_ranks(4)
@pytest.mark.parametrize("way", ["method", "unshard_for"])
def test_other_ways_to_run_a_module_unshard_its_parameters_on_all_meshes(way: str) -> None:
    plain = seeded(Moe)
    model = Meshes.of(4, 2).shard(copy.deepcopy(plain), fully_shard)
    block = model.blocks[0]
    expected = plain.blocks[0](inputs(0))
    if way == "method":
        block.run = block.forward
        register_fsdp_forward_method(block, "run")
        found = block.run(inputs(0))
    else:
        with unshard_for(block):
            found = block.forward(inputs(0))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(param.grad is not None for param in block.parameters())


@on_ranks(4)
def test_a_step_after_an_exception_is_right() -> None:
    ours, theirs = both(Meshes.of(4, 2))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = ours.blocks[1].experts.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        square_loss(ours, inputs(0))
    hook.remove()
    assert all(unit.is_sharded for unit in units_of(ours))
    torch.testing.assert_close(train(ours), train(theirs))


# -- state ------------------------------------------------------------------------------------------------------------


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@on_ranks(2, 4)
@KINDS
def test_state_dicts_go_between_models_torchs_and_files(kind: str, num_ranks: int, tmp_path: Path) -> None:
    meshes = meshes_of(num_ranks, kind)
    ours, theirs = both(meshes)
    train(ours)
    expected = full(ours)
    for shard in (fully_shard, peer_fully_shard):
        fresh = meshes.shard(seeded(Moe, 1), shard)
        fresh.load_state_dict(ours.state_dict())
        torch.testing.assert_close(full(fresh), expected)
    theirs.load_state_dict(ours.state_dict())
    again = meshes.shard(seeded(Moe, 2), fully_shard)
    again.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(full(again), expected)
    # Full tensors, of each rank's experts.
    again = meshes.shard(seeded(Moe, 2), fully_shard)
    again.load_state_dict(expected)
    torch.testing.assert_close(full(again), expected)
    # Files of torch, read at the same and by torch.
    dcp.save(ours.state_dict(), checkpoint_id=tmp_path)
    for shard in (fully_shard, peer_fully_shard):
        fresh = meshes.shard(seeded(Moe, 3), shard)
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        fresh.load_state_dict(state)
        torch.testing.assert_close(full(fresh), expected)
    # The meta device.
    with torch.device("meta"):
        empty = Moe()
    meta = meshes.shard(empty, fully_shard)
    meta.load_state_dict(ours.state_dict(), assign=True)
    torch.testing.assert_close(full(meta), expected)
    losses = train(ours, range(3, 5))
    torch.testing.assert_close(train(theirs, range(3, 5)), losses)
    torch.testing.assert_close(train(meta, range(3, 5)), losses)


@on_ranks(4)
def test_optimizer_states_and_checkpoints_of_the_library_go_on_alike(tmp_path: Path) -> None:
    meshes = Meshes.of(4, 2)

    def made(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = meshes.shard(seeded(Moe, seed), fully_shard)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    model, optimizer = made(0)
    one_step(model, optimizer, 0)
    save_checkpoint(tmp_path / "ours", model, optimizer)
    states = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": states}, checkpoint_id=tmp_path / "torch")
    expected = one_step(model, optimizer, 1)
    for way in ("ours", "torch"):
        other, its_optimizer = made(1)
        if way == "ours":
            load_checkpoint(tmp_path / "ours", other, its_optimizer)
        else:
            state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, its_optimizer)}
            dcp.load(state, checkpoint_id=tmp_path / "torch")
            other.load_state_dict(state["model"])
            set_optimizer_state_dict(other, its_optimizer, state["optim"])
        torch.testing.assert_close(one_step(other, its_optimizer, 1), expected)
        torch.testing.assert_close(full(other), full(model))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = square_loss(model, inputs(step))
    loss.backward()
    optimizer.step()
    return loss.item()


@on_ranks(4)
def test_a_wrapper_around_trains_saves_and_shows_them() -> None:
    meshes = Meshes.of(4, 2)
    plain = seeded(Moe)

    def shard(model: Any) -> Any:
        place = meshes.split(model)
        for block in model.blocks:
            fully_shard(block, mesh=meshes.dense, shard_placement_fn=place)
        return FSDP(model, use_orig_params=True)

    model, other = shard(copy.deepcopy(plain)), meshes.shard(copy.deepcopy(plain), fully_shard)
    for step in range(2):
        for each in (model, other):
            square_loss(each, inputs(step)).backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    expected = full(other)
    torch.testing.assert_close(model.state_dict(), expected)
    with FSDP.summon_full_params(model):
        shown = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        assert shown["blocks.0.experts.up"].shape == expected["blocks.0.experts.up"].shape
    again = shard(seeded(Moe, 1))
    again.load_state_dict(expected)
    torch.testing.assert_close(again.state_dict(), expected)


@on_ranks(4)
def test_conversions_reach_parameters_on_all_meshes() -> None:
    meshes = Meshes.of(4, 2)
    model = meshes.shard(seeded(Moe), fully_shard)
    plain = unwrap(meshes.shard(seeded(Moe), fully_shard))
    assert type(plain.blocks[0]) is MoeBlock
    assert plain.blocks[0].experts.up.placements == (Shard(0),)
    model.to(torch.float64)
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    square_loss(model, inputs(0).double()).backward()
    with torch.device("meta"):
        empty = Moe()
    model = meshes.shard(empty, fully_shard).to_empty(device="cpu")
    for param in model.parameters():
        assert isinstance(param, DTensor)
        nn.init.normal_(param.to_local())
    train(model)


# -- what cannot be used ----------------------------------------------------------------------------------------------


@on_ranks(4)
def test_meshes_that_cannot_be_used_raise(rank: int) -> None:
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    two, one = cube["b", "c"], init_device_mesh("cpu", (4,))

    def on(info: Any) -> Any:
        return fully_shard(
            nn.Linear(4, 4), mesh=one, shard_placement_fn=lambda _: _fsdp_common.ShardPlacementResult(Shard(0), info)
        )

    for info in (
        _fsdp_common.FSDPMeshInfo(two, shard_mesh_dim=1),
        _fsdp_common.HSDPMeshInfo(two, shard_mesh_dim=0, replicate_mesh_dim=1),
        _fsdp_common.DDPMeshInfo(cube["b"], replicate_mesh_dim=0),
        _fsdp_common.FSDPMeshInfo(cube, shard_mesh_dim=2),
    ):
        with pytest.raises(ValueError, match=r"must choose an FSDPMeshInfo\(mesh, shard_mesh_dim=0\)"):
            on(info)
    with pytest.raises(ValueError, match="divides the 2 that shard"):
        fully_shard(
            nn.Linear(4, 4),
            mesh=one,
            reshard_after_forward=4,
            shard_placement_fn=lambda _: _fsdp_common.ShardPlacementResult(
                Shard(0), _fsdp_common.FSDPMeshInfo(cube["c"], shard_mesh_dim=0)
            ),
        )


@on_ranks(4)
def test_a_call_that_raises_changes_nothing() -> None:
    plane, one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), init_device_mesh("cpu", (4,))
    info, model = _fsdp_common.FSDPMeshInfo(plane["b"], shard_mesh_dim=0), nn.Linear(4, 4)
    dims = {model.weight: 0, model.bias: 1}

    def place(param: nn.Parameter) -> Any:
        return Shard(0) if param is model.weight else _fsdp_common.ShardPlacementResult(Shard(dims[param]), info)

    with pytest.raises(ValueError, match=r"'bias' .* has no dim 1 to shard"):
        fully_shard(model, mesh=one, shard_placement_fn=place)
    dims[model.bias] = 0
    fully_shard(model, mesh=one, shard_placement_fn=place)
    assert isinstance(model.weight, DTensor)
    square_loss(model, torch.ones(2, 4)).backward()


class Scaled(nn.Module):
    """A weight for each feature, then one for each rank's expert; both are DTensors."""

    def __init__(self, dense: DeviceMesh, sparse: DeviceMesh) -> None:
        super().__init__()
        self.common = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), dense, [Replicate()]))
        self.own = nn.Parameter(distribute_tensor(torch.randn(4, WIDTH), sparse, [Replicate(), Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        common, own = self.common, self.own
        assert isinstance(common, DTensor)
        assert isinstance(own, DTensor)
        return (x @ common.to_local()).relu() * own.to_local().sum(0)


@on_ranks(4)
def test_meshes_of_which_some_dims_are_data_parallel_are_described_by_torch() -> None:
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    models: list[Any] = []
    for shard, dims in ((fully_shard, DataParallelMeshDims), (peer_fully_shard, torch_fsdp.DataParallelMeshDims)):
        torch.manual_seed(0)
        model = Scaled(dense, sparse)
        # As torchtitan calls it, also with our class.
        info = _fsdp_init._get_mesh_info(sparse, dims("efsdp"))
        common = model.common

        def place(param: nn.Parameter, info: Any = info, common: nn.Parameter = common) -> Any:
            return None if param is common else _fsdp_common.ShardPlacementResult(Shard(1), info)

        shard(model, mesh=dense, dp_mesh_dims=dims("dp"), shard_placement_fn=place)
        models.append(model)
    ours, theirs = models
    assert_same_placements(ours, theirs)
    torch.testing.assert_close(train(ours), train(theirs))
    assert_same(ours, theirs)
