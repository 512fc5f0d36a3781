"""save_checkpoint and load_checkpoint: any number of ranks, and a crash at any moment."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.weak import TensorWeakRef

from fsdp_flat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    load_checkpoint,
    load_full,
    register_optim_state_handler,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.checkpoint import checkpoints
from fsdp_flat.checkpoint.dcp_files import SafeReader, unpacked
from fsdp_flat.errors import (
    LoadError,
    OptionError,
    OptionTypeError,
    PeerFailureError,
    PhaseError,
    RankMismatchError,
    UnsupportedError,
)
from fsdp_flat.layout import clean_fqn
from tests.optim_state.factored import factored, merge_rows, split_rows
from tests.support import Ranks, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.models import Tied
from tests.support.steps import recorded
from tests.support.wrapper_models import batch, seeded, shard, train, whole_state

RanksOf = Callable[..., Ranks]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def run_and_save(path: str, strategy: str, use_orig_params: bool, background: bool) -> list[float]:
    """Two steps, a checkpoint, two more steps: the losses of those."""
    rank = dist.get_rank()
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **mesh)
    optimizer = adamw(model)
    train(model, optimizer, rank % 2, range(2))
    saving = save_checkpoint(path, model, optimizer, {"rank": rank, "steps": 2}, background=background)
    losses = train(model, optimizer, rank % 2, range(2, 4))
    assert saving.wait() == Path(path) / "step-00000000"
    assert saving.done
    return losses


def load_and_run(path: str, strategy: str, use_orig_params: bool, by_blocks: bool) -> tuple[list[float], Any]:
    """The losses of the same two steps after loading into a model that has other weights."""
    rank = dist.get_rank()
    model = shard(seeded(seed=9), strategy, use_orig_params=use_orig_params, by_blocks=by_blocks)
    optimizer = adamw(model)
    found = load_checkpoint(path, model, optimizer)
    return train(model, optimizer, rank % 2, range(2, 4)), (found.step, found.extra, found.skipped)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "saved_by, loaded_by, saved, loaded, by_blocks",
    [
        (2, 2, ("FULL_SHARD", True), ("FULL_SHARD", True), True),
        (2, 2, ("FULL_SHARD", False), ("SHARD_GRAD_OP", True), False),
        (4, 2, ("HYBRID_SHARD", True), ("FULL_SHARD", False), True),
        (2, 2, ("NO_SHARD", True), ("FULL_SHARD", True), True),
        (2, 4, ("FULL_SHARD", True), ("FULL_SHARD", False), False),
    ],
)
def test_training_goes_on_as_if_nothing_had_happened(
    ranks: RanksOf,
    tmp_path: Path,
    saved_by: int,
    loaded_by: int,
    saved: tuple[str, bool],
    loaded: tuple[str, bool],
    by_blocks: bool,
    background: bool,
) -> None:
    expected = ranks(saved_by).run(run_and_save, str(tmp_path), *saved, background)
    found = ranks(loaded_by).run(load_and_run, str(tmp_path), *loaded, by_blocks)
    for rank, (losses, (step, extra, skipped)) in enumerate(found):
        # Replicas train on the same rows, so that the global batch is the same at 2 and 4 ranks.
        assert losses == pytest.approx(expected[rank % 2], abs=1e-6)
        assert (step, skipped) == (0, ())
        assert extra == {"rank": rank if saved_by == loaded_by else 0, "steps": 2}


@on_ranks(2)
def test_checkpoints_are_numbered_and_the_newest_are_kept(tmp_path: Path) -> None:
    model = shard(seeded())
    for _ in range(3):
        save_checkpoint(tmp_path, model, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    save_checkpoint(tmp_path, model, step=40, keep_last=2)
    save_checkpoint(tmp_path, model, step=40, keep_last=2)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000040"]
    assert load_checkpoint(tmp_path, model).step == 40
    assert load_checkpoint(tmp_path, model, step=2).step == 2


@on_ranks(2)
def test_the_last_save_is_the_newest_also_with_a_lower_number(tmp_path: Path) -> None:
    model = shard(seeded())
    for step in (2, 40):
        save_checkpoint(tmp_path, model, step=step)
    assert save_checkpoint(tmp_path, model, step=3, keep_last=2).path.is_dir()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000040"]
    assert load_checkpoint(tmp_path, model).step == 3


@on_ranks(2)
def test_a_kill_between_the_renames_of_a_save_again_leaves_the_old_one(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model, step=5)
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced")
    dist.barrier()
    assert load_checkpoint(tmp_path, model).step == 5
    save_checkpoint(tmp_path, model, step=5)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@on_ranks(2)
def test_a_save_in_the_background_that_failed_is_said_at_the_next_save(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    if rank == 0:
        (tmp_path / "step-00000000.writing").write_text("a file where the directory should be")
    dist.barrier()
    save_checkpoint(tmp_path, model, step=0, background=True)
    with pytest.warns(UserWarning, match="step-00000000 in the background failed"):
        save_checkpoint(tmp_path, model, step=1)


class WithScalar(nn.Module):
    """A parameter of shape () and one without elements, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.nothing.sum()


