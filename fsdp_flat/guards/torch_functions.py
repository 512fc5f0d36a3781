"""Keeps functions of torch replaced from the first unit on, until ``restore_torch_functions()`` is called.

Torch's would be wrong on one rank's shards; these are right on all ranks, and call torch's own for everything that no
unit manages. They are replaced in every module that has imported them. References kept elsewhere before (a default
argument, a partial, a container) stay torch's, but for those of ``clip_grad_norm_``. These are all of them:

* ``torch.nn.utils.clip_grad_norm_``: the norm is that of all ranks.
* ``torch.amp.GradScaler``: an inf or NaN on one rank skips the step on every rank.
* ``torch.autograd.grad``: gradients of sharded parameters are this rank's, of the unsharded shape, not averaged.
* ``torch.autograd.backward``, which ``Tensor.backward`` calls: ``inputs`` may be sharded parameters.
* ``torch.optim.Optimizer.zero_grad``: gradients that no ``.grad`` shows yet are cleared too.
* ``torch.distributed.tensor.DTensor.full_tensor``: it raises first if ranks differed in the last backward of a tree on
  the tensor's mesh, which they compare without waiting.
* ``torch.distributed.barrier``: a rank that waits for long is seen by ranks that wait for it elsewhere.
* The constructor of ``torch.nn.parallel.DistributedDataParallel``: parameters that a unit has sharded raise, and DDP
  averages gradients of a unit that shards nothing.
* The constructor of ``torch.optim.Muon``: local shards raise with what to use instead.
* The constructors of torch's FSDPs, once these are imported: what a unit has sharded already raises. So do the static
  methods of torch's wrapper that are given a model with our wrappers and none of torch's, but for ``fsdp_modules``.

The constructors of units call :func:`replace_at_first_unit`. :func:`restore_torch_functions` undoes it for the process,
and :func:`replace_torch_functions` undoes that; both are names of ``fsdp_flat.compat`` too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from fsdp_flat.comm import ALONE, RankGroup, barrier_begun, begin_all_reduce, connected, is_compared, wait_in_barrier
from fsdp_flat.core import (
    FlatParameter,
    Unit,
    clear_hidden_gradients,
    dynamo_disabled,
    is_managed,
    outermost_of,
    owner_of,
    read_exchanges,
    read_exchanges_on,
    units_holding,
    units_in_backward,
    units_of,
)
from fsdp_flat.core.events import EVENTS
from fsdp_flat.errors import UnsupportedError, UsageError, phrase, some_of
from fsdp_flat.guards.optimizers import check_whole
from fsdp_flat.runtime import check_gradients_set, clip_grads, outer_holder_in, unit_record

_torch_grad: Callable[..., tuple[torch.Tensor | None, ...]] = torch.autograd.grad
_torch_backward: Callable[..., None] = torch.autograd.backward
_BACKWARD = inspect.signature(_torch_backward)
_torch_clip_grad_norm_: Callable[..., torch.Tensor] = clip_grad.clip_grad_norm_
# torch's function is a closure that runs the function in this cell under no_grad. With ours in the cell, references
# that no module has are right too: a default argument, a functools.partial, an attribute of a class. A function without
# the cell, as a program may have put there, is replaced by name alone.
_cells = [cell for cell in getattr(_torch_clip_grad_norm_, "__closure__", ()) or () if callable(cell.cell_contents)]
_CLIP_CELL: Any = _cells[0] if _cells else SimpleNamespace(cell_contents=_torch_clip_grad_norm_)
_clip_without_grad: Callable[..., torch.Tensor] = _CLIP_CELL.cell_contents
# GradScaler decides by what this method returns, for each device; there is no public way to change its decision.
_UNSCALE = "_unscale_grads_"
_torch_unscale_grads_: Callable[..., dict[torch.device, torch.Tensor]] = getattr(GradScaler, _UNSCALE)
_torch_zero_grad: Callable[..., None] = torch.optim.Optimizer.zero_grad
_torch_full_tensor: Callable[..., torch.Tensor] = DTensor.full_tensor
_torch_barrier: Callable[..., Any] = dist.barrier
_BARRIER = inspect.signature(_torch_barrier)
_torch_ddp_init: Callable[..., None] = DistributedDataParallel.__init__
_Muon: Any = getattr(torch.optim, "Muon", None)  # since 2.9
_torch_muon_init: Callable[..., None] = getattr(_Muon, "__init__", nn.Module.__init__)


class _State:
    """Holds whether functions are replaced: None until a unit is built, or a caller has decided.

    Attributes:
        torchs: torch's own values of attributes that are replaced, with their owner and name.
    """

    replaced: bool | None = None
    torchs: ClassVar[list[tuple[Any, str, Any]]] = []


def replace_at_first_unit() -> None:
    """Replace the functions of torch, unless that was done or undone before."""
    if _State.replaced is None:
        replace_torch_functions()
    elif _State.replaced:
        _guard_torch_fsdps()


def replace_torch_functions() -> None:
    """Replace torch's functions again after :func:`restore_torch_functions`. The first unit does it by itself."""
    if not _State.replaced:
        _rebind(_FUNCTIONS)
        for owner, name, ours in _ATTRIBUTES:
            _State.torchs.append((owner, name, getattr(owner, name)))
            setattr(owner, name, ours)
        _guard_torch_fsdps()
        _State.replaced = True


