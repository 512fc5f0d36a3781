"""Runs a model once on tensors without memory, and lists what a step allocates and computes, in order.

The model is not wrapped: hooks on the modules of the planned units list where their forwards begin and end, and where a
backward comes to their outputs, their inputs and their parameters. ``step_replay`` adds to that list what sharding
allocates and sends, for any strategy and number of ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from fsdp_flat.core.casts import cast_floats, keep_full_precision
from fsdp_flat.errors import OptionError
from fsdp_flat.runtime import listed
from fsdp_flat.tools.accelerator_functions import AcceleratorFunctions
from fsdp_flat.tools.planned_units import PlannedModel, PlannedUnit
from fsdp_flat.tools.torch_tools import (
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    run_backward,
)

Checkpointed = bool | Collection[type[nn.Module]] | None


class StepEvent(Enum):
    """Enumerates what happens in a step."""

    OPERATOR = "an operator has run"
    FORWARD_BEGIN = "the forward of a unit begins"
    FORWARD_END = "the forward of a unit ends"
    BACKWARD = "the backward of the loss begins"
    OUTPUTS = "a backward has come to the outputs of a forward"
    GRAD = "a parameter of a handle has its gradient"
    INPUTS = "a backward has computed the gradients of a forward's inputs"


class StepEntry(NamedTuple):
    """Describes one event of a step.

    Attributes:
        unit: the index of the unit in the plan; of ``GRAD`` with that of the ``handle``.
        call: the number of the unit's forward; a recomputation counts as one.
        nbytes: bytes of activations that are alive after an ``OPERATOR``; bytes of a gradient.
        flops: floating-point operations of an ``OPERATOR``.
    """

    event: StepEvent
    unit: int = -1
    handle: int = -1
    call: int = -1
    nbytes: int = 0
    flops: int = 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, after each of them, while they are alive.

    Args:
        excluded: tensors whose storages do not count.
        on_count: called with the bytes alive and the operator's floating-point operations.
    """

    def __init__(self, excluded: Iterable[torch.Tensor], on_count: Callable[[int, int], object]) -> None:
        super().__init__()
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._on_count = on_count
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(self, values: Any) -> None:
        """Count the storages of the tensors in ``values`` from now on."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self._excluded and key not in self._alive:
                    self._alive[key] = StorageWeakRef(storage), storage.nbytes()

    def alive(self) -> int:
        """Return the bytes alive now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # the device of a tensor, for example
            return result
        self.note(result)
        formula = flop_registry.get(func._overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **(kwargs or {}), out_val=result))
        self._on_count(self.alive(), flops)
        return result


class _InputsReached(torch.autograd.Function):
    """Passes tensors through, and calls ``reached`` once the gradients of all of them exist."""

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], object], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.reached()
        return (None, *grads)