@on_ranks(2)
def test_the_settings_for_state_dicts_do_not_matter(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    full = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *full):
        save_checkpoint(tmp_path, model, optimizer)
        assert load_checkpoint(tmp_path, model, optimizer).step == 0


@on_ranks(2)
def test_a_save_in_the_background_holds_what_was_there_when_it_was_called(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(Tied), use_orig_params=True)
    expected = whole_state(model)
    saving = save_checkpoint(tmp_path, model, background=True)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1.0)
    saving.wait()
    dist.barrier()
    other = shard(seeded(Tied, seed=1), use_orig_params=True)
    load_checkpoint(tmp_path, other)
    assert_equal(whole_state(other), expected)


@on_ranks(2)
def test_torch_reads_the_files_into_a_plain_model(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=False)
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    save_checkpoint(tmp_path, model, optimizer, {"rank": rank})
    plain = seeded(seed=1)
    state: dict[str, Any] = {
        "model": plain.state_dict(),
        "optim": {"state": {"last.bias": {"exp_avg": torch.zeros(2)}}},
        "extra": {"0": None, "1": None},
        "plain": None,
    }
    dcp.load(state, checkpoint_id=tmp_path / "step-00000000")
    assert state["extra"] == {"0": {"rank": 0}, "1": {"rank": 1}}
    assert state["plain"]["optim"]["param_groups"][0]["lr"] == 0.05
    assert_equal(dict(state["model"]), whole_state(model))
    whole = FSDP.optim_state_dict(model, optimizer)
    assert torch.equal(state["optim"]["state"]["last.bias"]["exp_avg"], whole["state"]["last.bias"]["exp_avg"])


@on_ranks(2)
def test_the_number_of_a_loaded_checkpoint_is_that_of_its_record(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    path = save_checkpoint(tmp_path, model, step=3).path
    dist.barrier()
    if rank == 0:
        path.rename(tmp_path / "step-00000009")  # by hand, to keep it apart
    dist.barrier()
    found = load_checkpoint(tmp_path, model)
    assert found is not None
    assert (found.step, found.path.name) == (3, "step-00000009")


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_replicas_share_the_writing(strategy: str, tmp_path: Path, rank: int) -> None:
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy == "HYBRID_SHARD" else {}
    model = shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), strategy, by_blocks=False, **mesh)
    save_checkpoint(tmp_path, model)
    dist.barrier()
    sizes = [(tmp_path / "step-00000000" / f"__{each}_0.distcp").stat().st_size for each in range(4)]
    full = sum(param.nbytes for param in whole_state(model).values())
    assert full < sum(sizes) < 1.3 * full
    assert max(sizes) < 0.6 * full