@contextmanager
def left_as_found() -> Iterator[None]:
    """Undo at the end what the first unit has replaced inside the block."""
    before = _State.replaced
    try:
        yield
    finally:
        if before is None and _State.replaced:
            restore_torch_functions()
            _State.replaced = None


def restore_torch_functions() -> None:
    """Restore torch's own functions, which work on this rank's shards alone.

    They stay restored until :func:`replace_torch_functions` is called.
    """
    if _State.replaced:
        _rebind({new: old for old, new in _FUNCTIONS.items()})
        for owner, name, torchs in _State.torchs:
            setattr(owner, name, torchs)
        _State.torchs.clear()
    _State.replaced = False


def _rebind(new_of: dict[Any, Any]) -> None:
    """Bind every name of a function in an imported module to its replacement, other than this module's own names."""
    by_id = {id(old): new for old, new in new_of.items()}
    for namespace in namespaces():
        if namespace is not globals():
            for name, value in list(namespace.items()):
                if id(value) in by_id:
                    namespace[name] = by_id[id(value)]


def namespaces() -> list[dict[str, Any]]:
    """Return the globals of every module, and of functions in modules whose globals belong to no module.

    ``runpy.run_path`` leaves such functions; a spawned process gets its ``__main__`` by it.
    """
    found = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    for namespace in list(found.values()):
        for value in list(namespace.values()):
            if type(value) is FunctionType:
                found.setdefault(id(value.__globals__), value.__globals__)
    return list(found.values())


def _trees_of(units: Iterable[Unit]) -> list[Unit]:
    """Return all units of the trees that ``units`` are in, in the same order on every rank."""
    roots = {root for unit in units if (root := outermost_of(unit)) is not None}
    alone = [unit for unit in units if outermost_of(unit) is None]
    found = [each for root in sorted(roots, key=lambda root: root.unit_id) for each in root.step.units]
    return list(dict.fromkeys([*found, *sorted(alone, key=lambda unit: unit.unit_id)]))


