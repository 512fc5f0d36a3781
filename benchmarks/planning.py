"""Writes into docs/ what plans say: outputs of ``examples/plan_and_record.py``, and the table of ways to save memory.

``python -m benchmarks.planning`` writes docs/planning.md, ``python -m benchmarks.planning --memory`` docs/memory.md.
Where transformers is installed, the first also runs the command on its page.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.counting import Counter
from benchmarks.implementations import quiet
from benchmarks.model import GPT, Block, batch_of, loss_of
from benchmarks.runner import ROOT, where
from benchmarks.spec import PRESETS, Setting
from benchmarks.tables import machine, markdown
from fsdp_flat import CPUOffload, MixedPrecision, ShardingStrategy, plan
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy

PAGE = ROOT / "docs" / "planning.md"
MEMORY_PAGE = ROOT / "docs" / "memory.md"
EXAMPLE = ROOT / "examples" / "plan_and_record.py"
# A name of a file that the example writes, and the text between it and the end of the block below.
OUTPUT = re.compile(r"(<!-- (\w+\.txt) -->\n```text\n)(.*?)(```\n)", re.DOTALL)
COMMAND = re.compile(r"^\$ fsdp-flat (.*)$", re.MULTILINE)
TABLE = re.compile(r"(<!-- python -m benchmarks\.planning --memory -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Row(NamedTuple):
    """Describes a way to save memory.

    Attributes:
        title: as the page has it.
        wrapper: arguments of the wrapper.
        changes: of the setting.
        offloads: arguments of ``plan`` that offload. That changes nothing on a CPU, so the row is planned alone.
        mode: of ``no_sync``.
    """

    title: str
    wrapper: Mapping[str, Any] = {}
    changes: Mapping[str, Any] = {}
    offloads: Mapping[str, Any] = {}
    mode: Literal["local", "sharded"] = "local"


PARTS = {"batch": 1, "accumulate": 4}
ROWS = (
    Row("`NO_SHARD`: all of it on every rank", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    Row("`SHARD_GRAD_OP` (ZeRO-2)", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    Row("`FULL_SHARD` (ZeRO-3)"),
    Row("`FULL_SHARD`, bf16 compute", {"mixed_precision": BF16}),
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


def with_outputs(page: str, folder: Path) -> str:
    """Return the page with the texts of ``folder`` in the blocks that are marked with their names."""
    texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
    return OUTPUT.sub(lambda block: block[1] + texts.get(block[2], block[3]) + block[4], page)


def output_of_command(page: str) -> str:
    """Run the command that the page shows, and return the line and what it prints."""
    (line,) = COMMAND.findall(page)
    command = [sys.executable, "-m", "fsdp_flat", *shlex.split(line)]
    shown = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return f"$ fsdp-flat {line}\n{shown}"


def outputs_of(page: str) -> dict[str, str]:
    """Return the text in each marked block of a page, by the name of its file."""
    return {block[2]: block[3] for block in OUTPUT.finditer(page)}


def memory_row(row: Row, setting: Setting) -> list[str]:
    """Return a line of the table: measured on ranks of this machine, and planned for as many GPUs."""
    setting = replace(setting, **row.changes)
    counted = milliseconds = planned = host = ""
    if not row.offloads:
        found = _on_ranks(row, setting)
        counted = f"{max(nbytes for nbytes, _ in found) / 1e6:.0f}"
        milliseconds = f"{1e3 * max(seconds for _, seconds in found):.0f}"
    if setting.accumulate == 1:  # a plan does not know of no_sync
        with torch.device("meta"):
            model = GPT(setting)
        found_plan = plan(
            model,
            setting.ranks,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            batch=torch.empty(setting.batch, setting.seq + 1, dtype=torch.long, device="meta"),
            loss=loss_of,
            optimizer=torch.optim.Adam,
            **row.wrapper,
            **row.offloads,
        )
        planned = f"{found_plan.peak_nbytes / 1e6:.0f}"
        host = f"{found_plan.host_nbytes / 1e6:.0f}" if row.offloads else ""
    return [row.title, counted, planned, host, milliseconds]


def _on_ranks(row: Row, setting: Setting) -> list[tuple[int, float]]:
    """Run the row in new processes; return of each rank the bytes at the peak of a step, and the CPU's seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_on_rank, (row, setting, store.port), setting.ranks)
    return [json.loads(store.get(str(rank))) for rank in range(setting.ranks)]


def _on_rank(rank: int, row: Row, setting: Setting, port: int) -> None:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    torch.manual_seed(0)
    with quiet():
        model = FSDP(GPT(setting), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, **row.wrapper)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batches = [batch_of(setting, rank, index) for index in range(setting.accumulate)]

    def step() -> float:
        begun = time.process_time()
        for index, batch in enumerate(batches, start=1):
            with nullcontext() if index == len(batches) else model.no_sync(row.mode):
                (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    for _ in range(setting.warmup):
        step()
    dist.barrier()
    seconds = min(step() for _ in range(setting.steps))
    with quiet(), Counter() as counter:
        step()
    store.set(str(rank), json.dumps([counter.peak, seconds]))
    dist.destroy_process_group()


def memory_table(setting: Setting) -> str:
    """Measure and plan every row, and return the table with the setting and the machine below."""
    rows = [memory_row(row, setting) for row in ROWS]
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(setting).parameters())
    model = (
        f"GPT of {numel / 1e6:.0f} million parameters ({setting.layers} blocks, width {setting.width}, vocabulary "
        f"{setting.vocab}), sequence {setting.seq}, batch {setting.batch} of a rank, fp32, Adam; {setting.ranks} ranks "
        "of one thread on CPU:"
    )
    lines = textwrap.wrap(f"{model} {machine({'where': where()})}", 120)
    return "\n".join([markdown(HEADER, rows), *lines, ""])


def main(argv: list[str] | None = None) -> None:
    """Run the example, and replace the texts and pictures of the page, and the line on the machine; or the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--memory", action="store_true", help="write the table of docs/memory.md instead")
    args = parser.parse_args(argv)
    if args.memory:
        table = memory_table(replace(PRESETS["compute"], steps=2, warmup=1))
        MEMORY_PAGE.write_text(TABLE.sub(lambda found: found[1] + table + found[3], MEMORY_PAGE.read_text()))
        return
    folder = args.page.parent / args.page.stem
    subprocess.run([sys.executable, EXAMPLE, "--out", folder], check=True)
    if find_spec("transformers"):
        (folder / "batch.txt").write_text(output_of_command(args.page.read_text()))
    (folder / "machine.txt").write_text(machine({"where": where()}))
    args.page.write_text(with_outputs(args.page.read_text(), folder))
    for path in [*folder.glob("*.txt"), *folder.glob("*.json")]:
        path.unlink()


if __name__ == "__main__":
    main()
