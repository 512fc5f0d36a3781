"""Measures one GPU: ``python -m benchmarks.gpu``; ``--device cpu --tiny`` tries out the command without a GPU.

One process is rank 0 of a simulated process group. It trains a GPT of about 1B parameters in bf16 with fp32 master
weights, and measures the time of a step, the time in which the host issues it, and memory, for plain training, torch's
FSDP1 and ``fully_shard``, and fsdp_flat. Compute is real; nothing is sent. From this rank's own data, an all-gather
fills the full buffer and a reduce-scatter the local shard. The figures show a library's overhead over compute, not how
well communication overlaps with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.implementations import autocast_for, library_of, optimizer_for, quiet, wrap
from benchmarks.model import GPT, batch_of, loss_of
from benchmarks.runner import ROOT, where
from benchmarks.spec import IMPLEMENTATIONS, Setting
from benchmarks.tables import markdown, medians, ratios

LARGE = Setting(
    layers=16, width=2048, heads=16, vocab=32768, seq=2048, batch=2, steps=10, warmup=3, bf16=True, fused=True
)
TINY = Setting(layers=2, width=32, heads=2, vocab=64, seq=16, batch=2, steps=2, warmup=1, bf16=True)
LABELS = {
    **{name: IMPLEMENTATIONS[name] for name in ("local", "fsdp1-full-flat", "fsdp1-full-orig", "fsdp1-grad-op")},
    "fsdp1-grad-op-flat": "torch FSDP1, SHARD_GRAD_OP, use_orig_params=False",
    **{name: IMPLEMENTATIONS[name] for name in ("fsdp2", "fsdp2-no-reshard")},
    **{name: IMPLEMENTATIONS[name] for name in ("flat-full-flat", "flat-full-orig", "flat-grad-op")},
    "flat-grad-op-flat": "fsdp_flat, SHARD_GRAD_OP, use_orig_params=False",
    **{name: IMPLEMENTATIONS[name] for name in ("flat-fully-shard", "flat-fully-shard-no-reshard")},
}
_FULL_PEERS = ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2")
_GRAD_OP_PEERS = ("fsdp1-grad-op", "fsdp1-grad-op-flat", "fsdp2-no-reshard")
# For each fsdp_flat variant, the torch implementations with the same resharding; the best in each round counts.
PEERS = {
    "flat-full-flat": _FULL_PEERS,
    "flat-full-orig": _FULL_PEERS,
    "flat-grad-op": _GRAD_OP_PEERS,
    "flat-grad-op-flat": _GRAD_OP_PEERS,
    "flat-fully-shard": ("fsdp2",),
    "flat-fully-shard-no-reshard": ("fsdp2-no-reshard",),
}
_ALL_GATHERS = ("all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


class _Done:
    """Stands for a finished collective, whose result is ready on the current stream."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input of a collective, flattened, under the argument names of any torch version."""
    values = [*args, *(kwargs[name] for name in ("output", "output_tensor", "input", "input_tensor") if name in kwargs)]
    return values[0].view(-1), values[1].view(-1)


