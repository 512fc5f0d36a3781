"""Makes tables from measured numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.spec import title_of

# For each fsdp_flat variant, the torch implementations; it is compared with the fastest of them in each round.
PEERS = {
    "flat-full-flat": ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2"),
    "flat-full-orig": ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2"),
    "flat-hybrid": ("fsdp1-hybrid",),
    **dict.fromkeys(("flat-full-bfloat16", "flat-full-int8"), ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2")),
    "flat-grad-op": ("fsdp1-grad-op", "fsdp2-no-reshard"),
    "flat-budget": ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2"),
    "flat-fully-shard": ("fsdp2",),
    "flat-fully-shard-budget": ("fsdp2",),
    "flat-fully-shard-no-reshard": ("fsdp2-no-reshard",),
}
# For each fsdp_flat variant, the torch implementation whose state dicts it is compared with.
STATE_PEERS = {
    "flat-full-flat": "fsdp1-full-flat",
    "flat-full-orig": "fsdp1-full-orig",
    "flat-fully-shard": "fsdp2",
    "flat-fully-shard-no-reshard": "fsdp2-no-reshard",
}


def medians(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return, by implementation, the median of every figure over the rounds; the minimum for CPU time."""
    rows: Sequence[Mapping[str, Any]] = results["rounds"]
    return {
        name: {
            key: (min if key == "cpu" else statistics.median)(row[name][key] for row in rows)
            for key in rows[0][name]
            if key != "loss"
        }
        for name in rows[0]
    }


def ratios(results: Mapping[str, Any], name: str, others: Sequence[str], key: str = "step") -> float | None:
    """Return the median over rounds of ``name``'s figure over the smallest of ``others`` in the round, or None."""
    rows = results["rounds"]
    others = [other for other in others if other in rows[0]]
    if not others or name not in rows[0]:
        return None
    return statistics.median(row[name][key] / min(row[other][key] for other in others) for row in rows)


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table: text in the first column, numbers in the others."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def step_table(results: Mapping[str, Any]) -> str:
    """Make the table of time, memory and bytes of a step; empty if none were measured."""
    if not results["rounds"]:
        return ""
    header = ["implementation", "step ms", "forward", "backward", "optimizer", "CPU ms", "x local", "x DDP", "x torch"]
    over_hosts = results["setting"].get("hosts", 1) > 1
    header += ["MB over the link"] * over_hosts + ["MB sent", "MB counted", "MB shared", "MB RSS", "wrap ms"]
    rows = []
    for name, row in medians(results).items():
        counts = results["counts"].get(name, {})
        rows.append(
            [
                title_of(name),
                *(_number(1e3 * row[key], ".1f") for key in ("step", "forward", "backward", "optimizer", "cpu")),
                _number(ratios(results, name, ["local"])),
                _number(ratios(results, name, ["ddp"])),
                _number(ratios(results, name, PEERS.get(name, ()))),
                *[_number(row.get("crossed", 0) / 1e6, ".1f")] * over_hosts,
                _number(counts["sent"] / 1e6, ".1f") if counts else "",
                _number(counts["alive"] / 1e6, ".1f") if counts else "",
                _number(counts["shared"] / 1e6, ".1f") if counts.get("shared") else "",
                _number(row["rss"] / 1e6, ".0f"),
                _number(1e3 * row["wrap"], ".0f"),
            ]
        )
    return markdown(header, rows)


def states_table(results: Mapping[str, Any]) -> str:
    """Make the table of milliseconds by kind of state dict and implementation; empty if none were measured."""
    rows: Sequence[Mapping[str, Any]] = results["states"]
    if not rows:
        return ""
    names = list(rows[0])
    kinds = list(dict.fromkeys(kind for name in names for kind in rows[0][name]))
    pairs = [(ours, theirs) for ours, theirs in STATE_PEERS.items() if ours in names and theirs in names]

    def cell(name: str, kind: str) -> str:
        times = [row[name].get(kind) for row in rows]
        if any(isinstance(time, str) for time in times):
            return "fails"
        return "" if None in times else _number(1e3 * statistics.median(times), ".1f")

    return markdown(
        ["state dict, ms", *names, *(f"x {theirs}" for _, theirs in pairs)],
        [
            [kind, *(cell(name, kind) for name in names), *(_number(_of_peer(rows, kind, *pair)) for pair in pairs)]
            for kind in kinds
        ],
    )


def _of_peer(rows: Sequence[Mapping[str, Any]], kind: str, ours: str, theirs: str) -> float | None:
    """Return the median over rounds of our time over FSDP1's; boxes are compared with its sharded state dicts."""
    pairs = [(row[ours].get(kind), row[theirs].get(kind.replace("boxes", "sharded"))) for row in rows]
    if not all(isinstance(one, float) and isinstance(other, float) for one, other in pairs):
        return None
    return statistics.median(one / other for one, other in pairs)


def describe(results: Mapping[str, Any]) -> str:
    """Describe the setting and the machine, in a few lines."""
    s = results["setting"]
    extras = [
        *(["bf16 compute, fp32 reduction and master weights"] if s["bf16"] else []),
        *([f"{s['accumulate']} micro-batches a step"] if s["accumulate"] > 1 else []),
        *(["activations recomputed"] if s["checkpoint"] else []),
        "fused Adam" if s["fused"] else "Adam",
    ]
    place = f", on 2 hosts joined by {s['gbit']} Gbit/s each way" if s.get("hosts", 1) > 1 else ""
    return (
        f"{s['layers']} blocks, width {s['width']}, vocabulary {s['vocab']}, sequence {s['seq']}, batch {s['batch']}.\n"
        f"{s['ranks']} ranks of one thread over gloo{place}; {', '.join(extras)}.\n"
        f"{len(results['rounds'] or results['states'])} rounds of fresh processes, "
        f"{str(s['steps']) + ' timed steps' if results['rounds'] else 'the median of 3 times'} each.\n"
        f"{machine(results)}"
    )


def machine(results: Mapping[str, Any]) -> str:
    """Describe the machine and the versions, in a line."""
    w = results["where"]
    return f"{w['cores']} cores ({w['cpu']}), {w['system']}, Python {w['python']}, torch {w['torch']}, {w['date']}.\n"


def write_table(results: Mapping[str, Any], path: Path) -> str:
    """Write the tables of ``results`` to ``path``, and return them."""
    text = "\n".join(part for part in (describe(results), step_table(results), states_table(results)) if part)
    path.write_text(text)
    return text


def save_results(folder: Path, name: str, results: Mapping[str, Any], table: str) -> None:
    """Write what was measured as JSON, and its table, which is printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1))
    (folder / f"{name}.md").write_text(table)
    print(table)
