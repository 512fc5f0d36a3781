"""Writes docs/performance.md from the results: ``python -m benchmarks.report``; ``--measure`` measures first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import before_after, micro, plans, projection, scale
from benchmarks.__main__ import main as bench
from benchmarks.runner import ROOT
from benchmarks.tables import STATE_PEERS, describe, markdown, states_table, step_table, write_picture

# Name of the result file: flags of ``python -m benchmarks``, and the heading.
RUNS = {
    "compute": (["--preset", "compute"], "Compute-heavy, fp32"),
    "states": (["--preset", "compute", "--states", "--only", *STATE_PEERS.values(), *STATE_PEERS], "State dicts"),
    "compute-bf16": (["--preset", "compute", "--bf16"], "Compute-heavy, bf16"),
    "communication": (["--preset", "communication"], "Communication-heavy, fp32"),
    "communication-bf16": (["--preset", "communication", "--bf16"], "Communication-heavy, bf16"),
    "accumulation": (["--preset", "compute", "--accumulate", "4", "--batch", "1"], "Gradient accumulation"),
    "checkpointing": (["--preset", "compute", "--checkpoint"], "Activations recomputed"),
    "ranks4": (["--preset", "communication", "--ranks", "4"], "4 ranks on the same cores"),
}

INTRO = """# Performance

One command makes each table. It runs every implementation in fresh single-threaded processes and alternates between
implementations in each round. Columns:

- Times are medians.
- "x local", "x DDP" and "x torch" are medians over rounds of the ratio within a round. "x torch" compares with the
  faster of torch's FSDP1 and `fully_shard` with the same resharding; for `fully_shard` it compares with torch's.
- "CPU ms" is the minimum CPU time of a step over all threads of a rank.
- "MB sent" is the number of bytes that a rank sends in a step.
- "MB counted" is the peak of all tensor storages of a forward and backward of five tokens: parameters, gradients and
  their buffers.
- "MB shared" is this rank's shared memory for messages to other ranks; gloo's buffers are not counted.
- "MB RSS" is the peak resident memory of the process, which includes all of these.

