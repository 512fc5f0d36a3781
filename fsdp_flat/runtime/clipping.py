"""Clips gradients by the norm of all gradients on all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch

from fsdp_flat.comm import ALONE, RankGroup, begin_all_reduce
from fsdp_flat.core import PLAIN, Step, TensorAdapter, Unit, adapter_if_dtensor, grads_by_adapter
from fsdp_flat.errors import OptionTypeError, UsageError
from fsdp_flat.user_warnings import warn_user

_DOING = "a norm of gradients, for which every rank must call clip_grad_norm_ with the same parameters"


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionTypeError(f"{name} must be a number; got {value!r}.") from error


# For each parameter whose gradient is split over the same groups of ranks, its dtype and the gradient of this rank.
_SplitGrads = list[tuple[torch.dtype, torch.Tensor | None]]


def _norm_dtype(split: _SplitGrads) -> torch.dtype:
    """Return the dtype of the norm, which depends on the parameters of these groups alone: ranks exchange it."""
    floats = [dtype.to_real() for dtype, _ in split if dtype.is_floating_point or dtype.is_complex]
    return functools.reduce(torch.promote_types, floats, torch.float32)


def check_gradients_set(step: Step, what: str) -> None:
    """Raise a UsageError if gradients of a backward are not set yet; ``what`` names the call that needs them."""
    param_groups = [param_group for unit in step.units for param_group in unit.param_groups]
    is_partial = any(param_group.grads.partial.shard is not None for param_group in param_groups)
    if step.has_unfinalized_gradients or is_partial or step.reductions.has_any(param_groups):
        raise UsageError(
            f"{what} was called on unit {step.root.name!r} after a backward whose gradients are not set yet, so its "
            "norm would lack them. First run the last backward of the step, with set_is_last_backward and "
            "set_requires_all_reduce switched on again, or call finalize_backward."
        )


@torch.no_grad()
def clip_grads(
    units: Iterable[Unit],
    unmanaged: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    *,
    among: Collection[torch.Tensor] | None = None,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; return the norm before scaling.

    Norms are computed in fp32, or in fp64 if a parameter is fp64. Norms of shards are summed over the shard group, and
    over the groups of tensor parallelism. Unsharded gradients (NO_SHARD units, ignored parameters) are the same on
    every rank and count once. The norm of order 0 is torch's norm of norms: the number of parameters whose gradient has
    an element that is not zero. Every rank must call this, with the same units.

    Args:
        units: all units of one or several trees.
        unmanaged: parameters that no unit manages.
        among: the parameters of the units whose gradients count; None is all.
        error_if_nonfinite: raise a RuntimeError, on every rank, if the norm is inf or NaN.
    """
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if max_norm < 0:
        warn_user(f"max_norm={max_norm} turns gradients around, as in torch. To clip nothing, pass float('inf').")
    units = list(units)
    # Groups do not depend on gradients: ranks must exchange the same norms.
    by_groups: dict[tuple[RankGroup, ...], _SplitGrads] = {}

    def split_over(rank_group: RankGroup, adapter: TensorAdapter) -> _SplitGrads:
        return by_groups.setdefault((rank_group, *map(RankGroup.of, adapter.groups)), [])

    managed = []
    for unit in units:
        for options, _ in unit.by_mesh():
            split_over(options.groups.shard, PLAIN)
        for param_group in unit.param_groups:
            rank_group = param_group.comm.options.groups.shard
            for param, adapter, grad in grads_by_adapter(param_group, one_by_one=norm_type <= 0):
                is_meant = among is None or param in among
                managed += [param] if is_meant else []
                split_over(rank_group, adapter).append((param.dtype, grad if is_meant else None))
    for other in unmanaged:
        adapter = adapter_if_dtensor(other)
        grad = None if other.grad is None else adapter.to_local(other.grad)
        split_over(ALONE, adapter).append((other.dtype, grad))
        if grad is not None and adapter is not PLAIN:
            # Partial sums may have been reduced; the tensor that is scaled below must be the one that the
            # optimizer reads.
            other.grad = adapter.from_local(grad)
    if not by_groups:
        split_over(ALONE, PLAIN)
    device = next((param_group.spec.device for unit in units for param_group in unit.param_groups), torch.device("cpu"))
    dtype = functools.reduce(torch.promote_types, list(map(_norm_dtype, by_groups.values())))
    total = _joined(
        [_power_sum(groups, split, norm_type, device).to(dtype) for groups, split in by_groups.items()], norm_type
    )
    is_shared = any(rank_group.size > 1 for rank_groups in by_groups for rank_group in rank_groups)
    for unit in units:
        unit.step.clipped_norm = total
        if is_shared:  # else a rank may clip alone
            unit.clipped = f"clip_grad_norm_ with max_norm={max_norm} and norm_type={norm_type}"
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients of all ranks is non-finite ({float(total)}), so they "
            "cannot be clipped. Find the first inf or NaN, or scale by it all the same with error_if_nonfinite=False."
        )
    grads = [grad for split in by_groups.values() for _, grad in split if grad is not None]
    dtypes = [grad.dtype for grad in grads]
    if not grads:
        # Of no gradients at all the norm is 0, of any order.
        total = total.where(total.isfinite(), 0.0) if norm_type < 0 else total
        trainable = [param for param in managed if param.requires_grad]
        if all(param.numel() == 0 for param in trainable):
            # This rank has no elements of any, so no gradients; their dtypes would be those of the parameters.
            dtypes = [param.dtype for param in trainable]
    if not dtypes:
        if among is None and is_shared:
            # If nothing is sharded, all ranks have the same gradients.
            warn_user(
                f"clip_grad_norm_ was called on a rank without gradients; it returns the norm in {dtype}, which may "
                "differ from the dtype on other ranks."
            )
        return total
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for some in _by_kind(grads):
        torch._foreach_mul_(some, factor.to(some[0].device, some[0].dtype))
    return total.to(functools.reduce(torch.promote_types, dtypes).to_real())


