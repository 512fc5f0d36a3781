"""Saves and loads every kind of state dict, and measures the time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.spec import is_fully_shard

Kind = tuple[str, Callable[[], Any], "Callable[[Any], Any] | None"]


def measure_states(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: int = 3) -> dict[str, Any]:
    """Return median seconds by kind: "model full", "load model full", ...; the error as a string if a kind raised.

    Every rank must call this. The optimizer must have stepped.
    """
    results: dict[str, Any] = {}
    for kind, save, load in _kinds(name, model, optimizer):
        results[kind] = _median(save, repeats)
        if load is not None and not isinstance(results[kind], str):
            state = save()
            results[f"load {kind}"] = _median(lambda load=load, state=state: load(state), repeats)
    return results


def _median(call: Callable[[], Any], repeats: int) -> float | str:
    times = []
    for _ in range(repeats):
        dist.barrier()
        begun = time.perf_counter()
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _kinds(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Kind]:
    if name in ("local", "ddp"):
        yield "model full", lambda: {k: v.clone() for k, v in model.state_dict().items()}, model.load_state_dict
        return
    if is_fully_shard(name):
        yield from _fsdp2_kinds(model, optimizer)
        return
    yield from _fsdp1_kinds(name, model, optimizer)


def _fsdp1_kinds(name: str, model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Kind]:
    if name.startswith("fsdp1"):
        from torch.distributed import fsdp as library
    else:
        import fsdp_flat as library
    FSDP, types = library.FullyShardedDataParallel, library.StateDictType

    def of(form: str, **flags: bool) -> tuple[Any, ...]:
        configs = (getattr(library, f"{form}{part}StateDictConfig") for part in ("", "Optim"))
        return types[f"{form.upper()}_STATE_DICT"], *(config(offload_to_cpu=False, **flags) for config in configs)

    settings = {
        "full": of("Full"),
        "full, rank 0": of("Full", rank0_only=True),
        "sharded": of("Sharded"),
        "local": of("Local"),
        **({} if name.startswith("fsdp1") else {"boxes": of("Sharded", boxes=True)}),
    }
    for kind, setting in settings.items():

        def typed(setting: Any = setting) -> Any:
            return FSDP.state_dict_type(model, *setting)

        def save(typed: Any = typed) -> Any:
            with typed():
                return model.state_dict()

        def load(state: Any, typed: Any = typed) -> None:
            with typed():
                model.load_state_dict(state)

        def save_optim(typed: Any = typed) -> Any:
            with typed():
                return FSDP.optim_state_dict(model, optimizer)

        def load_optim(state: Any, typed: Any = typed) -> None:
            with typed():
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))

        # Local state dicts need flat parameters; full ones are loaded from the same dict on every rank.
        if kind == "local" and not name.endswith("flat"):
            continue
        yield f"model {kind}", save, None if kind == "full, rank 0" else load
        if kind != "local":
            yield f"optimizer {kind}", save_optim, None if kind == "full, rank 0" else load_optim


def _fsdp2_kinds(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Kind]:
    from torch.distributed.checkpoint import state_dict as dcp

    yield "model, the module's own", model.state_dict, model.load_state_dict
    for kind, options in {
        "full": dcp.StateDictOptions(full_state_dict=True),
        "full, rank 0": dcp.StateDictOptions(full_state_dict=True, cpu_offload=True),
        "sharded": dcp.StateDictOptions(),
    }.items():
        can_load = kind != "full, rank 0"
        yield (
            f"model {kind}",
            lambda options=options: dcp.get_model_state_dict(model, options=options),
            (lambda state, options=options: dcp.set_model_state_dict(model, state, options=options))
            if can_load
            else None,
        )
        yield (
            f"optimizer {kind}",
            lambda options=options: dcp.get_optimizer_state_dict(model, optimizer, options=options),
            (lambda state, options=options: dcp.set_optimizer_state_dict(model, optimizer, state, options=options))
            if can_load
            else None,
        )
