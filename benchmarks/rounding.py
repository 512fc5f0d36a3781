"""Trains with collectives in fewer bits beside exact ones, and compares the losses: ``python -m benchmarks.rounding``.

The model is a GPT over bytes, and the text this package's own source, of which the last tenth is held out. Every way
starts from the same weights and has the same batches, but for one, whose initial weights differ: it shows how much of a
difference is chance. Ranks communicate by gloo, or by NCCL where there is a GPU, which they may share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.implementations import quiet, wrap
from benchmarks.model import GPT, loss_of
from benchmarks.runner import ROOT, where
from benchmarks.spec import Setting
from benchmarks.tables import machine, markdown, save_results
from fsdp_flat.collectives import QuantizedAllGather, QuantizedReduceScatter, use_collectives

NOTE = """\
`python -m benchmarks.rounding` trains a GPT over bytes in fp32 on this package's source. All-gathers are those of
`QuantizedAllGather`, reductions those of `QuantizedReduceScatter`; optimizers and state dicts keep fp32. Losses are
means over ranks and over the {window} steps until the step named; "held out" is the loss of the last tenth of the text,
evaluated with the same all-gathers.
"""

# By row of the table: the dtypes of all-gathers and of reductions; None is the library's own, in fp32.
WAYS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "exact": (None, None),
    "exact, other initial weights": (None, None),
    "bf16 all-gathers": (torch.bfloat16, None),
    "bf16 reductions": (None, torch.bfloat16),
    "both in bf16": (torch.bfloat16, torch.bfloat16),
    "int8 all-gathers": (torch.int8, None),
    "int8 reductions": (None, torch.int8),
    "both in int8": (torch.int8, torch.int8),
}
# Bytes of an element, with its share of a block's scale.
_NBYTES = {None: 4, torch.bfloat16: 2, torch.int8: 1 + 4 / 256}
_WINDOW = 20


def _text() -> torch.Tensor:
    """Return the source as bytes; it is read once, since it may change during the run."""
    sources = sorted((ROOT / "fsdp_flat").rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def _batch(text: torch.Tensor, setting: Setting, seed: int) -> torch.Tensor:
    """Return tokens (batch, seq + 1) from random places of a text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - setting.seq - 1, (setting.batch,), generator=generator)
    return torch.stack([text[start : start + setting.seq + 1] for start in starts])


def train(way: str, setting: Setting, text: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Train on this rank, and return the losses of all steps and the held-out loss, means over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = text.to(device, torch.long)
    held_out = text[-len(text) // 10 :]
    text = text[: -len(held_out)]
    torch.manual_seed("other" in way)
    with quiet():
        model: nn.Module = wrap("flat-full-orig", GPT(setting).to(device), setting, device)
    gathered, reduced = WAYS[way]
    use_collectives(
        model,
        all_gather=None if gathered is None else QuantizedAllGather(dtype=gathered),
        reduce_scatter=None if reduced is None else QuantizedReduceScatter(dtype=reduced),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(setting.steps):
        loss = loss_of(model, _batch(text, setting, step * size + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        evaluated = [loss_of(model, _batch(held_out, setting, step * size + rank)) for step in range(_WINDOW)]
    found = torch.stack([*losses, torch.stack(evaluated).mean()])
    dist.all_reduce(found)
    *curve, last = (found / size).tolist()
    return {"losses": curve, "held_out": last}


def _on_rank(rank: int, ways: Sequence[str], setting: Setting, text: torch.Tensor, port: int, out: str) -> None:
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
        # NCCL refuses two ranks on one device of one host, so each rank says that it is another host.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", LOCAL_RANK=str(device.index))
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=setting.ranks)
    for way in ways:
        found = train(way, setting, text, device)
        if rank == 0:
            print(f"{way}: held out {found['held_out']:.4f}", flush=True)
            Path(out, f"{way}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def rounding_table(results: dict[str, Any]) -> str:
    """Make the table: losses along the training and at its end, with the difference from exact collectives."""
    steps = results["setting"]["steps"]
    marks = [max(1, steps // part) for part in (10, 4, 2, 1)]
    header = ["collectives", "bytes an element, all-gather", "reduction", *(f"loss at {mark}" for mark in marks)]
    header += ["held out", "difference from exact"]
    exact = results["ways"]["exact"]["held_out"]
    rows = []
    for way, found in results["ways"].items():
        gathered, reduced = (f"{_NBYTES[dtype]:.3g}" for dtype in WAYS[way])
        curve = [statistics.mean(found["losses"][max(0, mark - _WINDOW) : mark]) for mark in marks]
        last = found["held_out"]
        rows.append([way, gathered, reduced, *(f"{loss:.4f}" for loss in (*curve, last)), f"{last - exact:+.4f}"])
    return markdown(header, rows)


def rounding_page(results: dict[str, Any]) -> str:
    """Return the section of the page: conditions, table, note."""
    setting = results["setting"]
    told = (
        f"{setting['ranks']} ranks over {results['backend']}; {setting['layers']} layers of width {setting['width']}, "
        f"{setting['ranks'] * setting['batch'] * setting['seq']} tokens a step."
    )
    note = NOTE.format(window=_WINDOW)
    if results["backend"] != "NCCL":
        note += "Over NCCL, which the command uses where there is a GPU, this has not been measured.\n"
    return "\n".join([f"{machine(results).strip()} {told}\n", rounding_table(results), note])


def main(argv: list[str] | None = None) -> None:
    """Train one way after another in fresh processes; print and write a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    setting = Setting(
        layers=args.layers, width=args.width, heads=4, vocab=256, seq=64, batch=4, ranks=args.ranks, steps=args.steps
    )
    args.out.mkdir(parents=True, exist_ok=True)
    parts = args.out / "rounding"
    parts.mkdir(exist_ok=True)
    ways = list(dict.fromkeys(["exact", *args.ways]))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_on_rank, (ways, setting, _text(), store.port, str(parts)), args.ranks)
    results = {
        "ways": {way: json.loads((parts / f"{way}.json").read_text()) for way in ways},
        "setting": {"ranks": args.ranks, "steps": args.steps, "width": args.width, "layers": args.layers},
        "backend": "NCCL" if torch.cuda.is_available() else "gloo",
        "where": where(),
    }
    results["setting"] |= {"batch": setting.batch, "seq": setting.seq}
    save_results(args.out, "rounding", results, rounding_table(results))


if __name__ == "__main__":
    main()
