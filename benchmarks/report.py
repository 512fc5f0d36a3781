"""Writes docs/performance.md and its pictures: ``python -m benchmarks.report``; ``--measure`` measures first.

Sections with results in ``benchmarks/results`` are replaced, others stay. A picture is drawn from the table above it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from benchmarks import gpu, saves, scale
from benchmarks.__main__ import main as bench
from benchmarks.network import NoNetworkError
from benchmarks.pictures import digest_in, digest_of, draw
from benchmarks.runner import ROOT
from benchmarks.tables import STATE_PEERS, describe, states_table, step_table

# Name of the result file: flags of ``python -m benchmarks``, and the heading.
RUNS = {
    "compute": (["--preset", "compute"], "Compute-heavy, fp32"),
    "compute-states": (
        ["--preset", "compute", "--states", "--only", *STATE_PEERS.values(), *STATE_PEERS],
        "State dicts",
    ),
    "compute-bf16": (["--preset", "compute", "--bf16"], "Compute-heavy, bf16"),
    "communication": (["--preset", "communication"], "Communication-heavy, fp32"),
    "communication-bf16": (["--preset", "communication", "--bf16"], "Communication-heavy, bf16"),
    "accumulation": (["--preset", "compute", "--accumulate", "4", "--batch", "1"], "Gradient accumulation"),
    "checkpointing": (["--preset", "compute", "--checkpoint"], "Activations recomputed"),
    "ranks4": (["--preset", "communication", "--ranks", "4"], "4 ranks on the same cores"),
    "hosts": (["--hosts", "2", "--gbit", "1"], "4 ranks on two hosts"),
}

SCALE = "Host time and memory by units and ranks"
SAVES = "Saves of a checkpoint"
GPU = "GPU"
HEADINGS = (SCALE, SAVES)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]*\.png)\)")

INTRO = """# Performance

One command makes each table. It runs every implementation in fresh processes and alternates between implementations in
each round. All but the first section are about CPUs, with one thread a process. Their columns:

- Times are medians.
- "x local", "x DDP" and "x torch" are medians over rounds of the ratio within a round. "x torch" compares with the
  faster of torch's FSDP1 and `fully_shard` with the same resharding; for `fully_shard` it compares with torch's.
- "CPU ms" is the minimum CPU time of a step over all threads of a rank.
- "MB sent" is the number of bytes that a rank sends in a step.
- "MB over the link" is the number of bytes that one host sends to the other in a step, as the interface counts them.
- "MB counted" is the peak of all tensor storages of a forward and backward of five tokens: parameters, gradients and
  their buffers.
- "MB shared" is this rank's shared memory for messages to other ranks; gloo's buffers are not counted.
- "MB RSS" is the peak resident memory of the process, which includes all of these.

```
make bench                                   # the tables of the compute-heavy model: steps and state dicts
make bench BENCH="--preset communication"    # any other: see python -m benchmarks --help
make bench BENCH="--hosts 2 --gbit 1"        # ranks on two hosts, which it makes on this machine as root
make bench-scale                             # host time and memory by units and ranks
make bench-gpu                               # one GPU: python -m benchmarks.gpu
python -m benchmarks.saves                   # saves of a checkpoint, beside those of torch
python -m benchmarks.functions               # functions of the library that a unit's step enters
python -m benchmarks.guards                  # what guards cost
python -m benchmarks.report                  # this page, with what the commands above have measured, and its pictures
python -m benchmarks.report --measure        # everything first
```
"""

STATES_NOTE = """\
Rows with "boxes" use `ShardedStateDictConfig(boxes=True)` and are compared with FSDP1's sharded state dict. Values have
their own memory everywhere except in boxes and local state dicts.
"""

HOSTS_NOTE = """\
`make bench BENCH="--hosts 2 --gbit 1"` measures this table, as root. Both hosts are network namespaces of one machine
and share its cores. HYBRID_SHARD shards within each host.
"""

GPU_NOTE = """\
`python -m benchmarks.gpu` trains decoders (RMSNorm, SwiGLU, `scaled_dot_product_attention`) in bf16 with fp32 master
weights and reductions and fused AdamW, in one process that is rank 0 of 8 simulated ranks. Compute is real.
Communication is emulated: collectives run in order on a stream of their own, as NCCL runs those of one group; each is a
copy, then a kernel that spins for bytes x 7/8 / bandwidth. Several GPUs over NVLink or InfiniBand have not been
measured. "step ms" is measured by CUDA events over steps issued one after the other, "host ms" is the time in which the
host issues a step to an idle device. Ratios are within a round, to the best of torch's; for `fully_shard` to the best
of torch's `fully_shard`. From a trace of two steps: "busy ms" of the stream of compute, and its idle time before the
host issued the next kernel ("idle, host"), the rest in which a collective ran ("idle, link"), and what is left ("idle,
other"). "drift MB" is the variation between steps of the memory held after a step.

```
python -m benchmarks.gpu                                # every row; results go to $OUT, or to benchmarks/results
python -m benchmarks.gpu --rows 1.2B-60 --gbps 100      # one row behind another link
python -m benchmarks.gpu --device cpu --tiny --rounds 1 # tries every row out without a GPU
```
"""
# Taken by the benchmark as it was at commit 809b75d.
NOT_MEASURED = """\
One NVIDIA H200, driver 580, Python 3.12, torch 2.11.0+cu130, 2026-11-27; `python -m benchmarks.gpu` before \
all-gathers overlapped compute; communication emulated: rank 0 of 8 simulated ranks, nothing sent.
A GPT of 0.94B parameters; times and peak memory as parts of those of the best of torch's with the same resharding.

| fsdp_flat before that change | step x torch |
|---|---:|
| FULL_SHARD | 0.70 |
| SHARD_GRAD_OP | 0.64 |
| fully_shard | 0.67 |
| fully_shard, reshard_after_forward=False | 0.74 |

The host's time was 0.50 to 0.80, peak memory 1.00 to 1.05 of the best of torch's. Behind an emulated link of 60 to 350
GB/s the same version took 0.99 to 1.07 (wrapper, FULL_SHARD) and 1.06 to 1.15 (`fully_shard`) of the best of torch's
step, because all-gathers of a forward waited for compute. **Rows with an emulated link have not been measured since the
overlap of all-gathers with compute was changed**; `python -m benchmarks.gpu` measures them.
"""


def page(results: Path, *, old: str = "", note: str = "") -> str:
    """Return the page in Markdown: sections of the ``old`` one, replaced where there are results.

    Args:
        results: the folder with the JSON files of the benchmarks.
        old: the page as it is.
        note: a sentence about the conditions, for the top of the page; by default the old one.
    """
    head, _, _ = old.partition("\n## ")
    note = note or head.rpartition("```\n")[2].strip()
    made = {**sections_of(old), **_measured(results, sections_of(old))}
    known = [GPU, *(heading for _, heading in RUNS.values()), *HEADINGS]
    # A section that only the old page has stays where it was, behind the one before it.
    order = sorted(made, key=lambda heading: _place(heading, list(made), known))
    return "\n".join([INTRO, *([f"{note}\n"] if note else []), *(f"## {each}\n\n{made[each]}" for each in order)])


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a page by their headings."""
    parts = (part.partition("\n\n") for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])
    return {heading: f"{body.strip()}\n" for heading, _, body in parts}


