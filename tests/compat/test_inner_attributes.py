"""The table of attributes of FSDP2's states, parameter groups and parameters: complete, and true beside torch's."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_flat
from fsdp_flat import MixedPrecisionPolicy
from fsdp_flat.compat.inner_names import HAS, INSTEAD, TAKES, advice_for
from fsdp_flat.composable import fsdp_param, fsdp_state
from fsdp_flat.errors import OptionError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.peer import peer_fully_shard
from tests.support.wrapper_models import message

CLASSES = {
    "FSDPState": "_fsdp_state",
    "FSDPStateContext": "_fsdp_state",
    "FSDPParamGroup": "_fsdp_param_group",
    "FSDPCommContext": "_fsdp_param_group",
    "FSDPParam": "_fsdp_param",
}
OURS: dict[str, Any] = {name: getattr(fsdp_param if name == "FSDPParam" else fsdp_state, name) for name in CLASSES}
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
not_before_2_13 = pytest.mark.skipif(VERSION < (2, 13), reason=f"torch {torch.__version__} had other names")
is_2_13 = pytest.mark.skipif(VERSION != (2, 13), reason=f"the table is of torch 2.13, and this is {torch.__version__}")


def names_of(kind: str) -> set[str]:
    """The attributes of a class of torch: those of its body, and those that its methods assign."""
    module = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{CLASSES[kind]}")
    definition = next(
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and node.name == kind
    )
    found = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(definition):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign)) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
            elif isinstance(target, ast.Name) and node in definition.body:
                found.add(target.id)
    return {name for name in found if not name.startswith("__")}


def instead(kind: str) -> list[str]:
    return [name for names in INSTEAD[kind].values() for name in names.split()]


@not_before_2_13
@pytest.mark.parametrize("kind", CLASSES)
def test_every_attribute_of_torchs_class_is_in_the_table_once(kind: str) -> None:
    places = [*HAS[kind].split(), *TAKES[kind].split(), *instead(kind)]
    wrong = {name: places.count(name) for name in names_of(kind) if places.count(name) != 1}
    assert wrong == {}, (
        f"torch {torch.__version__} has attributes of {kind} that are not in fsdp_flat/compat/inner_names.py once: "
        f"{sorted(wrong)}. Add each to HAS or TAKES, with a property of {OURS[kind].__module__}, or to INSTEAD."
    )


@is_2_13
@pytest.mark.parametrize("kind", CLASSES)
def test_every_attribute_of_the_table_is_torchs(kind: str) -> None:
    assert {*HAS[kind].split(), *TAKES[kind].split(), *instead(kind)} - names_of(kind) == set()


@pytest.mark.parametrize("kind", CLASSES)
def test_our_class_has_what_the_table_says(kind: str) -> None:
    """And no public attribute besides, other than what it is made of."""
    own = OURS[kind]
    assert own.__name__ == kind
    for name in TAKES[kind].split():
        found = vars(own)[name]
        assert hasattr(found, "__set__")
        assert not isinstance(found, property) or found.fset is not None, name
    for name in HAS[kind].split():
        found = vars(own)[name]
        assert not isinstance(found, property) or found.fset is None, name
    for name in instead(kind):
        assert name not in vars(own)
    more = {name for name in vars(own) if not name.startswith("_")} - {*HAS[kind].split(), *TAKES[kind].split()}
    assert more <= {"module", "unit"}


# -- values, beside torch's ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers whose rows do not divide evenly, and one with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5, bias=False))
        self.head = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.head(self.body(x)))


def sharded(fully_shard: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    for module in (*model.body, model):
        fully_shard(module, **options)
    return model


def plain(value: Any) -> Any:
    """What objects of two libraries have in common."""
    if isinstance(value, DeviceMesh):
        return value.mesh.tolist(), value.device_type
    if hasattr(value, "shard_mesh_size") and hasattr(value, "mesh"):  # of fewer ranks torch's mesh has one dim more
        return value.shard_mesh_size, value.shard_mesh_rank, plain(value.shard_process_group)
    if isinstance(value, dist.ProcessGroup):
        return dist.get_process_group_ranks(value)
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return (
            type(value).__name__,
            tuple(value.shape),
            local.detach().clone() if local.untyped_storage().nbytes() else None,
        )
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.Stream) or type(value).__name__ == "Stream":
        return "stream"
    if isinstance(value, ModuleType):
        return value.__name__
    if hasattr(value, "cast_forward_inputs"):
        return value.param_dtype, value.output_dtype
    if type(value).__name__ == "DTensorSpec":
        return plain(value.mesh), value.placements, value.shape, value.stride
    if type(value).__name__ == "FSDPState":
        return plain(list(value._modules))
    if type(value).__name__ in ("FSDPParamGroup", "FSDPParam", "OffloadPolicy", "CPUOffloadPolicy"):
        return type(value).__name__
    if type(value).__name__ == "ParamModuleInfo":
        return plain([value.module, value.param_name, value.shared_modules, value.shared_param_names])
    if isinstance(value, (tuple, list)):
        return list(map(plain, value))
    if isinstance(value, set):
        return sorted(map(plain, value))
    return value


# Values of ours that differ from torch's, with the reason.
DIFFERENT = {
    "unshard_async_op": "all-gathers are always asynchronous",
    "_comm_ctx": "compared by its attributes",
    "comm_ctx": "compared by its attributes",
    "_state_ctx": "compared by its attributes",
    "_pre_forward_hook_handle": "an object of its own",
    "_post_forward_hook_handle": "an object of its own",
    "FSDPParam.post_forward_mesh_info": "torch's does not follow that of the group",
}
# Those that torch sets at the first use of a tree, and ours have before.
LATE = {"_module_fqn", "_param_fqn", "_orig_dtype", "_reduce_dtype", "orig_dtype", "param_dtype", "reduce_dtype"}
LATE |= {"_unsharded_param", "unsharded_param", *HAS["FSDPCommContext"].split()}


def values(kind: str, shown: Any, *, used: bool) -> dict[str, Any]:
    found = {}
    for name in (*HAS[kind].split(), *TAKES[kind].split()):
        if (
            name in DIFFERENT
            or f"{kind}.{name}" in DIFFERENT
            or (name in LATE and not used)
            or (name == "_all_reduce_process_group" and not shown._is_hsdp)
        ):
            continue
        value = getattr(shown, name)
        if not callable(value) or isinstance(value, (nn.Module, torch.Tensor)):
            found[name] = plain(value)
    return found


def all_values(model: Any, *, used: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        group = state._fsdp_param_group
        parts = [("FSDPState", state), ("FSDPStateContext", state._state_ctx), ("FSDPCommContext", state._comm_ctx)]
        parts += [("FSDPParamGroup", group)]
        parts += [("FSDPParam", param) for param in group.fsdp_params]
        for index, (kind, shown) in enumerate(parts):
            found[f"{path} {kind} {index}"] = values(kind, shown, used=used)
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "smaller": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "hybrid": {"mesh": True},
}


def between_steps(model: Any) -> None:
    """Leave a model after a backward."""
    model(torch.ones(2, 5)).sum().backward()
    for param in model.parameters():
        param.grad = None


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(4)
def test_values_are_those_of_torchs_objects(options: str) -> None:
    """Before the first use of a model, in a forward, after a backward, and unsharded by hand."""
    kwargs = dict(OPTIONS[options])
    if "mesh" in kwargs:
        kwargs["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: list[list[dict[str, Any]]] = []
    with fsdp_flat.installed():
        for fully_shard in (fsdp_flat.fully_shard, peer_fully_shard):
            model = sharded(fully_shard, **kwargs)
            moments = [all_values(model, used=False)]
            inside: list[Any] = []

            def note(*_: Any, model: Any = model, inside: list[Any] = inside) -> None:
                inside.append(all_values(model, used=True))

            handle = model.head.register_forward_hook(note)
            model(torch.ones(2, 5)).sum().backward()
            handle.remove()
            moments += [all_values(model, used=True)]
            model.unshard()
            model.body[0].unshard(async_op=True).wait()
            moments += [all_values(model, used=True)]
            if options == "kept":  # whether an inner unit has been freed yet is the library's own choice
                moments += inside
            found.append(moments)
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, rtol=0, atol=0)
    assert len(found[0][0]) == 3 * 4 + 2 + 1 + 1


@on_ranks(2)
def test_what_there_is_nothing_of_raises_with_the_advice_of_the_table() -> None:
    model = sharded(fsdp_flat.fully_shard)
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    for shown in (state, state._comm_ctx, state._state_ctx, group, group.fsdp_params[0]):
        kind = type(shown).__name__
        for name in (*instead(kind), "no_name_of_torchs"):
            for use in (lambda shown=shown, name=name: getattr(shown, name), lambda s=shown, n=name: setattr(s, n, 1)):
                text = message(AttributeError, AttributeError, use)
                assert text.endswith(f"Instead: {advice_for(kind, name)}.")
        with pytest.raises(AttributeError, match="which would have no effect"):
            setattr(shown, HAS[kind].split()[-1], None)


# -- what has an effect ----------------------------------------------------------------------------------------------


def trained(model: Any, steps: int = 2) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step + 10 * dist.get_rank())
        model(torch.randn(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}


def both(change: Any) -> list[dict[str, torch.Tensor]]:
    """Weights after training with ``change`` made to a model of ours and to one of torch's."""
    found = []
    with fsdp_flat.installed():
        for fully_shard in (fsdp_flat.fully_shard, peer_fully_shard):
            model = sharded(fully_shard)
            change(model)
            found.append(trained(model))
    return found


