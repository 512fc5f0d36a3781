"""What a unit's modules point at, and where reduced gradients appear.

There are two kinds, chosen once when the handle is built:

* :class:`OrigViews` (``use_orig_params=True``): outside of compute ``module.weight`` is the user's own
  Parameter, whose data is this rank's 1-D slice (possibly empty).
* :class:`FlatViews` (``use_orig_params=False``): the originals leave ``module._parameters``; the optimizer
  sees the flat parameter alone.

In compute, both show ``leaves``: one Parameter per original, a view of the gathered buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.walk import ManagedParam
from fsdp_flat.layout import FLAT_PARAM, FlatLayout, SlotShard

__all__ = ["FlatViews", "OrigViews", "Views"]


class Views:
    """What is common to both kinds.

    Args:
        params: the managed parameters, in the layout's order.
        leaves: one Parameter per managed parameter, a view of the gathered buffer.
        layout: the handle's layout.
        rank: this rank on the shard axis.
        flat_param: the flat parameter.
        module: the unit's module, where a visible flat parameter is registered.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        rank: int,
        flat_param: nn.Parameter,
        module: nn.Module,
    ) -> None:
        self.params = tuple(params)
        self.leaves = tuple(leaves)
        self.layout = layout
        self.rank = rank
        self.flat_param = flat_param
        self.module = module
        self.pieces: tuple[SlotShard, ...] = tuple(layout.piece(i, rank) for i in range(len(layout.slots)))

    def use_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        """Show other leaves from now on (another compute dtype)."""
        self.leaves = tuple(leaves)

    def show_full(self) -> None:
        """Point the modules at the gathered parameters."""
        raise NotImplementedError

    def show_shard(self) -> None:
        """Point the modules at what this rank holds."""
        raise NotImplementedError

    def show_whole(self, whole: torch.Tensor) -> None:
        """Point the modules at whole Parameters, views of ``whole`` (1-D, ``layout.numel``), for summon_full_params."""
        raise NotImplementedError

    def hide_whole(self) -> None:
        """Undo :meth:`show_whole`; does nothing if nothing is shown."""
        raise NotImplementedError

    def shown(self, index: int) -> torch.Tensor:
        """What the first place of parameter ``index`` holds while whole parameters are shown."""
        site = self.params[index].sites[0]
        current = site.module._parameters.get(site.name)
        assert current is not None
        return current

    def shard_grad(self) -> torch.Tensor:
        """A copy of this rank's gradient (1-D, ``shard_numel``), zero where there is none."""
        raise NotImplementedError

    def show_whole_grads(self, whole: torch.Tensor) -> None:
        """While whole parameters are shown: give them whole gradients where there are any."""
        raise NotImplementedError

    def hide_whole_grads(self, own: torch.Tensor) -> None:
        """Undo :meth:`show_whole_grads`; ``own`` (1-D, ``shard_numel``) becomes this rank's gradient."""
        raise NotImplementedError

    def remove(self) -> None:
        """Take the managed parameters off the modules, so that ``Module._apply`` passes them by."""
        raise NotImplementedError

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        """Let sharded parameters be views of ``flat_param``'s data."""
        raise NotImplementedError

    def visible_params(self) -> list[nn.Parameter]:
        """The parameters that an optimizer of this handle holds."""
        raise NotImplementedError

    def requires_grad(self) -> list[bool]:
        """For each original parameter whether it is to get a gradient."""
        raise NotImplementedError

    def publish(self, shard_grad: torch.Tensor, used: Sequence[bool]) -> None:
        """Add a reduced gradient (1-D, the shard's numel) to ``.grad`` of what the optimizer holds."""
        raise NotImplementedError

    def adopt_changes(self, unit_name: str) -> None:
        """Take over what the user assigned to sharded parameters since they were last shown."""

    def version(self) -> int:
        """A number that changes when sharded values are changed in place."""
        raise NotImplementedError


