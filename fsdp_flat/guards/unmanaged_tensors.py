"""Finds tensors that no unit manages and that drift apart on the ranks: ignored and added parameters, and buffers.

Each rank has its own copy of these. Ranks compare the values and warn of those that differ, at the end of the first
backward that reduces gradients, at saves, and on request. Gradients are not compared, because they may differ on
purpose: a script may average ignored gradients by hand, or each rank may hold different experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_flat.comm import RankGroup, all_rank_groups, digest_of, doing, exchange_if_different, fingerprint
from fsdp_flat.core import (
    PLAIN,
    Step,
    Unit,
    check_module,
    unit_of,
    units_of,
    unreduced_params,
)
from fsdp_flat.errors import OptionError, counted, some_of
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.guards.replaced_modules import replaced_params
from fsdp_flat.runtime import group_settings, persistent_buffers, unit_record
from fsdp_flat.user_warnings import warn_user

_IGNORED, _ADDED, _OUTSIDE, _BUFFER = "ignored", "added after wrapping", "outside of every unit", "buffer"
# Models of which a warning has named the parameters outside of units.
_TOLD_OF: WeakSet[nn.Module] = WeakSet()


class UnmanagedTensors(OnceATree):
    """Warns, once the first reduced gradients exist, of what differs between ranks or nothing reduces."""

    def after_reduce(self, step: Step) -> None:
        """Compare the tensors of ranks, and warn. Every rank of the tree must call this."""
        if not self.is_first(step):
            return
        options, root_module = step.root.options, step.root_module()
        if root_module is not None:
            groups = dict.fromkeys(
                param_group.comm.options.groups for unit in step.units for param_group in unit.param_groups
            )
            tensors = ReplicatedTensors(root_module)
            tensors.compare(all_rank_groups(groups or [options.groups]))
            tensors.warn()
            if step.root.averages_ignored is None and options.groups.num_ranks > 1:
                _warn_of_added(tensors.added, root_module, step.units)
        warn_of_unsynchronized(step.units)


def _warn_of_added(added: Mapping[str, nn.Parameter], root_module: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of parameters added after wrapping that have this rank's gradient, but for those already named elsewhere."""
    names = [name for name, param in added.items() if _is_unsynchronized(param)]
    replaced = replaced_params(root_module, units) if names else {}
    names = [name for name in names if name not in replaced]
    if names:
        warn_user(
            f"Nothing averages the gradients of {counted(len(names), 'parameters')} added after wrapping: "
            f"{some_of(list(map(repr, names)), 8)}. Each rank trains its own, and a state dict holds rank 0's. Add "
            "modules (adapters) before wrapping; or call model.average_ignored_gradients(), or "
            "model.average_ignored_gradients(False) if this is done elsewhere."
        )


def _is_unsynchronized(param: nn.Parameter) -> bool:
    """Return whether a gradient is this rank's own; False too if a caller's hook may have reduced it."""
    return param.grad is not None and not (param._backward_hooks or param._post_accumulate_grad_hooks)


def warn_of_unsynchronized(units: Sequence[Unit]) -> None:
    """Warn of parameters whose gradients this tree's backward leaves to each rank, or averages over some ranks only."""
    options = units[0].options
    found = unit_record(units[0]).outer
    outer = None if found is None else found()
    if outer is not None and outer not in _TOLD_OF and options.groups.num_ranks > 1:
        _TOLD_OF.add(outer)
        around = units_of(outer)
        ignored = {param for unit in around for param in unit.ignored.params}
        left = unreduced_params(outer, around)
        names = [name for name, param in left.items() if _is_unsynchronized(param) and param not in ignored]
        if names:
            kind = type(outer).__name__
            call = "FullyShardedDataParallel" if options.api.has_wrapper else "fully_shard"
            warn_user(
                f"Gradients of {counted(len(names), 'parameters')} of {kind} are each rank's own, since {kind} itself "
                f"is no unit, only modules inside it are: {some_of(list(map(repr, names)), 8)}. Ranks drift apart "
                f"there, and a checkpoint holds rank 0's. Call {call} on the {kind} too, after its inner modules. "
                "Ignore this if something else averages these gradients, or if they are each rank's own on purpose."
            )
    mesh, num_ranks = options.groups.mesh, options.groups.num_ranks
    if not options.api.has_wrapper or mesh is None or mesh.size() <= num_ranks:
        return
    param_groups = [param_group for unit in units for param_group in unit.param_groups]
    # Ranks of tensor parallelism on other dims of the mesh have gradients of the same loss.
    if all(entry.adapter is PLAIN for param_group in param_groups for entry in param_group.params):
        trained = [
            param_group
            for param_group in param_groups
            if any(map(_is_unsynchronized, param_group.slots.visible_params))
        ]
        names = [
            param_group.slots.describe(index) for param_group in trained for index in range(len(param_group.params))
        ]
        if names:
            warn_user(
                f"Gradients of {len(names)} parameters are averaged over {num_ranks} of the {mesh.size()} ranks of "
                f"device_mesh {tuple(mesh.shape)}, and the others train on their own: {some_of(names, 8)}. "
                "A strategy that is not hybrid uses dim 0 of a mesh alone. Pass a 1-D mesh to shard over all ranks, "
                "or a 2-D one to HYBRID_SHARD (dim 0 replicates, dim 1 shards). Ignore this if something else averages "
                "these gradients over the other dims."
            )


