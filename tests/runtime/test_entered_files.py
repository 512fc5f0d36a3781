"""How many files a newcomer has to read to follow one unit through a step, or a state dict."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel, load_checkpoint, save_checkpoint
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.runtime.kit import batch, shared_memory
from tests.support import on_ranks
from tests.support.kit import Block, wrapped

MOST = 12
PACKAGE = Path(fsdp_flat.__file__).parent


class Entered:
    """The files of the package whose functions run while it is on."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.add(path.relative_to(PACKAGE).as_posix())

    def on(self, *_: Any) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def off(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


# Values, tensors of one process and collectives: the terms in which the layers above are written.
LOWER_LAYERS = ("api.py", "comm/", "flat/", "layout/")


def upper_files(call: Callable[[], object]) -> set[str]:
    """Return the files above the lower layers that ``call`` enters."""
    record = Entered()
    try:
        record.on()
        call()
    finally:
        record.off()
    return {path for path in record.files if not path.startswith(LOWER_LAYERS)}


class Watched(nn.Module):
    """Three blocks; ``record`` is on while the middle one runs forward, and while its backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.record = Entered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * 1
        x.register_hook(self.record.off)
        self.record.on()
        x = self.middle(x)
        self.record.off()
        x = x * 1
        x.register_hook(self.record.on)
        return self.last(x)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])
def test_forward_and_backward_of_a_unit_enter_few_files(shared: bool, use_orig_params: bool, rank: int) -> None:
    with shared_memory(shared):
        model = wrapped(Watched(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
        record = model.module.record
        for step in range(3):
            record.files.clear()
            try:
                model(batch(rank, step)).sum().backward()
            finally:
                record.off()
            model.zero_grad()
    files = record.files
    assert {"runtime/unit.py", "runtime/forward.py", "runtime/backward.py", "flat/handle.py"} <= files
    assert len(files) <= MOST, " ".join(sorted(files))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_state_dicts_enter_few_files_above_the_lower_layers(use_orig_params: bool, rank: int) -> None:
    module = nn.Sequential(Block(), Block())
    model = wrapped(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    states: list[dict[str, Any]] = [FullyShardedDataParallel.optim_state_dict(model, optimizer)]
    calls: dict[str, Callable[[], Any]] = {
        "model_save.py": model.state_dict,
        "optim_save.py": lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        "optim_load.py": lambda: FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states[0]),
    }
    for file, call in calls.items():
        files = upper_files(call)
        assert f"state/{file}" in files
        assert len(files) <= MOST, " ".join(sorted(files))


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_save_and_a_load_of_a_checkpoint_enter_few_files(use_orig_params: bool, tmp_path: Path, rank: int) -> None:
    model = wrapped(Watched(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(rank)).sum().backward()
    optimizer.step()
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save_checkpoint(tmp_path, model, optimizer),
        "load": lambda: load_checkpoint(tmp_path, model, optimizer),
    }
    for name, call in calls.items():
        files = upper_files(call)
        assert "checkpoint/checkpoints.py" in files
        assert len(files) <= MOST, f"{name}: {' '.join(sorted(files))}"


def test_the_record_sees_files_of_the_package_only_while_it_is_on() -> None:
    record = Entered()
    fsdp_flat.layout.clean_fqn("a")
    assert not record.files
    record.on()
    fsdp_flat.layout.clean_fqn("a")
    record.off()
    assert record.files == {"layout/fqn.py"}
