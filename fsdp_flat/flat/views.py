"""Sets the tensors that a unit's modules point at, and the ``.grad`` of reduced gradients.

There are two implementations, chosen when the handle is built:

* ``OrigViews`` (``use_orig_params=True``): outside of compute ``module.weight`` is the user's Parameter, whose data is
  this rank's 1-D local shard (possibly empty).
* ``FlatViews`` (``use_orig_params=False``): the original parameters leave ``module._parameters``; the optimizer sees
  only the flat parameter.

During compute, both show ``unsharded_params``: one Parameter per original, a view of the unsharded buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.flat.guards import ModuleGuard
from fsdp_flat.flat.storage import UnreducedLocalGrad, set_grad
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter
from fsdp_flat.flat.walk import ManagedParam
from fsdp_flat.layout import FLAT_PARAM, FlatLayout, LocalShard

__all__ = ["Views", "accumulate_grad", "run_grad_hooks"]


class Views:
    """Defines the interface and the shared code of both implementations.

    Args:
        params: the managed parameters, in layout order.
        unsharded_params: one Parameter per managed parameter, a view of the unsharded buffer.
        layout: the handle's layout.
        rank: this rank in the shard group.
        flat_param: the flat parameter.
        module: the unit's module, where a visible flat parameter is registered.
        unit_name: name of the unit, for error texts.

    Attributes:
        hooks: per parameter, the gradient hooks that were registered when it was flattened.
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
        self.unit_name = unit_name
        self.params = tuple(params)
        self.unsharded_params = tuple(unsharded_params)
        self.layout = layout
        self.rank = rank
        self.flat_param = flat_param
        self.module = module
        self.local_shards: tuple[LocalShard, ...] = tuple(
            layout.local_shard(i, rank) for i in range(len(layout.param_infos))
        )
        self.hooks = [entry.param._backward_hooks for entry in params]
        self._num_rewrites = 0
        self._guards: dict[nn.Module, ModuleGuard] = {}
        if layout.world_size > 1:
            for entry, param_info in zip(params, layout.param_infos, strict=True):
                for site in entry.sites:
                    guard = ModuleGuard(id(self), lambda: self.unit_name, param_info.fqn, param_info.shape)
                    self._guards.setdefault(site.module, guard)
        self._guard_hooks: list[tuple[Any, str, ModuleGuard]] = [
            (module._forward_pre_hooks, guard.key, guard) for module, guard in self._guards.items()
        ]

    def guard(self) -> None:
        """Register guards that raise when the modules are called with sharded parameters."""
        for hooks, key, guard in self._guard_hooks:
            hooks[key] = guard

    def unguard(self) -> None:
        """Remove the guards from the modules."""
        for hooks, key, _ in self._guard_hooks:
            hooks.pop(key, None)

    def run_hooks(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Pass an unsharded local gradient through the user's hooks on the original parameter."""
        hooks = self.params[index].param._backward_hooks or self.hooks[index]
        for hook in hooks.values() if hooks else ():
            result = hook(grad)
            grad = grad if result is None else result
        return grad

    def describe(self, index: int) -> str:
        """Return the FQN of a parameter and its unit, for error texts."""
        return f"{self.layout.param_infos[index].fqn!r} of unit {self.unit_name!r}"

    def use_unsharded_params(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        """Use other unsharded parameters from now on (of another compute dtype)."""
        self.unsharded_params = tuple(unsharded_params)
        self._storages = [
            unsharded_param.untyped_storage()._cdata if entry.adapter is PLAIN else 0
            for unsharded_param, entry in zip(self.unsharded_params, self.params, strict=True)
        ]

    def use_unsharded_views(self) -> None:
        """Point the modules at the unsharded parameters."""
        raise NotImplementedError

    def use_sharded_views(self) -> None:
        """Point the modules at the sharded parameters or their placeholders."""
        raise NotImplementedError

    def register_full_params(self, whole: torch.Tensor) -> None:
        """Point the modules at full Parameters, views of ``whole`` (1-D, ``layout.numel``), for summon_full_params."""
        self.use_full_tensors(
            [whole[param_info.interval.to_slice()].view(param_info.shape) for param_info in self.layout.param_infos]
        )

    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Point the modules at full Parameters made from ``tensors``, until :meth:`unregister_full_params`."""
        raise NotImplementedError

    def show_names(self) -> None:
        """Register a parameter under every original name, until :meth:`unregister_full_params`."""

    def unregister_full_params(self) -> None:
        """Undo :meth:`register_full_params`; does nothing if no full parameters are shown."""
        raise NotImplementedError

    def shown(self, index: int) -> torch.Tensor:
        """Return the local tensor of parameter ``index`` at its first site while full parameters are shown."""
        return self.params[index].adapter.to_local(self._at(index))

    def set_shown_grad(self, index: int, grad: torch.Tensor) -> None:
        """Set the gradient of that parameter, given its local tensor ``grad``."""
        self._at(index).grad = self.params[index].adapter.from_local(grad)

    def _at(self, index: int) -> nn.Parameter:
        site = self.params[index].sites[0]
        current = site.module._parameters.get(site.name)
        assert current is not None
        return current

    def shard_grad(self) -> torch.Tensor:
        """Return a copy of this rank's gradient (1-D, ``shard_numel``), zero where there is none."""
        raise NotImplementedError

    def has_grads(self) -> list[bool]:
        """Return for each original parameter whether this rank's local shard has a gradient."""
        raise NotImplementedError

    def register_full_grads(self, whole: torch.Tensor, there: Sequence[bool]) -> None:
        """Set full gradients on full parameters that are shown, if any rank has a gradient (``there``)."""
        raise NotImplementedError

    def restore_sharded_grads(self, own: torch.Tensor) -> None:
        """Undo :meth:`register_full_grads` and copy ``own`` (1-D, ``shard_numel``) into this rank's gradient."""
        raise NotImplementedError

    def remove(self) -> None:
        """Remove the managed parameters from the modules, so that ``Module._apply`` skips them."""
        raise NotImplementedError

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Replace the handle's tensors by None and remove the guards inside the block, to copy the modules.

        The current tensors, sharded or unsharded, are restored at the end.
        """
        guarded = [(module, guard) for module, guard in self._guards.items() if guard.is_on(module)]
        held: list[tuple[dict[str, Any], str, Any]] = []
        sites = [(site.module, site.name) for entry in self.params for site in entry.sites]
        for module, name in (*sites, (self.module, FLAT_PARAM)):
            where = next((d for d in (module._parameters, module.__dict__) if name in d), None)
            if where is not None and (name != FLAT_PARAM or where[name] is self.flat_param):
                held.append((where, name, where[name]))
        for module, guard in guarded:
            guard.take(module)
        for where, name, _ in held:
            where[name] = None
        try:
            yield
        finally:
            for where, name, tensor in held:
                where[name] = tensor
            for module, guard in guarded:
                guard.put(module)

    def unflatten(self, whole: torch.Tensor) -> None:
        """Register ordinary Parameters with the values of ``whole`` (1-D, ``layout.numel``) permanently."""
        raise NotImplementedError

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        """Make sharded parameters views of the data of ``flat_param``."""
        raise NotImplementedError

    def visible_params(self) -> list[nn.Parameter]:
        """Return the parameters of this handle that an optimizer holds."""
        raise NotImplementedError

    def grads(self) -> list[tuple[TensorAdapter, torch.Tensor | None]]:
        """Return this rank's gradients for the optimizer, each with the adapter of its parameter."""
        raise NotImplementedError

    def kept(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a map from unsharded parameters to the parameters that an optimizer holds, if they differ."""
        return {}

    def requires_grad(self) -> list[bool]:
        """Return for each original parameter whether it requires a gradient."""
        raise NotImplementedError

    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        """Adopt the ``requires_grad`` that the user set on unsharded parameters (``shown``, formerly ``before``)."""

    def set_sharded_grad(self, shard_grad: torch.Tensor, used: Sequence[int]) -> None:
        """Add a reduced gradient (1-D, ``shard_numel``) to the ``.grad`` of the optimizer's parameters."""
        raise NotImplementedError

    def adopt_changes(self) -> None:
        """Adopt tensors that the user assigned to sharded parameters since they were last shown."""

    def check_shown(self) -> None:
        """Check that no parameter was assigned while the modules pointed at unsharded ones.

        Raises:
            PhaseError: if one was; the assignment would be lost.
        """
        raise NotImplementedError

    def _is_shown(self, index: int, current: Any) -> bool:
        """Return whether ``current``, the module's tensor, is the unchanged unsharded parameter."""
        unsharded_param = self.unsharded_params[index]
        if current is not unsharded_param or self.params[index].adapter is not PLAIN:
            return current is unsharded_param
        return unsharded_param.untyped_storage()._cdata == self._storages[index]

    def _check_not_dtensor(self, index: int, current: Any) -> None:
        if isinstance(current, DTensor) and self.params[index].adapter is PLAIN:
            self._raise_replaced(f"Parameter {self.describe(index)}")

    def _raise_replaced(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} was replaced in its module: torch's fully_shard was called on a module that "
            "FullyShardedDataParallel manages, or on one around it. One of the two can shard a parameter. Take the "
            "wrapper away (fsdp_flat.unwrap) before fully_shard, or pass its parameters as ignored_params."
        )

    def _raise_assigned(self, index: int) -> NoReturn:
        raise PhaseError(
            f"Parameter {self.describe(index)} was assigned after a forward, "
            "while the unit was gathered, and the assignment would be lost. The weights were changed before the "
            "backward of that forward, or without one. Assign between steps, after backward, or inside "
            "summon_full_params."
        )

    def expose_unreduced_grads(self, own: torch.Tensor, grads_ready: bytes) -> list[UnreducedLocalGrad]:
        """Set ``.grad`` to this rank's shard of a waiting gradient (1-D, ``shard_numel``) where one is ready."""
        raise NotImplementedError

    def bump_version(self) -> None:
        """Count a change of shard values that bypasses version counters: a load, a write-back, ``.data =``."""
        self._num_rewrites += 1

    def version(self) -> int:
        """Return a number that changes when sharded values change."""
        raise NotImplementedError


def accumulate_grad(param: nn.Parameter, grad: torch.Tensor) -> bool:
    """Add a reduced gradient to ``param.grad``, and return whether :func:`run_grad_hooks` must follow."""
    if param.grad is not None:
        param.grad.add_(grad)
    else:
        set_grad(param, grad)
    return bool(param._post_accumulate_grad_hooks) or hasattr(param, "_in_backward_optimizers")


def run_grad_hooks(param: nn.Parameter) -> None:
    """Run the user's gradient hooks and in-backward optimizers, which torch skips: ``param`` is not in the graph."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)
    for optimizer in getattr(param, "_in_backward_optimizers", ()):
        optimizer.step()
        optimizer.zero_grad()
