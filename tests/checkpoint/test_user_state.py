"""Checkpoints of models with values and methods of their own, and ranks that fail alone."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, iter_full_state_dict, load_checkpoint, save_checkpoint
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError
from tests.checkpoint.held_saves import held
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import train_on
from tests.support.steps import recorded


class WithExtra(nn.Module):
    """A layer, and a value that is no tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Unreadable:
    """No class that torch.load(weights_only=True) knows."""


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train_on(model, optimizer, [torch.ones(2, 3)])
    return optimizer


@on_ranks(2)
def test_an_extra_state_that_could_not_be_loaded_is_refused_at_the_save(tmp_path: Path) -> None:
    model = FSDP(WithExtra({"steps": 3, "odd": Unreadable()}))
    text = r"get_extra_state\) holds something that torch.load.*: \['_extra_state'\]\['odd'\] is of type .*Unreadable"
    with pytest.raises(OptionError, match=text):
        save_checkpoint(tmp_path, model)
    assert list(tmp_path.iterdir()) == []
    model.module.extra = {"steps": 3}
    save_checkpoint(tmp_path, model)
    dist.barrier()
    model.module.extra = None
    load_checkpoint(tmp_path, model)
    assert model.module.extra == {"steps": 3}


def no_local() -> None:
    """A function that pickle finds."""


class Keyed(dict[Any, Any]):
    """A dict of its own, of which each entry could be read."""


@pytest.mark.parametrize(
    "extra, found",
    [
        ({"state": ("MT19937", np.zeros(3))}, "extra['state'][1] is of type numpy.ndarray"),
        ([1, {"loss": np.float64(0.5)}], "extra[1]['loss'] is of type numpy.float64"),
        ({"hook": no_local}, "extra['hook'] is of type builtins.function"),
        ({("a", np.float32(1.0)): 1}, "a key of extra[1] is of type numpy.float32"),
        (Keyed(a=1), "extra is of type tests.checkpoint.test_user_state.Keyed"),
        (Unreadable(), "extra is of type tests.checkpoint.test_user_state.Unreadable"),
    ],
)
@on_ranks(2)
def test_a_value_that_cannot_be_read_back_is_named_with_its_type(extra: Any, found: str, tmp_path: Path) -> None:
    model = FSDP(WithExtra(None))
    with pytest.raises(OptionError, match=re.escape(found)) as caught:
        save_checkpoint(tmp_path, model, extra=extra)
    assert "\x1b" not in str(caught.value)
    assert "torch.from_numpy(array)" in str(caught.value)


@on_ranks(2)
def test_values_that_cannot_be_pickled_are_named_too(tmp_path: Path) -> None:
    model = FSDP(WithExtra(None), use_orig_params=True)
    with pytest.raises(OptionError, match=re.escape("extra['schedule'] is of type builtins.function")):
        save_checkpoint(tmp_path, model, extra={"schedule": lambda step: step})
    optimizer = trained(model)
    for param in model.parameters():
        optimizer.state[param]["count"] = np.int64(3)
    with pytest.raises(
        OptionError, match=r"The optimizer .*: \['state'\]\['layer.*'\]\['count'\] is of type numpy.int64"
    ):
        save_checkpoint(tmp_path, model, optimizer)
    optimizer = trained(model)
    optimizer.param_groups[0]["schedule"] = np.zeros(2)
    with pytest.raises(OptionError, match=r"\['param_groups'\]\[0\]\['schedule'\] is of type numpy.ndarray"):
        save_checkpoint(tmp_path, model, optimizer)


@ORIG_PARAMS
@on_ranks(2)
def test_values_that_change_during_a_save_in_the_background_are_saved_as_they_were(
    use_orig_params: bool, tmp_path: Path
) -> None:
    """The thread is held until the values have changed."""
    model = FSDP(WithExtra({"seen": [1]}), use_orig_params=use_orig_params)
    optimizer = trained(model)
    for param in model.parameters():
        if param in optimizer.state:
            optimizer.state[param]["history"] = [1]
    is_changed = threading.Event()

    with held(is_changed):
        saving = save_checkpoint(tmp_path, model, optimizer, background=True)
    model.module.extra["seen"].append(2)
    for row in optimizer.state.values():
        row["history"].append(2)
    is_changed.set()
    saving.wait()
    dist.barrier()
    load_checkpoint(tmp_path, model, optimizer)
    assert model.module.extra == {"seen": [1]}
    assert all(row["history"] == [1] for row in optimizer.state.values())


class WithIgnored(nn.Module):
    """A layer, and a parameter to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.free = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.free


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["fsdp_flat.state.optim_save._others", "fsdp_flat.checkpoint.checkpoints.zlib.crc32"])
@on_ranks(2)
def test_a_rank_that_fails_alone_after_the_comparison_fails_the_save_on_all(
    where: str, failing: int, background: bool, tmp_path: Path, rank: int
) -> None:
    inner = WithIgnored()
    model = FSDP(inner, ignored_states=[inner.free])
    optimizer = trained(model)

    def fail(*_: Any, **_options: Any) -> Any:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(where, fail)
        with pytest.raises(MemoryError if rank == failing else PeerFailureError, match="no room"):
            save_checkpoint(tmp_path, model, optimizer, background=background).wait()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    assert save_checkpoint(tmp_path, model, optimizer).path.is_dir()


@pytest.mark.parametrize("raised", [OSError("no such disk"), ValueError("no such number")])
@on_ranks(2)
def test_a_rank_that_cannot_read_fails_the_load_on_all(raised: Exception, tmp_path: Path, rank: int) -> None:
    model = FSDP(WithExtra(None))
    optimizer = trained(model)
    save_checkpoint(tmp_path, model, optimizer)
    dist.barrier()

    def fail(*_: Any) -> Any:
        raise raised

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dcp.FileSystemReader, "read_data", fail)
        with pytest.raises(LoadError if rank == 1 else PeerFailureError, match=r"cannot be read: .*no such") as caught:
            load_checkpoint(tmp_path, model, optimizer)
    if rank == 1:
        assert caught.value.__cause__ is raised
    assert load_checkpoint(tmp_path, model, optimizer).step == 0


@on_ranks(1)
def test_an_interrupt_during_a_load_stays_one(tmp_path: Path) -> None:
    model = FSDP(WithExtra(None), sharding_strategy=ShardingStrategy.NO_SHARD)
    save_checkpoint(tmp_path, model)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp.FileSystemReader, "read_data", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(tmp_path, model)


class WithPlainMethod(nn.Module):
    """A wrapper inside of a module whose ``state_dict`` takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = FSDP(nn.Linear(3, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class WithOwnDict(WithPlainMethod):
    """The same with a dict of its own."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        parts = {"net": self.net.state_dict(), "head": self.head.state_dict()}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}


@pytest.mark.parametrize("kind", [WithPlainMethod, WithOwnDict])
@on_ranks(2)
def test_a_module_with_a_state_dict_method_of_its_own_is_saved_in_shards(
    kind: type[nn.Module], tmp_path: Path, rank: int
) -> None:
    torch.manual_seed(0)
    model = kind()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with recorded() as record:
        save_checkpoint(tmp_path / "run", model)
    # Integers, lengths and texts; no parameter is all-gathered.
    assert record.counts() == {"all_gather": 3, "gather": 1}
    dist.barrier()
    metadata = dcp.FileSystemReader(tmp_path / "run" / "step-00000000").read_metadata().state_dict_metadata
    assert len(metadata["model.net.weight"].chunks) >= 2
    assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(tmp_path / "run", model)
    assert_equal(dict(model.state_dict()), expected)
