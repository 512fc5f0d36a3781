"""Makes tables from measured numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.spec import ALL, TORCH, peers_of


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


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number as text; an empty text for None."""
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
        others = (["local"], ["ddp"], peers_of(name, ALL))
        rows.append(
            [
                ALL[name].title,
                *(number(1e3 * row[key], ".1f") for key in ("step", "forward", "backward", "optimizer", "cpu")),
                *(number(ratios(results, name, some)) for some in others),
                *[number(row.get("crossed", 0) / 1e6, ".1f")] * over_hosts,
                *(number(counts[key] / 1e6, ".1f") if counts.get(key) else "" for key in ("sent", "alive", "shared")),
                number(row["rss"] / 1e6, ".0f"),
                number(1e3 * row["wrap"], ".0f"),
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
    pairs = [(ours, theirs) for ours in names for theirs in names if _has_the_same_states(ours, theirs)]

    def median(kind: str, of: str, over: str = "") -> float | None:
        if kind not in rows[0][of] or (over and kind not in rows[0][over]):
            return None
        return statistics.median(row[of][kind] / row[over][kind] if over else 1e3 * row[of][kind] for row in rows)

    return markdown(
        ["state dict, ms", *names, *(f"x {theirs}" for _, theirs in pairs)],
        [
            [kind, *(number(median(kind, name), ".1f") for name in names), *(number(median(kind, *p)) for p in pairs)]
            for kind in kinds
        ],
    )


def _has_the_same_states(ours: str, theirs: str) -> bool:
    """Return whether state dicts of an implementation of fsdp_flat are compared with those of one of torch."""
    a, b = ALL[ours], ALL[theirs]
    is_same = (a.is_wrapper, a.use_orig_params, a.strategy) == (b.is_wrapper, b.use_orig_params, b.strategy)
    return a.is_ours and b.package == TORCH and is_same and not a.has_budget


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


def save_results(folder: Path, name: str, results: Mapping[str, Any], table: str) -> Path:
    """Write what was measured as JSON, and its table, which is printed too; return the path of the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results, indent=1))
    path.with_suffix(".md").write_text(table)
    print(table)
    return path