@contextmanager
def pretended(world: int) -> Iterator[None]:
    """Make this process rank 0 of ``world`` simulated ranks inside the block.

    The collectives of torch's fake backend launch one copy per rank and leave the result of a reduction undefined.
    These launch one or two copies and return this rank's shard, so that host time is the library's and values stay
    finite.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fsdp_flat.comm import torch_comm

    def all_gather(*args: Any, **kwargs: Any) -> _Done:
        output, own = _tensors(args, kwargs)
        rows = output.view(world, -1)
        # The local shard may be the first row itself.
        if own.data_ptr() != output.data_ptr():
            rows[0].copy_(own)
        rows[1:].copy_(own)
        return _Done()

    def reduce_scatter(*args: Any, **kwargs: Any) -> _Done:
        output, whole = _tensors(args, kwargs)
        output.copy_(whole[: output.numel()])
        return _Done()

    replaced: list[tuple[Any, str, Any]] = []
    for names, function in ((_ALL_GATHERS, all_gather), (_REDUCE_SCATTERS, reduce_scatter)):
        for owner in (dist, torch_comm):
            for name in names:
                if hasattr(owner, name):
                    replaced.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, function)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def measure(name: str, setting: Setting, device: str, world: int) -> dict[str, float]:
    """Train in this process, as rank 0 of ``world`` simulated ranks.

    Args:
        name: a key of ``LABELS``.
        setting: the model and how it is trained.
        device: ``"cuda"`` or ``"cpu"``.
        world: ranks.

    Returns:
        ``step`` and ``least`` (seconds; median and minimum device time of a step, over steps issued one after the
        other), ``host`` and ``host_least`` (seconds; median and minimum time in which the host issues a step to an idle
        device), ``peak``, ``reserved``, ``held`` (bytes; after a step), ``drift`` (bytes; maximum minus minimum of
        ``held`` over steps), ``parameters``. On the CPU, issuing a step includes computing it, and memory is 0.
    """
    where_to = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    with pretended(world), quiet():
        return _train(name, setting, where_to)


def _train(name: str, setting: Setting, device: torch.device) -> dict[str, float]:
    library_of(name)
    clock: _Clock = _DeviceClock(device) if device.type == "cuda" else _Clock()
    torch.manual_seed(0)
    with device:
        plain = GPT(setting)
    num_parameters = sum(param.numel() for param in plain.parameters())
    model = wrap(name, plain, setting, device)
    optimizer = optimizer_for(model, setting)
    tokens = batch_of(setting, 0, 0, device.type)

    def step() -> None:
        with autocast_for(name, setting, device.type):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(setting.warmup):
        step()
    clock.synchronize()
    clock.reset_peak()
    for _ in range(setting.steps):
        clock.mark()
        step()
    clock.mark()
    times = clock.seconds_between_marks()
    host, held = [], []
    for _ in range(setting.steps):
        clock.synchronize()
        begun = time.perf_counter()
        step()
        host.append(time.perf_counter() - begun)
        held.append(clock.allocated())
    clock.synchronize()
    return {
        "step": statistics.median(times),
        "least": min(times),
        "host": statistics.median(host),
        "host_least": min(host),
        "peak": clock.peak(),
        "reserved": clock.reserved(),
        "held": max(held),
        "drift": max(held) - min(held),
        "parameters": num_parameters,
    }


class _Clock:
    """Measures time on the CPU, which has no memory statistics."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record the time at which everything issued so far is done."""
        self._marks.append(time.perf_counter())

    def seconds_between_marks(self) -> list[float]:
        """Return the seconds from each mark to the next, once all are reached."""
        return [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def reset_peak(self) -> None:
        """Restart the recording of peak memory."""

    def allocated(self) -> int:
        """Return the bytes of tensors that are allocated now."""
        return 0

    def peak(self) -> int:
        """Return the peak bytes of tensors since :meth:`reset_peak`."""
        return 0

    def reserved(self) -> int:
        """Return the peak bytes reserved by the allocator since :meth:`reset_peak`."""
        return 0


class _DeviceClock(_Clock):
    """Measures time with events of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds_between_marks(self) -> list[float]:
        self.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def gpu_table(results: Mapping[str, Any]) -> str:
    """Make the table: medians over rounds, and ratios within a round to the best torch implementation.

    Args:
        results: ``rounds`` (a list of {name: figures of :func:`measure`}) and ``setting`` (plain values).
    """
    rows = medians(results)
    units = results["setting"]["layers"] + 1
    local = rows.get("local", {}).get("host_least")
    header = ["implementation", "step ms", "least", "x local", "x torch", "host ms", "host x torch", "host ms a unit"]
    header += ["peak MB", "peak x torch", "reserved MB", "held MB", "drift MB"]
    table = []
    for name, row in rows.items():
        peers = PEERS.get(name, ())
        own = None if local is None or name == "local" else (row["host_least"] - local) / units
        table.append(
            [
                LABELS[name],
                f"{1e3 * row['step']:.1f}",
                f"{1e3 * min(one[name]['least'] for one in results['rounds']):.1f}",
                _cell(ratios(results, name, ["local"])),
                _cell(ratios(results, name, peers)),
                f"{1e3 * row['host']:.1f}",
                _cell(ratios(results, name, peers, "host")),
                "" if own is None else f"{1e3 * own:.3f}",
                f"{row['peak'] / 1e6:.0f}",
                _cell(ratios(results, name, peers, "peak") if row["peak"] else None),
                f"{row['reserved'] / 1e6:.0f}",
                f"{row['held'] / 1e6:.1f}",
                f"{max(one[name]['drift'] for one in results['rounds']) / 1e6:.1f}",
            ]
        )
    return markdown(header, table)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _describe(results: Mapping[str, Any]) -> str:
    s, place = results["setting"], results["where"]
    first = next(iter(results["rounds"][0].values()))
    return (
        f"{first['parameters'] / 1e9:.2f}B parameters: {s['layers']} blocks, width {s['width']}, vocabulary "
        f"{s['vocab']}, sequence {s['seq']}, batch {s['batch']}; rank 0 of {results['world']} simulated ranks; "
        f"{'bf16 compute, fp32 reduction and master weights' if s['bf16'] else 'fp32'}; "
        f"{'activations recomputed; ' if s['checkpoint'] else ''}{'fused ' if s['fused'] else ''}Adam. "
        f"{len(results['rounds'])} rounds of fresh processes, {s['steps']} timed steps each.\n"
        f"{results['device']}, Python {place['python']}, torch {place['torch']}, {place['date']}.\n"
    )


def _in_new_process(name: str, setting: Setting, device: str, world: int) -> dict[str, float]:
    job = json.dumps({"name": name, "setting": asdict(setting), "device": device, "world": world})
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", job]
    # On the CPU, kernels are too small for several threads.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} if device == "cpu" else None
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure_rounds(
    names: Sequence[str], setting: Setting, device: str, world: int, rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    found = []
    for index in range(rounds):
        row: dict[str, Any] = {}
        # Reverse every other round, so that a device that slows down affects every implementation.
        for name in names if index % 2 == 0 else reversed(names):
            row[name] = one = _in_new_process(name, setting, device, world)
            say(
                f"round {index + 1}/{rounds} {name}: {1e3 * one['step']:.1f} ms a step, {1e3 * one['host']:.1f} ms of "
                f"the host, {one['peak'] / 1e6:.0f} MB"
            )
        found.append({name: row[name] for name in names})
    return found


def default_folder() -> Path:
    """Return the folder for results: ``$OUT`` if set, otherwise ``benchmarks/results``."""
    return Path(os.environ.get("OUT") or "benchmarks/results")


def main(argv: list[str] | None = None) -> None:
    """Measure in fresh processes; write JSON and a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--world", type=int, default=8, help="simulated ranks, over which parameters are sharded")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the command out")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of fresh processes")
    parser.add_argument("--only", nargs="+", choices=LABELS, default=list(LABELS), help="implementations")
    parser.add_argument("--out", type=Path, default=default_folder(), help="folder for JSON and table")
    parser.add_argument("--here", metavar="JOB", help="measure one implementation in this process and print the result")
    sizes = [field for field in fields(Setting) if field.name not in ("ranks", "accumulate")]
    for field in sizes:
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(f"--{field.name}", type=int, default=None)
    args = parser.parse_args(argv)
    if args.here:
        job = json.loads(args.here)
        print(json.dumps(measure(job["name"], Setting(**job["setting"]), job["device"], job["world"])))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the command out")
    changed = {field.name: value for field in sizes if (value := getattr(args, field.name)) is not None}
    setting = replace(TINY if args.tiny else LARGE, **changed)
    rounds = _measure_rounds(
        args.only, setting, args.device, args.world, args.rounds, lambda line: print(line, flush=True)
    )
    results = {
        "setting": asdict(setting),
        "world": args.world,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "where": where(),
        "rounds": rounds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    text = f"{_describe(results)}\n{gpu_table(results)}"
    # Results of a trial must not appear in docs/performance.md.
    name = "gpu" if args.device == "cuda" and not args.tiny else "gpu-trial"
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1))
    (args.out / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
