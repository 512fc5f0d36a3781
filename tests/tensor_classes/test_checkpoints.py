"""Checkpoints of parameters of classes of their own, that keep their values in one plain tensor or in several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import (
    ShardingStrategy,
    fully_shard,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    unwrap,
)
from fsdp_flat.checkpoint import full_save
from fsdp_flat.errors import LoadError, PeerFailureError, UnsupportedError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.extended_tensors import (
    Fickle,
    Holder,
    NewPair,
    OneWay,
    Rounded,
    Scaled,
    Sealed,
    SentInBfloat16,
    held_by,
)
from tests.support.kit import batch


def model_of(kind: type[Holder] | None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    return nn.Sequential(*[layer if kind is None else held_by(layer, kind) for layer in layers])


def in_place(kind: type[Holder]) -> nn.Module:
    model = model_of(kind)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def wrapped(kind: type[Holder]) -> nn.Module:
    return FSDP(model_of(kind), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(dist.get_rank(), step)).pow(2).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


FRONTS = pytest.mark.parametrize("sharded", [in_place, wrapped])


@FRONTS
@on_ranks(2, 4)
def test_training_goes_on_from_a_checkpoint(sharded: Callable[[type[Holder]], nn.Module], tmp_path: Path) -> None:
    model, again = sharded(SentInBfloat16), sharded(SentInBfloat16)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, again)]
    trained(model, optimizers[0], 0, 1)
    save_checkpoint(tmp_path, model, optimizers[0])
    load_checkpoint(tmp_path, again, optimizers[1])
    assert trained(again, optimizers[1], 2, 3) == trained(model, optimizers[0], 2, 3)


@FRONTS
@on_ranks(2)
def test_full_values_are_loaded_into_tensors_of_the_class_and_into_plain_ones(
    sharded: Callable[[type[Holder]], nn.Module], tmp_path: Path
) -> None:
    model, again, plain = sharded(SentInBfloat16), sharded(SentInBfloat16), model_of(None)
    fully_shard(plain)
    trained(model, torch.optim.Adam(model.parameters(), lr=1e-2), 0, 1)
    save_full(model, tmp_path / "full")
    x = batch(0, 5)
    assert not torch.equal(again(x), model(x))
    for each in (again, plain):
        load_full(each, tmp_path / "full")
    assert torch.equal(again(x), model(x))
    torch.testing.assert_close(plain(x), model(x), atol=1e-2, rtol=1e-2)  # the others compute with rounded values


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("kind", [NewPair, Scaled])
@on_ranks(4)
def test_a_parameter_of_several_tensors_is_saved_exactly_for_another_number_of_ranks(
    kind: type[Holder], before: int, after: int, rows: int, tmp_path: Path
) -> None:
    """The numbers of ``Scaled`` have the shape and dtype of its values, and are not its values."""
    first = torch.arange(8.0 * rows).view(rows, 8)
    wholes = [first, (first + 0.1).double() if kind is Scaled else first + 1000]

    def sharded(num_ranks: int, *inner: torch.Tensor) -> nn.Module:
        mesh = init_device_mesh("cpu", (4 // num_ranks, num_ranks), mesh_dim_names=("others", "own"))["own"]
        layer = nn.Linear(8, rows, bias=False)
        layer.weight = nn.Parameter(kind(*inner))
        return fully_shard(layer, mesh=mesh)

    save_checkpoint(tmp_path / f"saved{dist.get_rank() // before}", sharded(before, *wholes))
    dist.barrier()
    again = sharded(after, *map(torch.zeros_like, wholes))
    load_checkpoint(tmp_path / "saved0", again)
    parts = again.weight._local_tensor.detach().inner()  # type: ignore[union-attr, operator]
    for part, whole in zip(parts, wholes, strict=True):
        chunks = torch.chunk(whole, after)
        rank = dist.get_rank() % after
        assert torch.equal(part, chunks[rank] if rank < len(chunks) else whole[:0])


class RoundedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.dequantize().T


def rounded(seed: int, *, wraps: bool = False) -> nn.Module:
    """Shard linears with rounded weights over two ranks, and on four replicate them; return the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[RoundedLinear(8, 8, bias=False) for _ in range(2)])
    for layer in model:
        layer.weight = nn.Parameter(Rounded.of(layer.weight.detach()), requires_grad=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(dist.get_rank())
    if wraps:
        policy, strategy = ModuleWrapPolicy({RoundedLinear}), ShardingStrategy.HYBRID_SHARD
        return FSDP(model, auto_wrap_policy=policy, device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_torch(model: nn.Module, state: dict[str, Any], _path: Path) -> None:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def by_load_state_dict(model: nn.Module, state: dict[str, Any], _path: Path) -> None:
    model.load_state_dict(state)


def by_load_full(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path / "plain.pt")
    dist.barrier()
    load_full(model, path / "plain.pt")


@pytest.mark.parametrize(
    ("wraps", "load"),
    [
        (False, by_torch),
        (False, by_load_state_dict),
        (False, by_load_full),
        (True, by_load_state_dict),
        (True, by_load_full),
    ],
)
@on_ranks(2, 4)
def test_full_plain_values_are_loaded_into_a_class_that_rounds_at_random_alike_on_replicas(
    wraps: bool, load: Callable[..., None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)])
    model = rounded(1, wraps=wraps)
    load(model, plain.state_dict(), tmp_path)
    following, output = torch.rand(()), model(torch.eye(8))
    torch.testing.assert_close(output, plain(torch.eye(8)), atol=0.02, rtol=0.0)
    every = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(every, output)
    assert all(torch.equal(each, output) for each in every)
    torch.manual_seed(dist.get_rank())
    assert torch.equal(following, torch.rand(()))


@on_ranks(2)
def test_full_files_of_a_class_without_empty_like_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    model, again = rounded(0), rounded(1)
    save_full(model, tmp_path / "full")
    load_full(again, tmp_path / "full")
    torch.testing.assert_close(again(torch.eye(8)), model(torch.eye(8)), atol=0.02, rtol=0.0)


@FRONTS
@on_ranks(2)
def test_full_files_of_a_tensor_without_plain_values_are_refused_by_name(
    sharded: Callable[[type[Holder]], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"'0.weight' of the state dict is a NewPair.*keep"):
        save_full(sharded(NewPair), tmp_path / "full")


@FRONTS
@on_ranks(2)
def test_states_of_an_optimizer_that_are_of_the_parameters_class_are_refused_by_name(
    sharded: Callable[[type[Holder]], nn.Module], tmp_path: Path
) -> None:
    model = sharded(NewPair)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer, 0)
    with pytest.raises(UnsupportedError, match=r"'exp_avg' of '0.weight' is a NewPair.*first, second"):
        save_checkpoint(tmp_path, model, optimizer)


@FRONTS
@on_ranks(2)
def test_a_class_that_is_not_made_from_others_trains_and_its_checkpoint_is_refused_by_name(
    sharded: Callable[[type[Holder]], nn.Module], tmp_path: Path
) -> None:
    model = sharded(Sealed)
    trained(model, torch.optim.SGD(model.parameters(), lr=1e-2), 0, 1)
    with pytest.raises(UnsupportedError, match=r"'0.weight'.*Sealed"):
        save_checkpoint(tmp_path, model)


def wholes_of(*rows: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(each, 8) for each in rows]


def of_values(*wholes: torch.Tensor) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(8, len(whole), bias=False) for whole in wholes])
    for layer, whole in zip(model, wholes, strict=True):
        layer.weight = nn.Parameter(Fickle(whole, whole + 1))
        fully_shard(layer)
    return fully_shard(model)


