"""Averages over ranks, on request, gradients that no unit manages: those of ignored and of added parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_flat.comm import ShardingGroups, begin_all_reduce, connected
from fsdp_flat.core.params import is_managed, modules_of
from fsdp_flat.core.torch_core import is_replicated
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import UsageError
from fsdp_flat.layout import clean_fqn


def unmanaged_params(root: nn.Module, units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Return by name the parameters below ``root`` that none of its units manages."""
    param_groups = [param_group for unit in units for param_group in unit.param_groups]
    managed = {
        param
        for param_group in param_groups
        for param in (*param_group.slots.visible_params, *param_group.output.params)
    }
    return {
        clean_fqn(name): param
        for name, param in root.named_parameters()
        if param not in managed and not is_managed(param)
    }


def unreduced_params(root: nn.Module | None, units: Iterable[Unit]) -> dict[str, nn.Parameter]:
    """Return by name the trainable parameters below ``root`` whose gradients nothing reduces; none without a root."""
    if root is None or not (unmanaged := unmanaged_params(root, units)):
        return {}
    # DistributedDataParallel, replicate and DTensors reduce their own gradients.
    replicated = [
        module for module in modules_of(root) if isinstance(module, DistributedDataParallel) or is_replicated(module)
    ]
    reduced = {param for module in replicated for param in module.parameters()}
    return {
        name: param
        for name, param in unmanaged.items()
        if param.requires_grad and param not in reduced and not isinstance(param, DTensor)
    }


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
        for param, mean in zip(used, means(grads, groups, "gradients"), strict=True):
            param.grad = mean.to(param.dtype, copy=True)


def means(tensors: Sequence[torch.Tensor], groups: ShardingGroups, what: str) -> list[torch.Tensor]:
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
