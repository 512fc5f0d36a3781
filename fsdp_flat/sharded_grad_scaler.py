"""Scales losses; the decision to skip a step is reached by consensus over a process group.

Each rank has the gradients of its own shards only, so an overflow may occur on one rank and must count on all.
Differences from FSDP1's class of the same name:

* An ``unscale_`` takes one all-reduce, of the maximum of one number for all devices; none if the group has one rank.
* The recorded flag is 0 or 1, in a 0-dim tensor. FSDP1 records a sum over ranks in a 1-D tensor for each device, but
  torch's fused optimizers skip on exactly 1 and work with a 0-dim flag only.
* The decision covers optimizers that unscale in their own step (``fused=True``) too.
* The group is looked up at use, so a scaler may be made before the process group is.

The overridden names with a leading underscore belong to ``torch.amp.GradScaler``, which offers no public way to change
its use of the flag.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler, OptState

from fsdp_flat.comm import RankGroup, backend_of, begin_all_reduce
from fsdp_flat.core import read_exchanges, units_holding
from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UsageError

__all__ = ["ShardedGradScaler"]

_Outputs = TypeVar("_Outputs")


class ShardedGradScaler(GradScaler):
    """Scales losses of sharded models; an inf or NaN on one rank skips the step on every rank.

    A ``torch.amp.GradScaler``. Every rank of the group must call ``unscale_`` and ``step``, for the same optimizers in
    the same order, also when it holds no gradient.

    Args:
        device: type of the compute device, such as ``"cuda"`` or ``"cpu"``. As in ``torch.amp``, ``"cuda"`` without
            CUDA warns and disables the scaler.
        init_scale: the first scale.
        backoff_factor: factor of the scale after a skipped step; below 1.
        growth_factor: factor of the scale after ``growth_interval`` steps without a skip; above 1.
        growth_interval: number of steps.
        enabled: False makes ``step`` call the optimizer and everything else do nothing.
        process_group: ranks that decide together; None is the default group at the time of use. A hybrid strategy needs
            all of its ranks, so the default.

    Raises:
        OptionTypeError: ``process_group`` is not a process group.
        AssertionError: a factor is out of range (raised by ``torch.amp.GradScaler``).
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # Check the methods in use: a simulated group need not be torch's class. Ranks outside a group hold a marker.
        is_group = all(callable(getattr(process_group, name, None)) for name in ("rank", "size"))
        if process_group is not None and not is_group and process_group != dist.GroupMember.NON_GROUP_MEMBER:
            raise OptionTypeError(
                f"process_group must be a torch.distributed.ProcessGroup or None; got {type(process_group).__name__}. "
                "For a hybrid strategy pass None: every rank has a say."
            )
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    # -- scaling -----------------------------------------------------------------------------------------------------

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply outputs, usually the loss, by the scale.

        Args:
            outputs: a tensor, or lists, tuples and other iterables of tensors, nested to any depth.

        Returns:
            The same structure; each tensor keeps its shape, dtype and device. Iterables that are neither list nor tuple
            become iterators that scale as they are read.

        Raises:
            OptionError: an item of ``outputs`` is neither a tensor nor an iterable of tensors.
            PhaseError: a tensor is on the meta device, so has no value.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if outputs.is_meta:
                raise PhaseError(
                    "scale() got a tensor on device meta, which has no value; materialize the model first."
                )
            # torch.amp gives a loss of a lower precision the dtype of the scale.
            return super().scale(outputs).to(outputs.dtype)  # type: ignore[return-value]
        # Iterating over a mapping gives its keys, over a string more strings.
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
            raise OptionError(
                f"outputs must be a tensor or an iterable of tensors; got {type(outputs).__name__}. Pass the tensors "
                "that backward() is called on."
            )
        kind: Any = type(outputs)
        scaled: Any = map(self.scale, outputs)
        if isinstance(outputs, (list, tuple)):
            scaled = kind(*scaled) if hasattr(outputs, "_fields") else kind(scaled)
        return scaled

    # -- unscaling and consensus ---------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and exchange between ranks whether any found an inf or NaN.

        Every rank of the group must call this. Gradients change in place; only sparse fp16 gradients are replaced.

        Raises:
            AssertionError: ``scale`` was never called (raised by ``torch.amp.GradScaler``, as the other).
            RuntimeError: a second call since the last ``update``, or one after ``step``.
        """
        super().unscale_(optimizer)
        if self._enabled:
            state = self._per_optimizer_states[id(optimizer)]
            try:
                state["found_inf_per_device"] = self._agree(state["found_inf_per_device"])
            except BaseException:
                state["stage"] = OptState.READY  # else this rank alone would decide whether to step
                raise

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Check for an inf or NaN on all ranks, for optimizers that unscale in their own ``step``."""
        found: Any = self._agree(super()._check_inf_per_device(optimizer))
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply gradients by ``inv_scale``; return this rank's flag for each device, of at least one device.

        Gradients in fp16 are always allowed, which FSDP1's class asks for and ``torch.amp`` does not.
        """
        read_exchanges(units_holding(param for group in optimizer.param_groups for param in group["params"]))
        # Of one class each: the operator takes no DTensors beside plain tensors.
        batches: dict[tuple[torch.device, torch.dtype, type], list[torch.Tensor]] = {}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            grad = param.grad
            if grad is not None and grad.is_sparse:
                if grad.dtype is torch.float16:
                    # Entries of one index are summed in fp32, and the sum must fit into fp16.
                    grad = param.grad = grad.float().coalesce().half()
                grad = grad._values()
            if grad is not None and grad.numel() > 0:
                batches.setdefault((grad.device, grad.dtype, type(grad)), []).append(grad)
        flags: dict[torch.device, torch.Tensor] = {}
        with torch.no_grad():
            for (device, *_), grads in batches.items():
                if device not in flags:
                    flags[device] = found_inf.to(device, copy=True)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flags[device], inv_scale.to(device))
        return flags or {found_inf.device: found_inf}

    def _agree(self, flags: Mapping[Any, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """Return the maximum of the flags of all devices of all ranks, on the scale's device."""
        assert self._scale is not None
        home = self._scale.device
        group = self.process_group
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        size = 1 if group is None else dist.get_world_size(group)
        if size < 1:
            raise UsageError(
                f"rank {dist.get_rank()} is not in the scaler's process_group, so it has no part in the decision to "
                "skip a step; make the scaler with a group of this rank."
            )
        device = home if size == 1 else _exchange_device(group, home, self._device)
        # Copies to the CPU are synchronous: they might be read before they are complete.
        own = [flag.to(device, non_blocking=device.type != "cpu") for flag in flags.values()]
        total = functools.reduce(torch.maximum, own)
        if size > 1:
            assert group is not None
            total = begin_all_reduce(total, RankGroup.of(group), largest=True).wait()
        return {home: total.to(home, non_blocking=home.type != "cpu")}

    # -- the next scale ----------------------------------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Set the scale of the next iteration, after every optimizer's ``step``.

        A skipped step multiplies it by the backoff factor; ``growth_interval`` steps in a row that were not skipped, by
        the growth factor.

        Args:
            new_scale: use this scale instead, the same on every rank: a number, or a tensor of one element on the
                scaler's device type that does not require grad.

        Raises:
            AssertionError: no scale yet, no ``unscale_`` or ``step`` since the last update, or an unusable
                ``new_scale`` (raised by ``torch.amp.GradScaler``).
        """
        if isinstance(new_scale, torch.Tensor):
            new_scale = new_scale.squeeze()
        elif isinstance(new_scale, int):
            new_scale = float(new_scale)
        elif new_scale is None and self._enabled and self._growth_tracker is not None:
            # Growth happens when the count equals the interval, so without this a shortened interval might never be
            # reached.
            self._growth_tracker.clamp_(max=self._growth_interval - 1)
        super().update(new_scale)


def _exchange_device(group: Any, home: torch.device, configured: str) -> torch.device:
    """Return a device on which the group can reduce.

    The choice depends on values that are equal on every rank, so not on the devices of gradients.
    """
    for device in (home, torch.device(configured), torch.accelerator.current_accelerator()):
        if device is not None and backend_of(group, device) is not None:
            return device
    return home