def _fingerprint(tensor: torch.Tensor) -> int:
    if tensor.is_meta or type(tensor.data) is not torch.Tensor or tensor.is_quantized:
        return 0
    return fingerprint(tensor.detach().to_dense())


def _differing(fingerprints: Mapping[str, int], rank_groups: Iterable[RankGroup]) -> set[str]:
    """Return names whose fingerprints differ between ranks that have them. Every rank of the groups must call this."""
    found = {name: [fingerprints[name]] for name in sorted(fingerprints)}
    for rank_group in rank_groups:
        # Fingerprints found over one group are exchanged over the next.
        for payload in exchange_if_different(json.dumps(found, sort_keys=True).encode(), rank_group) or ():
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


class ReplicatedTensors:
    """Compares the tensors of which each rank has its own, and a state dict of ``module`` holds rank 0's.

    They are trainable parameters that no unit manages, and persistent buffers. Parameters that are each rank's own on
    purpose, as ``average_ignored_gradients(False)`` says, are compared only with ``every``.

    Attributes:
        fingerprints: a hash of each tensor on this rank, by name.
    """

    def __init__(self, module: nn.Module, *, every: bool = False) -> None:
        units = units_of(module)
        self._averages = units[0].averages_ignored if units else None
        params = unreduced_params(module, units) if every or (units and self._averages is not False) else {}
        self._kinds: dict[str, str] = {}
        if params:
            ignored = {param for unit in units for param in unit.ignored.params}
            ignored.update(param for unit in units for each in unit.ignored.modules for param in each.parameters())
            other = _OUTSIDE if unit_of(module) is None else _ADDED
            self._kinds = {name: _IGNORED if param in ignored else other for name, param in params.items()}
        self._tensors = {**params, **persistent_buffers(module)}
        self.fingerprints = {name: _fingerprint(tensor) for name, tensor in self._tensors.items()}
        self._named: list[str] = []

    @property
    def added(self) -> dict[str, Any]:
        """The trainable parameters of modules added after wrapping that :meth:`warn` does not name."""
        return {
            name: self._tensors[name]
            for name, kind in self._kinds.items()
            if kind == _ADDED and _WERE_EQUAL.get(self._tensors[name], True)
        }

    def compare(self, rank_groups: Sequence[RankGroup], *, are_equal: bool = False) -> list[str]:
        """Return the names of those that differ, the same on all ranks. Every rank of the groups must call this.

        Nothing is exchanged if :attr:`fingerprints` ``are_equal``, as ranks that have compared them know.
        """
        differing = set() if are_equal else _differing(self.fingerprints, rank_groups)
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
        if self._named:
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
            unit.step.recover()
        rank_groups = units[0].options.groups.rank_groups
        found = ReplicatedTensors(model, every=True).compare(rank_groups)
        settings = {} if optim is None else group_settings(model, optim)
        digests = {
            f"{key!r} of {fqn!r}": digest_of(text.encode())
            for fqn, of_param in settings.items()
            for key, text in of_param.items()
        }
        return sorted([*found, *_differing(digests, rank_groups)])