def _by_kind(tensors: Iterable[torch.Tensor]) -> Collection[list[torch.Tensor]]:
    """Group tensors by device and dtype; an operation on a list launches as few kernels as for one of its tensors."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds.values()


@torch.no_grad()
def local_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of order ``norm_type`` of some gradients as one vector, a scalar of ``dtype`` on ``device``."""
    norms = [
        torch.stack(
            torch._foreach_norm(some, norm_type, dtype=dtype.to_complex() if some[0].is_complex() else dtype)
        ).to(device)
        for some in _by_kind(grad for grad in grads if grad.numel() > 0)
    ]
    if not norms:
        # The norm that adds nothing to that of other gradients: norms of a negative order become smaller with each.
        return torch.full((), math.inf if norm_type < 0 else 0.0, dtype=dtype, device=device)
    return torch.linalg.vector_norm(norms[0] if len(norms) == 1 else torch.cat(norms), norm_type)


def _power_sum(
    rank_groups: tuple[RankGroup, ...], split: _SplitGrads, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the ``norm_type``-th power of the norm of gradients that are split over groups, the same on every rank.

    For the order 0 it is the norm of norms, and for inf and -inf the norm itself.
    """
    grads, dtype = [grad for _, grad in split], _norm_dtype(split)
    connected = [rank_group for rank_group in rank_groups if rank_group.size > 1]
    if norm_type == 0:
        # A parameter that is split counts once.
        counts = torch.zeros(len(grads), dtype=dtype, device=device)
        for at, grad in enumerate(grads):
            if grad is not None:
                counts[at] = (grad != 0).any()
        for rank_group in connected:
            counts = begin_all_reduce(counts, rank_group, largest=True, collective=_DOING).wait()
        return counts.sum()
    norm = local_norm([grad for grad in grads if grad is not None], norm_type, device, dtype)
    if not math.isinf(norm_type):
        norm = norm.pow(norm_type)
        for rank_group in connected:
            norm = begin_all_reduce(norm, rank_group, collective=_DOING).wait()
        return norm
    sign = math.copysign(1.0, norm_type)
    for rank_group in connected:
        norm = sign * begin_all_reduce(sign * norm, rank_group, largest=True, collective=_DOING).wait()
    return norm


def _joined(parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients, from what :func:`_power_sum` returned for several groups of them."""
    if math.isinf(norm_type):
        return torch.stack(parts).max() if norm_type > 0 else torch.stack(parts).min()
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    return total if norm_type == 0 else total.pow(1.0 / norm_type)
