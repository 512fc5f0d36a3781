"""Trains parameters that are all-gathered by functions of their own beside torch's fully_shard."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.core.storage import TensorStorage
from fsdp_flat.errors import PeerFailureError, ShardingError, UnsupportedError, UsageError
from tests.support import assert_equal, on_ranks
from tests.support.extended_tensors import (
    Holder,
    Mute,
    NewPair,
    Pair,
    Rounded,
    SentInBfloat16,
    SentInInt8,
    SentUnpadded,
    assert_alike,
    held_by,
)
from tests.support.kit import batch
from tests.support.peer import peer_fully_shard

BOTH = (fully_shard, peer_fully_shard)


class Layers(nn.Module):
    """An MLP with a residual connection, without biases: the gradient of one would be of the weights' class."""

    def __init__(self, width: int = 8, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def model_of(kind: type[Holder] | None, *, bias: bool = False, width: int = 8, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[Layers(width, bias=bias) for _ in range(3)])
        return model if kind is None else held_by(model, kind)


def sharded(model: nn.Module, shard: Callable[..., Any], **kwargs: Any) -> nn.Module:
    for child in model:  # type: ignore[attr-defined]
        shard(child, **kwargs)
    shard(model, **kwargs)
    return model


def values_of(model: nn.Module) -> dict[str, Any]:
    """Return this rank's part of each parameter, as plain tensors."""
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        local = param._local_tensor.detach()
        found[name] = local.inner() if isinstance(local, Holder) else [local]
    return found


def trained(
    model: nn.Module, num_steps: int = 4, *, optimizer: Any = None, width: int = 8, first: int = 0
) -> list[float]:
    """Train, and return this rank's losses."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(first, first + num_steps):
        loss = model(batch(dist.get_rank(), step, width)).pow(2).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def assert_trains_as_torch(make: Callable[[], nn.Module], **kwargs: Any) -> None:
    """Assert that losses, and the parameters after training, equal those of torch's fully_shard."""
    width = kwargs.pop("width", 8)
    models = [sharded(make(), shard, **kwargs) for shard in BOTH]
    assert_alike(*[(trained(model, width=width), values_of(model)) for model in models])


@pytest.mark.parametrize("kind", [Pair, NewPair])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2, 4)
def test_both_tensors_of_a_pair_train_as_on_torch_and_as_a_replica(
    kind: type[Holder], reshard_after_forward: bool
) -> None:
    assert_trains_as_torch(lambda: model_of(kind), reshard_after_forward=reshard_after_forward)
    plain = model_of(None)
    model = sharded(model_of(kind), fully_shard, reshard_after_forward=reshard_after_forward)
    losses = trained(model)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = plain(batch(dist.get_rank(), step)).pow(2).mean()
        assert abs(loss.item() - expected) < 1e-5
        loss.backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Pair, NewPair])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2, 4)
