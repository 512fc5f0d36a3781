"""For one GPU: ``python -m benchmarks.gpu``. It has never run on one; on the CPU it runs with ``--device cpu``.

Two parts. First, two ranks share the device over gloo and train beside a replicated model: a missing wait between
streams would show as another loss or weight. Then one process, as rank 0 of a group that only pretends to
communicate, trains a GPT of about 1B parameters in bf16 with fp32 masters: time a step, peak memory, and whether
memory is the same in every step, for plain training, torch's FSDP1 and fully_shard, and fsdp_flat. Nothing is
sent in the second part, so it says what a library adds to compute, not how well communication is hidden.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.implementations import library_of, optimizer_for, quiet, wrap
from benchmarks.model import GPT, batch_of, loss_of
from benchmarks.runner import where
from benchmarks.spec import Setting
from benchmarks.tables import markdown

__all__ = ["check_streams", "main", "measure"]

LARGE = Setting(layers=20, width=2048, heads=16, vocab=32768, seq=2048, batch=2, bf16=True, fused=True)
SMALL = Setting(layers=8, width=1024, heads=16, vocab=512, seq=256, batch=4)
TINY = Setting(layers=2, width=32, heads=2, vocab=64, seq=16, batch=2, steps=2, warmup=1)
NAMES = ("local", "fsdp1-full-orig", "fsdp2", "flat-full-flat", "flat-full-orig")


def check_streams(setting: Setting, device: str, steps: int = 5) -> float:
    """Two processes train on one device against a replicated model; returns the largest difference of a weight."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train_beside_replica, (setting, device, steps, folder), nprocs=2)
        return max(float((Path(folder) / f"{rank}").read_text()) for rank in range(2))


def _train_beside_replica(rank: int, setting: Setting, device: str, steps: int, folder: str) -> None:
    from fsdp_flat import FullyShardedDataParallel as FSDP

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    where_to = torch.device(device)
    torch.manual_seed(0)
    plain = GPT(setting).to(where_to)
    sharded = wrap("flat-full-orig", copy.deepcopy(plain), setting, where_to)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for step in range(steps):
        both = [batch_of(setting, r, step, device) for r in range(2)]
        sum(loss_of(plain, tokens) / 2 for tokens in both).backward()
        loss_of(sharded, both[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    with FSDP.summon_full_params(sharded):
        worst = max(float((p - expected[name]).detach().abs().max()) for name, p in sharded.named_parameters())
    Path(folder, f"{rank}").write_text(str(worst))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, setting: Setting, device: str, world: int) -> dict[str, Any]:
    """In this process, as rank 0 of ``world`` pretended ranks: seconds a step, peak bytes, bytes held after each step.

    Memory is 0 where the device keeps no statistics.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with quiet():
            return _measure(name, setting, torch.device(device))
    finally:
        dist.destroy_process_group()


def _measure(name: str, setting: Setting, device: torch.device) -> dict[str, Any]:
    library_of(name)
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = wrap(name, GPT(setting), setting, device)
    optimizer = optimizer_for(model, setting)
    tokens = batch_of(setting, 0, 0, device.type)
    times, held = [], []
    for step in range(setting.warmup + setting.steps):
        if on_gpu and step == setting.warmup:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.bf16 and name == "local"):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        held.append(torch.cuda.memory_allocated() if on_gpu else 0)
    return {
        "step": statistics.median(times[setting.warmup :]),
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "held": held[setting.warmup :],
    }


def _measure_into(_index: int, name: str, setting: Setting, device: str, world: int, path: str) -> None:
    Path(path).write_text(json.dumps(measure(name, setting, device, world)))


def main(argv: list[str] | None = None) -> None:
    """Check, measure in fresh processes, write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--world", type=int, default=8, help="pretended ranks; parameters are split over as many")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the script out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the script out")
    setting = replace(TINY, bf16=True) if args.tiny else LARGE
    worst = check_streams(TINY if args.tiny else SMALL, args.device)
    print(f"largest difference of a weight from the replicated model after 5 steps: {worst:.2e}", flush=True)
    rows: dict[str, Any] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_measure_into, (name, setting, args.device, args.world, f"{folder}/out"), nprocs=1)
            rows[name] = json.loads(Path(folder, "out").read_text())
    header = ["implementation", "step ms", "peak MB", "reserved MB", "held after a step, MB"]
    table = markdown(
        header,
        [
            [
                name,
                f"{1e3 * row['step']:.1f}",
                f"{row['peak'] / 1e6:.0f}",
                f"{row['reserved'] / 1e6:.0f}",
                ", ".join(sorted({f"{held / 1e6:.1f}" for held in row["held"]})),
            ]
            for name, row in rows.items()
        ],
    )
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"device": device_name, "worst": worst, "rows": rows, "where": where()}
    (args.out / "gpu.json").write_text(json.dumps(results, indent=1))
    print(table)


if __name__ == "__main__":
    main()