# -- what is not whole ---------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    victim = next(iter(sorted(path.glob("__1_*.distcp"))))
    with open(victim, "r+b") as file:
        file.truncate(victim.stat().st_size - 1)


def alter(path: Path) -> None:
    victim = next(iter(sorted(path.glob("__0_*.distcp"))))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)


def without_number(path: Path) -> None:
    body = json.loads((path / "commit.json").read_text())
    del body["step"]
    (path / "commit.json").write_text(json.dumps(body))


DAMAGE = {
    "truncated": (truncate, "bytes"),
    "altered": (alter, "was altered"),
    "missing": (lambda path: (path / "__1_0.distcp").unlink(), "does not exist"),
    "without a record": (lambda path: (path / "commit.json").unlink(), "was never finished"),
    "record cut off": (lambda path: (path / "commit.json").write_text('{"format": 2, "st'), "cannot be read"),
    "another format": (lambda path: (path / "commit.json").write_text('{"format": 7}'), "has format 7"),
    "record of nothing": (
        lambda path: (path / "commit.json").write_text('{"format": 2, "step": 1, "order": 2, "files": {}}'),
        "names no files",
    ),
    "record of a list": (
        lambda path: (path / "commit.json").write_text('{"format": 2, "step": 1, "order": 2, "files": []}'),
        "cannot be read",
    ),
    "record without a number": (without_number, "cannot be read: KeyError"),
    "still being written": (lambda path: path.rename(path.with_suffix(".writing")), "never finished"),
}


@pytest.mark.parametrize("how", DAMAGE)
@on_ranks(2)
def test_the_newest_whole_checkpoint_is_taken_and_what_was_passed_over_is_said(
    how: str, tmp_path: Path, rank: int
) -> None:
    verify_files, text = DAMAGE[how]
    model = shard(seeded())
    optimizer = adamw(model)
    train(model, optimizer, rank, range(1))
    save_checkpoint(tmp_path, model, optimizer, "first")
    expected = whole_state(model)
    train(model, optimizer, rank, range(1, 2))
    save_checkpoint(tmp_path, model, optimizer, "second")
    dist.barrier()
    if rank == 0:
        verify_files(tmp_path / "step-00000001")
    dist.barrier()
    if rank == 0:
        with pytest.warns(UserWarning, match=f"passed over: .*{text}") as told:
            found = load_checkpoint(tmp_path, model, optimizer)
        assert str(told[0].message).endswith(f"{found.skipped[0]}.")
        assert ".." not in str(told[0].message)
    else:
        found = load_checkpoint(tmp_path, model, optimizer)
    assert (found.step, found.extra) == (0, "first")
    assert text in found.skipped[0]
    assert_equal(whole_state(model), expected)


@on_ranks(2)
def test_a_link_to_nothing_is_passed_over_and_costs_no_checkpoint(tmp_path: Path, rank: int) -> None:
    model, text = shard(seeded()), "step-00000003 is a link to .*nowhere, which does not exist"
    save_checkpoint(tmp_path, model)
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000003").symlink_to(tmp_path / "nowhere")
    dist.barrier()
    with pytest.warns(UserWarning, match=f"passed over: .*{text}") if rank == 0 else contextlib.nullcontext():
        found = load_checkpoint(tmp_path, model)
    assert found.step == 0
    assert re.search(text, found.skipped[0])
    with pytest.raises(LoadError, match=text):
        load_checkpoint(tmp_path, model, step=3)
    assert save_checkpoint(tmp_path, model, keep_last=1).step == 4
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    save_checkpoint(tmp_path, model, step=3, keep_last=1)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert load_checkpoint(tmp_path, model).step == 3


@on_ranks(2)
def test_a_checkpoint_that_cannot_be_read_does_not_count_among_those_that_are_kept(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model)
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000000" / "commit.json").unlink()
    dist.barrier()
    save_checkpoint(tmp_path, model, keep_last=1)
    dist.barrier()
    assert (tmp_path / "step-00000001" / "commit.json").exists()


