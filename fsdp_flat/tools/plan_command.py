"""Shows the plan of a model that a command line names: the function behind ``plan`` and ``describe``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_flat.composable import MixedPrecisionPolicy
from fsdp_flat.errors import FsdpFlatError, OptionError
from fsdp_flat.sizes import nbytes_of, size_text
from fsdp_flat.tools.command_output import show
from fsdp_flat.tools.hub_models import hub_batch, is_hub_config
from fsdp_flat.tools.named_models import classes_named, imported, named_model
from fsdp_flat.tools.plan_search import largest_batch, repeated_classes
from fsdp_flat.tools.planned_step import MakeOptimizer
from fsdp_flat.tools.planning import plan
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.tools.text import BYTES_A_SECOND, FLOPS, speed_of, words_of
from fsdp_flat.wrap import ModuleWrapPolicy

# By name of a precision, the dtype of parameters (None: as the model is built) and that of compute (None: the same).
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "as-built": (None, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp32": (torch.float32, None),
    "pure-bf16": (torch.bfloat16, None),
}
APIS = {"wrapper": "FullyShardedDataParallel", "fully_shard": "fully_shard"}
_REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The number of rows that ``--batch`` leaves open.
_AUTO = "auto"
# Attributes of a model's config that say how long its sequences are.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_len", "block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Holds what the flags of ``plan`` and ``describe`` say; None is for those that are left out.

    Attributes:
        wrap: names of the classes of modules to make units of.
        strategy: name of the ``ShardingStrategy``, or one with a memory budget, as "FULL_SHARD:40GB".
        replicas: ranks that hold the same shard.
        api: a key of ``APIS``.
        precision: a key of ``PRECISIONS``; without it a hub model is trained in "bf16", and others are "as-built".
        reduce_dtype: "fp32" or "bf16", for a precision with a dtype of compute.
        batch: the shape of a rank's input, as "4x2048"; without it the units alone are shown. "auto", or "autox2048",
            is the largest number of rows that ``fit`` allows, of sequences as long as the model's config says.
        tokens: the input is of integers.
        loss: ``module:function``, called with the model and the batch.
        optimizer: a class of ``torch.optim`` in any case, "none", or ``module:function``.
        fused: the optimizer's fused implementation.
        recompute: recompute the forwards of units in backward.
        offload: keep shards, gradients and optimizer states in host memory.
        offload_optimizer: keep the optimizer's states there between its steps.
        offload_activations, accumulate: as ``offload_activations`` and ``accumulates`` of :func:`fsdp_flat.plan`.
        device, fit: as ``device_type`` and ``fit`` of it.
        bandwidth, flops: speeds as text, as "50GB/s" and "400TFLOPS".
    """

    wrap: Sequence[str] = ()
    strategy: str | None = None
    replicas: int = 1
    api: str = "wrapper"
    precision: str | None = None
    reduce_dtype: str = "fp32"
    batch: str | None = None
    tokens: bool = False
    loss: str | None = None
    optimizer: str = "AdamW"
    fused: bool = False
    recompute: bool | None = None
    offload: bool | None = None
    offload_optimizer: bool = False
    offload_activations: bool = False
    accumulate: bool = False
    device: str = "cuda"
    fit: str | None = None
    bandwidth: str | None = None
    flops: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> PlanFlags:
        """Return the flags among the arguments of a command."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})


def show_plan(
    name: str, num_ranks: int, flags: PlanFlags, *, allow_pickle: bool, as_json: bool, picture: Path | None = None
) -> int:
    """Show the units of a model, and of a step if the flags give a batch; return 1 if nothing fits.

    Args:
        name: the model; see :func:`named_model`.
        num_ranks: ranks of the job.
        flags: what to plan.
        allow_pickle: as of :func:`named_model`.
        as_json: print JSON.
        picture: a file to draw the memory of the step into.
    """
    model, is_hub = named_model(name, allow_pickle=allow_pickle), is_hub_config(name)
    assumed: dict[str, str] = {}
    limit_nbytes = None
    if flags.batch is not None and flags.batch.partition("x")[0] == _AUTO:
        if flags.fit is None:
            raise OptionError("--batch auto needs --fit, the memory of a rank, as 80GB.")
        limit_nbytes = nbytes_of(flags.fit, "--fit")
        flags = _flags_of_auto(model, flags, assumed)
    arguments = _unit_arguments(model, flags, assumed, is_hub=is_hub)
    if flags.batch is None and (flags.fit is not None or picture is not None):
        raise OptionError(f"{'--picture' if flags.fit is None else '--fit'} needs a --batch, to count activations.")

    def planned(rows: int) -> StepPlan:
        if flags.batch is None:
            return plan(model, num_ranks, **arguments)
        own = replace(flags, batch=flags.batch.replace(_AUTO, str(rows)))
        return plan(model, num_ranks, **arguments, **_step_arguments(model, own, assumed, is_hub=is_hub))

    try:
        if limit_nbytes is None:
            found = planned(1)
        else:
            rows, found = largest_batch(planned, limit_nbytes)
            shape, says = str(flags.batch).replace(_AUTO, str(rows)), "the largest that fits"
            assumed["batch"] = f"{shape}, {says if found.fits else 'which does not fit'} {size_text(limit_nbytes)}"
    except FsdpFlatError:
        raise
    except Exception as error:
        # The model's code, or torch in it, refuses the input; whoever calls plan() gets the traceback.
        where = _place_of(error)
        raise OptionError(
            f"{type(model).__name__} cannot run on --batch {flags.batch}: {words_of(error)}{where}."
        ) from error
    if picture is not None:
        found.save(picture)
    lines = [f"{key}: {text}" for key, text in assumed.items()]
    show(_data_of(found, assumed), "\n".join([*lines, "", str(found)]), as_json=as_json)
    return int(not found.fits)


def _flags_of_auto(model: nn.Module, flags: PlanFlags, assumed: dict[str, str]) -> PlanFlags:
    """Return the flags with which to plan batches of any number of rows: what is not given comes from the model."""
    assert flags.batch is not None
    classes = [cls.__name__ for cls in repeated_classes(model)[:1]] if not flags.wrap else []
    if classes:
        assumed["units"] = f"modules of {classes[0]} (--wrap)"
    flags = replace(flags, wrap=flags.wrap or classes, fit=None)
    if flags.batch != _AUTO:
        return flags
    config = getattr(model, "config", None)
    known = [(name, getattr(config, name, None)) for name in _LENGTHS]
    found = next(((name, length) for name, length in known if isinstance(length, int)), None)
    if found is None:
        raise OptionError(
            f"{type(model).__name__} has no config that says how long its input is ({', '.join(_LENGTHS)}). Name the "
            "shape of a row, as --batch autox2048."
        )
    assumed["length"] = f"{found[1]} tokens, the model's own ({found[0]}); --batch {_AUTO}x2048 sets another"
    return replace(flags, batch=f"{_AUTO}x{found[1]}", tokens=True)


def _unit_arguments(model: nn.Module, flags: PlanFlags, assumed: dict[str, str], *, is_hub: bool) -> dict[str, Any]:
    """Return the arguments of plan() that decide on units; the model gets the dtype that its precision says."""
    if flags.strategy is not None and flags.strategy.partition(":")[0].upper() not in ShardingStrategy.__members__:
        raise OptionError(
            f"--strategy is one of {', '.join(ShardingStrategy.__members__)}, or with a memory budget "
            f"FULL_SHARD:40GB; got {flags.strategy}."
        )
    # A search tries the hybrid strategies by itself.
    strategy = "HYBRID_SHARD" if (flags.strategy, flags.fit) == (None, None) and flags.replicas > 1 else flags.strategy
    precision = flags.precision or ("bf16" if is_hub else "as-built")
    held, computed = PRECISIONS[precision]
    if held is not None:
        model.to(held)
    arguments: dict[str, Any] = {
        "num_replicas": flags.replicas,
        "api": APIS[flags.api],
        "auto_wrap_policy": ModuleWrapPolicy(classes_named(model, list(flags.wrap))) if flags.wrap else None,
        "sharding_strategy": strategy if strategy is None or ":" in strategy else ShardingStrategy[strategy.upper()],
    }
    dtypes = ", ".join(sorted({_dtype_text(param.dtype) for param in model.parameters()})) or "no"
    text = f"{precision}: {dtypes} parameters, gradients and optimizer states"
    if computed is not None:
        kind = MixedPrecisionPolicy if flags.api == "fully_shard" else MixedPrecision
        reduced = _REDUCE_DTYPES[flags.reduce_dtype]
        arguments["mixed_precision"] = kind(param_dtype=computed, reduce_dtype=reduced)
        text += f", computes in {_dtype_text(computed)}, reduces in {_dtype_text(reduced)}"
    assumed["precision"] = text
    return arguments


def _step_arguments(model: nn.Module, flags: PlanFlags, assumed: dict[str, str], *, is_hub: bool) -> dict[str, Any]:
    """Return the arguments of plan() that decide on a step."""
    assert flags.batch is not None
    sizes = _sizes_of(flags.batch)
    rows = torch.empty(sizes, dtype=torch.long if flags.tokens else _input_dtype(model), device="meta")
    batch = hub_batch(model, rows) if is_hub else rows
    computes_loss = isinstance(batch, dict) and "labels" in batch
    make, text = _optimizer_of(flags)
    assumed["optimizer"] = text
    if flags.loss is not None:
        assumed["loss"] = flags.loss
    elif computes_loss:
        assumed["loss"] = "the model's own, from labels"
    else:
        assumed["loss"] = "the model's own if it returns one, or the sum of its output (--loss)"
    if flags.accumulate:
        assumed["gradients"] = "those of an earlier backward are kept"
    chosen = flags.offload is not None or flags.offload_optimizer
    given_loss = {} if flags.loss is None else {"loss": imported(flags.loss)}
    return {
        **given_loss,
        "batch": batch,
        "optimizer": make,
        "checkpointing": flags.recompute,
        "cpu_offload": CPUOffload(bool(flags.offload), flags.offload_optimizer) if chosen else None,
        "offload_activations": flags.offload_activations,
        "accumulates": flags.accumulate,
        "device_type": flags.device,
        "fit": flags.fit,
        "bandwidth": None if flags.bandwidth is None else speed_of("--bandwidth", flags.bandwidth, BYTES_A_SECOND),
        "flops": None if flags.flops is None else speed_of("--flops", flags.flops, FLOPS),
    }


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes_of(shape: str) -> list[int]:
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError as error:
        raise OptionError(f"--batch is a shape like 4x2048, or {_AUTO}; got {shape}.") from error
    if min(sizes) < 1:
        raise OptionError(f"--batch is a shape of positive sizes, like 4x2048; got {shape}.")
    return sizes


def _input_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, in which a model as built takes its input."""
    return next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.get_default_dtype())