def test_a_model_leaves_the_meta_device_and_computes_in_bfloat16(
    kind: type[Holder], reshard_after_forward: bool
) -> None:
    results = []
    for shard in BOTH:
        model = sharded(
            model_of(kind, device="meta"),
            shard,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for param in model.parameters():
            assert type(param._local_tensor) is kind
            with torch.no_grad():
                for each in param._local_tensor.inner():
                    each.copy_(torch.randn(each.shape) / 4)
        results.append((trained(model), values_of(model)))
    assert_alike(*results, atol=1e-3, rtol=1e-2)  # a sum that is rounded otherwise may flip a bit in bf16


def set_functions(model: nn.Module, seen: list[Any]) -> None:
    """Set the functions on the local tensors of the weights: no class is needed."""

    def pre(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        seen.append((mesh.ndim, mesh.size(), tuple(outer_size)))
        return (self.to(torch.bfloat16),), None

    @torch.no_grad()
    def post(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (tensor,) = outputs
        if out is None:
            whole = tensor.to(param_dtype)
            return whole, (tensor, whole)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(tensor)
        return None

    for name, param in model.named_parameters():
        if name.endswith("weight"):
            local = param._local_tensor
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)


@pytest.mark.parametrize("meta", [False, True])
@on_ranks(2, 4)
def test_functions_are_called_that_were_set_on_plain_local_tensors(meta: bool) -> None:
    results = []
    for shard in BOTH:
        seen: list[Any] = []
        model = sharded(model_of(None, bias=True, device="meta" if meta else "cpu"), shard)
        if meta:
            model.to_empty(device="cpu")
            torch.manual_seed(0)
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(
                        DTensor.from_local(
                            torch.randn(param._local_tensor.shape) / 4, param.device_mesh, param.placements
                        )
                    )
        # The optimizer may be there before, and keeps its parameters.
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        set_functions(model, seen)
        losses = trained(model, optimizer=optimizer)
        assert (1, dist.get_world_size(), (16, 8)) in seen
        results.append((losses, values_of(model)))
    assert_alike(*results)


@on_ranks(2, 4)
def test_an_uneven_parameter_is_sent_with_its_padding() -> None:
    # Dims of 3 and 6: uneven over 2 and 4 ranks, and without a row on the last of 4.
    assert_trains_as_torch(lambda: model_of(SentInBfloat16, bias=True, width=3), reshard_after_forward=False, width=3)


@on_ranks(2, 4)
def test_an_upcast_parameter_is_freed_and_filled_again() -> None:
    for make in (lambda: model_of(SentInBfloat16), lambda: model_of(SentInInt8, bias=True)):
        assert_trains_as_torch(make, reshard_after_forward=True)


@on_ranks(4)
def test_the_function_gets_the_mesh_that_shards_of_two_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seen: list[Any] = []
    model = sharded(model_of(None), fully_shard, mesh=mesh)
    set_functions(model, seen)
    trained(model)
    assert {(ndim, size) for ndim, size, _ in seen} == {(1, 2)}
    assert_trains_as_torch(lambda: model_of(NewPair), mesh=mesh)


@on_ranks(4)
def test_shards_kept_for_a_smaller_group_are_those_that_the_forward_sent() -> None:
    ours = sharded(model_of(SentInInt8), fully_shard, reshard_after_forward=2)
    # torch cannot do this; with all ranks it is the same.
    other = sharded(model_of(SentInInt8), fully_shard, reshard_after_forward=True)
    assert trained(ours) == trained(other)
    assert_equal(values_of(ours), values_of(other))


@on_ranks(2)
def test_memory_is_freed_between_steps_and_parameters_stay_the_same_objects() -> None:
    model = sharded(model_of(SentInInt8), fully_shard)
    trained(model, 1)
    groups = [group for unit in units_of(model) for group in unit.param_groups]
    assert groups
    assert all(isinstance(group.storage, TensorStorage) and group.output.nbytes == 0 for group in groups)
    before = [group.output.params for group in groups]
    trained(model, 1)
    assert all(own is group.output.params for own, group in zip(before, groups, strict=True))


@on_ranks(2, 4)
def test_sharded_parameters_in_host_memory_train_as_on_torch() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy

    ours = sharded(model_of(NewPair), fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))
    theirs = sharded(model_of(NewPair), peer_fully_shard, offload_policy=TorchCPUOffloadPolicy(pin_memory=False))
    assert_alike(trained(ours), trained(theirs))


@on_ranks(2, 4)
def test_gradients_of_several_backwards_are_accumulated() -> None:
    results = []
    for shard in BOTH:
        model = sharded(model_of(SentInInt8), shard)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            loss = model(batch(dist.get_rank(), step)).pow(2).mean()
            losses.append(loss.item())
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, values_of(model)))
    assert_alike(*results)


@on_ranks(2, 4)
def test_frozen_parameters_of_such_a_class_are_beside_trained_plain_ones() -> None:
    def make() -> nn.Module:
        model = model_of(None, bias=True)
        for layers in model:
            layers.up.weight.requires_grad_(False)  # type: ignore[union-attr]
            weight = layers.up.weight.detach()  # type: ignore[union-attr]
            layers.up.weight = nn.Parameter(SentInInt8(weight.clone()), requires_grad=False)  # type: ignore[union-attr]
        return model

    assert_trains_as_torch(make)


