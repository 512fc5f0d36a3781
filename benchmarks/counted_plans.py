"""Counts steps of CPU ranks beside their plans, for docs/planning.md: ``python -m benchmarks.counted_plans``."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.counting import Counter
from benchmarks.model import GPT, Block, batch_of, loss_of
from benchmarks.planning import PAGE
from benchmarks.spec import Setting
from benchmarks.tables import markdown
from fsdp_flat import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    plan,
)
from fsdp_flat.wrap import ModuleWrapPolicy

RANKS = 2
SETTING = Setting(layers=6, width=256, heads=4, vocab=1024, seq=128, batch=4)
AdamW = torch.optim.AdamW


class Row(NamedTuple):
    """Describes a way to train: the arguments that ``plan`` gets."""

    name: str
    is_wrapper: bool = True
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    use_orig_params: bool = False
    low_precision: bool = False
    checkpointing: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = AdamW


ROWS = (
    Row("wrapper"),
    Row("wrapper, original parameters, bf16", use_orig_params=True, low_precision=True),
    Row("wrapper, SHARD_GRAD_OP", strategy=ShardingStrategy.SHARD_GRAD_OP),
    Row("wrapper, NO_SHARD", strategy=ShardingStrategy.NO_SHARD),
    Row("wrapper, recomputation", checkpointing=True),
    Row("wrapper, fused AdamW", optimizer=partial(AdamW, fused=True)),
    Row("wrapper, foreach AdamW", optimizer=partial(AdamW, foreach=True)),
    Row("fully_shard", is_wrapper=False),
    Row("fully_shard, bf16", is_wrapper=False, low_precision=True),
    Row("fully_shard, recomputation", is_wrapper=False, checkpointing=True),
    Row("fully_shard, fused AdamW", is_wrapper=False, optimizer=partial(AdamW, fused=True)),
    Row("fully_shard, foreach AdamW", is_wrapper=False, optimizer=partial(AdamW, foreach=True)),
)


def _precision(row: Row) -> Any:
    kind = MixedPrecision if row.is_wrapper else MixedPrecisionPolicy
    return kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if row.low_precision else None


def planned(row: Row) -> list[float]:
    """Return the planned peaks of forward, backward and optimizer, and the bytes sent."""
    with torch.device("meta"):
        model = GPT(SETTING)
    found = plan(
        model,
        RANKS,
        sharding_strategy=row.strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=_precision(row),
        use_orig_params=row.use_orig_params,
        api="FullyShardedDataParallel" if row.is_wrapper else "fully_shard",
        batch=batch_of(SETTING, 0, 0),
        loss=loss_of,
        optimizer=row.optimizer,
        checkpointing=row.checkpointing,
        device_type="cpu",
    )
    return [*[moment.nbytes.total for moment in found.phases], found.sent_nbytes]


def _sharded(row: Row) -> nn.Module:
    model = GPT(SETTING)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks if row.checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    if row.is_wrapper:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=row.strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=_precision(row),
            use_orig_params=row.use_orig_params,
        )
    options = {"mp_policy": _precision(row)} if row.low_precision else {}
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class _BothSides(Counter):
    """Counts before each operator too: memory that a storage gets back is no operator's result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.alive()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, before, self.alive())
        return result


def counted(row: Row, rank: int) -> list[float]:
    """Return the peaks of the third step of this rank, and the bytes that it sends in it."""
    torch.manual_seed(0)
    gc.collect()
    batch = batch_of(SETTING, rank, 0)
    others = _BothSides().alive() - batch.nbytes
    model = _sharded(row)
    optimizer = row.optimizer(model.parameters())
    for _ in range(2):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    peaks: list[float] = []
    with _BothSides() as counter:
        loss = loss_of(model, batch)
        peaks.append(counter.peak - others)
        counter.peak = 0
        loss.backward()
        peaks.append(counter.peak - others)
        counter.peak = 0
        optimizer.step()
        peaks.append(counter.peak - others)
        return [*peaks, counter.sent]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = [counted(row, rank) for row in ROWS]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table() -> str:
    """Return the table of plans beside the larger count of the ranks, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), nprocs=RANKS)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    lines = []
    for row, *of_ranks in zip(ROWS, *ranks, strict=True):
        pairs = zip(planned(row), map(max, *of_ranks), strict=True)
        lines.append([row.name, *[f"{a / 1e6:.2f}, {b / 1e6:.2f}" for a, b in pairs]])
    return markdown(["MB: plan, counted", "forward", "backward", "optimizer", "sent"], lines)


def main(argv: list[str] | None = None) -> None:
    """Write the table into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counted_plans", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    found = table()
    print(found)
    page = args.page.read_text()
    begin, end = "<!-- counted_plans -->\n", "<!-- end of counted_plans -->"
    before, _, rest = page.partition(begin)
    args.page.write_text(before + begin + found + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