@on_ranks(2)
def test_a_later_parameter_without_plain_values_on_one_rank_is_refused_by_name_on_all(tmp_path: Path) -> None:
    wholes = wholes_of(4, 4, 4)
    wholes[1][3] = -1.0
    with pytest.raises((UnsupportedError, PeerFailureError), match=r"'1.weight' of the state dict is a Fickle.*keep"):
        save_full(of_values(*wholes), tmp_path / "full")
    assert not list(tmp_path.glob("full/*"))


@on_ranks(2)
def test_a_rank_without_rows_needs_no_values_of_them() -> None:
    wholes = wholes_of(4, 1)
    with patch.object(Fickle, "has_empty_values", new=False):
        found = dict(iter_full_state_dict(of_values(*wholes), dst=None))
    assert_equal(found, {f"{index}.weight": whole for index, whole in enumerate(wholes)})


@on_ranks(2)
def test_values_that_fail_in_the_middle_of_a_save_are_told_by_name_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """Memory may suffice for what is tried first, and not later."""
    model, made = of_values(*wholes_of(4, 4, 4)), list[int]()
    values = Fickle.dequantize

    def fails_later(self: Fickle) -> torch.Tensor:
        made.append(1)
        if rank == 1 and len(made) > 4:
            raise torch.OutOfMemoryError("no memory")
        return values(self)

    with patch.object(Fickle, "dequantize", fails_later):
        with pytest.raises((torch.OutOfMemoryError, PeerFailureError), match=r"'1.weight'.*Fickle.*no memory"):
            save_full(model, tmp_path / "full")
        assert rank == 1 or not list(tmp_path.glob("full/*"))  # rank 0 has written
        made.clear()
        with patch.object(full_save, "_LEAST_NBYTES", 0):  # one tensor at a time
            remaining = iter_full_state_dict(model, dst=None)
            name, value = next(remaining)
            assert name == "0.weight"
            assert not value.isnan().any()
            with pytest.raises((torch.OutOfMemoryError, PeerFailureError), match=r"'1.weight'.*Fickle.*no memory"):
                next(remaining)
            assert list(remaining) == []


