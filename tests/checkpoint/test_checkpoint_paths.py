"""A wrong path of a checkpoint does not restart training silently, and a checkpoint's own directory loads."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from fsdp_flat import (
    FullyShardedDataParallel,
    fully_shard,
    list_checkpoints,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    verify_checkpoint,
)
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError
from tests.support import assert_equal, on_ranks
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import seeded, shard, train


def full(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a value of a full state dict, which is a DTensor under `fully_shard`."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@on_ranks(2)
def test_a_first_run_and_its_continuation_are_one_program(tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trained = []
    for last in (2, 5):
        found = load_checkpoint(tmp_path / "run", model, optimizer)
        for step in range(0 if found is None else found.step + 1, last):
            train(model, optimizer, rank, range(step, step + 1))
            trained.append(step)
            save_checkpoint(tmp_path / "run", model, optimizer, step=step, keep_last=1)
    assert trained == [0, 1, 2, 3, 4]
    dist.barrier()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000004"]


@on_ranks(2)
def test_nothing_to_load_is_said_once_in_the_log_with_what_is_beside_it(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path / "run", model)
    (tmp_path / "empty").mkdir(exist_ok=True)
    (tmp_path / "empty" / ".gitkeep").touch()
    dist.barrier()
    logger, records = logging.getLogger("fsdp_flat"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for name in ("rnu", "empty"):
            assert load_checkpoint(tmp_path / name, model) is None
    finally:
        logger.removeHandler(handler)
    # Without a configuration of its own, logging shows this level on stderr.
    assert all(record.levelno == logging.WARNING for record in records)
    said = [f"{tmp_path / name} {what}, so" for name, what in (("rnu", "does not exist"), ("empty", "is empty"))]
    assert len(records) == (len(said) if rank == 0 else 0)
    assert all(text in record.getMessage() for text, record in zip(said, records))
    assert all("beside that directory there is empty, run." in record.getMessage() for record in records)


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_a_checkpoints_own_directory_loads_also_as_a_copy_with_another_name(
    tmp_path: Path, rank: int, front: str
) -> None:
    model = FullyShardedDataParallel(seeded()) if front == "wrapper" else fully_shard(seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(1))
    expected = {name: full(value).clone() for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path / "run", model, optimizer, {"rank": rank}, step=100)
    train(model, optimizer, rank, range(1))
    save_checkpoint(tmp_path / "run", model, optimizer, step=200)
    if rank == 0:
        shutil.copytree(tmp_path / "run" / "step-00000100", tmp_path / "best")
        (tmp_path / "latest").symlink_to(Path("run") / "step-00000100")
    dist.barrier()
    for path in (tmp_path / "run" / "step-00000100", tmp_path / "best", tmp_path / "latest"):
        train(model, optimizer, rank, range(1))
        found = load_checkpoint(path, model, optimizer)
        assert found is not None
        assert (found.step, found.path, found.extra, found.skipped) == (100, path, {"rank": rank}, ())
        assert_equal({name: full(value) for name, value in model.state_dict().items()}, expected)


@on_ranks(2)
def test_a_directory_with_other_things_is_an_error_that_lists_them(tmp_path: Path) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path / "out" / "run", model)
    save_checkpoint(tmp_path / "out" / "run", model, step=7)
    other = tmp_path / "other"
    other.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (other / name).touch()
    (tmp_path / "file").touch()
    if dist.get_rank() == 0:
        (tmp_path / "link").symlink_to("gone")
    dist.barrier()
    for path, text in (
        (other, "other holds no checkpoint, but config.json, model.safetensors. Pass the directory that was given to"),
        (tmp_path / "out", "out holds no checkpoint, but run. Pass the directory that was given to save_checkpoint "),
        (tmp_path / "out", "save_checkpoint (run has checkpoints), or that of one checkpoint (step-00000100)"),
        (tmp_path / "file", "file is a file"),
        (tmp_path / "link", "link is a link to gone, which does not exist"),
        (tmp_path / "out" / "run" / "step-00000008", "step-00000008 does not exist; checkpoints there: 0, 7"),
    ):
        with pytest.raises((LoadError, PeerFailureError), match=re.escape(text)):
            load_checkpoint(path, model)


@on_ranks(2)
def test_a_save_into_a_checkpoints_own_directory_is_refused(tmp_path: Path) -> None:
    model = shard(seeded())
    own = save_checkpoint(tmp_path, model, step=3).path
    with pytest.raises(
        (OptionError, PeerFailureError), match=r"step-00000003 is a checkpoint itself; pass the directory"
    ):
        save_checkpoint(own, model)
    assert load_checkpoint(own, model) is not None


@on_ranks(2)
def test_a_directory_of_checkpoints_may_have_a_name_like_a_checkpoints(tmp_path: Path) -> None:
    model = shard(seeded())
    assert load_checkpoint(tmp_path / "step-1", model) is None
    save_checkpoint(tmp_path / "step-1", model, step=5)
    found = load_checkpoint(tmp_path / "step-1", model)
    assert found is not None
    assert found.step == 5


@on_ranks(2)
def test_a_url_made_a_path_or_an_empty_text_is_refused_where_a_path_is_due_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named "s3:" was made in the working directory, and files were written into that for an empty text."""
    monkeypatch.chdir(tmp_path)
    model = shard(seeded())
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("directory", lambda path: save_checkpoint(path, model, step=1)),
        ("directory", lambda path: load_checkpoint(path, model)),
        ("directory", list_checkpoints),
        ("path", verify_checkpoint),
        ("directory", lambda path: save_full(model, path)),
        ("path", lambda path: load_full(model, path)),
    ]
    for name, call in calls:
        with pytest.raises(OptionError, match=f"{name} must be a path, or a URL as a str; got .*'s3:/bucket/run'"):
            call(Path("s3://bucket/run"))
        with pytest.raises(OptionError, match=f"{name} is an empty text"):
            call("")
        dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [save_checkpoint, save_full])
@on_ranks(2)
def test_the_name_of_a_file_is_refused_where_a_folder_is_written(save: Any, tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    args = (model, tmp_path / "model.pt") if save is save_full else (tmp_path / "model.pt", model)
    with pytest.raises(OptionError, match=r"directory must be a folder.*model\.pt', the name of a file"):
        save(*args)
    dist.barrier()
    if rank == 0:
        (tmp_path / "model.pt").mkdir()
    dist.barrier()
    save(*args)
    assert (tmp_path / "model.pt").is_dir()


@on_ranks(2)
def test_a_folder_of_torchs_checkpoints_is_named_by_load_checkpoint(tmp_path: Path) -> None:
    with peer_warnings_silenced():
        dcp.save({"model": {"x": torch.ones(2)}}, checkpoint_id=str(tmp_path / "dcp"))
    text = r"is a checkpoint of torch\.distributed\.checkpoint.*dcp\.load.*fsdp-flat convert .* --to sharded"
    with pytest.raises((LoadError, PeerFailureError), match=text):
        load_checkpoint(tmp_path / "dcp", shard(seeded()))
