"""Saves and loads full and sharded state dicts, and measures the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as dcp

from benchmarks.implementations import library_of
from benchmarks.spec import Implementation

Save = Callable[[], Any]
Load = Callable[[Any], Any]


def measure_states(
    each: Implementation, model: Any, optimizer: torch.optim.Optimizer, repeats: int = 3
) -> dict[str, float]:
    """Return median seconds by kind: "model full", "load model full", ...

    Every rank must call this. The optimizer must have stepped.
    """
    results: dict[str, Any] = {}
    for kind, (save, load) in state_dicts(each, model, optimizer).items():
        results[kind] = _median(save, repeats)
        results[f"load {kind}"] = _median(partial(load, save()), repeats)
    return results


def _median(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def state_dicts(each: Implementation, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Save, Load]]:
    """Return by kind of state dict the functions that save and load it. Every rank must call each."""
    if not each.is_sharded:
        return {"model full": (lambda: {k: v.clone() for k, v in model.state_dict().items()}, model.load_state_dict)}
    found: dict[str, tuple[Save, Load]] = {}
    if not each.is_wrapper:
        for kind in ("full", "sharded"):
            options = dcp.StateDictOptions(full_state_dict=kind == "full")
            found[f"model {kind}"] = (
                partial(dcp.get_model_state_dict, model, options=options),
                partial(dcp.set_model_state_dict, model, options=options),
            )
            found[f"optimizer {kind}"] = (
                partial(dcp.get_optimizer_state_dict, model, optimizer, options=options),
                partial(dcp.set_optimizer_state_dict, model, optimizer, options=options),
            )
        return found
    library = library_of(each)
    FSDP = library.FullyShardedDataParallel

    def load_optimizer(state: Any) -> None:
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))

    for form in ("Full", "Sharded"):
        configs = [getattr(library, f"{form}{part}StateDictConfig")(offload_to_cpu=False) for part in ("", "Optim")]
        of_type = partial(_of_type, library, model, library.StateDictType[f"{form.upper()}_STATE_DICT"], configs)
        found[f"model {form.lower()}"] = of_type(model.state_dict), of_type(model.load_state_dict)
        found[f"optimizer {form.lower()}"] = (
            of_type(partial(FSDP.optim_state_dict, model, optimizer)),
            of_type(load_optimizer),
        )
    return found


def _of_type(library: Any, model: Any, kind: Any, configs: list[Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a call while a type of state dicts is chosen."""

    def call_inside(*state: Any) -> Any:
        with library.FullyShardedDataParallel.state_dict_type(model, kind, *configs):
            return call(*state)

    return call_inside
