"""State dicts of fully_shard-ed models: nn.Module's own, without communication, and torch's functions on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_flat.composable import CPUOffloadPolicy, fully_shard
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.beside import children_and_root as sharded
from tests.support.beside import whole
from tests.support.kit import mesh, normal, square_loss, train_on
from tests.support.peer import peer_fully_shard


class Mlp(nn.Module):
    """Two layers of one size each way, residual."""

    def __init__(self, dim: int, device: str = "cpu") -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 2 * dim + 1, device=device)
        self.outer = nn.Linear(2 * dim + 1, dim, device=device)
        self.register_buffer("count", torch.zeros(dim, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def mlps(dim: int, device: str = "cpu", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Mlp(dim, device) for _ in range(3)])


@contextmanager
def no_communication() -> Iterator[None]:
    counted = CommDebugMode()
    with counted:
        yield
    assert counted.get_total_counts() == 0, counted.get_comm_counts()


def pointers(values: Any) -> dict[str, int]:
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).data_ptr() for name, value in values.items()
    }


def step(model: nn.Module, dim: int) -> None:
    torch.manual_seed(dist.get_rank())
    square_loss(model, torch.randn(3, dim)).backward()
    for param in model.parameters():
        with torch.no_grad():
            param -= 0.1 * param.grad
            param.grad = None


def assert_full(values: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(values) == set(expected)
    for name, value in values.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(full, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2, 4)
@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_a_state_dict_aliases_the_shards(dim: int, is_hybrid: bool, num_ranks: int) -> None:
    on = {"mesh": mesh(num_ranks // 2, 2)} if is_hybrid else {}
    plain = mlps(dim)
    model = sharded(copy.deepcopy(plain), **on)
    with no_communication():
        state = model.state_dict()
    assert_full(state, plain.state_dict())
    assert list(state) == list(plain.state_dict())
    own = pointers(state)
    assert own == pointers({**dict(model.named_parameters()), **dict(model.named_buffers())})
    # After a load, of DTensors and of plain tensors made DTensors.
    other = mlps(dim, seed=1)
    given = {
        name: distribute_tensor(value, state[name].device_mesh, state[name].placements)
        if isinstance(state[name], DTensor)
        else value
        for name, value in other.state_dict().items()
    }
    with no_communication():
        model.load_state_dict(given)
    assert pointers(model.state_dict()) == own
    assert_full(state, other.state_dict())
    # In pieces.
    with no_communication():
        for name, value in sharded(mlps(dim, seed=2), **on).state_dict().items():
            model.load_state_dict({name: value}, strict=False)
    assert pointers(model.state_dict()) == own
    assert_full(state, mlps(dim, seed=2).state_dict())
    # A dict taken once follows training.
    step(model, dim)
    assert pointers(model.state_dict()) == own
    assert_full(
        state, {name: value.full_tensor() for name, value in model.named_parameters()} | dict(model.named_buffers())
    )
    assert not torch.equal(state["0.inner.weight"].full_tensor(), mlps(dim, seed=2)[0].inner.weight)


@on_ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_state_dict_after_a_forward_reshards_first(reshard_after_forward: bool) -> None:
    plain = mlps(4)
    model = sharded(copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    own = pointers(model.state_dict())
    model(torch.randn(2, 4))
    with no_communication():
        state = model.state_dict()
    assert pointers(state) == own
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_full(state, plain.state_dict())
    model.unshard()
    model[0].unshard()
    assert_full(model.state_dict(), plain.state_dict())


@on_ranks(2, 4)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.parametrize("dim", [2, 3, 5])
def test_meta_parameters_take_a_load_or_an_initialisation(dim: int) -> None:
    plain = mlps(dim)
    model = sharded(mlps(dim, "meta"), offload_policy=CPUOffloadPolicy() if dim == 5 else None)
    given = sharded(copy.deepcopy(plain)).state_dict()
    with pytest.raises(UsageError, match=r"meta device: 'inner\.weight' of unit '0'"):
        model(torch.ones(2, dim))
    # In pieces, then the rest.
    names = list(given)
    model.load_state_dict({name: given[name] for name in names[:4]}, strict=False, assign=True)
    with pytest.raises(UsageError, match="meta device"):
        model(torch.ones(2, dim))
    model.load_state_dict({name: given[name] for name in names[4:]}, strict=False, assign=True)
    assert_full(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model(torch.ones(2, dim)), plain(torch.ones(2, dim)))
    # to_empty, then init and load.
    model = sharded(mlps(dim, "meta")).to_empty(device="cpu")
    own = pointers(model.state_dict())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    model.load_state_dict(given)
    assert pointers(model.state_dict()) == own
    assert_full(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model(torch.ones(2, dim)), plain(torch.ones(2, dim)))


@on_ranks(2, 4)
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("dim", [2, 3, 5])
def test_offloaded_meta_parameters_take_a_load_and_train_as_those_of_torch(dim: int, pin_memory: bool) -> None:
    plain = mlps(dim)
    found = []
    for shard, policy in ((fully_shard, CPUOffloadPolicy), (peer_fully_shard, TorchCPUOffloadPolicy)):
        # torch pins with or without an accelerator.
        pins = pin_memory and (shard is fully_shard or torch.accelerator.is_available())
        model = sharded(mlps(dim, "meta"), shard, offload_policy=policy(pin_memory=pins))
        given = {
            name: distribute_tensor(value, param.device_mesh, param.placements)
            for (name, value), param in zip(plain.named_parameters(), model.parameters(), strict=True)
        }
        model.load_state_dict({**dict(plain.named_buffers()), **given}, strict=True, assign=True)
        losses = trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), dim=dim)
        state = model.state_dict()
        assert {value.device.type for value in state.values()} == {"cpu"}
        found.append((losses, {name: whole(value) for name, value in state.items()}))
    torch.testing.assert_close(found[0], found[1])


@on_ranks(2)
def test_offloaded_parameters_that_are_loaded_from_an_accelerator_are_refused_by_name() -> None:
    model = sharded(mlps(3), offload_policy=CPUOffloadPolicy())
    given = sharded(mlps(3, seed=1)).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        # A machine without an accelerator has no such tensors.
        patch.setattr(DTensor, "device", property(lambda _: torch.device("cuda:0")), raising=False)
        model.load_state_dict({"1.inner.weight": given["1.inner.weight"]}, strict=False, assign=True)
        with pytest.raises(UsageError, match=r"in host memory, but these are on cuda:0: 'inner\.weight' of unit '1'"):
            model(torch.ones(2, 3))
    model.load_state_dict(given, assign=True)
    torch.testing.assert_close(model(torch.ones(2, 3)), mlps(3, seed=1)(torch.ones(2, 3)))


@on_ranks(2)
def test_conversions_keep_an_optimizers_parameters() -> None:
    plain = mlps(4)
    model = sharded(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.double()
    plain.double()
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in model.parameters()}
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each, opt in ((model, optimizer), (plain, reference)):
        train_on(each, opt, [torch.ones(2, 4, dtype=torch.float64)])
    assert_full(model.state_dict(), plain.state_dict())
    model.to(torch.float32)
    plain.to(torch.float32)
    assert_full(model.state_dict(), plain.state_dict())
    assert all(param.dtype == torch.float32 for param in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(sharded(copy.deepcopy(plain)).state_dict())
    assert_full(model.state_dict(), plain.state_dict())
    for each, opt in ((model, optimizer), (plain, reference)):
        train_on(each, opt, [torch.ones(2, 4)])
    assert_full(model.state_dict(), plain.state_dict())


@on_ranks(2, 4)
def test_rank_zero_loads_a_full_state_dict_for_all(rank: int) -> None:
    plain = mlps(3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for model in (sharded(mlps(3, seed=1)), sharded(mlps(3, "meta")).to_empty(device="cpu")):
        set_model_state_dict(model, plain.state_dict() if rank == 0 else {}, options=options)
        assert_full(model.state_dict(), plain.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert set(full) == (set(plain.state_dict()) if rank == 0 else set())
    if rank == 0:
        assert_full(full, plain.state_dict())
    # Value by value.
    gathered = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            gathered[name] = whole
        else:
            del whole
    if rank == 0:
        assert_full(gathered, plain.state_dict())


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 2, seed: int = 0, dim: int = 3
) -> torch.Tensor:
    inputs = [normal(100 * (seed + each) + dist.get_rank(), 3, dim) for each in range(num_steps)]
    return torch.stack(train_on(model, optimizer, inputs))


FRONTS = {"ours": fully_shard, "torch": peer_fully_shard}


@on_ranks(2, 4)
@pytest.mark.parametrize("saved, loaded", [("ours", "ours"), ("ours", "torch"), ("torch", "ours")])
def test_checkpoints_of_torch_pass_between_both_fronts(saved: str, loaded: str, tmp_path: Path) -> None:
    first = sharded(mlps(3), FRONTS[saved])
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    trained(first, optimizer)
    model_state, optim_state = get_state_dict(first, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path)

    second = sharded(mlps(3, seed=5), FRONTS[loaded])
    other = torch.optim.AdamW(second.parameters(), lr=0.1)
    model_state, optim_state = get_state_dict(second, other)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(second, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for _ in range(2):
        torch.testing.assert_close(trained(first, optimizer, seed=7), trained(second, other, seed=7))
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), two.to_local(), msg=name)

    # Full optimizer state on rank 0, and back by broadcast.
    full = get_optimizer_state_dict(first, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    third = sharded(mlps(3, seed=6), FRONTS[loaded])
    again = torch.optim.AdamW(third.parameters(), lr=0.1)
    set_optimizer_state_dict(third, again, full, options=options)
    for one, two in zip(first.parameters(), third.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[one][key].to_local(), again.state[two][key].to_local())


@on_ranks(2)
@pytest.mark.parametrize("assign", [False, True])
def test_full_tensors_load_and_wrong_shapes_are_refused(assign: bool) -> None:
    plain, model = mlps(3, seed=1), sharded(mlps(3))
    own = pointers(model.state_dict())
    with no_communication():
        model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=assign)
    state = model.state_dict()
    assert_full(state, plain.state_dict())
    assert assign or pointers(state) == own
    with pytest.raises(RuntimeError, match=r"inner\.weight"):
        model.load_state_dict({**state, "0.inner.weight": torch.zeros(2, 2)}, assign=assign)
    assert_full(model.state_dict(), plain.state_dict())
    model[0].inner.weight = nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(UsageError, match=r"'inner\.weight'.*distribute_tensor"):
        model(torch.ones(2, 3))


@on_ranks(2)
@pytest.mark.parametrize("way", ["assigned", "data", "emptied", "reloaded by assignment"])
def test_a_state_dict_of_an_inner_module_notices_changes_of_its_parameters(way: str) -> None:
    model = sharded(mlps(4))
    inner = model[1].inner
    model.state_dict()
    other = distribute_tensor(torch.ones(9, 4), inner.weight.device_mesh, inner.weight.placements)
    if way == "assigned":
        inner.weight = nn.Parameter(other)
    elif way == "data":
        inner.weight.data.copy_(other)
    elif way == "emptied":
        inner.to_empty(device="cpu")
        with torch.no_grad():
            inner.weight.to_local().copy_(other.to_local())
            inner.bias.to_local().zero_()
    else:
        inner.load_state_dict({"weight": other}, strict=False, assign=True)
    state = inner.state_dict()
    assert_full({"weight": state["weight"]}, {"weight": torch.ones(9, 4)})
    own = pointers(state)
    step(model, 4)
    assert pointers(inner.state_dict()) == own
    assert not torch.equal(state["weight"].full_tensor(), torch.ones(9, 4))
    assert_full(state, {name: value.full_tensor() for name, value in inner.named_parameters()})