def plain_values(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a state dict as lists of plain tensors."""
    found = {}
    for name, value in state.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        found[name] = [each.detach() for each in local.inner()] if isinstance(local, Holder) else [local]
    return found


@pytest.mark.parametrize("full", [False, True])
@on_ranks(2, 4)
def test_state_dicts_equal_torchs_and_load_into_another_model(full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    states, models, optimizers = [], [], []
    for shard in BOTH:
        model = sharded(model_of(SentInBfloat16), shard)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        trained(model, 2, optimizer=optimizer)
        states.append(get_model_state_dict(model, options=options))
        models.append(model)
        optimizers.append(optimizer)
    ours, theirs = states
    assert list(ours) == list(theirs)
    assert {name: type(value) for name, value in ours.items()} == {name: type(value) for name, value in theirs.items()}
    assert_alike(plain_values(ours), plain_values(theirs))
    optim_states = [
        get_optimizer_state_dict(model, optimizer, options=options)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert list(optim_states[0]["state"]) == list(optim_states[1]["state"])
    again = sharded(model_of(SentInBfloat16), fully_shard)
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    optimizer = torch.optim.Adam(again.parameters(), lr=1e-2)
    if full:
        # torch's functions for full states send tensors of the class by collectives that it does not have.
        again.load_state_dict(ours)
        losses = [model(batch(dist.get_rank(), 2)).pow(2).mean().item() for model in (again, models[0])]
        assert losses[0] == losses[1]
        return
    set_model_state_dict(again, ours, options=options)
    # These are the states of the optimizer itself, not copies.
    set_optimizer_state_dict(again, optimizer, copy.deepcopy(optim_states[0]), options=options)
    assert trained(again, 2, optimizer=optimizer, first=2) == trained(models[0], 2, optimizer=optimizers[0], first=2)


@on_ranks(2)
def test_a_parameter_of_such_a_class_is_assigned_and_loaded() -> None:
    first, second = [sharded(model_of(NewPair), fully_shard) for _ in range(2)]
    trained(first, 2)
    second.load_state_dict(first.state_dict(), assign=True)
    # The two share memory now, so neither takes a step.
    losses = [model(batch(dist.get_rank(), 5)).pow(2).mean().item() for model in (first, second)]
    assert losses[0] == losses[1]
    assert trained(second, 1) != trained(second, 1)


@on_ranks(2)
def test_a_conversion_changes_the_tensors_inside() -> None:
    model = sharded(model_of(NewPair), fully_shard)
    trained(model, 1)
    model.double()
    assert all(param._local_tensor.first.dtype == torch.float64 for param in model.parameters())
    loss = model(batch(dist.get_rank(), 1, dtype=torch.float64)).pow(2).mean()
    loss.backward()
    assert all(param.grad.dtype == torch.float64 for param in model.parameters())


@on_ranks(2)
def test_a_conversion_of_a_parameter_that_a_weak_reference_holds_raises_and_changes_nothing() -> None:
    model = sharded(model_of(NewPair), fully_shard)
    reference = weakref.ref(next(model.parameters()))
    with pytest.raises(UsageError, match="cannot change its dtype or device"):
        model.double()
    assert all(param._local_tensor.first.dtype == torch.float32 for param in model.parameters())
    model.float()
    del reference
    model.double()
    assert all(param._local_tensor.first.dtype == torch.float64 for param in model.parameters())


@on_ranks(2, 4)
def test_an_extension_that_forgets_the_padding_is_refused_on_all_ranks() -> None:
    model = sharded(model_of(SentUnpadded, width=3), fully_shard)
    with pytest.raises((ShardingError, PeerFailureError), match=r"weight.*padded shape|failed while preparing"):
        model(batch(dist.get_rank(), width=3))


@on_ranks(2)
def test_extensions_that_cannot_be_called_are_refused_by_name() -> None:
    model = sharded(model_of(Mute), fully_shard)
    with pytest.raises(UnsupportedError, match=r"'up.weight' \(16, 8\) of unit .*is a Mute.*fsdp_pre_all_gather"):
        model(batch(dist.get_rank()))
    model = sharded(model_of(None), fully_shard)
    model[0].up.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None  # type: ignore[index, union-attr]
    with pytest.raises(ShardingError, match=r"'up.weight'.*no fsdp_post_all_gather.*needs both"):
        model(batch(dist.get_rank()))
    model[0].up.weight._local_tensor.fsdp_post_all_gather = lambda: None  # type: ignore[index, union-attr]
    model[0].up.weight._local_tensor.fsdp_pre_all_gather = lambda mesh, size: None  # type: ignore[index, union-attr]
    with pytest.raises(ShardingError, match=r"'up.weight'.*takes 2 arguments"):
        model(batch(dist.get_rank()))


def changed(post: Callable[..., Any], *, sends: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Shard a linear whose local tensor is all-gathered in bf16, and made whole by ``post(tensor, dtype, out)``."""
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(8, 8, bias=False))
    extend(layer.weight, post, sends)  # type: ignore[arg-type]
    return layer


