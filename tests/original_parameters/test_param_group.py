"""The handle: what modules show, and changes that a user makes to the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FlatParameter
from fsdp_flat.core import ParamGroup, ParamGroupSpec, add_reduced
from fsdp_flat.core.options import Ignored
from fsdp_flat.errors import UsageError
from fsdp_flat.runtime.param_walk import unit_params
from tests.support import assert_equal

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.bias = nn.Parameter(torch.tensor([10.0, 11.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


def handle_of(module: nn.Module, *, rank: int = 0, world_size: int = 2, use_orig_params: bool = True) -> ParamGroup:
    params = unit_params(module, "small", Ignored(frozenset(), frozenset()), {}, ())
    return ParamGroup(
        params,
        ParamGroupSpec(
            unit_name="small",
            module=module,
            rank=rank,
            world_size=world_size,
            num_ranks=world_size,
            use_orig_params=use_orig_params,
            device=CPU,
            shard_device=CPU,
        ),
    )


def whole_flat(handle: ParamGroup) -> torch.Tensor:
    """What every rank's shards make up together."""
    flat = torch.zeros(handle.layout.numel)
    for param_info, value in zip(
        handle.layout.param_infos, (torch.arange(6.0), torch.tensor([10.0, 11.0])), strict=True
    ):
        flat[param_info.interval.to_slice()] = value
    return flat