def loss_of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes itself (``.loss`` of its output), or else the sum of its output.

    ``batch`` is what the model is called with: a tuple of arguments, a dict of keyword arguments, or one argument.
    """
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    trained = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not trained:
        raise OptionError(
            f"The output of {type(model).__name__} has no tensor that requires a gradient. Pass a loss "
            "(plan(loss=...), --loss), which is called with the model and the batch."
        )
    return torch.stack([tensor.float().sum() for tensor in trained]).sum()


def step_entries(
    planned: PlannedModel,
    batch: Any,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    checkpointed: Checkpointed = None,
    *,
    is_accelerator: bool = False,
) -> list[StepEntry]:
    """Run a forward and a backward without memory, and return what happens, in order.

    Args:
        planned: the model and its units.
        batch: what ``loss`` is called with; its tensors are replaced by ones of their shapes and dtypes.
        loss: called with a copy of the model and the batch.
        checkpointed: recompute in backward the forwards of the units below the outermost, or of modules of classes.
        is_accelerator: operators allocate what those of an accelerator do.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, params = _without_memory(planned)
        batch = tree_map(lambda leaf: _like(leaf, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, batch)
        run = _Run()
        modules = list(model.modules())
        units = [modules[unit.position] for unit in planned.units]
        for module in _modules_to_checkpoint(modules, units[1:], checkpointed):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        for position in planned.full_precision:
            keep_full_precision(modules[position])
        for index, (unit, module) in enumerate(zip(planned.units, units, strict=True)):
            run.hook(index, unit, module, params)
        counter = LiveBytes([*model.parameters(), *model.buffers()], run.ran_operator)
        counter.note(batch)
        try:
            with silent(FAKE_TENSOR_LOGGER), counter, AcceleratorFunctions() if is_accelerator else nullcontext():
                result = loss(model, batch)
                run.add(StepEvent.BACKWARD)
                run_backward(result)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise OptionError(
                f"{type(model).__name__} or its loss reads values of tensors ({error}), and plan runs it without "
                "values. Leave that part out of the loss that plan gets, or plan without a batch."
            ) from error
        run.ran_operator(counter.alive(), 0)  # what the caller still holds
    return run.entries


@contextmanager
def silent(name: str) -> Iterator[None]:
    """Drop what a logger says inside the block, when an error says it too."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _modules_to_checkpoint(
    modules: list[nn.Module], units: list[nn.Module], checkpointed: Checkpointed
) -> list[nn.Module]:
    if checkpointed is None or isinstance(checkpointed, bool):
        return units if checkpointed else []
    classes = listed(
        "checkpointing", checkpointed, lambda kind: isinstance(kind, type), "True, False or module classes"
    )
    found = [module for module in modules if isinstance(module, tuple(classes))]
    if not found:
        names = ", ".join(cls.__name__ for cls in classes)
        raise OptionError(f"checkpointing names classes that the model has no module of: {names}.")
    return found


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")


def _without_memory(planned: PlannedModel) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
    """Return a copy of the model in the dtypes of compute, and the copy of each parameter."""
    dtypes = {param: dtype for unit in planned.units for param, dtype in unit.compute_dtypes.items()}
    params = {
        param: nn.Parameter(_like(param, dtypes.get(param, param.dtype)), requires_grad=param.requires_grad)
        for param in planned.module.parameters()
    }
    buffers = {}
    for buffer in planned.module.buffers():
        casts = planned.buffer_dtype is not None and buffer.is_floating_point()
        buffers[buffer] = _like(buffer, planned.buffer_dtype if casts and planned.buffer_dtype else buffer.dtype)
    copies: dict[int, Any] = {id(tensor): twin for tensor, twin in (*params.items(), *buffers.items())}
    return copy.deepcopy(planned.module, copies), params


class _Run:
    """Lists the events of a step, by hooks on the modules and parameters of units."""

    def __init__(self) -> None:
        self.entries: list[StepEntry] = []
        self._num_calls = 0
        # By unit, the calls under way; a recomputation that stops early leaves its own.
        self._open: dict[int, list[int]] = {}

    def add(self, event: StepEvent, **fields: int) -> None:
        self.entries.append(StepEntry(event, **fields))

    def ran_operator(self, nbytes: int, flops: int) -> None:
        self.add(StepEvent.OPERATOR, nbytes=nbytes, flops=flops)

    def hook(self, index: int, unit: PlannedUnit, module: nn.Module, params: dict[nn.Parameter, nn.Parameter]) -> None:
        """Hook the module and the parameters of the unit ``index``."""

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            call, self._num_calls = self._num_calls, self._num_calls + 1
            self._open.setdefault(index, []).append(call)
            self.add(StepEvent.FORWARD_BEGIN, unit=index, call=call)
            if unit.input_dtype is not None:
                args, kwargs = cast_floats((args, kwargs), unit.input_dtype)
            if not unit.handles or not torch.is_grad_enabled():
                return args, kwargs
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _requires_grad(leaf)]
            given = list({id(leaf): leaf for leaf in leaves}.values())
            if not given:
                return args, kwargs
            reached = partial(self.add, StepEvent.INPUTS, unit=index, call=call)
            aliases = dict(zip(map(id, given), _InputsReached.apply(reached, *given), strict=True))
            replaced: tuple[Any, Any] = tree_map(lambda leaf: aliases.get(id(leaf), leaf), (args, kwargs))
            return replaced

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            call = self._open[index].pop()
            if unit.output_dtype is not None:
                output = cast_floats(output, unit.output_dtype)
            reached = partial(self.add, StepEvent.OUTPUTS, unit=index, call=call)
            for leaf in tree_leaves(output):
                if _requires_grad(leaf) and not leaf.is_leaf and torch.is_grad_enabled():
                    leaf.register_hook(lambda _grad: reached())
            self.add(StepEvent.FORWARD_END, unit=index, call=call)
            return output

        def take_grad(handle: int, param: torch.Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is not None:
                self.add(StepEvent.GRAD, unit=index, handle=handle, nbytes=grad.untyped_storage().nbytes())

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)
        for number, handle in enumerate(unit.handles):
            for param in handle.params:
                if param.requires_grad:
                    params[param].register_post_accumulate_grad_hook(partial(take_grad, number))


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