def group_of(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def divide(model: Any) -> None:
    group_of(model.body[0]).force_sum_reduction_for_comms = True  # gloo can do no other
    group_of(model.body[0]).gradient_divide_factor = 3.0
    assert group_of(model.body[0]).gradient_divide_factor == 3.0


def hook(model: Any) -> None:
    group_of(model)._all_reduce_hook = lambda grad: grad.mul_(2)


def prefetch(model: Any) -> None:
    states = [each._get_fsdp_state() for each in model.body]
    model._get_fsdp_state()._states_to_forward_prefetch = states
    model._get_fsdp_state()._states_to_backward_prefetch = states[::-1]
    assert list(model._get_fsdp_state()._states_to_forward_prefetch) == states
    assert list(model._get_fsdp_state()._states_to_backward_prefetch) == states[::-1]


def doubled(model: Any) -> None:
    """A program's own end of a backward: it reduces a loss's gradient scaled by two."""
    group = group_of(model.body[1])
    before = group.post_backward

    def post_backward(*args: Any) -> None:
        model.calls.append("end")
        before(*args)

    begin = group.pre_backward

    def pre_backward(*args: Any) -> None:
        model.calls.append("begin")
        begin(*args)
        assert group.is_unsharded

    model.calls = []
    group.post_backward, group.pre_backward = post_backward, pre_backward
    assert group_of(model.body[1]).post_backward is post_backward


CHANGES = {each.__name__: each for each in (divide, hook, prefetch, doubled)}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_an_assignment_has_torchs_effect(change: str) -> None:
    mine, theirs = both(CHANGES[change])
    assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    unchanged, _ = both(lambda model: None)
    assert (max((mine[name] - unchanged[name]).abs().max() for name in mine) > 1e-6).item() is (
        change in ("divide", "hook")
    )


@on_ranks(2)
def test_a_function_around_the_begin_or_end_of_a_backward_runs_in_each_until_the_method_is_assigned_again() -> None:
    model = sharded(fsdp_flat.fully_shard)
    group = group_of(model.body[1])
    before = group.post_backward, group.pre_backward
    doubled(model)
    trained(model)
    assert model.calls == ["begin", "end"] * 2
    group_of(model.body[1]).post_backward, group_of(model.body[1]).pre_backward = before
    trained(model)
    assert model.calls == ["begin", "end"] * 2
    assert "post_backward" not in vars(group.unit)


@on_ranks(2)
def test_prefetch_is_in_the_order_that_was_assigned() -> None:
    model = sharded(fsdp_flat.fully_shard)
    prefetch(model)
    with fsdp_flat.composable.trace(model) as events:
        model(torch.ones(2, 5)).sum().backward()
    assert [name for event, name in events if event == "forward_prefetch"] == ["body.0", "body.1"]
    with pytest.raises(OptionError, match="unit of its own"):
        model._get_fsdp_state()._states_to_forward_prefetch = [fsdp_state.FSDPState(model.head, None)]


@on_ranks(2)
def test_the_last_backward_and_unused_parameters_are_switched_by_assignment() -> None:
    model = sharded(fsdp_flat.fully_shard)
    context = model._get_fsdp_state()._state_ctx
    context.is_last_backward = False
    model(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert context.iter_forward_root is None
    context.is_last_backward = True
    model(torch.ones(2, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_gradient_that_waits_is_read_and_dropped() -> None:
    model = sharded(fsdp_flat.fully_shard)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    params = group_of(model.body[0]).fsdp_params
    reference = Net()
    torch.manual_seed(0)
    reference = Net()
    for _ in range(2):
        reference(torch.ones(2, 5)).sum().backward()
    found = [param.unsharded_accumulated_grad for param in params]
    assert_close(found, [param.grad for param in reference.body[0].parameters()], rtol=1e-6, atol=1e-6)
    params[0].unsharded_accumulated_grad = None
    assert params[0].unsharded_accumulated_grad is None
    with pytest.raises(UsageError, match="takes None alone"):
        params[1].unsharded_accumulated_grad = torch.ones(7)
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 5)).sum().backward()
    first, second = (param.grad.full_tensor() for param in model.body[0].parameters())
    assert_close(first, reference.body[0].weight.grad / 2, rtol=1e-6, atol=1e-6)
    assert_close(second, reference.body[0].bias.grad * 1.5, rtol=1e-6, atol=1e-6)


# -- what becomes of parameters after forward ------------------------------------------------------------------------


@on_ranks(2)
def test_a_frozen_model_is_resharded_after_forward_root_or_not_once_its_mesh_is_assigned_again() -> None:
    """dinov3 does it for its teacher, before the first forward."""
    for fully_shard in (peer_fully_shard, fsdp_flat.fully_shard):
        model = sharded(fully_shard).requires_grad_(False)
        state = model._get_fsdp_state()
        info = state._fsdp_param_group.post_forward_mesh_info
        assert info == state._fsdp_param_group.mesh_info
        state._lazy_init()
        assert state._fsdp_param_group.post_forward_mesh_info is None
        state._fsdp_param_group.post_forward_mesh_info = info
        model(torch.ones(2, 5))
        assert state._fsdp_param_group.is_sharded


@on_ranks(2)
def test_units_stay_unsharded_over_forwards_without_gradients_and_see_later_weights() -> None:
    """Rollouts of a trained model: no all-gather from the second forward on, until the weights change."""
    model = sharded(fsdp_flat.fully_shard)
    x = torch.ones(2, 5)
    groups = [group_of(each) for each in (*model.body, model)]
    params = list(model.parameters())
    kept = {group: group.post_forward_mesh_info for group in groups}
    for group in groups:
        group.post_forward_mesh_info = None
    gathers = []
    for change in (False, False, True, False):
        if change:
            with torch.no_grad():
                for param in params:  # modules hold unsharded ones
                    param.add_(1.0)
        with fsdp_flat.composable.trace(model) as events, torch.no_grad():
            output = model(x)
        gathers.append(sum(event == "unshard" for event, _ in events))
        assert all(group.is_unsharded for group in groups)
    assert gathers == [3, 0, 3, 0]
    torch.manual_seed(0)
    reference = Net()
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(1.0)
        assert_close(output, reference(x), rtol=1e-5, atol=1e-5)
    model.reshard()
    for group, info in kept.items():
        group.post_forward_mesh_info = info
    with torch.no_grad():
        model(x)
    assert all(group.is_sharded for group in groups)
    assert_close(trained(model), trained_plain(reference), rtol=1e-4, atol=1e-4)


def trained_plain(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        losses = []
        for rank in range(dist.get_world_size()):
            torch.manual_seed(step + 10 * rank)
            losses.append(model(torch.randn(2, 5)).square().mean())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@on_ranks(4)
def test_a_mesh_of_fewer_ranks_is_assigned_and_another_number_is_refused() -> None:
    model = sharded(fsdp_flat.fully_shard, reshard_after_forward=2)
    group = group_of(model.body[0])
    info = group.post_forward_mesh_info
    assert (info.shard_mesh_size, info.shard_mesh_rank) == (2, dist.get_rank() % 2)
    assert group._use_post_forward_mesh
    group.post_forward_mesh_info = None
    assert group.post_forward_mesh_info is None
    group.post_forward_mesh_info = info
    states = []
    model.head.register_forward_hook(lambda *_: states.append(group._sharded_state.name))
    model(torch.ones(2, 5)).sum().backward()
    assert states == ["SHARDED_POST_FORWARD"]
    with pytest.raises(OptionError, match="divides the 4 that shard"):
        group.post_forward_mesh_info = "all"