def draw_pictures(text: str, folder: Path) -> None:
    """Draw each picture of a page from the table of its section, unless the file was drawn from it already."""
    for heading, body in sections_of(text).items():
        picture = PICTURE.search(body)
        if picture is not None:
            path = folder / picture[1]
            if not path.exists() or digest_in(path) != digest_of(body):
                draw(body, path, title=f"One training step: {heading}", note=body.partition("\n\n")[0])


def _place(heading: str, headings: list[str], known: list[str]) -> int:
    while heading not in known and headings.index(heading):
        heading = headings[headings.index(heading) - 1]
    return known.index(heading) if heading in known else -1


def _measured(results: Path, old: Container[str]) -> dict[str, str]:
    """Return the sections that there are results of, and those that need none and are not on the ``old`` page."""
    made: dict[str, list[str]] = {}
    for name, (_, heading) in RUNS.items():
        found = _read(results / f"{name}.json")
        if found is None:
            continue
        made[heading] = [describe(found), *[HOSTS_NOTE] * (name == "hosts")]
        if found["states"]:
            made[heading] += [states_table(found), STATES_NOTE]
        else:
            made[heading] += [step_table(found), f"![time and memory of a step](performance-{name}.png)\n"]
    found = _read(results / "scale.json")
    if found is not None:
        made[SCALE] = [scale.NOTE, scale.scale_table(found)]
        found = _read(results / "scale-no-gc.json")
        made[SCALE] += [scale.NO_GC_NOTE, scale.scale_table(found)] if found is not None else []
    found = _read(results / "saves.json")
    if found is not None:
        made[SAVES] = [saves.saves_table(found)]
    found = _read(results / "gpu.json")
    if found is not None or GPU not in old:
        made[GPU] = [*([NOT_MEASURED] if found is None else [gpu.gpu_page(found)]), GPU_NOTE]
    return {heading: "\n".join(parts) for heading, parts in made.items()}


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def main(argv: list[str] | None = None) -> None:
    """Write the page; with ``--measure``, measure first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--measure", action="store_true", help="run every benchmark first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="a sentence about the conditions, for the top of the page")
    args = parser.parse_args(argv)
    if args.measure:
        for name, (flags, heading) in RUNS.items():
            try:
                bench([*flags, "--rounds", str(args.rounds), "--name", name, "--out", str(args.results)])
            except NoNetworkError as error:
                print(f"{heading}: not measured. {error}")
        scale.main(["--out", str(args.results)])
        scale.main(["--no-gc", "--out", str(args.results)])
        saves.main(["--out", str(args.results)])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    old = args.out.read_text() if args.out.exists() else ""
    text = page(args.results, old=old, note=args.note)
    args.out.write_text(text)
    draw_pictures(text, args.out.parent)
    print(f"{args.out} written")


if __name__ == "__main__":
    main()
