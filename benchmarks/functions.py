"""Counts the functions of the library that one unit's steady step enters: ``python -m benchmarks.functions``.

With ``--states`` those that a save or a load enters, of a model or a checkpoint, beside torch's FSDP1 and DCP.
Comprehensions and lambdas of Python 3.11 are functions too.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp

import fsdp_flat
from benchmarks.implementations import quiet, shard
from benchmarks.runner import on_ranks
from benchmarks.spec import IMPLEMENTATIONS, Implementation
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.guards import guards_off

PACKAGE = Path(fsdp_flat.__file__).parent
TORCH = Path(torch.__file__).parent / "distributed"
_WIDTH = 8
# Ranks wait for each other in different functions, so several steps are counted together.
_STEPS_BEFORE, _STEPS = 3, 5


class Entered:
    """Records the functions of a package that run while it is on, with the number of calls."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self.calls: dict[CodeType, int] = {}
        self._package = str(package)

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self._package):
            self.calls[code] = self.calls.get(code, 0) + 1

    def on(self, *_: Any) -> None:
        """Begin to record, in every thread."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def off(self, *_: Any) -> None:
        """Stop recording."""
        sys.setprofile(None)
        threading.setprofile(None)

    def lines(self, times: int = _STEPS) -> list[str]:
        """Return one line for each function: its file, line and name, and calls each time."""
        found = sorted(self.calls.items(), key=lambda entry: (entry[0].co_filename, entry[0].co_firstlineno))
        return [f"{calls / times:5.1f}  {path_of(code)}:{code.co_firstlineno} {code.co_name}" for code, calls in found]


def path_of(code: CodeType) -> str:
    """Return the path of a function's file below the package, or below torch.distributed."""
    path = Path(code.co_filename)
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else TORCH).as_posix()


class Block(nn.Module):
    """Adds a linear layer's output to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``."""
        return x + torch.relu(self.linear(x))


class Watched(nn.Module):
    """Three blocks; ``entered`` is on while the middle one runs forward, and while its backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.entered = Entered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``."""
        x = self.first(x) * 1
        x.register_hook(self.entered.off)
        self.entered.on()
        x = self.middle(x)
        self.entered.off()
        x = x * 1
        x.register_hook(self.entered.on)
        return self.last(x)


FRONTS = {
    "wrapper, use_orig_params=False": IMPLEMENTATIONS["flat-full-flat"],
    "wrapper, use_orig_params=True": IMPLEMENTATIONS["flat-full-orig"],
    "fully_shard": IMPLEMENTATIONS["flat-fully-shard"],
}


def entered_in_steps(front: Implementation) -> Entered:
    """Train a few steps, and return what the middle block entered in the last of them. Every rank must call this."""
    torch.manual_seed(0)
    watched = Watched()
    entered, model = watched.entered, shard(front, watched, {Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS_BEFORE + _STEPS):
        if step == _STEPS_BEFORE:
            entered.calls.clear()
        try:
            model(torch.ones(2, _WIDTH)).sum().backward()
        finally:
            entered.off()
        optimizer.step()
        optimizer.zero_grad()
    return entered


def summary(entered: Entered, times: int = _STEPS) -> str:
    """Return the numbers of functions, files and calls a time, without the shared-memory transport, which is apart."""
    paths = [(path_of(code), calls) for code, calls in entered.calls.items()]
    own = [(path, calls) for path, calls in paths if not path.startswith("comm/shm/")]
    files, calls = {path for path, _ in own}, sum(calls for _, calls in own) / times
    guards = sum(path.startswith("guards/") for path, _ in own)
    return (
        f"{len(own)} functions in {len(files)} files, {calls:.0f} calls ({guards} of the functions in guards; the "
        f"shared-memory transport: {len(paths) - len(own)} more)"
    )


def trained(each: Implementation) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, after one step."""
    torch.manual_seed(0)
    model = shard(each, Watched(), {Block})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, _WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_dicts(library: Any, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    """Return by name a function that saves or loads full state dicts. Every rank must call each."""
    wrapper = library.FullyShardedDataParallel
    with wrapper.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        states = wrapper.optim_state_dict(model, optimizer)
    return {
        "a FULL state dict": model.state_dict,
        "an optimizer's state dict": lambda: wrapper.optim_state_dict(model, optimizer),
        "a load of a FULL state dict": lambda: model.load_state_dict(state),
        "a load of an optimizer's state dict": lambda: wrapper.optim_state_dict_to_load(model, optimizer, states),
    }


def checkpoints(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Callable[[], Any]]:
    """Return by name a function that saves or loads checkpoints. Every rank must call each."""
    return {
        "a checkpoint": lambda: save_checkpoint(folder, model, optimizer),
        "a load of a checkpoint": lambda: load_checkpoint(folder, model, optimizer),
    }


def dcp_checkpoints(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> dict[str, Callable[[], Any]]:
    """Return the same by torch's DCP, without what FSDP1 does."""
    wrapper = fsdp.FullyShardedDataParallel
    with wrapper.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": wrapper.optim_state_dict(model, optimizer)}
    return {
        "a checkpoint": lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp"),
        "a load of a checkpoint": lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"),
    }


def entered_in_states(folder: str) -> Iterator[tuple[str, Entered]]:
    """Yield what the second save, or load, of each kind enters. Every rank must iterate."""
    for name in ("flat-full-flat", "flat-full-orig"):
        each = IMPLEMENTATIONS[name]
        model, optimizer = trained(each)
        calls = state_dicts(fsdp_flat, model, optimizer) | checkpoints(model, optimizer, f"{folder}/{name}")
        yield from _entered_by(calls, f"use_orig_params={each.use_orig_params}", PACKAGE)
    model, optimizer = trained(IMPLEMENTATIONS["fsdp1-full-orig"])
    yield from _entered_by(state_dicts(fsdp, model, optimizer), "torch's FSDP1", TORCH / "fsdp")
    yield from _entered_by(dcp_checkpoints(model, optimizer, folder), "torch's DCP", TORCH / "checkpoint")


def _entered_by(calls: dict[str, Callable[[], Any]], setting: str, package: Path) -> Iterator[tuple[str, Entered]]:
    for name, call in calls.items():
        call()
        entered = Entered(package)
        entered.on()
        try:
            call()
        finally:
            entered.off()
        yield f"{name}, {setting}", entered


def count_states(_rank: int, lists: bool, folder: str) -> list[str]:
    """Return lines on saves and loads, with the functions of each if they are listed. Every rank must call this."""
    with quiet():
        return [
            line
            for title, entered in entered_in_states(folder)
            for line in (f"{title}: {summary(entered, 1)}", *(entered.lines(1) if lists else ()))
        ]


def count_steps(_rank: int, lists: bool) -> list[str]:
    """Return lines on a step of each front, with guards and without. Every rank must call this."""
    found = []
    for name, front in FRONTS.items():
        for guards in (True, False):
            with nullcontext() if guards else guards_off():
                entered = entered_in_steps(front)
            title = name if guards else f"{name}, without guards"
            found += [f"{title}: {summary(entered)}", *(entered.lines() if lists else ())]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts on two ranks; with ``--list`` the functions too."""
    flags = sys.argv[1:] if argv is None else argv
    with tempfile.TemporaryDirectory() as folder:
        count, arguments = (count_states, [folder]) if "--states" in flags else (count_steps, [])
        print(*on_ranks(count, 2, "--list" in flags, *arguments)[0], sep="\n")


if __name__ == "__main__":
    main()
