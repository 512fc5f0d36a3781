"""Compares and averages tensors that no unit manages: ignored and later added trainable parameters, and buffers.

Each rank has its own copy of these. Ranks compare the values and warn of those that differ, at the end of the first
backward that reduces gradients, at saves, and on request. They average gradients and buffers only on request. Gradients
are not compared, because they may differ on purpose: a script may average ignored gradients by hand, or each rank may
hold different experts.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    ShardingGroups,
    agree,
    begin_all_reduce,
    connected,
    digest_of,
    doing,
    exchange_if_different,
    fingerprint,
)
from fsdp_flat.errors import OptionError, UsageError, counted, some_of
from fsdp_flat.flat import PLAIN, check_module, is_managed, modules_of
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.runtime.group_settings import group_settings
from fsdp_flat.runtime.options import UnitOptions
from fsdp_flat.runtime.torch_runtime import is_replicated
from fsdp_flat.runtime.unit import Unit, unit_of, units_of
from fsdp_flat.user_warnings import warn_user

_IGNORED, _ADDED, _OUTSIDE, _BUFFER = "ignored", "added after wrapping", "outside of every unit", "buffer"
# Models of which a warning has named the parameters outside of units.
_TOLD_OF: WeakSet[nn.Module] = WeakSet()
_BUFFERS = ErrorTexts("averaging buffers", "Ranks have different buffers.", "Register the same buffers on every rank.")


def unmanaged_params(root: nn.Module, units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Return by name the parameters below ``root`` that none of its units manages."""
    handles = [handle for unit in units for handle in unit.handles]
    managed = {param for handle in handles for param in (*handle.shown.visible_params, *handle.buffer.params)}
    return {
        clean_fqn(name): param
        for name, param in root.named_parameters()
        if param not in managed and not is_managed(param)
    }