def beside_unmanaged(*, in_place: bool, weight: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Shard a linear beside one that no unit manages, whose weight is of a class of its own."""
    model = nn.Sequential(nn.Linear(8, 8), weight(nn.Linear(8, 8, bias=False)))
    if in_place:
        return fully_shard(model, ignored_params={*model[1].parameters()})
    return FSDP(model, ignored_modules=[model[1]], use_orig_params=True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_unmanaged_tensors_that_take_no_plain_values_are_named_before_a_load_of_full_files(
    in_place: bool, strict: bool, tmp_path: Path
) -> None:
    def one_way(layer: nn.Module) -> nn.Module:
        return held_by(layer, OneWay)

    torch.manual_seed(0)
    model, again = [beside_unmanaged(in_place=in_place, weight=one_way) for _ in range(2)]
    save_full(model, tmp_path / "full")
    x = batch(0, 5)
    before, loads = again(x), list[str]()
    for module in again.modules():
        module.register_load_state_dict_post_hook(lambda module, _: loads.append(type(module).__name__))
    with pytest.raises(LoadError, match=r"'1.weight' \(a OneWay, .*keep=.*Nothing was loaded"):
        load_full(again, tmp_path / "full", strict=strict)
    assert not loads
    assert torch.equal(again(x), before)
    # As the error says.
    load_full(again, tmp_path / "full", keep=lambda name: name != "1.weight", strict=False)
    found, saved = [
        dict(iter_full_state_dict(each, dst=None, keep=lambda name: "0." in name)) for each in (again, model)
    ]
    assert_equal(found, saved)


class LoadsItself(nn.Linear):
    """A linear that makes a tensor of its weight's class of the plain one that it loads."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self.weight = nn.Parameter(OneWay(state_dict.pop(f"{prefix}weight").clone()))


@on_ranks(2)
def test_a_module_that_loads_full_values_in_its_own_way_loads_them(tmp_path: Path) -> None:
    def loading(_layer: nn.Module) -> nn.Module:
        return held_by(LoadsItself(8, 8, bias=False), OneWay)

    torch.manual_seed(0)
    model, again = [beside_unmanaged(in_place=False, weight=loading) for _ in range(2)]
    save_full(model, tmp_path / "full")
    load_full(again, tmp_path / "full")
    x = batch(0, 5)
    assert torch.equal(again(x), model(x))


@on_ranks(2)
def test_a_model_that_cannot_be_unwrapped_trains_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), held_by(nn.Linear(8, 8, bias=False), SentInBfloat16))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer, 0)
    with pytest.raises(UnsupportedError, match="SentInBfloat16, which has no full plain tensor"):
        unwrap(model)
    trained(model, optimizer, 1)