```
make bench                                   # the first two tables
make bench BENCH="--preset communication"    # any other: see python -m benchmarks --help
make bench-scale                             # host time and memory by units and ranks
make gpu                                     # one GPU: tests, the stream sanitizer, and python -m benchmarks.gpu
python -m benchmarks.before_after --against CHECKOUT   # two versions in the same rounds
python -m benchmarks.plans                   # the exchanges of ranks that save a checkpoint
python -m benchmarks.micro                   # collectives alone
python -m benchmarks.report --measure        # everything, and this page
```
"""

STATES_NOTE = """\
Rows with "boxes" use `ShardedStateDictConfig(boxes=True)` and are compared with FSDP1's sharded state dict. Values have
their own memory everywhere except in boxes and local state dicts.
"""


GPU_NOTE = """\
`python -m benchmarks.gpu`, the last part of `make gpu`, trains about 1B parameters in bf16 on one GPU as rank 0 of
8 simulated ranks: an all-gather fills the full buffer, and nothing is sent. "step ms" is measured by CUDA events, over
steps issued one after the other. "host ms" is the time in which the host issues a step to an idle device; "host ms a
unit" is its minimum, less that of plain training, divided by the number of units. Ratios are within a round, to the
best torch implementation with the same resharding. "drift MB" is the variation between steps of the memory held after a
step. Results are written to `$OUT`, or to `benchmarks/results`. `make gpu BENCH="--rounds 5"` passes flags on.
"""
NO_GPU_NOTE = "Nothing has been measured on a GPU yet.\n"


def page(results: Path, pictures: Path, *, note: str = "") -> str:
    """Return the page in Markdown, from the JSON files in ``results``; write pictures to ``pictures``."""
    parts = [INTRO, f"{note}\n"] if note else [INTRO]
    for name, (_, heading) in RUNS.items():
        found = _read(results / f"{name}.json")
        if found is not None:
            parts += [f"## {heading}\n", describe(found)]
            if found["states"]:
                parts += [states_table(found), STATES_NOTE]
                continue
            write_picture(found, pictures / f"performance-{name}.png")
            parts += [step_table(found), f"![step time and memory](performance-{name}.png)\n"]
    compared = before_after.comparison_table(results)
    parts += ["## Before and after\n", before_after.NOTE, compared] if compared else []
    found = _read(results / "scale.json")
    if found is not None:
        parts += ["## Host time and memory by units and ranks\n", scale.NOTE, scale.scale_table(found)]
        found = _read(results / "scale-no-gc.json")
        parts += [scale.NO_GC_NOTE, scale.scale_table(found)] if found is not None else []
    found = _read(results / "plans.json")
    if found is not None:
        parts += ["## Plans of a checkpoint\n", plans.NOTE, plans.plans_table(found)]
    if (results / "micro.md").exists():
        parts += ["## Collectives alone\n", micro.NOTE, (results / "micro.md").read_text()]
    measured = results / "gpu.md"
    parts += ["## GPU\n", GPU_NOTE, measured.read_text() if measured.exists() else NO_GPU_NOTE]
    return "\n".join([*parts, *_projection(results)])


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _projection(results: Path) -> list[str]:
    m = projection.MACHINE
    parts = [
        "## 8, 64 and 1024 GPUs, by arithmetic\n",
        "These figures are computed, not measured. Assumptions: "
        f"{m.flops / 1e12:.0f} TFLOP/s sustained in bf16, {m.inside / 1e9:.0f} GB/s a GPU for large\n"
        f"collectives within a node of {m.node} and {m.across / 1e9:.0f} GB/s across nodes, "
        f"{1e6 * m.hop:.1f} microseconds a ring step, 8192 tokens a GPU, activations\n"
        "recomputed, bf16 all-gathers, fp32 reduce-scatters; memory without activations. If communication takes longer "
        "than\ncompute, larger batches, hybrid sharding or 8-bit collectives (`fsdp_flat.collectives`) shorten it.\n",
        markdown(
            ["model", "compute ms", "GB sent", "network ms", "step ms", "compute share", "GiB held"],
            projection.projection_rows(),
        ),
    ]
    checked = []
    for name in ("compute", "communication", "ranks4"):
        found = _read(results / f"{name}.json")
        counted = found and found["counts"].get("flat-full-orig")
        if found and counted:
            checked.append([name, f"{_lower_bound(found['setting']) / 1e6:.1f}", f"{counted['sent'] / 1e6:.1f}"])
    if checked:
        parts += [
            "Bytes by the formula and as counted (the outermost unit and the last unit of the forward are not "
            "resharded, so they are\nall-gathered once; the rest of the difference is padding and the flags of used "
            "parameters):\n",
            markdown(["setting", "formula MB", "counted MB"], checked),
        ]
    return parts


def _lower_bound(setting: dict[str, Any]) -> float:
    width = setting["width"]
    block = 12 * width * width + 13 * width
    outside = (2 * setting["vocab"] + setting["seq"] + 2) * width
    inside = (setting["layers"] - 1) * block
    sent = projection.bytes_sent(inside, setting["ranks"], gather_itemsize=4, reduce_itemsize=4)
    share = (setting["ranks"] - 1) / setting["ranks"]
    return sent + (outside + block) * 2 * 4 * share


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
        for name, (flags, _) in RUNS.items():
            bench([*flags, "--rounds", str(args.rounds), "--name", name, "--out", str(args.results)])
        scale.main(["--out", str(args.results)])
        scale.main(["--no-gc", "--out", str(args.results)])
        plans.main(["--out", str(args.results)])
        micro.main(["--out", str(args.results)])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(args.results, args.out.parent, note=args.note))
    print(f"{args.out} written")


if __name__ == "__main__":
    main()