class OrigViews(Views):
    """Views of ``use_orig_params=True``."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        rank: int,
        flat_param: nn.Parameter,
        module: nn.Module,
    ) -> None:
        super().__init__(params, leaves, layout, rank, flat_param, module)
        self.sharded = tuple(entry.param for entry in params)
        self.use_leaves(leaves)
        self._pointers: tuple[int, ...] = ()
        self._stash: list[torch.Tensor | None] | None = None
        self._is_whole = layout.world_size == 1
        self.bind_shard()

    def use_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        super().use_leaves(leaves)
        self._bindings = [
            (site.module._parameters, site.name, leaf, entry.param)
            for entry, leaf in zip(self.params, self.leaves, strict=True)
            for site in entry.sites
        ]

    def show_full(self) -> None:
        for parameters, name, leaf, _ in self._bindings:
            parameters[name] = leaf

    def show_shard(self) -> None:
        for parameters, name, _, sharded in self._bindings:
            parameters[name] = sharded

    def show_whole(self, whole: torch.Tensor) -> None:
        self._stash = [sharded.grad for sharded in self.sharded]
        for sharded, slot in zip(self.sharded, self.layout.slots, strict=True):
            sharded.grad = None
            sharded.data = whole[slot.interval.to_slice()].view(slot.shape)
        self.show_shard()

    def hide_whole(self) -> None:
        if self._stash is None:
            return
        stash, self._stash = self._stash, None
        for sharded in self.sharded:
            sharded.grad = None
        self.show_shard()
        self.bind_shard()
        for sharded, grad in zip(self.sharded, stash, strict=True):
            sharded.grad = grad

    def _grads(self) -> list[torch.Tensor | None]:
        return [sharded.grad for sharded in self.sharded] if self._stash is None else self._stash

    def shard_grad(self) -> torch.Tensor:
        whole = torch.zeros_like(self.flat_param.data)
        for grad, piece in zip(self._grads(), self.pieces, strict=True):
            if grad is not None:
                whole[piece.in_shard.to_slice()].copy_(grad.reshape(-1))
        return whole

    def show_whole_grads(self, whole: torch.Tensor) -> None:
        for sharded, grad, slot in zip(self.sharded, self._grads(), self.layout.slots, strict=True):
            sharded.grad = None if grad is None else whole[slot.interval.to_slice()].view(slot.shape)

    def hide_whole_grads(self, own: torch.Tensor) -> None:
        for sharded, grad, piece in zip(self.sharded, self._grads(), self.pieces, strict=True):
            sharded.grad = None
            if grad is not None:
                grad.reshape(-1).copy_(own[piece.in_shard.to_slice()])

    def remove(self) -> None:
        for parameters, name, _, _ in self._bindings:
            parameters.pop(name, None)

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        shard = self.flat_param.data
        for sharded, piece, slot in zip(self.sharded, self.pieces, self.layout.slots, strict=True):
            local = shard[piece.in_shard.to_slice()]
            data = local.view(slot.shape) if self._is_whole else local
            grad, sharded.grad = sharded.grad, None
            sharded.data = data
            # Only Module._apply changes dtype or device under a gradient; torch converts the gradient with it.
            if grad is not None and grad.shape == data.shape:
                sharded.grad = grad.to(dtype=data.dtype, device=data.device) if rebuilt else grad
        self._pointers = tuple(sharded.data_ptr() for sharded in self.sharded)

    def visible_params(self) -> list[nn.Parameter]:
        return list(self.sharded)

    def requires_grad(self) -> list[bool]:
        return [sharded.requires_grad for sharded in self.sharded]

    def publish(self, shard_grad: torch.Tensor, used: Sequence[bool]) -> None:
        for sharded, piece, slot, was_used in zip(self.sharded, self.pieces, self.layout.slots, used, strict=True):
            if not was_used:
                continue
            local = shard_grad[piece.in_shard.to_slice()]
            if self._is_whole:
                local = local.view(slot.shape)
            _accumulate(sharded, local)

    def version(self) -> int:
        return self.flat_param._version + sum([sharded._version for sharded in self.sharded])

    def adopt_changes(self, unit_name: str) -> None:
        shown = [parameters.get(name) for parameters, name, _, _ in self._bindings]
        expected = [sharded for _, _, _, sharded in self._bindings]
        if all(a is b for a, b in zip(shown, expected, strict=True)) and self._pointers == tuple(
            [sharded.data_ptr() for sharded in self.sharded]
        ):
            return
        for parameters, name, _, sharded in self._bindings:
            current = parameters.get(name)
            if current is not None and current is not sharded:
                sharded.data = current.data
        for index, sharded in enumerate(self.sharded):
            if sharded.data_ptr() != self._pointers[index]:
                self._write_back(index, sharded.data, unit_name)
        self.show_shard()
        self.bind_shard()

    def _write_back(self, index: int, data: torch.Tensor, unit_name: str) -> None:
        slot, piece = self.layout.slots[index], self.pieces[index]
        target = self.flat_param.data[piece.in_shard.to_slice()]
        if data.shape == target.shape:
            target.copy_(data)
        elif tuple(data.shape) == slot.shape:
            target.copy_(data.reshape(-1)[piece.in_param.to_slice()])
        else:
            raise UsageError(
                f"Parameter {slot.fqn!r} of unit {unit_name!r} was replaced by a tensor of shape {tuple(data.shape)} "
                f"on rank {self.rank}; expected the whole shape {slot.shape} or this rank's slice "
                f"{tuple(target.shape)}. Change shapes before wrapping, or inside summon_full_params."
            )


class FlatViews(Views):
    """Views of ``use_orig_params=False``: the leaves sit in the modules' ``__dict__`` at all times."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        rank: int,
        flat_param: nn.Parameter,
        module: nn.Module,
    ) -> None:
        super().__init__(params, leaves, layout, rank, flat_param, module)
        self.show_shard()

    def use_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        super().use_leaves(leaves)
        self.show_shard()

    def show_full(self) -> None:
        pass

    def show_shard(self) -> None:
        for entry, leaf in zip(self.params, self.leaves, strict=True):
            for site in entry.sites:
                site.module._parameters.pop(site.name, None)
                site.module.__dict__[site.name] = leaf
        self.module._parameters[FLAT_PARAM] = self.flat_param

    def show_whole(self, whole: torch.Tensor) -> None:
        self.module._parameters.pop(FLAT_PARAM, None)
        for entry, slot in zip(self.params, self.layout.slots, strict=True):
            view = whole[slot.interval.to_slice()].view(slot.shape)
            fresh = nn.Parameter(view, requires_grad=self.flat_param.requires_grad)
            for site in entry.sites:
                site.module.__dict__.pop(site.name, None)
                site.module._parameters[site.name] = fresh

    def hide_whole(self) -> None:
        self.show_shard()

    def shard_grad(self) -> torch.Tensor:
        grad = self.flat_param.grad
        return torch.zeros_like(self.flat_param.data) if grad is None else grad.clone()

    def show_whole_grads(self, whole: torch.Tensor) -> None:
        if self.flat_param.grad is not None:
            for index, slot in enumerate(self.layout.slots):
                self.shown(index).grad = whole[slot.interval.to_slice()].view(slot.shape)

    def hide_whole_grads(self, own: torch.Tensor) -> None:
        if self.flat_param.grad is not None:
            self.flat_param.grad.copy_(own)

    def remove(self) -> None:
        self.module._parameters.pop(FLAT_PARAM, None)

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        pass

    def visible_params(self) -> list[nn.Parameter]:
        return [self.flat_param]

    def requires_grad(self) -> list[bool]:
        return [self.flat_param.requires_grad] * len(self.leaves)

    def publish(self, shard_grad: torch.Tensor, used: Sequence[bool]) -> None:
        if not any(used):
            return
        _accumulate(self.flat_param, shard_grad)

    def version(self) -> int:
        return self.flat_param._version


def _accumulate(param: nn.Parameter, grad: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.add_(grad)
    elif grad.dtype == param.dtype:
        param.grad = grad
    else:
        # keep_low_precision_grads: torch refuses a gradient of another dtype unless it comes in through ``.data``.
        param.grad = torch.empty_like(param)
        param.grad.data = grad
