"""The checks by which clients leave out or refuse FSDP on CPUs: lifted while installed, undone, and said aloud."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.state
import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from packaging.specifiers import SpecifierSet
from transformers import TrainingArguments

import fsdp_flat
from fsdp_flat.compat import client_gates
from tests.clients.kit import rank_environment
from tests.support import on_ranks

# Uses of torch and of Python in the clients that are deprecated.
IGNORED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    before = dict(os.environ)  # accelerate remembers there that FSDP was asked for
    yield
    os.environ.clear()
    os.environ.update(before)
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def functions() -> list[Any]:
    """Return what lift() may replace in the clients that are imported here."""
    return [
        PartialState.__init__,
        AcceleratorState.__init__,
        FullyShardedDataParallelPlugin.__post_init__,
        TrainingArguments.__post_init__,
    ]


def lightning_accepts() -> bool:
    accepted = []
    for make, options in ((Trainer, {"logger": False, "enable_checkpointing": False}), (Fabric, {})):
        try:
            make(accelerator="cpu", devices=2, strategy="fsdp", **options)
            accepted.append(True)
        except ValueError:  # about GPUs
            accepted.append(False)
    assert len(set(accepted)) == 1, accepted
    return accepted[0]


@IGNORED
def test_clients_imported_before_are_treated_at_once_and_given_back_by_uninstall() -> None:
    before = functions()
    assert not lightning_accepts()
    with fsdp_flat.installed():
        assert all(now is not then for now, then in zip(functions(), before))
        assert lightning_accepts()
    assert functions() == before
    assert not lightning_accepts()


@IGNORED
def test_nothing_is_replaced_on_a_machine_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    before = functions()
    with fsdp_flat.installed():
        assert functions() == before
        assert not lightning_accepts()


def test_one_line_of_the_log_names_each_client_with_its_version(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_flat"), fsdp_flat.installed():
        fsdp_flat.install()
    lines = [record.getMessage() for record in caplog.records if "FSDP on CPUs" in record.getMessage()]
    assert sorted(line.split()[0] for line in lines) == ["accelerate", "lightning", "transformers"]
    assert f"accelerate {accelerate.__version__}: FSDP on CPUs is allowed, with fsdp_flat" in lines


def test_a_version_that_is_not_known_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(client_gates.VERSIONS, "accelerate", SpecifierSet("<1"))
    with pytest.warns(UserWarning, match=rf"accelerate {accelerate.__version__} may have others.*print\(model\)"):
        fsdp_flat.install()
    fsdp_flat.uninstall()


@IGNORED
def test_a_script_that_no_launcher_started_is_told_that_it_does_not_shard() -> None:
    with fsdp_flat.installed(), pytest.warns(UserWarning, match="without sharding .*torchrun or accelerate launch"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())


@IGNORED
def test_a_key_of_the_trainers_config_that_transformers_does_not_read_is_warned_of(tmp_path: Path) -> None:
    """As accelerate's ``offload_params``, which the Trainer calls ``cpu_offload``: nothing was offloaded."""
    known = {"version": 1, "transformer_layer_cls_to_wrap": ["Block"], "limit_all_gathers": True, "cpu_offload": True}
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_offload_params": True, "fsdp_use_orig_params": True}))
    with fsdp_flat.installed():
        TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=known)
        with pytest.warns(UserWarning, match="does not read, so they change nothing: offload_params. The doc"):
            TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=str(tmp_path / "fsdp.json"))


@IGNORED
@on_ranks(2)
def test_an_fsdp_plugin_that_ends_as_ddp_is_warned_of() -> None:
    with rank_environment(), fsdp_flat.installed():
        Accelerator()  # decides for the process
        with pytest.warns(UserWarning, match="trains by DistributedDataParallel .*to the first Accelerator"):
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        assert isinstance(accelerator.prepare(torch.nn.Linear(2, 2)), torch.nn.parallel.DistributedDataParallel)
        forget()


@IGNORED
@on_ranks(2)
def test_fsdp_of_version_2_on_torch_is_warned_of() -> None:
    plugin = {"fsdp_version": 2}
    with rank_environment(), fsdp_flat.installed():
        with pytest.warns(UserWarning, match=r"torch's fully_shard here.*--fully-shard"):
            Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
        forget()
    with rank_environment(), fsdp_flat.installed(fully_shard=True):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
        forget()