def _optimizer_of(flags: PlanFlags) -> tuple[MakeOptimizer | None, str]:
    """Return what makes the optimizer, and its name for people."""
    name = flags.optimizer
    if name.lower() == "none":
        if flags.fused:
            raise OptionError("--fused is an implementation of an optimizer, and --optimizer none is none.")
        return None, "none"
    if ":" in name:
        made: Callable[..., Any] = imported(name)
    else:
        base = torch.optim.Optimizer
        classes = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, base)]
        known = {each.__name__.lower(): each.__name__ for each in classes if each is not base}
        if name.lower() not in known:
            choices = ", ".join(sorted(known.values()))
            raise OptionError(f"--optimizer is none, module:function, or one of {choices}; got {name}.")
        made, name = getattr(torch.optim, known[name.lower()]), known[name.lower()]
    if not flags.fused:
        return made, name
    if "fused" not in inspect.signature(made).parameters:
        raise OptionError(f"{name} has no fused implementation; leave out --fused.")
    return partial(made, fused=True), f"{name}, fused"


def _place_of(error: BaseException) -> str:
    """Return where the innermost code raised that belongs neither to torch nor to this library, or an empty text."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _data_of(found: StepPlan, assumed: dict[str, str]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "assumed": assumed,
        "units": [asdict(unit) for unit in found.units],
        "shard_nbytes": found.shard_nbytes,
    }
    if not found.phases:
        return data
    peak = found.peak
    return data | {
        "peak_nbytes": found.peak_nbytes,
        "peak": {**asdict(peak.nbytes), "phase": peak.phase.value, "unit": peak.unit},
        "phases": {
            moment.phase.value: {**asdict(moment.nbytes), "total": moment.nbytes.total} for moment in found.phases
        },
        "host_nbytes": found.host_nbytes,
        "sent_nbytes": found.sent_nbytes,
        "flops": found.flops,
        "seconds": found.seconds,
        "exposed_seconds": found.exposed_seconds,
        "fits": found.fits,
        "choices": [{k: v for k, v in asdict(choice).items() if k != "arguments"} for choice in found.choices],
    }
