"""Checkpoints and full models in file systems of fsspec: memory, a local folder as one, and an object store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist

from fsdp_flat import (
    list_checkpoints,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    verify_checkpoint,
)
from fsdp_flat.errors import LoadError, OptionError, UnsupportedError
from tests.support import assert_equal, on_ranks
from tests.support.kit import wrapped
from tests.support.wrapper_models import seeded, train, whole_state


def names_in(url: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def save_and_load(url: str, rank: int) -> None:
    """Save, list, verify and load at a URL, over what a save that was cut off has left."""
    model = wrapped(seeded(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    assert load_checkpoint(f"{url}/run", model, optimizer) is None
    for step in range(4):
        train(model, optimizer, rank, range(step, step + 1))
        save_checkpoint(f"{url}/run", model, optimizer, {"rank": rank}, step=step, keep_last=2, background=step == 2)
    expected = whole_state(model)
    save_checkpoint(f"{url}/run", model, optimizer, {"rank": rank}, step=3, keep_last=2)  # the same number again
    dist.barrier()
    assert names_in(f"{url}/run") == ["step-00000002", "step-00000003"]
    found = list_checkpoints(f"{url}/run")
    assert [(each.step, each.problem, str(each.path)) for each in found] == [
        (3, "", f"{url}/run/step-00000003"),
        (2, "", f"{url}/run/step-00000002"),
    ]
    assert verify_checkpoint(found[0].path).nbytes == found[0].nbytes > 0
    # A save that was killed has written all but the record; and the newest is damaged.
    fs, path = fsspec.core.url_to_fs(f"{url}/run")
    if rank == 0:
        fs.makedirs(f"{path}/step-00000009", exist_ok=True)
        fs.pipe(f"{path}/step-00000009/__0_0.distcp", b"cut off")
    dist.barrier()
    train(model, optimizer, rank, range(1))
    with pytest.warns(UserWarning, match="step-00000009: it was never finished") if rank == 0 else mock.MagicMock():
        loaded = load_checkpoint(f"{url}/run", model, optimizer)
    assert (loaded.step, loaded.extra) == (3, {"rank": rank})
    assert_equal(whole_state(model), expected)
    dist.barrier()
    if rank == 0:
        fs.pipe(f"{path}/step-00000003/__0_0.distcp", b"damaged")
    dist.barrier()
    with pytest.raises(LoadError, match=r"step-00000003/__0_0.distcp has 7 bytes"):
        load_checkpoint(f"{url}/run", model, optimizer, step=3)
    save_checkpoint(f"{url}/run", model, optimizer, step=10, keep_last=1)
    dist.barrier()
    assert names_in(f"{url}/run") == ["step-00000010"]
    # Full models.
    save_full(model, f"{url}/hub", max_file_bytes=100)
    dist.barrier()
    written = names_in(f"{url}/hub")
    assert "model.safetensors.index.json" in written
    assert not any(name.endswith(".partial") for name in written)
    train(model, optimizer, rank, range(1))
    assert load_full(model, f"{url}/hub") == ([], [])
    assert_equal(whole_state(model), expected)
    save_full(model, f"{url}/hub")
    dist.barrier()
    assert names_in(f"{url}/hub") == ["model.checksums.json", "model.safetensors"]
    assert load_full(model, f"{url}/hub/model.safetensors") == ([], [])


@on_ranks(1)
def test_one_process_saves_and_loads_in_memory(rank: int) -> None:
    save_and_load("memory:///saves", rank)


@on_ranks(2)
def test_ranks_save_and_load_by_urls_of_a_folder(tmp_path: Path, rank: int) -> None:
    save_and_load(f"file://{tmp_path}", rank)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The address of an object store on this machine."""
    server = pytest.importorskip("moto.server", reason="the object store of this test is moto[server]")
    pytest.importorskip("s3fs", reason="the object store of this test is reached by s3fs")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.mark.from_size("cover", "imports a server and boto; a folder as a file system goes the same ways")
@on_ranks(2)
def test_ranks_save_and_load_in_an_object_store(store: str, rank: int) -> None:
    options = {"s3": {"endpoint_url": store, "key": "none", "secret": "none"}}
    with mock.patch.dict(fsspec.config.conf, options):
        if rank == 0:
            fsspec.filesystem("s3").mkdir("bucket")
        dist.barrier()
        save_and_load("s3://bucket/jobs", rank)


@on_ranks(1)
def test_what_cannot_be_opened_is_named_with_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model: Any = wrapped(seeded())
    with pytest.raises(OptionError, match=r"directory='nothing://x' cannot be opened by fsspec: Protocol not known"):
        save_checkpoint("nothing://x", model)
    with mock.patch.dict(sys.modules, {"s3fs": None}), pytest.raises(OptionError, match=r"path='s3://b/x' .* s3fs"):
        load_full(model, "s3://b/x")
    with (
        mock.patch.dict(sys.modules, {"fsspec.core": None}),
        pytest.raises(UnsupportedError, match=r"directory='memory://x' is a URL, .*pip install 'fsdp-flat\[remote\]'"),
    ):
        list_checkpoints("memory://x")
    assert list(tmp_path.iterdir()) == []


@on_ranks(1)
def test_commands_read_what_is_at_a_url(tmp_path: Path) -> None:
    from fsdp_flat.tools.command import main

    model = wrapped(seeded())
    save_checkpoint("memory://shown/run", model, step=1)
    save_full(model, "memory://shown/hub")
    for command in ("ls", "show", "verify"):
        for name in ("run", "hub"):
            assert main([command, f"memory://shown/{name}"]) == 0, (command, name)
    assert main(["diff", "memory://shown/run", "memory://shown/hub", "--key", "model"]) == 0
    assert main(["convert", "memory://shown/run", str(tmp_path / "hub"), "--to", "safetensors"]) == 0
    assert main(["diff", str(tmp_path / "hub"), "memory://shown/hub/model.safetensors"]) == 0
    assert main(["show", "nothing://x"]) == 2
