"""A failing case as a script that runs under torchrun, with the case in words above it."""

from __future__ import annotations

from dataclasses import asdict, fields

from .case import Case, Node, Optimizer, Options, Rows, to_json
from .running import Failure

SCRIPT = '''\
# ---- {kind} ----
{words}
# Run from the repository:
#   {env}OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --standalone --nproc-per-node {num_ranks} this_file.py
# or write the JSON to a file:  python -m tests.fuzz --case FILE{flag}
import os
import tempfile

import torch.distributed as dist

from tests.fuzz.running import run_here

CASE = r"""
{json}
"""

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo")
directory = [tempfile.mkdtemp()]
dist.broadcast_object_list(directory, src=0)
report = run_here(CASE, directory[0], {environ!r})
print(report.failure.text if report.failure else "clean")
'''


def script_of(case: Case, failure: Failure, *, shared_memory: bool) -> str:
    """Write the script that shows a failure."""
    first = next((line for line in failure.text.splitlines() if line.strip()), "")
    words = "\n".join(f"# {line}".rstrip() for line in [*described(case), first[:300]])
    return SCRIPT.format(
        kind=failure.kind,
        words=words,
        num_ranks=case.num_ranks,
        json=to_json(case),
        env="" if shared_memory else "FSDP_FLAT_SHARED_MEMORY=0 ",
        flag="" if shared_memory else " --no-shared-memory",
        environ={} if shared_memory else {"FSDP_FLAT_SHARED_MEMORY": "0"},
    )


def described(case: Case) -> list[str]:
    """Describe a case line by line: the model as a tree, what differs from the defaults, the program."""
    lines = [f"{case.num_ranks} ranks, width {case.width}, seed {case.seed}", "model:"]
    lines += _tree(case.model, 1)
    wrapping = case.wrapping
    detail = {
        "module": wrapping.kinds,
        "transformer": wrapping.kinds,
        "size": wrapping.min_size,
        "lambda": wrapping.ids,
        "custom": wrapping.ids,
        "hand": wrapping.ids,
    }.get(wrapping.policy, "")
    if case.rows is None:
        lines.append(f"units: {wrapping.policy} {detail} {dict(wrapping.strategies) or ''}".rstrip())
    else:
        changed = {f.name: value for f in fields(Rows) if (value := getattr(case.rows, f.name)) not in ((), False)}
        lines.append(f"fully_shard: {changed or 'the root only'}")
    for name, spec, plain in (("options", case.options, Options()), ("optimizer", case.optimizer, Optimizer())):
        changed = {
            f.name: getattr(spec, f.name) for f in fields(plain) if getattr(spec, f.name) != getattr(plain, f.name)
        }
        lines.append(f"{name}: {changed or 'defaults'}")
    lines.append("program:")
    lines += [f"  {action.kind} {action.args or ''}".rstrip() for action in case.actions]
    return lines


def _tree(node: Node, depth: int) -> list[str]:
    plain = asdict(Node(kind=node.kind, id=node.id))
    hidden = ("children", "kind", "id", "size")
    extra = {key: value for key, value in asdict(node).items() if key not in hidden and value != plain[key]}
    if node.kind == "branch" or node.kind == "rankpart":
        extra["ranks"] = node.ranks
    line = f"{'  ' * depth}{node.id}: {node.kind} {extra or ''}".rstrip()
    return [line, *(one for child in node.children for one in _tree(child, depth + 1))]
