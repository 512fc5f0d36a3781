"""``python -m tests.fuzz``: run seeds, shrink what fails, print scripts."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from .case import FRONTS, Case, from_json, to_json
from .features import FEATURES, without
from .generate import case_from
from .running import TIMEOUT_S, Failure, Fuzzer
from .script import script_of
from .shrink import shrink


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    args = parsed(argv)
    if args.print and args.seed is not None:
        print(to_json(without(case_from(args.seed, args.ranks[0], args.front), args.without), indent=1))
        return 0
    if args.case:
        return replay(args)
    num_failed = 0
    for num_ranks in args.ranks:
        for shared_memory in args.transports:
            num_failed += run_seeds(args, num_ranks, shared_memory)
    return 1 if num_failed else 0


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, as in 2,3,4")
    parser.add_argument("--front", default="", choices=FRONTS, help="one front only")
    parser.add_argument("--case", type=Path, help="run the case of a JSON file")
    parser.add_argument("--print", action="store_true", help="with --seed: print the case and end")
    parser.add_argument("--no-shared-memory", action="store_true", help="only without shared memory")
    parser.add_argument("--shared-memory", action="store_true", help="only with shared memory")
    parser.add_argument("--no-shrink", action="store_true", help="print failing cases as they are")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="time for shrinking one case")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds until a case counts as a hang")
    parser.add_argument("--failures", type=Path, help="append failing cases, shrunken, to this file")
    parser.add_argument("--without", default="", help=f"features to leave out, of: {', '.join(FEATURES)}")
    parser.add_argument("--plant", default="", help="plant a defect, to see it found")
    args = parser.parse_args(argv)
    args.ranks = [int(text) for text in args.ranks.split(",")]
    args.without = [name for name in args.without.split(",") if name]
    args.transports = [True, False]
    if args.shared_memory or args.no_shared_memory:
        args.transports = [not args.no_shared_memory]
    return args


def replay(args: argparse.Namespace) -> int:
    """Run one case from a file."""
    case = from_json(args.case.read_text())
    status = 0
    for shared_memory in args.transports:
        with Fuzzer(case.num_ranks, shared_memory=shared_memory, timeout_s=args.timeout, plant=args.plant) as fuzzer:
            failure = fuzzer.run(case)
        print("clean" if failure is None else f"{failure.kind}\n{failure.text}")
        status = status or int(failure is not None)
    return status


def run_seeds(args: argparse.Namespace, num_ranks: int, shared_memory: bool) -> int:
    """Run the seeds in one configuration; returns how many failed."""
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    label = f"{num_ranks} ranks, {'shared memory' if shared_memory else 'no shared memory'}"
    kinds: Counter[str] = Counter()
    with Fuzzer(num_ranks, shared_memory=shared_memory, timeout_s=args.timeout, plant=args.plant) as fuzzer:
        start = last = time.monotonic()
        spent_shrinking = 0.0
        for count, seed in enumerate(seeds, 1):
            case = without(case_from(seed, num_ranks, args.front), args.without)
            failure = fuzzer.run(case)
            if failure is not None:
                kinds[failure.kind] += 1
                before = time.monotonic()
                small = case
                if not args.no_shrink and kinds[failure.kind] == 1:
                    small, failure = shrink(case, failure, fuzzer, seconds=args.shrink_seconds)
                spent_shrinking += time.monotonic() - before
                tell(args, label, seed, small, failure, shared_memory)
            now = time.monotonic()
            if now - last > 10 or count == len(seeds):
                last = now
                speed = count / max(1e-9, now - start - spent_shrinking)
                print(f"{label}: {count} of {len(seeds)} seeds, {speed:.1f} a second, {sum(kinds.values())} failed")
                sys.stdout.flush()
        print(f"  actions: {dict(fuzzer.actions.most_common())}")
        print(f"  left out: {dict(fuzzer.refused.most_common(12))}")
        if kinds:
            print(f"  failures: {dict(kinds.most_common())}")
        print(f"  time: {time.monotonic() - start:.1f} s, of which shrinking {spent_shrinking:.1f} s")
    return sum(kinds.values())


def tell(args: argparse.Namespace, label: str, seed: int, case: Case, failure: Failure, shared_memory: bool) -> None:
    """Print a failure, with the script that shows it, and keep it in the file of failures."""
    text = f"FAILED seed {seed}, {label}: {failure.kind}"
    print(text)
    if args.no_shrink:
        print("\n".join(failure.text.splitlines()[:3]))
    else:
        print(script_of(case, failure, shared_memory=shared_memory))
    if args.failures:
        with open(args.failures, "a") as file:
            file.write(f"# {text}\n{to_json(case)}\n")
            file.write("".join(f"# {line}\n" for line in failure.text.splitlines()))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