def gather(handle: ParamGroup, flat: torch.Tensor | None = None) -> None:
    own = handle.layout.shard(handle.spec.rank).to_slice()
    buffer, _ = handle.output.send(handle.pool)
    assert_equal(buffer[own], handle.flat_param.data, what="the own slice")
    buffer.copy_(whole_flat(handle) if flat is None else flat)
    handle.output.arrived()


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_reset_frees_the_buffer_and_the_handle_can_be_gathered_again(is_gathered: bool) -> None:
    module = Small()
    handle = handle_of(module)
    if is_gathered:
        gather(handle)
    handle.reset(frees=True)
    assert handle.output.nbytes == 0
    gather(handle)
    handle.slots.show_unsharded()
    assert_equal(module.weight.detach(), torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_shards_hold_every_element_once(rank: int, use_orig_params: bool) -> None:
    handle = handle_of(Small(), rank=rank, world_size=3, use_orig_params=use_orig_params)
    assert_equal(handle.flat_param.data, whole_flat(handle)[handle.layout.shard(rank).to_slice()])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gathered_parameters_are_shown_used_and_hidden_again(use_orig_params: bool) -> None:
    module = Small()
    original = module.weight
    handle = handle_of(module, use_orig_params=use_orig_params)
    for _ in range(2):
        gather(handle)
        handle.slots.show_unsharded()
        x = torch.eye(3)
        assert_equal(module(x).detach(), torch.arange(6.0).view(2, 3).t() + torch.tensor([10.0, 11.0]))
        assert module.weight is handle.output.params[0]
        handle.slots.show_sharded()
        handle.output.free(handle.pool)
        assert handle.output.nbytes == 0
        with pytest.raises(UsageError, match=r"'weight' \(2, 3\) of unit 'small'"):
            module(x)
        if use_orig_params:
            assert module.weight is original
            assert module.weight.dim() == 1
        else:
            assert list(module._parameters) == ["_flat_param"]
            assert isinstance(module._flat_param, FlatParameter)
            assert module.weight.shape == (2, 3)


def test_with_original_parameters_shards_share_memory_with_the_flat_shard() -> None:
    module = Small()
    handle = handle_of(module)
    with torch.no_grad():
        module.weight.fill_(5.0)
    local_shard = handle.local_shards[0]
    assert_equal(handle.flat_param.data[local_shard.in_shard.to_slice()], torch.full((local_shard.numel,), 5.0))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_values_that_the_optimizer_changes_are_gathered_next(use_orig_params: bool) -> None:
    module = Small()
    handle = handle_of(module, use_orig_params=use_orig_params)
    before = handle.weights_epoch()
    with torch.no_grad():
        for param in handle.slots.visible_params:
            param.mul_(2.0)
    assert handle.weights_epoch() != before
    own = handle.layout.shard(0).to_slice()
    assert_equal(handle.output.send(handle.pool)[0][own], 2 * whole_flat(handle)[own])


# -- what users assign between steps ---------------------------------------------------------------------------------


def adopted(handle: ParamGroup) -> dict[str, torch.Tensor]:
    """This rank's values after the handle took over what was assigned."""
    handle.adopt_changes()
    data = handle.flat_param.data
    return {
        param_info.fqn: data[local_shard.in_shard.to_slice()].clone()
        for param_info, local_shard in zip(handle.layout.param_infos, handle.local_shards, strict=True)
    }


def slices(handle: ParamGroup, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        param_info.fqn: values[param_info.fqn].reshape(-1)[local_shard.in_param.to_slice()]
        for param_info, local_shard in zip(handle.layout.param_infos, handle.local_shards, strict=True)
    }


NEW = {"weight": torch.arange(6.0).view(2, 3) + 100, "bias": torch.tensor([10.0, 11.0])}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", ["whole", "slice"])
@pytest.mark.parametrize("how", ["data", "parameter"])
def test_an_assigned_tensor_is_taken_over_whole_or_as_a_slice(how: str, form: str, rank: int) -> None:
    module = Small()
    original = module.weight
    handle = handle_of(module, rank=rank)
    value = NEW["weight"].clone() if form == "whole" else slices(handle, NEW)["weight"].clone()
    if how == "data":
        module.weight.data = value
    else:
        module.weight = nn.Parameter(value)
    assert_equal(adopted(handle), slices(handle, NEW))
    assert module.weight is original, "the parameter that an optimizer holds"
    with torch.no_grad():
        module.weight.add_(1.0)
    expected = slices(handle, NEW)
    expected["weight"] = expected["weight"] + 1
    assert_equal(adopted(handle), expected)


def test_an_assigned_tensor_of_another_shape_is_refused_by_name_with_both_shapes() -> None:
    module = Small()
    handle = handle_of(module)
    module.weight.data = torch.zeros(5, 7)
    with pytest.raises(UsageError, match=r"'weight' of unit 'small'.*\(5, 7\).*expected the unsharded shape \(2, 3\)"):
        handle.adopt_changes()


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_new_flat_shard_is_taken_over(use_orig_params: bool) -> None:
    module = Small()
    handle = handle_of(module, use_orig_params=use_orig_params)
    fresh = torch.arange(float(handle.layout.shard_numel)) + 50
    handle.flat_param.data = fresh
    handle.adopt_changes()
    own = handle.layout.shard(0).to_slice()
    assert_equal(handle.output.send(handle.pool)[0][own], fresh)
    if use_orig_params:
        assert_equal(module.weight.detach(), fresh[handle.local_shards[0].in_shard.to_slice()])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_new_flat_shard_of_an_unsharded_unit_is_what_compute_sees(use_orig_params: bool) -> None:
    module = Small()
    handle = handle_of(module, world_size=1, use_orig_params=use_orig_params)
    fresh = torch.arange(float(handle.layout.shard_numel)) + 50
    handle.flat_param.data = fresh
    handle.adopt_changes()
    handle.output.send(handle.pool)
    handle.output.arrived()
    handle.slots.show_unsharded()
    assert_equal(module.weight.detach(), fresh[:6].view(2, 3))


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_land_flat_and_leave_nothing_on_the_leaves(use_orig_params: bool) -> None:
    module = Small()
    handle = handle_of(module, use_orig_params=use_orig_params)
    grads_ready: list[Any] = []
    handle.grads.on_ready = lambda: grads_ready.append(handle)
    gather(handle)
    handle.slots.show_unsharded()
    for _ in range(2):
        module(torch.ones(4, 3)).sum().backward()
        handle.grads.collect()
    assert grads_ready == [handle] * 2  # once a backward: there are few gradients
    assert all(leaf.grad is None for leaf in handle.output.params)
    assert sum(handle.grads.ready()) == 2
    expected = torch.zeros(handle.layout.numel)
    for param_info in handle.layout.param_infos:
        expected[param_info.interval.to_slice()] = 8.0
    assert_equal(handle.grads.take_flat()[0], expected)
    assert not any(handle.grads.ready())
    assert_equal(handle.grads.take_flat()[0], torch.zeros(handle.layout.numel))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_gradient_after_one_that_was_refused_is_examined_as_the_first_one(use_orig_params: bool) -> None:
    module = Small()
    handle = handle_of(module, use_orig_params=use_orig_params)
    calls: list[int] = []

    def refuse() -> None:
        calls.append(1)
        raise UsageError("not now")

    handle.grads.on_ready = refuse
    gather(handle)
    handle.slots.show_unsharded()
    for number in range(2):
        with pytest.raises(UsageError, match="not now"):
            module(torch.ones(4, 3)).sum().backward()
        assert len(calls) == number + 1


def test_a_published_gradient_is_added_to_what_was_used_and_the_rest_stays_none() -> None:
    module = Small()
    handle = handle_of(module, rank=0)
    shard = torch.ones(handle.layout.shard_numel)
    add_reduced(handle, shard.clone(), [True, False])
    add_reduced(handle, shard.clone(), [True, False])
    assert module.weight.grad is not None
    assert_equal(module.weight.grad, torch.full_like(module.weight, 2.0).detach())
    assert module.bias.grad is None


def test_requires_grad_set_by_the_user_is_followed_at_the_next_show() -> None:
    module = Small()
    handle = handle_of(module)
    assert [leaf.requires_grad for leaf in handle.output.params].count(True) == 2
    module.bias.requires_grad_(False)
    gather(handle)
    handle.slots.show_unsharded()
    assert [leaf.requires_grad for leaf in handle.output.params].count(True) == 1
    module(torch.ones(4, 3)).sum().backward()
    handle.grads.collect()
    assert handle.grads.ready() == b"\x01\x00"
    handle.slots.show_sharded()
    module.bias.requires_grad_(True)
    handle.slots.show_unsharded()
    assert [leaf.requires_grad for leaf in handle.output.params].count(True) == 2
