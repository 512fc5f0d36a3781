"""torch's pipelining with stages that ``fully_shard`` sharded, ours after install() and torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fsdp_flat
from tests.support import assert_close, on_ranks

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 3
SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, 2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def train(
    mesh: DeviceMesh, schedule: str, fully_shard: Callable[..., Any], *, reshards: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a pipeline of sharded stages; return the last stage's losses and this rank's full weights."""
    make, num_local = SCHEDULES[schedule]
    pp, dp = mesh["pp"], mesh["dp"]
    torch.manual_seed(0)
    num_stages = pp.size() * num_local
    whole = [nn.Sequential(Block(), Block()) for _ in range(num_stages)]
    stages = []
    for index in range(pp.get_local_rank(), num_stages, pp.size()):
        module = whole[index]
        for block in module:
            fully_shard(block, mesh=dp, reshard_after_forward=reshards)
        fully_shard(module, mesh=dp, reshard_after_forward=reshards)
        stages.append(PipelineStage(module, index, num_stages, torch.device("cpu"), group=pp.get_group()))
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=0.05) for stage in stages]
    run = make(stages if num_local > 1 else stages[0], NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    losses = []
    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + dp.get_local_rank())
        inputs, target = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH)
        found: list[torch.Tensor] = []
        run.step(
            *([inputs] if stages[0].is_first else []),
            **({"target": target, "losses": found} if stages[-1].is_last else {}),
        )
        losses += [loss.item() for loss in found]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {
        f"{stage.stage_index}.{name}": param.full_tensor().detach()
        for stage in stages
        for name, param in stage.submod.named_parameters()
    }
    return losses, weights


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("schedule", list(SCHEDULES))
@on_ranks(2, 4)
def test_a_pipeline_of_sharded_stages_trains_as_torchs(schedule: str, reshards: bool) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    expected = train(mesh, schedule, torch.distributed.fsdp.fully_shard, reshards=reshards)
    with fsdp_flat.installed(fully_shard=True):
        found = train(mesh, schedule, torch.distributed.fsdp.fully_shard, reshards=reshards)
    assert len(found[0]) == (NUM_STEPS * NUM_MICROBATCHES if mesh["pp"].get_local_rank() == 1 else 0)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Model(nn.Module):
    """Returns hidden states; its head is called in chunks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@on_ranks(2)
def test_states_are_equal_for_one_unit_and_missing_without_one() -> None:
    model: Any = Model()
    for module in (*model.body, model.head, model):
        fsdp_flat.fully_shard(module)
    state: Any = fsdp_flat.fully_shard
    assert state.state(model) == model._get_fsdp_state() != model.head._get_fsdp_state()
    assert state.state(model.body) is None
    assert model._get_fsdp_state()._fsdp_param_group is None
    assert model.head._get_fsdp_state()._is_root is None
    model(torch.randn(2, WIDTH))
    assert model._get_fsdp_state()._is_root
    assert not model.head._get_fsdp_state()._is_root
    assert len(model._get_fsdp_state()._state_ctx.all_states) == 4
    assert state.state(nn.Linear(2, 2)) is None


@on_ranks(2)
def test_states_tell_which_stages_share_streams() -> None:
    stages = [fsdp_flat.fully_shard(Block()) for _ in range(3)]
    fsdp_flat.share_comm_ctx(stages[:2])
    first, second, third = (stage._get_fsdp_state()._comm_ctx for stage in stages)
    assert first is second
    assert first is not third


class Normed(nn.Module):
    """A head behind a norm; one unit may hold both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def toggled(fully_shard: Callable[..., Any], *, pairs: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train with a loss in chunks, over which the unit of the head stays unsharded; return what its group says."""
    torch.manual_seed(0)
    model: Any = Normed()
    fully_shard(model.body)
    fully_shard([model.norm, model.head] if pairs else model.head, reshard_after_forward=False)
    fully_shard(model)
    head, seen = model.head, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def note() -> None:
        group = head._get_fsdp_state()._fsdp_param_group
        seen.append((group.is_unsharded, group.is_sharded, group.fsdp_params[0].sharded_state.name))

    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        hidden = model(torch.randn(6, WIDTH))
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False)
        leaf = hidden.detach().requires_grad_()
        for index, chunk in enumerate(leaf.chunk(3)):
            head.set_requires_gradient_sync(index == 2)
            head(chunk).square().mean().backward()
            note()
        head.set_reshard_after_backward(True)
        head.reshard()
        note()
        hidden.backward(leaf.grad)
        note()
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: param.full_tensor().detach() for name, param in model.named_parameters()}


@on_ranks(2, 4)
def test_a_head_that_stays_unsharded_over_chunks_says_so_as_torchs() -> None:
    expected = toggled(torch.distributed.fsdp.fully_shard, pairs=False)
    found = toggled(fsdp_flat.fully_shard, pairs=False)
    assert found[0] == expected[0]
    assert found[0][:4] == [(True, False, "UNSHARDED")] * 3 + [(False, True, "SHARDED")]
    assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_one_of_two_modules_of_a_unit_that_stays_unsharded_over_chunks_says_so_as_torchs() -> None:
    expected, _ = toggled(torch.distributed.fsdp.fully_shard, pairs=True)
    found, _ = toggled(fsdp_flat.fully_shard, pairs=True)
    assert found == expected