@on_ranks(2)
def test_without_any_whole_checkpoint_the_error_names_each(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    assert load_checkpoint(tmp_path / "nowhere", model) is None
    save_checkpoint(tmp_path, model)
    dist.barrier()
    if rank == 0:
        truncate(tmp_path / "step-00000000")
    dist.barrier()
    before = whole_state(model)
    with pytest.raises(LoadError, match=r"No complete checkpoint in .*__1_0.distcp has"):
        load_checkpoint(tmp_path, model)
    with pytest.raises(LoadError, match=r"step-00000007 does not exist; checkpoints there: 0\.$"):
        load_checkpoint(tmp_path, model, step=7)
    with pytest.raises(LoadError, match=r"step-00000007 does not exist; checkpoints there: none\.$"):
        load_checkpoint(tmp_path / "nowhere", model, step=7)
    assert_equal(whole_state(model), before)


def write_with_record(path: Path, name: str, data: bytes) -> None:
    """Write a file of a checkpoint, with a record that says that this is what was written."""
    (path / name).write_bytes(data)
    body = json.loads((path / "commit.json").read_text())
    body["files"][name] = {"size": len(data), "crc32": zlib.crc32(data)}
    del body["crc32"]
    (path / "commit.json").write_text(json.dumps(body))


# Pickles that call os.system: by its module, and through one that metadata may name.
CALLS = [
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
]


@pytest.mark.parametrize("pickled", CALLS)
@on_ranks(2)
def test_metadata_that_would_run_code_are_refused(pickled: bytes, tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model)
    dist.barrier()
    path = tmp_path / "step-00000000"
    if rank == 0:
        write_with_record(path, ".metadata", pickled)
    dist.barrier()
    with pytest.raises(LoadError, match=r"refers to .*os\.system"):
        load_checkpoint(tmp_path, model)


@pytest.mark.parametrize("written_by", [b"pathlib\nPosixPath", b"pathlib._local\nPosixPath", b"pathlib\nWindowsPath"])
def test_metadata_with_the_path_of_another_python_or_system_are_read(written_by: bytes, tmp_path: Path) -> None:
    metadata = Metadata({}, storage_meta=StorageMeta(checkpoint_id=Path("runs", "step-00000000")))
    pickled = pickle.dumps(metadata, protocol=2)  # names a type by two lines
    pickled, num_paths = re.subn(rb"pathlib(\._local)?\n\w+Path", written_by, pickled)
    assert num_paths == 1
    (tmp_path / ".metadata").write_bytes(pickled)
    found = SafeReader(tmp_path).read_metadata().storage_meta
    assert found is not None
    assert found.checkpoint_id.parts == ("runs", "step-00000000")


@on_ranks(2)
def test_metadata_refer_to_no_type_that_only_one_python_has(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, shard(seeded()))
    pickled = (tmp_path / "step-00000000" / ".metadata").read_bytes()
    assert b"pathlib" not in pickled


# -- what does not fit ---------------------------------------------------------------------------------------------


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.other = nn.Linear(6, 2)


@ORIG_PARAMS
@on_ranks(2)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    save_checkpoint(tmp_path, shard(seeded(), use_orig_params=use_orig_params))
    model = shard(seeded(Wider), use_orig_params=use_orig_params, by_blocks=False)
    before = whole_state(model)
    with pytest.raises(LoadError, match=r"missing: 'other.weight'.*Nothing was loaded"):
        load_checkpoint(tmp_path, model)
    assert_equal(whole_state(model), before)
    with pytest.raises(LoadError, match="saved without an optimizer"):
        load_checkpoint(tmp_path, shard(seeded()), adamw(model))


@on_ranks(2)
def test_bad_arguments_of_a_save_are_named_on_every_rank_and_nothing_is_written(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    for kind, bad, text in (
        (OptionError, {"step": -1}, "step must be an int of at least 0, or None; got -1"),
        (OptionTypeError, {"step": "3"}, "step must be an int of at least 0, or None; got '3'"),
        (OptionError, {"keep_last": 0}, "keep_last must be an int of at least 1; got 0"),
        (OptionTypeError, {"keep_last": None}, "keep_last must be an int of at least 1; got None"),
        (OptionTypeError, {"keep_last": 1.5}, "keep_last must be an int of at least 1; got 1.5"),
    ):
        with pytest.raises(kind, match=text):
            save_checkpoint(tmp_path, model, **bad)
    for call in (lambda: save_checkpoint(None, model), lambda: load_checkpoint(None, model)):
        with pytest.raises(OptionTypeError, match="directory must be a path, as a str or a Path; got None"):
            call()
    for call in (lambda: save_checkpoint(tmp_path, None), lambda: load_checkpoint(tmp_path, None)):
        with pytest.raises(OptionTypeError, match=r"takes a model, an nn\.Module; got NoneType"):
            call()
    with pytest.raises(OptionTypeError, match="step must be an int of at least 0, or None; got '3'"):
        load_checkpoint(tmp_path, model, step="3")
    with pytest.raises(OptionError if rank == 0 else PeerFailureError, match="weights_only=True"):
        save_checkpoint(tmp_path, model, extra=random.Random() if rank == 0 else None)
    loss = square_loss(model, batch(rank))
    with FSDP.summon_full_params(model), pytest.raises(PhaseError):
        save_checkpoint(tmp_path, model)
    loss.backward()
    with pytest.raises(OptionError, match="holds no FullyShardedDataParallel"):
        save_checkpoint(tmp_path, nn.Linear(2, 2))
    train(other_model := shard(seeded(seed=2)), other := adamw(other_model), rank, range(1))
    with pytest.raises(OptionError, match="none of this model's"):
        save_checkpoint(tmp_path, model, other)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_disk_that_fails_is_an_error_on_every_rank_and_leaves_the_last_checkpoint(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model)
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000001.writing").write_text("a file where the directory should be")
    dist.barrier()
    for background in (False, True):
        with pytest.raises(OSError if rank == 0 else PeerFailureError):
            save_checkpoint(tmp_path, model, background=background).wait()
    dist.barrier()
    if rank == 0:
        (tmp_path / "step-00000001.writing").unlink()
    dist.barrier()
    assert load_checkpoint(tmp_path, model).step == 0


# -- what ranks tell each other --------------------------------------------------------------------------------------


@ORIG_PARAMS
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_ranks_synchronize_five_times_in_a_save(
    strategy: str, background: bool, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy == "HYBRID_SHARD" else {}
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **mesh)
    optimizer = adamw(model)
    train(model, optimizer, rank % 2, range(1))
    # The first save in the background creates its process group.
    save_checkpoint(tmp_path, model, optimizer, background=background).wait()
    for own_optimizer in (None, optimizer):
        with recorded() as record:
            save_checkpoint(tmp_path, model, own_optimizer, {"rank": rank}, background=background).wait()
        # A barrier through the store comes first; then integers, the lengths and texts of what is written, the outcome.
        assert record.counts() == {"all_gather": 3, "gather": 1}


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_one_rank_sends_the_states_of_a_parameter_that_are_no_tensors(
    strategy: str, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    mesh = {"device_mesh": init_device_mesh("cpu", (2, 2))} if strategy == "HYBRID_SHARD" else {}
    model = shard(seeded(WithScalar), strategy, by_blocks=False, use_orig_params=use_orig_params, **mesh)
    optimizer = adamw(model)
    train(model, optimizer, rank % 2, range(1))
    sent: list[str] = []

    def read(plain: dict[str, Any], each_rows: Any) -> bytes:
        for text in filter(None, each_rows):
            sent.extend(unpacked(base64.b64decode(text)))
        return write(plain, each_rows)

    write = checkpoints._packed_plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_packed_plain", read)
        save_checkpoint(tmp_path, model, optimizer)
    names = FSDP.optim_state_dict(model, optimizer)["state"]
    assert sorted(sent) == (sorted(names) if rank == 0 else [])
    dist.barrier()
    load_checkpoint(tmp_path, model, optimizer)
    assert all(row["step"] == 1.0 for row in optimizer.state.values())


@on_ranks(2)
def test_a_progress_bar_counts_the_bytes_that_rank_0_writes(tmp_path: Path, rank: int) -> None:
    pytest.importorskip("tqdm", reason="draws the bar")
    model = shard(seeded())
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        save_checkpoint(tmp_path, model, progress=True)
        save_full(model, tmp_path / "full", progress=True)
    assert ("Saving: 100%" in shown.getvalue()) == (rank == 0)
    assert ("Saving the model: 100%" in shown.getvalue()) == (rank == 0)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("saved_by, loaded_by", [(2, 2), (2, 4), (4, 2)])
def test_states_with_a_handler_go_into_a_checkpoint_and_out_of_it(
    ranks: RanksOf, tmp_path: Path, saved_by: int, loaded_by: int, background: bool
) -> None:
    saved = ranks(saved_by).run(save_factored, str(tmp_path), background)
    for loaded in ranks(loaded_by).run(load_factored, str(tmp_path)):
        assert_equal(loaded, saved[0])


@on_ranks(2)
def test_merged_states_are_whole_on_one_rank_each_while_they_are_saved(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    calls = []

    def merge(parts: Any, shape: torch.Size) -> torch.Tensor:
        calls.append(shape)
        return merge_rows(parts, shape)

    register_optim_state_handler(model, "row_sums", merge=merge, split=split_rows)
    save_checkpoint(tmp_path, model, optimizer)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, len(calls))
    matrices = sum(value.dim() == 2 for value in whole_state(model).values())
    assert sum(everyone) == matrices
    assert max(everyone) - min(everyone) <= 1


@on_ranks(2)
def test_a_handler_that_raises_on_one_rank_or_is_there_on_one_only_fails_on_all(tmp_path: Path, rank: int) -> None:
    def merge(parts: Any, shape: torch.Size) -> torch.Tensor:
        if rank == 1:
            raise MemoryError("no room")
        return merge_rows(parts, shape)

    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    register_optim_state_handler(model, "row_sums", merge=merge, split=split_rows)
    for save in (
        lambda: save_checkpoint(tmp_path, model, optimizer),
        lambda: FSDP.optim_state_dict(model, optimizer),
    ):
        with pytest.raises((MemoryError, PeerFailureError), match="no room"):
            save()
    other = shard(seeded(), use_orig_params=True)
    if rank == 0:
        register_optim_state_handler(other, "row_sums", merge=merge_rows, split=split_rows)
    with pytest.raises(RankMismatchError, match="rank 0 of the group has a handler of 'row_sums', rank 1 has"):
        save_checkpoint(tmp_path, other, factored(other))


@on_ranks(4)
def test_units_over_some_of_the_ranks_below_one_over_all_are_saved_together(tmp_path: Path, rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        inner = FSDP(nn.Linear(4, 4), process_group=pairs[rank // 2])
        return FSDP(nn.Sequential(inner, nn.Linear(4, 2)))

    model, other = make(0), make(1)
    save_checkpoint(tmp_path / "own", model)
    load_checkpoint(tmp_path / "own", other)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def save_factored(path: str, background: bool) -> dict[str, Any]:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    register_optim_state_handler(model, "row_sums", merge=merge_rows, split=split_rows)
    save_checkpoint(path, model, optimizer, background=background).wait()
    return FSDP.optim_state_dict(model, optimizer)["state"]


@on_ranks(2)
def test_merged_states_are_read_and_split_one_after_another(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    alive: list[TensorWeakRef] = []
    most = []

    def split(whole: torch.Tensor, shape: torch.Size, start: int, stop: int) -> torch.Tensor:
        alive.append(TensorWeakRef(whole))
        most.append(sum(ref() is not None for ref in alive))
        return split_rows(whole, shape, start, stop).clone()

    register_optim_state_handler(model, "row_sums", merge=merge_rows, split=split)
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer)
    assert len(most) > 3
    assert max(most) <= 2


@on_ranks(2)
def test_states_that_are_merged_to_one_number_come_back_on_every_rank(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, rank, range(1))
    register_optim_state_handler(
        model,
        "momentum_buffer",
        merge=lambda parts, shape: torch.stack([part.tensor.sum() for part in parts]).sum(),
        split=lambda whole, shape, start, stop: torch.full((stop - start,), float(whole)),
    )
    sums = {name: row["momentum_buffer"] for name, row in FSDP.optim_state_dict(model, optimizer)["state"].items()}
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer)
    params = {clean_fqn(name): param for name, param in model.named_parameters()}
    assert sorted(sums) == sorted(params)
    for name, param in params.items():
        if param.numel() > 0:
            assert set(optimizer.state[param]["momentum_buffer"].tolist()) == {float(sums[name])}, name


@on_ranks(2)
def test_a_handler_of_a_state_that_is_no_tensor_is_refused_on_every_rank(tmp_path: Path, rank: int) -> None:
    model = FSDP(nn.Linear(1, 1, bias=False), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["count"] = 3
    register_optim_state_handler(model, "count", merge=merge_rows, split=split_rows)
    with pytest.raises((UnsupportedError, PeerFailureError), match="has a handler, which merges tensors"):
        save_checkpoint(tmp_path, model, optimizer)


def load_factored(path: str) -> dict[str, Any]:
    model = shard(seeded(seed=3), use_orig_params=True)
    optimizer = factored(model)
    with pytest.raises(LoadError, match="register_optim_state_handler"):
        load_checkpoint(path, model, optimizer)
    register_optim_state_handler(model, "row_sums", merge=merge_rows, split=split_rows)
    load_checkpoint(path, model, optimizer)
    return FSDP.optim_state_dict(model, optimizer)["state"]


@ORIG_PARAMS
@on_ranks(2)
def test_compiled_models_and_others_load_each_others_checkpoints_and_files(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    def made(seed: int, compiled: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = shard(seeded(seed=seed), use_orig_params=use_orig_params)
        optimizer = adamw(model)
        train(model, optimizer, rank, range(seed + 1))
        # Around the outermost wrapper, and around one that a plain module holds.
        return (torch.compile(model, backend="eager") if compiled else model), optimizer

    for put in (lambda model: model, nn.Sequential):
        for index, (from_compiled, to_compiled) in enumerate([(True, False), (False, True), (True, True)]):
            path = tmp_path / f"{put.__name__}{index}"
            (model, optimizer), (other, other_optimizer) = made(0, from_compiled), made(1, to_compiled)
            expected = {clean_fqn(name): value.clone() for name, value in put(model).state_dict().items()}
            save_checkpoint(path / "run", put(model), optimizer)
            load_checkpoint(path / "run", put(other), other_optimizer)
            save_full(put(model), path / "full")
            for load in (lambda: None, lambda: load_full(put(other), path / "full")):  # noqa: B023
                load()
                found = {clean_fqn(name): value for name, value in put(other).state_dict().items()}
                assert_equal(found, expected)
                with torch.no_grad():
                    for param in other.parameters():
                        param.zero_()
            assert len(other_optimizer.state) == len(optimizer.state)


@on_ranks(2)
def test_a_save_between_backwards_inside_no_sync_says_that_their_gradients_are_not_in_it(
    tmp_path: Path, rank: int
) -> None:
    model = shard(seeded())
    with model.no_sync():
        model(batch(rank)).sum().backward()
    with pytest.warns(UserWarning, match="between backwards inside no_sync: gradients of .* are not reduced yet"):
        save_checkpoint(tmp_path, model)
    model(batch(rank)).sum().backward()
    save_checkpoint(tmp_path, model)