# -- clipping ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@functools.wraps(_torch_clip_grad_norm_)
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients as ``torch.nn.utils.clip_grad_norm_``, by their norm over all ranks where units shard them.

    Every rank must call this, with the same parameters: a list without those that have no gradient here may be empty on
    some ranks. Two calls are local: between backwards inside ``no_sync``, where gradients are each rank's own, and of
    one parameter, passed as a tensor, that lies whole on one rank.

    Args:
        parameters: one or several, of any number of models; all that no unit shards count as the same on every rank.
        max_norm: bound of the norm.
        norm_type: order of the norm; ``float("inf")`` for the largest element.
        error_if_nonfinite: raise a RuntimeError if the norm is inf or NaN.
        foreach: passed on to torch's function; no unit's gradients need it.

    Returns:
        The norm before scaling, a scalar, the same on every rank: a DTensor for parameters of ``fully_shard`` that have
        one mesh and dtype, as torch's function returns, else a plain tensor.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    units = units_holding(given)
    is_whole = isinstance(parameters, torch.Tensor) and bool(units) and _is_on_one_rank(parameters, units[0])
    if not is_whole:
        read_exchanges(units)
    if not units or _suits_torch(given, units):
        # torch warns of an empty generator.
        return _clip_without_grad(given or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    trees = _trees_of(units)
    steps = {unit.step for unit in trees}
    if is_whole or any(step.end.shows_unreduced for step in steps):
        return _clip_without_grad(given, max_norm, norm_type, error_if_nonfinite, foreach)
    for step in steps:
        check_gradients_set(step, "torch.nn.utils.clip_grad_norm_")
    unmanaged = [param for param in given if not is_managed(param)]
    return clip_grads(trees, unmanaged, max_norm, norm_type, among=set(given), error_if_nonfinite=error_if_nonfinite)


def _suits_torch(params: list[torch.Tensor], units: list[Unit]) -> bool:
    """Return whether torch's own function takes the gradients: nothing is sharded, or all are DTensors of one kind."""
    kinds = {(param.device_mesh, param.dtype) if isinstance(param, DTensor) else None for param in params}
    if None not in kinds:
        return len(kinds) == 1
    return kinds == {None} and all(len(_groups_of(unit)) == 0 for unit in units)


def _is_on_one_rank(param: torch.Tensor, unit: Unit) -> bool:
    """Return whether one rank has all elements of a unit's parameter, which the layout shows on every rank."""
    for param_group in unit.param_groups:
        for each in param_group.slots.visible:
            if each.param is param and len(each.indices) == 1:
                index, ranks = each.indices.start, range(param_group.layout.world_size)
                is_plain = not param_group.params[index].adapter.groups
                return is_plain and sum(not param_group.layout.local_shard(index, rank).is_empty for rank in ranks) <= 1
    return False


def _groups_of(unit: Unit) -> list[RankGroup]:
    """Return the groups of several ranks over which a unit's parameters are sharded."""
    tensor_parallel = [
        RankGroup.of(group)
        for param_group in unit.param_groups
        for entry in param_group.params
        for group in entry.adapter.groups
    ]
    shard = [param_group.comm.options.groups.shard for param_group in unit.param_groups]
    return [group for group in (*shard, *tensor_parallel) if group.size > 1]


# -- full tensors ------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_full_tensor)
def _full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the full tensor as ``DTensor.full_tensor``, which ranks of its mesh call together.

    Raises:
        RankMismatchError: (a ValueError) ranks differed in the last backward of a tree on this mesh.
    """
    if not torch.compiler.is_compiling():
        read_exchanges_on(self.device_mesh)
    return _torch_full_tensor(self, *args, **kwargs)


# -- scaling -----------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_unscale_grads_)
def _unscale_grads_(
    self: GradScaler, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
) -> dict[torch.device, torch.Tensor]:
    """Unscale the gradients of an optimizer; return for each device whether any rank has found an inf or NaN."""
    units = _trees_of(units_holding(param for group in optimizer.param_groups for param in group["params"]))
    read_exchanges(units)
    found = _torch_unscale_grads_(self, optimizer, inv_scale, found_inf, *args)
    groups = dict.fromkeys(
        group
        for unit in units
        for group in (*_groups_of(unit), *[options.groups.replicate for options, _ in unit.by_mesh()])
        if group != ALONE
    )
    if not connected(groups):
        return found
    # A rank without gradients has a part in the decision too.
    total = functools.reduce(torch.maximum, [flag.to(found_inf.device) for flag in found.values()], found_inf)
    device = units[0].options.device
    total = total.to(device, copy=True)
    for group in connected(groups):
        total = begin_all_reduce(total, group, largest=True).wait()
    return {each: total.to(each) for each in found or {found_inf.device: found_inf}}


# -- clearing ----------------------------------------------------------------------------------------------------------


@dynamo_disabled
@functools.wraps(_torch_zero_grad)
def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Clear gradients as ``torch.optim.Optimizer.zero_grad``, those too that wait for a later backward to show them."""
    _torch_zero_grad(self, set_to_none)
    params = (param for group in self.param_groups for param in group["params"])
    clear_hidden_gradients(params, set_to_none=set_to_none)


# -- gradients of chosen tensors ---------------------------------------------------------------------------------------


@functools.wraps(_torch_grad)
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients as ``torch.autograd.grad``, also of parameters that units manage; ``.grad`` stays as it is.

    The graph holds the unsharded parameters, so the gradient of a parameter that a unit manages has the unsharded shape
    (that of all the unit's parameters, 1-D, for a flat one), on every rank that of its own loss. Nothing averages it
    over ranks. So does FSDP1 with ``use_orig_params=False``, and FSDP2 with ``reshard_after_forward=False``.

    Raises:
        UnsupportedError: (a NotImplementedError) ``create_graph=True`` for parameters that units manage.
    """
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "is_grads_batched": is_grads_batched}
    is_one = isinstance(inputs, (torch.Tensor, GradientEdge))
    given = [inputs] if is_one else list(inputs)
    in_graph = {} if torch.compiler.is_compiling() or is_grads_batched else _unsharded_params_of(given)
    if not in_graph:
        unused = {"allow_unused": allow_unused, "materialize_grads": materialize_grads, "only_inputs": only_inputs}
        return _torch_grad(outputs, inputs if is_one else given, grad_outputs, **options, **unused)
    if create_graph:
        raise UnsupportedError(
            "torch.autograd.grad was called with create_graph=True for parameters of "
            f"{sorted(unit.name for unit in units_holding(given))}. Second-order gradients through sharded parameters "
            "are not supported; take them with respect to inputs, or leave these modules unwrapped."
        )
    asked = list(dict.fromkeys(each for tensor in given for each in in_graph.get(tensor, [tensor])))
    found = _torch_grad(outputs, asked, grad_outputs, **options, allow_unused=True)
    grad_of = dict(zip(asked, found, strict=True))
    results: list[torch.Tensor | None] = []
    for index, tensor in enumerate(given):
        parts = in_graph.get(tensor, [tensor])
        if all(grad_of[part] is None for part in parts) and not materialize_grads:
            if not allow_unused:
                raise RuntimeError(
                    f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set "
                    "allow_unused=True if this is the desired behavior."
                )
            results.append(None)
            continue
        dense = [torch.zeros_like(part) if (own := grad_of[part]) is None else own for part in parts]
        results.append(
            torch.cat([each.reshape(-1) for each in dense]) if isinstance(tensor, FlatParameter) else dense[0]
        )
    return tuple(results)


@functools.wraps(_torch_backward)
def backward(*args: Any, **kwargs: Any) -> None:
    """Run a backward as ``torch.autograd.backward``; ``inputs`` may be parameters that units manage.

    Only those then get gradients, the same as in any other backward: reduced over ranks, and in ``.grad``. Every rank
    must pass the same ones.
    """
    if (kwargs.get("inputs") is not None or len(args) > 5) and not torch.compiler.is_compiling():
        given = _BACKWARD.bind(*args, **kwargs)
        inputs: Any = given.arguments["inputs"]
        inputs = inputs.values() if isinstance(inputs, dict) else inputs
        listed: list[Any] = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else list(inputs or ())
        in_graph = _unsharded_params_of(listed)
        given.arguments["inputs"] = [each for tensor in listed for each in in_graph.get(tensor, [tensor])] or inputs
        args, kwargs = given.args, given.kwargs
    # An earlier backward may have raised, of another model that has not run since.
    before = {unit.step.backward for unit in units_in_backward()}
    try:
        _torch_backward(*args, **kwargs)
    except (AttributeError, TypeError, RuntimeError) as error:
        units = [unit for unit in units_in_backward() if unit.step.backward not in before]
        if not isinstance(error, RuntimeError):
            _explain_none(error, units)
        else:
            for step in {unit.step for unit in units}:
                for guard in EVENTS.step_raised:
                    guard(step, error)
        raise


def _explain_none(error: Exception, found: list[Unit]) -> None:
    """Add to an error about None, raised in a backward, which units were in it and where their gradients are."""
    # The outermost one is in backward all the time.
    units = sorted({unit.name for unit in [unit for unit in found if unit is not unit.step.root] or found})
    if units and "NoneType" in str(error) and _WHERE_GRADS_ARE not in str(error):
        error.args = (
            f"{phrase(error)}. It was raised in the backward of units {some_of(list(map(repr, units)), 4)}. "
            f"{_WHERE_GRADS_ARE}",
            *error.args[1:],
        )


_WHERE_GRADS_ARE = (
    "A hook or a custom function that met .grad of a sharded parameter found None: it is set at the end of backward, "
    "once gradients are reduced. Until then this rank's gradients are in .grad of the unsharded parameters, which "
    "modules hold while their unit runs: take the parameter from its module there, and expect None before its first "
    "gradient."
)


def _unsharded_params_of(given: list[Any]) -> dict[torch.Tensor, list[nn.Parameter]]:
    """Return for each parameter that a unit manages the leaves of the graph that stand for it."""
    return {
        visible.param: [param_group.output.params[index] for index in visible.indices]
        for unit in units_holding(each for each in given if isinstance(each, torch.Tensor))
        if unit_record(unit).full is None  # else modules compute with the parameters that an optimizer holds
        for param_group in unit.param_groups
        for visible in param_group.slots.visible
    }


# -- barriers ----------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_barrier)
def _barrier(*args: Any, **kwargs: Any) -> Any:
    """Wait for all ranks of a group as ``torch.distributed.barrier``.

    Raises:
        UsageError: (a RuntimeError) another rank waits for this one in a collective of sharded parameters instead.
    """
    given = _BARRIER.bind(*args, **kwargs).arguments
    group = given.get("group") or dist.group.WORLD
    if given.get("async_op"):
        barrier_begun()
    elif group is not None and is_compared(group):
        return wait_in_barrier(lambda async_op: _torch_barrier(**{**given, "async_op": async_op}), group)
    return _torch_barrier(*args, **kwargs)


# -- DDP ---------------------------------------------------------------------------------------------------------------


@functools.wraps(_torch_ddp_init)
def _ddp_init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Refuse parameters that units have sharded, whose shards DDP would overwrite by rank 0's or leave unreduced."""
    given = inspect.signature(_torch_ddp_init).bind(self, module, *args, **kwargs)
    given.apply_defaults()
    unreduced = _check_ddp(module, given.arguments) if isinstance(module, nn.Module) else []
    _torch_ddp_init(self, module, *args, **kwargs)
    for param in unreduced:
        param.register_post_accumulate_grad_hook(_AccumulatedByAutograd())


def _check_ddp(module: nn.Module, given: Mapping[str, Any]) -> list[nn.Parameter]:
    """Raise if DDP with the ``given`` arguments cannot be right; return parameters of units that DDP has to average."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = {param: name for name, param in module.named_parameters() if name not in ignored}
    units, unreduced = units_holding(names), []
    if not units:
        return []
    mesh, finds_unused = given["device_mesh"], given["find_unused_parameters"]
    group = given["process_group"] or (dist.group.WORLD if mesh is None else mesh.get_group(0))
    ranks = set(dist.get_process_group_ranks(group))
    for unit in units:
        groups = unit.options.groups
        own = [set(dist.get_process_group_ranks(each.group)) for each in groups.rank_groups if each.group is not None]
        reduces = groups.num_ranks == dist.get_world_size() or len(ranks) == 1 or ranks <= set().union(*own)
        sharded = [each for each in _groups_of(unit) if each.group is not None]
        mixes = any(len(ranks.intersection(dist.get_process_group_ranks(each.group))) > 1 for each in sharded)
        held = [
            param for param_group in unit.param_groups for param in param_group.slots.visible_params if param in names
        ]
        trained = [param for param in held if param.requires_grad]
        if sharded and ((given["init_sync"] and mixes) or (trained and not reduces)):
            raise UsageError(
                f"DistributedDataParallel over ranks {sorted(ranks)} was given {names[held[0]]!r}, which unit "
                f"{unit.name!r} shards: every rank holds another part of it, and DDP takes these for copies. Leave DDP "
                "out: FSDP averages gradients over all its ranks. To shard within some ranks and replicate over "
                "others, use ShardingStrategy.HYBRID_SHARD or a 2-D mesh; for a part that is only replicated, put DDP "
                "around that part before FSDP is, or use NO_SHARD."
            )
        if sharded or (reduces and finds_unused):
            continue
        if finds_unused and trained:
            raise UsageError(
                f"DistributedDataParallel with find_unused_parameters=True over ranks {sorted(ranks)} cannot find "
                f"{names[held[0]]!r} of unit {unit.name!r} in the graph, and would not average its gradient. Pass "
                "find_unused_parameters=False, or give the unit these ranks as its process_group and leave DDP out."
            )
        unreduced += trained
    return unreduced


class _AccumulatedByAutograd:
    """Accumulates a gradient that a unit has set once more, by autograd, as DDP's hooks run there alone."""

    def __init__(self) -> None:
        self._runs = False

    def __call__(self, param: torch.Tensor) -> None:
        if not self._runs:
            grad, param.grad = param.grad, None
            self._runs = True
            try:
                with torch.enable_grad():
                    param.view_as(param).backward(grad)
            finally:
                self._runs = False


# -- torch.optim.Muon --------------------------------------------------------------------------------------------------


@functools.wraps(_torch_muon_init)
def _muon_init(self: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse local shards before torch does, whose error is about a number of dimensions."""
    given = list(params)
    for each in given:
        listed = each.get("params", ()) if isinstance(each, Mapping) else each
        entries = [listed] if isinstance(listed, torch.Tensor) else list(listed)
        for entry in entries:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, torch.Tensor):
                check_whole(type(self).__name__, param)
        if isinstance(each, dict) and not isinstance(listed, torch.Tensor):
            each["params"] = entries  # it may have been an iterator
    _torch_muon_init(self, given, *args, **kwargs)


# -- tables ------------------------------------------------------------------------------------------------------------

# Torch's functions, with what replaces them in every module that has imported them.
_FUNCTIONS: dict[Any, Any] = {
    _torch_clip_grad_norm_: clip_grad_norm_,
    _torch_grad: grad,
    _torch_backward: backward,
    _torch_barrier: _barrier,
}
# Attributes, with what replaces them.
_ATTRIBUTES: list[tuple[Any, str, Any]] = [
    (_CLIP_CELL, "cell_contents", clip_grad_norm_),
    (GradScaler, _UNSCALE, _unscale_grads_),
    (torch.optim.Optimizer, "zero_grad", zero_grad),
    (DTensor, "full_tensor", _full_tensor),
    (DistributedDataParallel, "__init__", _ddp_init),
]
if _Muon is not None:
    _ATTRIBUTES.append((_Muon, "__init__", _muon_init))


# -- torch's FSDPs -----------------------------------------------------------------------------------------------------


def _guard_torch_fsdps() -> None:
    """Have torch's FSDPs refuse what our units have sharded, if they are imported; a later import is noticed later."""
    fsdp = "torch.distributed.fsdp"
    wrapper = getattr(sys.modules.get(f"{fsdp}.fully_sharded_data_parallel"), "FullyShardedDataParallel", None)
    found = [
        # After install() the name in torch's module is ours, and torch's own class raises for another reason.
        (wrapper if str(getattr(wrapper, "__module__", "")).startswith(fsdp) else None, _refusing_outer_unit),
        (getattr(sys.modules.get(f"{fsdp}._fully_shard._fsdp_param_group"), "FSDPParamGroup", None), _refusing_params),
    ]
    for kind, refusing in found:
        # After install() the second is a subclass that joins ours to it.
        kind = kind.__bases__[0] if kind is not None and "joined" in vars(kind) else kind
        if kind is not None and all(owner is not kind for owner, *_ in _State.torchs):
            guarded = {"__init__": refusing(kind.__init__)}
            if refusing is _refusing_outer_unit:
                guarded |= {
                    name: _refusing_ours(kind, name, method.__func__)
                    for name, method in vars(kind).items()
                    if isinstance(method, staticmethod) and not name.startswith("_") and name != "fsdp_modules"
                }
            for name, method in guarded.items():
                _State.torchs.append((kind, name, vars(kind)[name]))
                setattr(kind, name, method)


def _refusing_ours(kind: Any, name: str, method: Callable[..., Any]) -> staticmethod[..., Any]:
    """Return a static method of torch's wrapper that refuses a model with our wrappers and none of torch's."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for model in (*args, *kwargs.values()):
            if isinstance(model, nn.Module):
                ours = [unit for unit in units_of(model) if unit.options.api.has_wrapper]
                if ours and not any(isinstance(module, kind) for module in model.modules()):
                    raise UsageError(
                        f"torch's FullyShardedDataParallel.{name} was called on a {type(model).__name__} that "
                        f"fsdp_flat has sharded (unit {ours[0].name!r}), of which it knows nothing. Call "
                        f"fsdp_flat.FullyShardedDataParallel.{name}: import the class from fsdp_flat there too, or "
                        "call fsdp_flat.install() first, which replaces torch's names in all imported code."
                    )
        return method(*args, **kwargs)

    return staticmethod(call)


def _refusing_outer_unit(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of torch's wrapper that refuses a module inside one of our units."""

    @functools.wraps(init)
    def construct(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        held = outer_holder_in(module) if isinstance(module, nn.Module) else None
        if held is not None:
            raise UsageError(
                f"torch's FullyShardedDataParallel was called on a {type(module).__name__} inside unit {held[1]!r}, "
                f"whose parameters fsdp_flat has sharded. {_ONE_OF_TWO}"
            )
        init(self, module, *args, **kwargs)

    return construct


def _refusing_params(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of FSDP2's parameter group that refuses parameters of our units."""

    @functools.wraps(init)
    def construct(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        for param in params:
            if is_managed(param):
                owner = owner_of(param)
                what = "a flat parameter" if owner is None else owner.describe()
                raise UsageError(
                    f"torch's fully_shard was called on {what}, which fsdp_flat has sharded. {_ONE_OF_TWO}"
                )
        init(self, params, *args, **kwargs)

    return construct


_ONE_OF_TWO = (
    "One of the two libraries can shard a parameter. Call fsdp_flat.fully_shard or "
    "fsdp_flat.FullyShardedDataParallel for all of the model (fsdp_flat.install(fully_shard=True) replaces torch's "
    "names); leave the parameters out (ignored_params of torch's fully_shard); or take the units apart first, by "
    "fsdp_flat.unwrap."
)