def unreduced_params(root: nn.Module | None, units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Return by name the trainable parameters below ``root`` whose gradients nothing reduces; none without a root."""
    if root is None:
        return {}
    # DistributedDataParallel, replicate and DTensors reduce their own gradients.
    replicated = [
        module for module in modules_of(root) if isinstance(module, DistributedDataParallel) or is_replicated(module)
    ]
    reduced = {param for module in replicated for param in module.parameters()}
    return {
        name: param
        for name, param in unmanaged_params(root, units).items()
        if param.requires_grad and param not in reduced and not isinstance(param, DTensor)
    }


def _persistent_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name the persistent buffers below ``root``, each once, without DTensors."""
    found: dict[torch.Tensor, str] = {}
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            persists = buffer is not None and name not in module._non_persistent_buffers_set
            if persists and not isinstance(buffer, DTensor):
                found.setdefault(buffer, clean_fqn(join_fqn(path, name)))
    return {name: buffer for buffer, name in found.items()}


def note_outer_model(module: nn.Module, walked: Iterable[nn.Module] | None, path: str) -> None:
    """Note the model around a unit: a walk over modules has come to the unit's module by ``path``.

    A module does not know what holds it. ``outer.parameters()``, with which callers make optimizers, is such a walk.

    Args:
        module: a wrapper, or a module of ``fully_shard``.
        walked: the modules that the walk has passed, its first one among them.
        path: the path from the first one to ``module``; the longest one counts.
    """
    unit = unit_of(module)
    if unit is None or len(path) <= len(unit.path_from_outer):
        return
    for each in walked or ():
        inner: nn.Module | None = each
        for name in path.split("."):
            inner = None if inner is None else inner._modules.get(name)
        if inner is module:
            unit.outer, unit.path_from_outer = weakref.ref(each), path
            return


def _is_unsynchronized(param: nn.Parameter) -> bool:
    """Return whether a gradient is this rank's own; False too if a caller's hook may have reduced it."""
    return param.grad is not None and not (param._backward_hooks or param._post_accumulate_grad_hooks)


def warn_of_unsynchronized(units: Sequence[Unit]) -> None:
    """Warn of parameters whose gradients this tree's backward leaves to each rank, or averages over some ranks only."""
    options = units[0].options
    outer = None if units[0].outer is None else units[0].outer()
    if outer is not None and outer not in _TOLD_OF and options.groups.num_ranks > 1:
        _TOLD_OF.add(outer)
        around = units_of(outer)
        ignored = {param for unit in around for param in unit.ignored.params}
        left = unreduced_params(outer, around)
        names = [name for name, param in left.items() if _is_unsynchronized(param) and param not in ignored]
        if names:
            kind = type(outer).__name__
            call = "FullyShardedDataParallel" if options.front.has_wrapper else "fully_shard"
            warn_user(
                f"Gradients of {counted(len(names), 'parameters')} of {kind} are each rank's own, since {kind} itself "
                f"is no unit, only modules inside it are: {some_of(list(map(repr, names)), 8)}. Ranks drift apart "
                f"there, and a checkpoint holds rank 0's. Call {call} on the {kind} too, after its inner modules. "
                "Ignore this if something else averages these gradients, or if they are each rank's own on purpose."
            )
    mesh, num_ranks = options.groups.mesh, options.groups.num_ranks
    if not options.front.has_wrapper or mesh is None or mesh.size() <= num_ranks:
        return
    handles = [handle for unit in units for handle in unit.handles]
    # Ranks of tensor parallelism on other dims of the mesh have gradients of the same loss.
    if all(entry.adapter is PLAIN for handle in handles for entry in handle.params):
        trained = [handle for handle in handles if any(map(_is_unsynchronized, handle.shown.visible_params))]
        names = [handle.shown.describe(index) for handle in trained for index in range(len(handle.params))]
        if names:
            warn_user(
                f"Gradients of {len(names)} parameters are averaged over {num_ranks} of the {mesh.size()} ranks of "
                f"device_mesh {tuple(mesh.shape)}, and the others train on their own: {some_of(names, 8)}. "
                "A strategy that is not hybrid uses dim 0 of a mesh alone. Pass a 1-D mesh to shard over all ranks, "
                "or a 2-D one to HYBRID_SHARD (dim 0 replicates, dim 1 shards). Ignore this if something else averages "
                "these gradients over the other dims."
            )


def averaged_lines(params: Mapping[str, nn.Parameter], *, averages: bool) -> list[str]:
    """Describe what :func:`average_gradients` is to average, one fact a line, the same on all ranks."""
    described = [f"parameter {name!r} {tuple(param.shape)} of {param.dtype}" for name, param in params.items()]
    return [f"average_ignored_gradients() {'called' if averages else 'not called'}", *(described if averages else ())]


def average_gradients(
    params: Mapping[str, nn.Parameter], unit: Unit, any_rank: Callable[[Sequence[bool]], list[bool]]
) -> None:
    """Replace each gradient by its mean over the ranks of the outermost ``unit``; one without counts as zeros.

    A gradient that no rank has stays None; sparse ones become dense. Averaging an averaged gradient to which a backward
    has added gives the mean of the sum, so this may follow each backward of an accumulation. Every rank of the unit's
    groups must call this, with the same parameters. ``any_rank`` returns for each flag whether it is true on any of
    these ranks.
    """
    groups, policy = unit.options.groups, unit.policy
    if policy.divide_factor is not None or policy.hook is not None:
        raise UsageError(
            "average_ignored_gradients() gives means over ranks, but a communication hook or "
            "set_gradient_divide_factor has the gradients of units combined in another way. Reduce the others "
            "by hand too, and call model.average_ignored_gradients(False)."
        )
    if not params or groups.num_ranks == 1:
        return
    used = list(compress(params.values(), any_rank([param.grad is not None for param in params.values()])))
    with torch.no_grad():
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in used]
        for param, mean in zip(used, _means(grads, groups, "gradients"), strict=True):
            param.grad = mean.to(param.dtype, copy=True)


def _print(tensor: torch.Tensor) -> int:
    if tensor.is_meta or type(tensor.data) is not torch.Tensor or tensor.is_quantized:
        return 0
    return fingerprint(tensor.detach().to_dense())


