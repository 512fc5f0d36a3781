"""Measures and plans the bytes and the time of each way to save memory: ``python -m benchmarks.memory``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.counting import Counter
from benchmarks.implementations import quiet
from benchmarks.model import GPT, Block, batch_of, loss_of
from benchmarks.runner import on_ranks, where
from benchmarks.spec import IMPLEMENTATIONS, PRESETS, Setting
from benchmarks.tables import machine, markdown
from benchmarks.worker import Training
from fsdp_flat import CPUOffload, MixedPrecision, ShardingStrategy, plan
from fsdp_flat.wrap import ModuleWrapPolicy


class Row(NamedTuple):
    """Describes a way to save memory.

    Attributes:
        title: as the page has it.
        strategy: of the wrapper.
        changes: of the setting.
        offloads: arguments of ``plan`` that offload. That changes nothing on a CPU, so the row is planned alone.
        mode: of ``no_sync``.
    """

    title: str
    strategy: str = "FULL_SHARD"
    changes: Mapping[str, Any] = {}
    offloads: Mapping[str, Any] = {}
    mode: str = "local"


PARTS = {"batch": 1, "accumulate": 4}
ROWS = (
    Row("`NO_SHARD`: all of it on every rank", "NO_SHARD"),
    Row("`SHARD_GRAD_OP` (ZeRO-2)", "SHARD_GRAD_OP"),
    Row("`FULL_SHARD` (ZeRO-3)"),
    Row("`FULL_SHARD`, bf16 compute", changes={"bf16": True}),
    Row("`FULL_SHARD`, activation checkpointing of each block", changes={"checkpoint": True}),
    Row("`FULL_SHARD`, 4 backwards of a quarter of the batch, `no_sync()`", changes=PARTS),
    Row('the same, `no_sync(mode="sharded")`', changes=PARTS, mode="sharded"),
    Row("`FULL_SHARD`, `offload_optimizer`", offloads={"cpu_offload": CPUOffload(offload_optimizer=True)}),
    Row("`FULL_SHARD`, `offload_activations`", offloads={"offload_activations": True}),
    Row("`FULL_SHARD`, `CPUOffload(offload_params=True)`", offloads={"cpu_offload": CPUOffload(offload_params=True)}),
)
HEADER = [
    "option",
    "peak MB, counted on CPU",
    "peak MB, planned for a GPU",
    "MB on the host, planned",
    "ms of CPU a step",
]


def measured(rank: int, row: Row, setting: Setting) -> tuple[int, float]:
    """Return the bytes of tensors at the peak of a step, and its seconds of CPU. Every rank must call this."""
    with quiet():
        each = replace(IMPLEMENTATIONS["flat-full-orig"], strategy=row.strategy)
        training = Training(each, setting, rank)
        training.no_sync = partial(training.model.no_sync, row.mode)
        for _ in range(setting.warmup):
            training.step()
        dist.barrier()
        seconds = min(training.step()["cpu"] for _ in range(setting.steps))
        with Counter() as counter:
            training.step()
    return counter.peak, seconds


def memory_row(row: Row, setting: Setting) -> list[str]:
    """Return a line of the table: measured on ranks of this machine, and planned for as many GPUs."""
    setting = replace(setting, **row.changes)
    counted = milliseconds = planned = host = ""
    if not row.offloads:
        found = on_ranks(measured, setting.ranks, row, setting)
        counted = f"{max(nbytes for nbytes, _ in found) / 1e6:.0f}"
        milliseconds = f"{1e3 * max(seconds for _, seconds in found):.0f}"
    if setting.accumulate == 1:  # a plan does not know of no_sync
        with torch.device("meta"):
            model = GPT(setting)
        found_plan = plan(
            model,
            setting.ranks,
            sharding_strategy=ShardingStrategy[row.strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if setting.bf16 else None,
            use_orig_params=True,
            batch=batch_of(setting, 0, 0),
            loss=loss_of,
            optimizer=torch.optim.Adam,
            **row.offloads,
        )
        planned = f"{found_plan.peak_nbytes / 1e6:.0f}"
        host = f"{found_plan.host_nbytes / 1e6:.0f}" if row.offloads else ""
    return [row.title, counted, planned, host, milliseconds]


def main() -> None:
    """Print the table, the setting and the machine."""
    setting = replace(PRESETS["compute"], steps=2, warmup=1)
    rows = [memory_row(row, setting) for row in ROWS]
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(setting).parameters())
    print(markdown(HEADER, rows))
    print(
        f"GPT of {numel / 1e6:.0f} million parameters ({setting.layers} blocks, width {setting.width}, vocabulary "
        f"{setting.vocab}), sequence {setting.seq}, batch {setting.batch} of a rank, fp32, Adam; {setting.ranks} ranks "
        f"of one thread on CPU: {machine({'where': where()})}"
    )


if __name__ == "__main__":
    main()
