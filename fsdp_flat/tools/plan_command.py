"""Shows the plan of a model that a command line names: the function behind ``plan`` and ``describe``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fsdp_flat.api import ShardingStrategy
from fsdp_flat.errors import OptionError
from fsdp_flat.tools.command_output import show
from fsdp_flat.tools.named_models import classes_named, named_model
from fsdp_flat.tools.planning import plan
from fsdp_flat.wrap import ModuleWrapPolicy


def show_plan(
    name: str,
    num_ranks: int,
    *,
    shape: str | None,
    wrap: Sequence[str],
    allow_pickle: bool,
    as_json: bool,
    arguments: dict[str, Any],
    is_tokens: bool = False,
    picture: Path | None = None,
) -> int:
    """Show the units of a model, and of a step if the shape of a batch is given; return 1 if nothing fits.

    Args:
        name: the model; see :func:`named_model`.
        num_ranks: ranks of the job.
        shape: a rank's input, as "4x2048".
        wrap: names of the classes of modules to make units of.
        allow_pickle: as of :func:`named_model`.
        as_json: print JSON.
        arguments: of :func:`plan`; the strategy by its name.
        is_tokens: the input is of integers.
        picture: a file to draw the memory of the step into.
    """
    model = named_model(name, allow_pickle=allow_pickle)
    strategy = arguments.get("sharding_strategy")
    if strategy is not None and strategy not in ShardingStrategy.__members__:
        raise OptionError(f"--strategy is one of {', '.join(ShardingStrategy.__members__)}; got {strategy}.")
    found = plan(
        model,
        num_ranks,
        **{key: value for key, value in arguments.items() if key != "sharding_strategy" and value is not None},
        sharding_strategy=None if strategy is None else ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy(classes_named(model, list(wrap))) if wrap else None,
        batch=None if shape is None else _batch_of(shape, is_tokens=is_tokens),
    )
    if picture is not None:
        found.save(picture)
    data: dict[str, Any] = {"units": [asdict(unit) for unit in found.units], "shard_nbytes": found.shard_nbytes}
    if shape is not None:
        peak = found.peak
        data |= {
            "peak_nbytes": found.peak_nbytes,
            "peak": {**asdict(peak.nbytes), "phase": peak.phase.value, "unit": peak.unit},
            "sent_nbytes": found.sent_nbytes,
            "flops": found.flops,
            "fits": found.fits,
            "choices": [{k: v for k, v in asdict(choice).items() if k != "arguments"} for choice in found.choices],
        }
    show(data, str(found), as_json=as_json)
    return int(not found.fits) if shape is not None else 0


def _batch_of(shape: str, *, is_tokens: bool) -> torch.Tensor:
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError as error:
        raise OptionError(f"--batch is a shape like 4x2048; got {shape}.") from error
    return torch.empty(sizes, dtype=torch.long if is_tokens else None, device="meta")