def _differing(prints: Mapping[str, int], rank_groups: Iterable[RankGroup], device: torch.device) -> set[str]:
    """Return names whose fingerprints differ between ranks that have them. Every rank of the groups must call this."""
    found = {name: [prints[name]] for name in sorted(prints)}
    for rank_group in rank_groups:
        # Fingerprints found over one group are exchanged over the next.
        for payload in exchange_if_different(json.dumps(found, sort_keys=True).encode(), rank_group, device) or ():
            for name, values in json.loads(payload).items():
                # Two values are enough to show a difference.
                found[name] = sorted({*found.get(name, ()), *values})[:2]
    return {name for name, values in found.items() if len(values) > 1}


def _warn(kinds: Mapping[str, str]) -> None:
    params = [f"{name!r} ({kind})" for name, kind in kinds.items() if kind != _BUFFER]
    buffers = [repr(name) for name, kind in kinds.items() if kind == _BUFFER]
    if params:
        warn_user(
            f"Trainable parameters that no unit manages differ between ranks, and a state dict holds rank 0's: "
            f"{', '.join(params)}. Start them from the same values and call model.average_ignored_gradients() to have "
            "their gradients averaged over ranks, or model.average_ignored_gradients(False) if they are each rank's "
            "own on purpose. Modules that are added before wrapping are sharded like the others. For parameters "
            "outside of every unit call fully_shard, or FullyShardedDataParallel, on the whole model too."
        )
    if buffers:
        warn_user(
            f"Buffers differ between ranks, and a state dict holds rank 0's: {', '.join(buffers)}. "
            "Statistics of batches are each rank's own: convert the model by "
            "nn.SyncBatchNorm.convert_sync_batchnorm before wrapping, or call model.average_buffers() before a state "
            "dict is taken or the model is evaluated."
        )


# For each tensor that was compared, whether it has been equal on the ranks that compared it, each time.
_WERE_EQUAL = WeakTensorKeyDictionary()


class RankZeroTensors:
    """Compares the tensors of which each rank has its own, and a state dict of ``module`` holds rank 0's.

    They are trainable parameters that no unit manages, and persistent buffers. Parameters that are each rank's own on
    purpose, as ``average_ignored_gradients(False)`` says, are compared only with ``every``.

    Attributes:
        prints: a hash of each tensor on this rank, by name.
    """

    def __init__(self, module: nn.Module, *, every: bool = False) -> None:
        units = units_of(module)
        self._averages = units[0].averages_ignored if units else None
        ignored = {param for unit in units for param in unit.ignored.params}
        ignored.update(param for unit in units for each in unit.ignored.modules for param in each.parameters())
        params = unreduced_params(module, units) if every or (units and self._averages is not False) else {}
        other = _OUTSIDE if unit_of(module) is None else _ADDED
        self._kinds = {name: _IGNORED if param in ignored else other for name, param in params.items()}
        self._tensors = {**params, **_persistent_buffers(module)}
        self.prints = {name: _print(tensor) for name, tensor in self._tensors.items()}
        self._named: list[str] = []

    def compare(self, rank_groups: Sequence[RankGroup], device: torch.device) -> list[str]:
        """Return the names of those that differ, the same on all ranks. Every rank of the groups must call this."""
        differing = _differing(self.prints, rank_groups, device)
        for name, tensor in self._tensors.items() if all(each.rank == 0 for each in rank_groups) else ():
            before = _WERE_EQUAL.get(tensor)
            # Ignored parameters that differ when they are first compared do so on purpose, as experts do.
            expected = before is None and self._kinds.get(name) == _IGNORED and not self._averages
            if name in differing and before is not False and not expected:
                self._named.append(name)
            _WERE_EQUAL[tensor] = before is not False and name not in differing
        return sorted(differing)

    def warn(self) -> None:
        """Warn on the first rank, once for each tensor. A warning may raise: no rank may wait for this one after it."""
        _warn({name: self._kinds.get(name, _BUFFER) for name in sorted(self._named)})


