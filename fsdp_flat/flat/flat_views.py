"""Implements the views of ``use_orig_params=False``: the optimizer sees only the flat parameter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from fsdp_flat.flat.guards import ShardedPlaceholder, unguarded
from fsdp_flat.flat.storage import UnreducedLocalGrad
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter
from fsdp_flat.flat.views import Views, accumulate_grad, run_grad_hooks
from fsdp_flat.flat.walk import ManagedParam
from fsdp_flat.layout import FLAT_PARAM, FlatLayout

__all__ = ["FlatViews"]


class FlatViews(Views):
    """Implements :class:`Views` for ``use_orig_params=False``.

    The original parameters leave ``module._parameters``. During compute the modules hold unsharded parameters as plain
    attributes, otherwise placeholders of the same shape that raise when used.
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
        # Only weak references to the originals are kept, so that their memory is freed.
        entries = [
            replace(entry, param=unsharded_param, replaced=entry.replaced or TensorWeakRef(entry.param))
            for entry, unsharded_param in zip(params, unsharded_params, strict=True)
        ]
        super().__init__(entries, unsharded_params, layout, rank, flat_param, module, unit_name)
        _warn_of_lost_hooks(params, unit_name)
        self.hooks = [entry.param._backward_hooks for entry in params]
        self.use_unsharded_params(unsharded_params)

    def use_unsharded_params(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        super().use_unsharded_params(unsharded_params)
        self._placeholders: list[torch.Tensor] = list(unsharded_params)
        if self.layout.world_size > 1:
            self._placeholders = [
                ShardedPlaceholder.of(unsharded_param, param_info.fqn, lambda: self.unit_name)
                for unsharded_param, param_info in zip(unsharded_params, self.layout.param_infos, strict=True)
            ]
        self._bindings = [
            (site.module.__dict__, site.name, unsharded_param, placeholder)
            for entry, unsharded_param, placeholder in zip(
                self.params, self.unsharded_params, self._placeholders, strict=True
            )
            for site in entry.sites
        ]
        self._shows_full_params = True
        self.use_sharded_views()

    def use_unsharded_views(self) -> None:
        for hooks, key, _ in self._guard_hooks:
            hooks.pop(key, None)
        for attributes, name, unsharded_param, _ in self._bindings:
            attributes[name] = unsharded_param

    def use_sharded_views(self) -> None:
        if self._shows_full_params:
            self._shows_full_params = False
            for entry in self.params:
                for site in entry.sites:
                    site.module._parameters.pop(site.name, None)
        for attributes, name, _, placeholder in self._bindings:
            attributes[name] = placeholder
        for hooks, key, guard in self._guard_hooks:
            hooks[key] = guard
        self.module._parameters[FLAT_PARAM] = self.flat_param

    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self.unguard()
        self._shows_full_params = True
        self.module._parameters.pop(FLAT_PARAM, None)
        for entry, tensor in zip(self.params, tensors, strict=True):
            fresh = nn.Parameter(entry.adapter.from_local(tensor), requires_grad=self.flat_param.requires_grad)
            for site in entry.sites:
                site.module.__dict__.pop(site.name, None)
                site.module._parameters[site.name] = fresh

    def show_names(self) -> None:
        self.register_full_params(torch.empty(self.layout.numel, dtype=self.flat_param.dtype, device="meta"))

    def unregister_full_params(self) -> None:
        self.use_sharded_views()

    def shard_grad(self) -> torch.Tensor:
        with unguarded():
            grad = self.flat_param.grad
            return torch.zeros_like(self.flat_param.data) if grad is None else grad.clone()

    def has_grads(self) -> list[bool]:
        return [self.flat_param.grad is not None] * len(self.unsharded_params)

    def register_full_grads(self, whole: torch.Tensor, there: Sequence[bool]) -> None:
        if any(there):
            for index, param_info in enumerate(self.layout.param_infos):
                self.set_shown_grad(index, whole[param_info.interval.to_slice()].view(param_info.shape))

    def restore_sharded_grads(self, own: torch.Tensor) -> None:
        if self.flat_param.grad is not None:
            self.flat_param.grad.copy_(own)

    def remove(self) -> None:
        self.module._parameters[FLAT_PARAM] = None

    def unflatten(self, whole: torch.Tensor) -> None:
        self.unguard()
        self.module._parameters.pop(FLAT_PARAM, None)
        for entry, param_info in zip(self.params, self.layout.param_infos, strict=True):
            data = entry.adapter.from_local(whole[param_info.interval.to_slice()].view(param_info.shape).clone())
            fresh = nn.Parameter(data, requires_grad=self.flat_param.requires_grad)
            for site in entry.sites:
                site.module.__dict__.pop(site.name, None)
                site.module._parameters[site.name] = fresh

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        pass

    def visible_params(self) -> list[nn.Parameter]:
        return [self.flat_param]

    def grads(self) -> list[tuple[TensorAdapter, torch.Tensor | None]]:
        with unguarded():
            grad = self.flat_param.grad
        if all(entry.adapter is PLAIN for entry in self.params):
            return [(PLAIN, grad)]
        return [
            (entry.adapter, None if grad is None else grad[local_shard.in_shard.to_slice()])
            for entry, local_shard in zip(self.params, self.local_shards, strict=True)
        ]

    def requires_grad(self) -> list[bool]:
        with unguarded():
            return [self.flat_param.requires_grad] * len(self.unsharded_params)

    def set_sharded_grad(self, shard_grad: torch.Tensor, used: Sequence[int]) -> None:
        if not any(used):
            return
        # The flat parameter is not in the autograd graph, so its hooks run here, on this rank's reduced gradient.
        with unguarded():
            hooks = self.flat_param._backward_hooks or {}
        for hook in hooks.values():
            result = hook(shard_grad)
            shard_grad = shard_grad if result is None else result
        with unguarded():
            is_hooked = accumulate_grad(self.flat_param, shard_grad)
        if is_hooked:
            run_grad_hooks(self.flat_param)

    def expose_unreduced_grads(self, own: torch.Tensor, grads_ready: bytes) -> list[UnreducedLocalGrad]:
        if not any(grads_ready):
            return []

        def describe() -> str:
            return f"the flat parameter of unit {self.unit_name!r}"

        with unguarded():
            return [UnreducedLocalGrad(self.flat_param, own, describe, range(len(grads_ready)))]

    def adopt_changes(self) -> None:
        current = self.module._parameters.get(FLAT_PARAM)
        if current is not None and current is not self.flat_param:
            self._raise_replaced(f"The flat parameter of unit {self.unit_name!r}")

    def check_shown(self) -> None:
        for index, entry in enumerate(self.params):
            for site in entry.sites:
                current = site.module.__dict__.get(site.name)
                if current is not self._placeholders[index] and not self._is_shown(index, current):
                    self._raise_assigned(index)

    def version(self) -> int:
        with unguarded():
            return self.flat_param._version + self._num_rewrites


def _warn_of_lost_hooks(params: Sequence[ManagedParam], unit_name: str) -> None:
    lost = [entry.fqn for entry in params if entry.param._post_accumulate_grad_hooks]
    if lost:
        warnings.warn(
            f"Parameter {lost[0]!r} of unit {unit_name!r} has a hook from register_post_accumulate_grad_hook, which "
            "will not run: with use_orig_params=False the parameter becomes a part of a flat one, and only that gets a "
            "reduced gradient. Register the hook on the flat parameter after wrapping, or pass use_orig_params=True.",
            stacklevel=2,
        )