def extend(
    param: DTensor, post: Callable[..., Any], sends: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    local = param._local_tensor

    def pre_all_gather(mesh: Any) -> Any:
        return ((sends or torch.Tensor.bfloat16)(local),), None

    def post_all_gather(outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return post(outputs[0], param_dtype, out)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post_all_gather  # type: ignore[attr-defined]


def whole_and(freed: Callable[..., tuple[Any, ...]], fill: Callable[..., object]) -> Callable[..., Any]:
    def post(tensor: torch.Tensor, dtype: torch.dtype, out: Any) -> Any:
        if out is not None:
            return fill(out, tensor)
        whole = tensor.to(dtype)
        return whole, freed(tensor, whole)

    return post


def ignored(_out: Any, _tensor: torch.Tensor) -> None:
    pass


def copied(out: Any, tensor: torch.Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(tensor[: len(out)])


def replaced(out: Any, tensor: torch.Tensor) -> None:
    out.data = tensor.to(out.dtype)


def both(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor, whole


def sent_alone(tensor: torch.Tensor, _whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor,)


@pytest.mark.parametrize("freed", [both, sent_alone])
@on_ranks(2)
def test_an_extension_that_leaves_out_as_it_was_is_refused_at_the_second_all_gather(freed: Callable[..., Any]) -> None:
    layer = changed(whole_and(freed, ignored))
    x = batch(dist.get_rank())
    layer(x).pow(2).mean().backward()
    with pytest.raises(ShardingError, match=r"'weight' \(8, 8\).*called with out=.*not written.*copy_"):
        layer(x)


@pytest.mark.parametrize("fill", [copied, replaced])
@pytest.mark.parametrize("freed", [both, sent_alone])
@pytest.mark.parametrize("value", [None, 0x7F7F, 0x2A2A])
@on_ranks(2)
def test_an_extension_that_fills_out_in_its_own_way_trains(
    value: int | None, freed: Callable[..., Any], fill: Callable[..., Any]
) -> None:
    """Weights may have the bits by which memory is known that was not written."""
    layer = changed(whole_and(freed, fill))
    plain = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        if value is None:
            torch.manual_seed(0)
            plain.reset_parameters()
        else:
            plain.weight.copy_(torch.tensor(value, dtype=torch.int16).view(torch.bfloat16))
        layer.weight._local_tensor.copy_(plain.weight.chunk(2)[dist.get_rank()])
    x = batch(dist.get_rank()) * (1.0 if value is None else 1e-30)
    rounded = plain.weight.detach().bfloat16().float()
    for _ in range(3):
        output = layer(x)
        torch.testing.assert_close(output, x @ rounded.T)
        output.sum().backward()


@on_ranks(2)
def test_a_frozen_parameter_that_keeps_what_it_made_first_trains_nothing_and_is_not_refused() -> None:
    layer = changed(whole_and(sent_alone, ignored))
    layer.weight.requires_grad_(False)
    x = batch(dist.get_rank())
    first = layer(x.requires_grad_())
    first.sum().backward()
    assert torch.equal(layer(x), first)


@on_ranks(2)
def test_a_forward_before_an_evaluation_in_which_an_extension_raises_still_has_its_backward() -> None:
    raises = [False]

    def fill(out: Any, tensor: torch.Tensor) -> None:
        if raises[0]:
            raise MemoryError("in the extension")
        copied(out, tensor)

    model = nn.Sequential(changed(whole_and(both, fill)), fully_shard(nn.Linear(8, 8)))
    fully_shard(model)
    grads = []
    for fails in (False, True):
        loss = model(batch(dist.get_rank())).sum()
        raises[0] = fails
        with torch.no_grad(), pytest.raises(MemoryError) if fails else nullcontext():
            model(batch(dist.get_rank()))
        raises[0] = False
        loss.backward()
        grads.append([param.grad for param in model.parameters()])
        model.zero_grad()
    assert_equal(*grads)


@on_ranks(2)
def test_after_an_extension_has_raised_all_groups_of_its_unit_show_sharded_parameters() -> None:
    def post(tensor: torch.Tensor, dtype: torch.dtype, out: Any) -> Any:
        raise MemoryError("in the extension")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())  # a group each: dtypes differ
    fully_shard(model)
    extend(model[1].weight, post)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        model(batch(dist.get_rank()))
    assert all(isinstance(param, DTensor) for param in (*model.parameters(), *model.state_dict().values()))


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "too few rows": (lambda tensor, dtype, out: (tensor[:-1].to(dtype), ()), r"a Tensor of shape \(7, 8\)"),
    "too few rows of a view": (lambda tensor, dtype, out: (tensor[:-1], ()), r"a Tensor of shape \(7, 8\)"),
    "too few rows of a class": (
        lambda tensor, dtype, out: (Rounded.of(tensor[:-1].float()), ()),
        r"a Rounded of shape \(7, 8\)",
    ),
    "too many rows of a class that has no views": (
        lambda tensor, dtype, out: (Rounded.of(torch.cat([tensor, tensor]).float()), ()),
        r"a Rounded of shape \(16, 8\)",
    ),
    "a tensor": (lambda tensor, dtype, out: tensor.to(dtype), "a Tensor;"),
    "nothing": (lambda tensor, dtype, out: None, "a NoneType;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_an_extension_that_returns_no_whole_parameter_is_refused_by_name(mistake: str) -> None:
    post, got = MISTAKES[mistake]
    with pytest.raises(ShardingError, match=rf"'weight' \(8, 8\).*returned {got}.*64 elements"):
        changed(post)(batch(dist.get_rank()))


@on_ranks(2)
def test_an_extension_that_sends_no_pair_of_tensors_and_metadata_is_refused_by_name() -> None:
    layer = changed(whole_and(both, copied))
    local, x = layer.weight._local_tensor, batch(dist.get_rank())
    result: Any
    results = {"a Tensor;": local, "a tuple of 1;": (local,), "a NoneType;": None, "a tuple of 2;": (3, None)}
    for got, result in results.items():
        local.fsdp_pre_all_gather = lambda _mesh: result  # type: ignore[union-attr] # noqa: B023
        with pytest.raises(ShardingError, match=rf"'weight' \(8, 8\).*returned {got}.*a tuple of the tensors to send"):
            layer(x)


@on_ranks(2)
def test_an_extension_of_the_old_form_that_sends_too_few_rows_is_refused_by_name() -> None:
    layer = changed(whole_and(both, copied), sends=lambda local: local[:-1].bfloat16())
    with pytest.raises(ShardingError, match=r"'weight' \(8, 8\).*returned a Tensor of shape \(6, 8\)"):
        layer(batch(dist.get_rank()))


@on_ranks(2)
def test_the_attributes_of_such_parameters_survive_and_the_full_tensor_does_not() -> None:
    model = model_of(NewPair)
    model[0].up.weight.decay = 0.5  # type: ignore[index, union-attr]
    fully_shard(model)
    weight = model[0].up.weight  # type: ignore[index, union-attr]
    assert weight.decay == 0.5
    assert "first" not in weight.__dict__
    seen = []
    model[0].up.register_forward_hook(lambda module, *_: seen.append(module.weight.decay))  # type: ignore[index, union-attr]
    model(batch(dist.get_rank()))
    assert seen == [0.5]
