"""Finds the first output or gradient in which a wrapped model differs from the plain model that it was made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fsdp_flat.comm import begin_all_reduce
from fsdp_flat.core import dynamo_disabled, graph_task_id, units_of
from fsdp_flat.core.containers import tensors_in
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.runtime import summon_full_params


@dataclass(frozen=True, slots=True)
class Difference:
    """Describes the first tensor in which two models differ on this rank.

    Attributes:
        kind: a parameter before the run, an output of a module, or a parameter's gradient after it.
        name: name of the parameter or the module in the plain model.
        call: index of the module's call that returned the output, from 0.
        largest: the largest absolute difference; infinite if shapes or the number of calls differ, or if a parameter is
            missing.
    """

    kind: Literal["parameter", "output", "gradient"]
    name: str
    call: int
    largest: float

    def __str__(self) -> str:
        of_call = f" of call {self.call}" if self.call else ""
        return f"first difference: {self.kind}{of_call} of {self.name!r}, by {self.largest:.3g} at most"


def compare_with(
    model: nn.Module,
    reference: nn.Module,
    run: Callable[[nn.Module], Any],
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> Difference | None:
    """Run a wrapped model and a plain replica on the same data, and find the first tensor that differs.

    Compared in this order: parameters before the run; outputs of modules, in the order of their calls in the replica;
    gradients, beginning with the module that ran last. The replica's gradients are averaged over the ranks of the
    outermost unit, as DistributedDataParallel does. Random numbers are the same in both runs. Gradients of both models
    are cleared before, and those of this run stay::

        replica = build().to(device)
        replica.load_state_dict(model.state_dict())
        print(compare_with(model, replica, lambda m: loss_of(m(inputs)).backward()))

    Every rank must call this; each gets the first difference of its own outputs. It needs memory for a full model.

    Args:
        model: a wrapper, or any module that holds wrappers.
        reference: a plain module of the same structure on the same device.
        run: runs forward and backward of the model that it gets, on this rank's data.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Returns:
        The first difference, or None.

    Raises:
        OptionError: nothing at or below ``model`` is wrapped, or ``reference`` holds a wrapper too.
    """
    units = units_of(model)
    if not units or units_of(reference):
        raise OptionError(
            "compare_with takes a wrapped model and a plain one; got "
            f"{len(units)} FullyShardedDataParallel in the first and {len(units_of(reference))} in the second."
        )
    find = partial(_first, rtol=rtol, atol=atol)
    with summon_full_params(model, writeback=False):
        found = find("parameter", _named(reference), _named(model))
    model.zero_grad()
    reference.zero_grad()
    options = units[0].options
    outputs = [_run(run, module, options.device) for module in (reference, model)]
    found = found or find("output", *outputs)
    expected = _mean_gradients(reference, options.groups.rank_groups, outputs[0])
    with summon_full_params(model, writeback=False, with_grads=True):
        grads = {key: param.grad for key, param in _named(model).items()}
        return found or find("gradient", expected, {key: grads.get(key) for key in expected})


# Tensors by name, and index of the module's call.
_Tensors = Mapping[tuple[str, int], torch.Tensor | None]


def _named(model: nn.Module) -> dict[tuple[str, int], nn.Parameter]:
    return {(clean_fqn(name), 0): param for name, param in model.named_parameters()}


def _first(kind: Any, expected: _Tensors, actual: _Tensors, *, rtol: float, atol: float) -> Difference | None:
    for key, value in expected.items():
        largest = _difference(value, actual[key], rtol, atol) if key in actual else float("inf")
        if largest > 0:
            return Difference(kind, *key, largest)
    return None


@torch.no_grad()
def _difference(expected: torch.Tensor | None, actual: torch.Tensor | None, rtol: float, atol: float) -> float:
    """Return the largest absolute difference, or 0 if all are within the tolerances. None stands for zeros."""
    if expected is None or actual is None:
        there = expected if actual is None else actual
        return 0.0 if there is None else _difference(torch.zeros_like(there), there, rtol, atol)
    if expected.shape != actual.shape:
        return float("inf")
    wide = torch.promote_types(torch.promote_types(expected.dtype, actual.dtype), torch.float32)
    one, other = expected.to(wide), actual.to(wide)
    if torch.allclose(other, one, rtol=rtol, atol=atol, equal_nan=True):
        return 0.0
    largest = float((one - other).abs().max())
    return largest if largest == largest else float("inf")


def _run(run: Callable[[nn.Module], Any], root: nn.Module, device: torch.device) -> dict[tuple[str, int], torch.Tensor]:
    """Run a model and return a copy of the first tensor of each module call's output, in the order of the calls.

    The random number generators are restored afterwards.
    """
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    counts: Counter[str] = Counter()

    @dynamo_disabled
    def note(name: str, output: Any) -> None:
        # A checkpoint calls modules again to recompute.
        tensors = tensors_in(output) if graph_task_id() == -1 else []
        if tensors:
            outputs[name, counts[name]] = tensors[0].detach().clone()
            counts[name] += 1

    # Wrappers have the clean name of their inner module, which is recorded instead.
    innermost = {
        clean_fqn(path): child for path, child in root.named_modules() if FSDP_WRAPPED_MODULE not in child._modules
    }
    on_cpu = device.type == "cpu"
    with (
        ExitStack() as hooks,
        torch.random.fork_rng([] if on_cpu else [device.index], device_type="cuda" if on_cpu else device.type),
    ):
        for name, module in innermost.items():
            hook = module.register_forward_hook(lambda _module, _args, output, name=name: note(name, output))
            hooks.callback(hook.remove)
        run(root)
    return outputs


def _mean_gradients(reference: nn.Module, rank_groups: Any, outputs: _Tensors) -> _Tensors:
    """Return the mean of the gradients over all ranks, beginning with the module that ran last."""
    position = {name: index for index, (name, _) in enumerate(outputs)}
    means: dict[tuple[str, int], torch.Tensor] = {}
    # The order of collectives is the same on all ranks, whichever modules their data have run.
    for name, param in reference.named_parameters():
        if param.requires_grad:
            mean = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            for rank_group in rank_groups:
                begin_all_reduce(mean, rank_group).wait()
                mean /= rank_group.size
            means[name, 0] = mean
    return dict(sorted(means.items(), key=lambda item: -position.get(item[0][0].rpartition(".")[0], -1)))
