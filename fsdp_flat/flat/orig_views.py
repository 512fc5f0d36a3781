"""Implements the views of ``use_orig_params=True``: outside of compute the user's Parameters are local shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.guards import ShardedParameter, set_sharded_class, unguarded
from fsdp_flat.flat.storage import UnreducedLocalGrad, set_grad
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter
from fsdp_flat.flat.views import Views, accumulate_grad, run_grad_hooks
from fsdp_flat.flat.walk import ManagedParam
from fsdp_flat.layout import FlatLayout

__all__ = ["OrigViews"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _unguarded(method: _Method) -> _Method:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unguarded():
            return method(*args, **kwargs)

    return cast(_Method, run)


class OrigViews(Views):
    """Implements :class:`Views` for ``use_orig_params=True``.

    Outside of compute ``module.weight`` is always the same Parameter object. Its data is a 1-D local shard, possibly
    empty, or the full parameter if nothing is sharded or inside ``summon_full_params``.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        unsharded_params: Sequence[nn.Parameter],
        layout: FlatLayout,
        rank: int,
        flat_param: nn.Parameter,
        module: nn.Module,
        unit_name: str,
    ) -> None:
        super().__init__(params, unsharded_params, layout, rank, flat_param, module, unit_name)
        self.sharded = tuple(entry.param for entry in params)
        self.use_unsharded_params(unsharded_params)
        self._pointers: tuple[int, ...] = ()
        self._saved_grads: list[torch.Tensor | None] | None = None
        self._is_unsharded = layout.world_size == 1
        self.bind_shard()
        self.guard()

    def use_unsharded_params(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        super().use_unsharded_params(unsharded_params)
        self._places = [
            (index, (site.module._parameters, site.name))
            for index, entry in enumerate(self.params)
            for site in entry.sites
        ]
        self._bindings = [
            (site.module._parameters, site.name, unsharded_param, entry.param)
            for entry, unsharded_param in zip(self.params, self.unsharded_params, strict=True)
            for site in entry.sites
        ]

    def use_unsharded_views(self) -> None:
        for hooks, key, _ in self._guard_hooks:
            hooks.pop(key, None)
        for parameters, name, unsharded_param, _ in self._bindings:
            parameters[name] = unsharded_param

    def use_sharded_views(self) -> None:
        for hooks, key, guard in self._guard_hooks:
            hooks[key] = guard
        for parameters, name, _, sharded in self._bindings:
            parameters[name] = sharded

    @_unguarded
    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._saved_grads = [sharded.grad for sharded in self.sharded]
        for sharded, tensor in zip(self.sharded, tensors, strict=True):
            sharded.grad = None
            sharded.data = tensor
            set_sharded_class(sharded, nn.Parameter)
        self.use_sharded_views()
        self.unguard()
        self._show_dtensors()

    def _show_dtensors(self) -> None:
        """Register a DTensor Parameter where the user's plain one replaces a DTensor, which it cannot become."""
        for entry, sharded in zip(self.params, self.sharded, strict=True):
            if entry.adapter is not PLAIN:
                shown = nn.Parameter(entry.adapter.from_local(sharded.data), requires_grad=sharded.requires_grad)
                for site in entry.sites:
                    site.module._parameters[site.name] = shown

    @_unguarded
    def unregister_full_params(self) -> None:
        if self._saved_grads is None:
            return
        stash, self._saved_grads = self._saved_grads, None
        for sharded in self.sharded:
            sharded.grad = None
        self.use_sharded_views()
        self.bind_shard()
        for sharded, grad in zip(self.sharded, stash, strict=True):
            set_grad(sharded, grad)

    def _grads(self) -> list[torch.Tensor | None]:
        return [sharded.grad for sharded in self.sharded] if self._saved_grads is None else self._saved_grads

    @_unguarded
    def shard_grad(self) -> torch.Tensor:
        whole = torch.zeros_like(self.flat_param.data)
        for grad, local_shard in zip(self._grads(), self.local_shards, strict=True):
            if grad is not None:
                whole[local_shard.in_shard.to_slice()].copy_(grad.reshape(-1))
        return whole

    @_unguarded
    def has_grads(self) -> list[bool]:
        return [grad is not None for grad in self._grads()]

    @_unguarded
    def register_full_grads(self, whole: torch.Tensor, there: Sequence[bool]) -> None:
        for index, (is_there, param_info) in enumerate(zip(there, self.layout.param_infos, strict=True)):
            if is_there:
                self.set_shown_grad(index, whole[param_info.interval.to_slice()].view(param_info.shape))

    @_unguarded
    def restore_sharded_grads(self, own: torch.Tensor) -> None:
        for sharded, grad, local_shard in zip(self.sharded, self._grads(), self.local_shards, strict=True):
            sharded.grad = None
            if grad is not None:
                grad.reshape(-1).copy_(own[local_shard.in_shard.to_slice()])

    def remove(self) -> None:
        # Not absent, because optimizers number parameters in registration order, and not None, which modules that
        # rebuild their list of weights after a conversion (nn.RNN) would keep.
        for parameters, name, _, _ in self._bindings:
            parameters[name] = nn.Parameter(self.flat_param.new_empty(0), requires_grad=False)

    @_unguarded
    def unflatten(self, whole: torch.Tensor) -> None:
        self.use_sharded_views()
        self.unguard()
        for sharded, param_info in zip(self.sharded, self.layout.param_infos, strict=True):
            sharded.grad = None
            sharded.data = whole[param_info.interval.to_slice()].view(param_info.shape).clone()
            sharded.__dict__.pop("_fsdp_flattened", None)
            set_sharded_class(sharded, nn.Parameter)
        self._show_dtensors()

    @_unguarded
    def bind_shard(self, *, rebuilt: bool = False) -> None:
        shard = self.flat_param.data
        for sharded, local_shard, param_info in zip(
            self.sharded, self.local_shards, self.layout.param_infos, strict=True
        ):
            local = shard[local_shard.in_shard.to_slice()]
            data = local.view(param_info.shape) if self._is_unsharded else local
            grad, sharded.grad = sharded.grad, None
            sharded.data = data
            # Only Module._apply changes the dtype or device of a parameter with a gradient; torch converts both.
            if grad is not None and grad.shape == data.shape:
                set_grad(sharded, grad.to(dtype=data.dtype, device=data.device) if rebuilt else grad)
            set_sharded_class(sharded, nn.Parameter if self._is_unsharded else ShardedParameter)
        self._pointers = tuple(sharded.data_ptr() for sharded in self.sharded)

    def visible_params(self) -> list[nn.Parameter]:
        return list(self.sharded)

    @_unguarded
    def grads(self) -> list[tuple[TensorAdapter, torch.Tensor | None]]:
        return [(entry.adapter, sharded.grad) for entry, sharded in zip(self.params, self.sharded, strict=True)]

    def kept(self) -> dict[nn.Parameter, nn.Parameter]:
        return dict(zip(self.unsharded_params, self.sharded, strict=True))

    @_unguarded
    def requires_grad(self) -> list[bool]:
        return [sharded.requires_grad for sharded in self.sharded]

    @_unguarded
    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        for sharded, now, was in zip(self.sharded, shown, before, strict=True):
            if now != was:
                sharded.requires_grad_(now)

    def set_sharded_grad(self, shard_grad: torch.Tensor, used: Sequence[int]) -> None:
        hooked = []
        with unguarded():
            for sharded, local_shard, param_info, was_used in zip(
                self.sharded, self.local_shards, self.layout.param_infos, used, strict=True
            ):
                # A parameter with no elements on this rank gets no gradient, so norms and optimizers skip it.
                if not was_used or (local_shard.is_empty and param_info.numel > 0):
                    continue
                local = shard_grad[local_shard.in_shard.to_slice()]
                if self._is_unsharded:
                    local = local.view(param_info.shape)
                if accumulate_grad(sharded, local):
                    hooked.append(sharded)
        for sharded in hooked:
            run_grad_hooks(sharded)

    @_unguarded
    def expose_unreduced_grads(self, own: torch.Tensor, grads_ready: bytes) -> list[UnreducedLocalGrad]:
        there = [index for index, has_landed in enumerate(grads_ready) if has_landed]
        # If this rank has no elements of any of them, empty gradients show whether the caller has cleared them.
        shown = [
            index
            for index in there
            if not self.local_shards[index].is_empty or self.layout.param_infos[index].numel == 0
        ]
        shown = shown or there
        return [
            UnreducedLocalGrad(
                self.sharded[index],
                own[self.local_shards[index].in_shard.to_slice()].view(self.sharded[index].shape),
                partial(self.describe, index),
                [index],
            )
            for index in shown
        ]

    @_unguarded
    def version(self) -> int:
        versions = [sharded._version for sharded in self.sharded]
        return self.flat_param._version + self._num_rewrites + sum(versions)

    @_unguarded
    def adopt_changes(self) -> None:
        shown = [parameters.get(name) for parameters, name, _, _ in self._bindings]
        expected = [sharded for _, _, _, sharded in self._bindings]
        if all(a is b for a, b in zip(shown, expected, strict=True)) and self._pointers == tuple(
            [sharded.data_ptr() for sharded in self.sharded]
        ):
            return
        for index, (parameters, name) in self._places:
            current, sharded = parameters.get(name), self.sharded[index]
            self._check_not_dtensor(index, current)
            if current is not None and current is not sharded:
                sharded.data = current.data
        for index, sharded in enumerate(self.sharded):
            if sharded.data_ptr() != self._pointers[index]:
                self._write_back(index, sharded.data)
        self.use_sharded_views()
        self.bind_shard()

    def check_shown(self) -> None:
        shown = ((parameters.get(name), index) for index, (parameters, name) in self._places)
        for current, index in shown:
            if current is not self.sharded[index] and not self._is_shown(index, current):
                self._raise_assigned(index)

    def _write_back(self, index: int, data: torch.Tensor) -> None:
        self.bump_version()
        param_info, local_shard = self.layout.param_infos[index], self.local_shards[index]
        target = self.flat_param.data[local_shard.in_shard.to_slice()]
        if data.shape == target.shape:
            target.copy_(data)
        elif tuple(data.shape) == param_info.shape:
            target.copy_(data.reshape(-1)[local_shard.in_param.to_slice()])
        else:
            raise UsageError(
                f"Parameter {param_info.fqn!r} of unit {self.unit_name!r} was replaced by a tensor of shape "
                f"{tuple(data.shape)} on rank {self.rank}; expected the whole shape {param_info.shape} or this rank's "
                f"slice {tuple(target.shape)}. Change shapes before wrapping, or inside summon_full_params."
            )
