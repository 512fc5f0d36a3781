"""Measures time, memory and bytes of every implementation: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path

from benchmarks.runner import measure, where
from benchmarks.spec import ALL, IMPLEMENTATIONS, OVER_HOSTS, PRESETS, Setting
from benchmarks.tables import describe, save_results, states_table, step_table

FLAGS = list(fields(Setting))


def main(argv: list[str] | None = None) -> Path:
    """Run the measurements that the command line selects; return the path of the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="sizes; other flags override single ones (default: compute, or communication with --hosts 2)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of fresh processes")
    parser.add_argument("--only", nargs="+", choices=ALL, help="implementations (default: all)")
    parser.add_argument("--states", action="store_true", help="save and load state dicts, instead of steps")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for JSON and table")
    parser.add_argument("--name", help="name of the files (default: made from the flags)")
    for field in FLAGS:
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(f"--{field.name}", type=int, default=None)
    args = parser.parse_args(argv)
    changed = {field.name: value for field in FLAGS if (value := getattr(args, field.name)) is not None}
    if args.hosts not in (None, 1, 2):
        parser.error(f"--hosts is 1 or 2, got {args.hosts}")
    preset = args.preset or "compute"
    if args.hosts == 2:
        changed, preset = {"ranks": 4, **changed}, args.preset or "communication"
    setting = replace(PRESETS[preset], **changed)
    names = args.only or list(IMPLEMENTATIONS if setting.hosts == 1 else OVER_HOSTS)
    results = {
        "setting": asdict(setting),
        "where": where(),
        **measure(names, setting, rounds=args.rounds, states=args.states),
    }
    name = args.name or "-".join(
        [preset, *["states"] * args.states, *(f"{key}{value:d}" for key, value in changed.items())]
    )
    table = "\n".join(filter(None, (describe(results), step_table(results), states_table(results))))
    return save_results(args.out, name, results, table)


if __name__ == "__main__":
    main()
