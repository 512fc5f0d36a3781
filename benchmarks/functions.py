"""Counts the functions of the library that one unit's steady step enters: ``python -m benchmarks.functions``."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel, fully_shard
from fsdp_flat.guards import guards_off
from fsdp_flat.wrap import ModuleWrapPolicy

PACKAGE = Path(fsdp_flat.__file__).parent
_WIDTH = 8
# Ranks wait for each other in different functions, so several steps are counted together.
_STEPS_BEFORE, _STEPS = 3, 5


class Entered:
    """Records the functions of the package that run while it is on, with the number of calls."""

    def __init__(self) -> None:
        self.calls: dict[CodeType, int] = {}

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.calls[code] = self.calls.get(code, 0) + 1

    def on(self, *_: Any) -> None:
        """Begin to record, in every thread."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def off(self, *_: Any) -> None:
        """Stop recording."""
        sys.setprofile(None)
        threading.setprofile(None)

    def lines(self) -> list[str]:
        """Return one line for each function: its file, line and name, and calls a step."""
        found = sorted(self.calls.items(), key=lambda entry: (entry[0].co_filename, entry[0].co_firstlineno))
        return [f"{calls / _STEPS:5.1f}  {path_of(code)}:{code.co_firstlineno} {code.co_name}" for code, calls in found]


def path_of(code: CodeType) -> str:
    """Return the path of a function's file below the package."""
    return Path(code.co_filename).relative_to(PACKAGE).as_posix()


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


def flat(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    """Wrap every block."""
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)


def rows(model: nn.Module) -> nn.Module:
    """Call ``fully_shard`` on every block and on the model."""
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


FRONTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper, use_orig_params=False": functools.partial(flat, use_orig_params=False),
    "wrapper, use_orig_params=True": functools.partial(flat, use_orig_params=True),
    "fully_shard": rows,
}


def entered_in_steps(wrap: Callable[[nn.Module], nn.Module]) -> Entered:
    """Train a few steps, and return what the middle block entered in the last of them. Every rank must call this."""
    watched = Watched()
    entered, model = watched.entered, wrap(watched)
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


def summary(entered: Entered) -> str:
    """Return the numbers of functions, files and calls a step, without the shared-memory transport, which is apart."""
    paths = [(path_of(code), calls) for code, calls in entered.calls.items()]
    own = [(path, calls) for path, calls in paths if not path.startswith("comm/shm/")]
    files, calls = {path for path, _ in own}, sum(calls for _, calls in own) / _STEPS
    guards = sum(path.startswith("guards/") for path, _ in own)
    return (
        f"{len(own)} functions in {len(files)} files, {calls:.0f} calls ({guards} of the functions in guards; the "
        f"shared-memory transport: {len(paths) - len(own)} more)"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts of each front on two ranks, with guards and without; with ``--list`` the functions too."""
    lists = "--list" in (sys.argv[1:] if argv is None else argv)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_on_rank, (2, store.port, lists), 2)


def _on_rank(rank: int, size: int, port: int, lists: bool) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for name, wrap in FRONTS.items():
        torch.manual_seed(0)
        for guards in (True, False):
            with nullcontext() if guards else guards_off():
                entered = entered_in_steps(wrap)
            if rank == 0:
                title = name if guards else f"{name}, without guards"
                print(f"{title}: {summary(entered)}", *(entered.lines() if lists else ()), sep="\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
