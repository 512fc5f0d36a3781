"""Plans the units of a model and a step of training, before the model is wrapped: ``fsdp_flat.plan``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import is_a
from fsdp_flat.errors import OptionError
from fsdp_flat.sizes import nbytes_of
from fsdp_flat.tools.plan_search import search
from fsdp_flat.tools.planned_step import (
    APIS,
    Checkpointed,
    Loss,
    MakeOptimizer,
    StepSettings,
    UnitArguments,
    loss_of_output,
    planned_step,
)
from fsdp_flat.tools.step_plan import StepPlan


def plan(
    module: nn.Module,
    num_ranks: int,
    *,
    num_replicas: int = 1,
    sharding_strategy: Any = None,
    auto_wrap_policy: Any = None,
    mixed_precision: Any = None,
    ignored_modules: Any = None,
    ignored_states: Any = None,
    use_orig_params: bool = False,
    cpu_offload: Any = None,
    forward_prefetch: bool = False,
    api: str = APIS[0],
    batch: Any = None,
    loss: Loss = loss_of_output,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    checkpointing: Checkpointed = None,
    device_type: str = "cuda",
    bandwidth: float | None = None,
    flops: float | None = None,
    accumulates: bool = False,
    fit: str | float | None = None,
    offload_activations: bool = False,
) -> StepPlan:
    """Describe the units that ``FullyShardedDataParallel`` or ``fully_shard`` would make of a module, and their step.

    It needs no process group, and changes and allocates nothing, so the module may be on the meta device::

        with torch.device("meta"):
            model = build()
        print(plan(model, 64, auto_wrap_policy=ModuleWrapPolicy({Block}), batch=torch.empty(8, 2048, dtype=torch.long)))

    With a ``batch`` it runs the model once on tensors without memory, and so counts activations. The plan is that of a
    step after the first: the optimizer has its states, and gradients were set to None, unless it ``accumulates``. It
    does not know of ``no_sync``, nor of switches that are set after wrapping.

    Args:
        module: an unwrapped module.
        num_ranks: ranks of the job.
        num_replicas: ranks that hold the same shard, for hybrid strategies.
        sharding_strategy, auto_wrap_policy, mixed_precision, ignored_modules, ignored_states, use_orig_params,
            cpu_offload, forward_prefetch: as for ``FullyShardedDataParallel``.
        api: "FullyShardedDataParallel", or "fully_shard", called on the modules that the policy chooses and then on
            ``module``. There SHARD_GRAD_OP is ``reshard_after_forward=False``, NO_SHARD a mesh of (num_ranks, 1), and a
            hybrid strategy a mesh of (num_replicas, num_ranks / num_replicas); ``mixed_precision`` is the
            ``MixedPrecisionPolicy``, and ``CPUOffload(offload_optimizer=True)`` a call of
            :func:`fsdp_flat.offload_optimizer`.
        batch: one rank's input: what ``loss`` is called with. Values do not matter, so its tensors may be on meta.
        loss: returns the loss of a model and a batch; by default of what the model computes itself, or the sum of its
            output.
        optimizer: called with the parameters of a rank, returns the optimizer; None for none.
        checkpointing: recompute the forwards of the units below the outermost in backward, or those of the modules of
            classes.
        device_type: the device of training. On "cpu" one reduction is in flight, and forward all-gathers the next unit
            early; on accelerators two are, and it does so with ``forward_prefetch``.
        bandwidth: bytes that a rank sends a second.
        flops: floating-point operations that a rank computes a second.
        accumulates: reduced gradients of an earlier backward exist when the step begins: gradients are accumulated
            without ``no_sync``, or ``zero_grad(set_to_none=False)`` keeps them.
        fit: the memory of a rank, bytes or a text like "80GB". Of the arguments ``sharding_strategy``,
            ``auto_wrap_policy``, ``checkpointing`` and ``cpu_offload`` those left out are searched for: the result is
            the plan that fits at the least cost, or the smallest if none fits, with all that were compared. Offloading
            (of the optimizer's states, then of everything) is compared if nothing fits without it, and a memory budget
            ("FULL_SHARD:40GB") if parameters can stay for backward in part.
        offload_activations: the forward runs inside :func:`fsdp_flat.offload_activations`.

    Raises:
        OptionError: ``num_ranks`` is not a multiple of ``num_replicas``, wrapping would raise it, the model or the
            optimizer cannot run without values, or ``fit`` is given without a ``batch``.
    """
    # Each plan of a search reads them.
    ignored_modules, ignored_states = (
        list(given) if isinstance(given, Iterator) else given for given in (ignored_modules, ignored_states)
    )
    try:
        is_accelerator = torch.device(device_type).type != "cpu"
    except RuntimeError as error:
        raise OptionError(f"device_type={device_type!r} names no device: {error}") from error
    for name, speed in (("bandwidth", bandwidth), ("flops", flops)):
        if speed is not None and not speed > 0:
            raise OptionError(f"{name} must be a positive number a second, or None; got {speed!r}.")
    arguments = UnitArguments(
        num_ranks=num_ranks,
        num_replicas=num_replicas,
        sharding_strategy=sharding_strategy,
        auto_wrap_policy=auto_wrap_policy,
        mixed_precision=mixed_precision,
        ignored_modules=ignored_modules,
        ignored_states=ignored_states,
        use_orig_params=use_orig_params,
        api=api,
        offloads=_offloads(cpu_offload) and is_accelerator,
        offloads_optimizer=getattr(cpu_offload, "offload_optimizer", False) and is_accelerator,
        is_accelerator=is_accelerator,
        prefetches_forward=forward_prefetch or not is_accelerator,
    )
    if batch is None:
        if fit is not None:
            raise OptionError("plan(fit=...) needs a batch: without one it cannot count activations.")
        return planned_step(module, arguments)
    step = StepSettings(batch, loss, optimizer, bandwidth, flops, accumulates, offload_activations and is_accelerator)
    if fit is None:
        return planned_step(module, arguments, step, checkpointing)
    return search(module, arguments, step, nbytes_of(fit, "fit"), checkpointing, searches_offload=cpu_offload is None)


def _offloads(cpu_offload: Any) -> bool:
    if isinstance(cpu_offload, bool) or cpu_offload is None:
        return bool(cpu_offload)
    return bool(getattr(cpu_offload, "offload_params", False)) or is_a(cpu_offload, "CPUOffloadPolicy")