def check_replicas(model: nn.Module, optim: torch.optim.Optimizer | None = None) -> list[str]:
    """Compare what each rank has a copy of: buffers, trainable parameters that no unit manages, optimizer settings.

    Such parameters are ignored ones, and those of modules added after wrapping. Values are compared bit by bit over the
    groups of the outermost unit. Every rank of the group must call this. It reads every such tensor once::

        for step, batch in enumerate(batches):
            train_step(model, optimizer, batch)
            if step % 1000 == 0:
                assert fsdp_flat.check_replicas(model, optimizer) == []

    Args:
        model: a wrapper, or any module that holds wrappers or modules of ``fully_shard``.
        optim: its optimizer, of which the settings of the parameter groups are compared too: a learning rate that a
            scheduler has computed from one rank's loss differs.

    Returns:
        The names of the tensors that differ between ranks, and settings as ``"'lr' of 'layer.weight'"``, sorted, the
        same on all ranks.

    Raises:
        OptionError: nothing at or below ``model`` is sharded.
        OptionTypeError: ``optim`` is no optimizer.
    """
    check_module(model)
    units = units_of(model)
    if not units:
        raise OptionError(f"check_replicas takes a sharded model; a {type(model).__name__} without a unit was given.")
    with doing("check_replicas"):
        for unit in units:
            unit.context.recover()
        return _all_differing(model, optim, units[0].options)


def _all_differing(model: nn.Module, optim: torch.optim.Optimizer | None, options: UnitOptions) -> list[str]:
    """Return the names of tensors and settings that differ between ranks. Every rank must call this."""
    found = RankZeroTensors(model, every=True).compare(options.groups.rank_groups, options.device)
    settings = {} if optim is None else group_settings(model, optim)
    prints = {
        f"{key!r} of {fqn!r}": digest_of(text.encode()) for fqn, row in settings.items() for key, text in row.items()
    }
    return sorted([*found, *_differing(prints, options.groups.rank_groups, options.device)])


def _means(tensors: Sequence[torch.Tensor], groups: ShardingGroups, what: str) -> list[torch.Tensor]:
    """Return the mean over ranks of each tensor, dense; of an integer one the maximum."""
    # One all-reduce for each dtype, device and group.
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    results = list(tensors)
    for (dtype, _), indices in by_kind.items():
        averages = dtype.is_floating_point or dtype.is_complex
        # Sum in fp32 at least: sums in short dtypes lose digits or overflow.
        wide = torch.promote_types(dtype, torch.float32) if averages else dtype
        dense = [tensors[index].to_dense() for index in indices]
        flat = torch.cat([each.reshape(-1).to(wide) for each in dense])
        collective = f"the average of {what} that no unit manages"
        for rank_group in connected(groups.rank_groups):
            flat = begin_all_reduce(flat, rank_group, largest=not averages, collective=collective).wait()
        if averages:
            flat /= groups.num_ranks
        for index, each, mean in zip(indices, dense, flat.split([each.numel() for each in dense]), strict=True):
            results[index] = mean.view(each.shape)
    return results


def average_buffers(root: nn.Module, groups: ShardingGroups) -> None:
    """Replace each persistent buffer by its mean over ranks; an integer one by the maximum.

    Boolean buffers are unchanged. Every rank of the groups must call this, with the same buffers.
    """
    with torch.no_grad():
        buffers = {name: buffer for name, buffer in _persistent_buffers(root).items() if buffer.dtype is not torch.bool}
        lines = [f"buffer {name!r} {tuple(buffer.shape)} of {buffer.dtype}" for name, buffer in buffers.items()]
        device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))
        agree(lines, None, groups.rank_groups, device, _BUFFERS)
        for buffer, mean in zip(buffers.values(), _means([*buffers.values()], groups, "buffers"), strict=True):
            buffer.copy_(mean.to_sparse(buffer.sparse_dim()) if buffer.is_sparse else mean)
