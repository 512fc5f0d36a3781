"""``fsdp-flat convert``, ``consolidate`` and ``reshard``: equal to the bit, read by everyone, in little memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, load_full
from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from tests.support import Ranks
from tests.tools.conftest import Run, RunJson
from tests.tools.peer_files import build, trained

SOURCES = ["fsdp2", "fsdp1", "run", "hub_of_two", "model.pt", "all.pt", "fsdp1_sharded_files"]
KINDS = ["full", "dcp", "sharded", "safetensors", "torch"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_model_is_equal_to_the_bit_in_every_kind_and_back(
    peer_files: Path, tmp_path: Path, source: str, kind: str, run: Run
) -> None:
    assert run("convert", peer_files / source, tmp_path / "there", "--to", kind, "--ranks", 3)[0] == 0
    assert run("verify", tmp_path / "there")[0] == 0
    assert run("convert", tmp_path / "there", tmp_path / "back", "--to", "dcp", "--model-only")[0] == 0
    for path in (tmp_path / "there", tmp_path / "back"):
        status, text, _ = run("diff", peer_files / "hub", path)
        assert (status, text) == (0, "9 tensors and 0 values are equal, bit by bit\n")


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_optimizer_and_settings_come_along_where_the_kind_holds_them(
    peer_files: Path, tmp_path: Path, kind: str, run: Run
) -> None:
    run("convert", peer_files / "fsdp2", tmp_path / "there", "--to", kind)
    assert run("diff", peer_files / "fsdp2", tmp_path / "there")[:2] == (
        0,
        "27 tensors and 13 values are equal, bit by bit\n",
    )


def test_torch_loads_what_was_written(peer_files: Path, tmp_path: Path, run: Run) -> None:
    expected = torch.load(peer_files / "model.pt", weights_only=True)
    for kind in ("full", "torch", "dcp", "safetensors"):
        run("convert", peer_files / "run", tmp_path / kind, "--to", kind, "--ranks", 2)
    model = build()
    model.load_state_dict(torch.load(tmp_path / "full", weights_only=True))
    found = torch.load(tmp_path / "torch", weights_only=True, mmap=True)
    state = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    safetensors = pytest.importorskip("safetensors.torch", reason="reads with the other implementation")
    hub = safetensors.load_file(tmp_path / "safetensors" / "model.safetensors")
    for name, value in expected.items():
        for each in (model.state_dict(), found["model"], state["model"], hub):
            assert torch.equal(each[name], value), name
    assert [group["lr"] for group in found["optim"]["param_groups"]] == [0.1]


def test_shared_tensors_stay_shared_in_a_file_and_are_written_once(tmp_path: Path, run: Run) -> None:
    weight = torch.arange(10_000.0)
    state = {"a": weight, "b": weight, "transposed": torch.arange(6).view(2, 3).t(), "none": torch.zeros(0, 3)}
    torch.save(state, tmp_path / "in.pt")
    for kind in ("full", "safetensors", "dcp"):
        run("convert", tmp_path / "in.pt", tmp_path / kind, "--to", kind, "--ranks", 2)
        assert run("diff", tmp_path / "in.pt", tmp_path / kind)[0] == 0
        assert run("verify", tmp_path / kind)[0] == 0
        files = [tmp_path / kind, *(tmp_path / kind).rglob("*")]
        assert sum(file.stat().st_size for file in files if file.is_file()) < 2 * weight.nbytes
    loaded = torch.load(tmp_path / "full", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()


def test_tensors_without_elements_in_the_file_are_no_tensors_to_convert(tmp_path: Path, run: Run) -> None:
    empty = torch.empty(2, 3, device="meta")
    torch.save({"a": empty, "b": torch.empty(2, 3, device="meta"), "c": torch.ones(2)}, tmp_path / "in.pt")
    found = open_checkpoint(tmp_path / "in.pt")
    assert set(found.tensors) == {("c",)}
    assert set(found.values) == {("a",), ("b",)}
    assert run("show", tmp_path / "in.pt")[0] == 0
    status, _, errors = run("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "safetensors")
    assert status == 2
    assert "a, b: no tensors" in errors
    assert not (tmp_path / "out").exists()


def test_consolidate_merges_the_model_into_one_file(peer_files: Path, tmp_path: Path, run: Run) -> None:
    for name in ("model.safetensors", "model.pt"):
        assert run("consolidate", peer_files / "run", tmp_path / name)[0] == 0
        assert (tmp_path / name).is_file()
        assert run("diff", peer_files / "hub", tmp_path / name)[0] == 0


@pytest.mark.parametrize("command", [("consolidate",), ("reshard", "--ranks", 4), ("convert", "--to", "dcp")])
def test_flat_parameters_of_local_state_dicts_are_not_taken_for_a_model(
    command: tuple[Any, ...], peer_files: Path, tmp_path: Path, run: Run
) -> None:
    status, _, errors = run(command[0], peer_files / "fsdp1_local_files", tmp_path / "out", *command[1:])
    assert status == 2
    assert "fsdp1_local_files holds a LOCAL_STATE_DICT: " in errors
    assert "_flat_param" in errors
    assert list(tmp_path.iterdir()) == []


def test_reshard_writes_the_rows_of_each_of_the_ranks(peer_files: Path, tmp_path: Path, run_json: RunJson) -> None:
    assert run_json("reshard", peer_files / "fsdp2", tmp_path / "four", "--ranks", 4)[0] == 0
    _, found = run_json("show", tmp_path / "four")
    weight = next(tensor for tensor in found["tensors"] if tensor["name"] == "model.0.weight")
    parts = sorted((part["rank"], part["offsets"], part["sizes"]) for part in weight["parts"])
    assert parts == [(0, [0, 0], [2, 5]), (1, [2, 0], [2, 5]), (2, [4, 0], [2, 5]), (3, [6, 0], [1, 5])]


def test_a_model_too_large_for_a_file_gets_an_index(peer_files: Path, tmp_path: Path, run: Run) -> None:
    run("convert", peer_files / "run", tmp_path / "hub", "--to", "safetensors", "--max-file", "200B")
    assert len(list((tmp_path / "hub").glob("model-0000?-of-*.safetensors"))) > 1
    assert run("diff", peer_files / "hub", tmp_path / "hub")[0] == 0


def load_on_this_rank(folder: Path, full: Path) -> None:
    model = FSDP(build(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    found = load_checkpoint(folder, model, optimizer)
    assert found is not None
    expected = build()
    expected_optimizer = trained(expected)
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for param, (name, _) in zip(expected.parameters(), expected.named_parameters()):
        for key, value in expected_optimizer.state[param].items():
            assert torch.equal(states[name][key], value), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.1
    again = FSDP(build(), use_orig_params=True)
    load_full(again, full)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("source", ["fsdp2", "fsdp1", "run", "all.pt"])
def test_this_library_trains_on_from_what_was_converted(
    peer_files: Path, tmp_path: Path, source: str, run: Run, ranks: Callable[..., Ranks]
) -> None:
    assert run("convert", peer_files / source, tmp_path / "run", "--to", "sharded", "--ranks", 3)[0] == 0
    assert run("convert", peer_files / source, tmp_path / "hub", "--to", "safetensors")[0] == 0
    ranks(2).run(load_on_this_rank, tmp_path / "run", tmp_path / "hub")


def test_nothing_is_left_after_a_failure_and_nothing_is_overwritten(peer_files: Path, tmp_path: Path, run: Run) -> None:
    copy = shutil.copytree(peer_files / "fsdp2", tmp_path / "copy")
    next(copy.glob("__1_*")).unlink()
    status, _, errors = run("convert", copy, tmp_path / "out", "--to", "torch")
    assert (status, errors.count("\n")) == (2, 1)
    assert "__1_0.distcp" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    status, _, errors = run("convert", peer_files / "hub", copy, "--to", "dcp")
    assert (status, errors) == (2, f"fsdp-flat convert: {copy} exists; name a file or folder to make.\n")


def test_what_a_kind_cannot_hold_is_named(tmp_path: Path, run: Run) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": Path("x")}, tmp_path / "a.pt")
    assert "args: objects of classes" in run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "dcp")[2]
    assert run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "dcp", "--model-only")[0] == 0
    torch.save({"model": {"w": torch.ones(2), "version": 3}}, tmp_path / "c.pt")
    assert "version: no tensors" in run("convert", tmp_path / "c.pt", tmp_path / "d", "--to", "safetensors")[2]
    torch.save({"net": {"w": torch.ones(2)}}, tmp_path / "e.pt")
    assert "Name it by --key" in run("convert", tmp_path / "e.pt", tmp_path / "f", "--to", "full")[2]
    assert run("convert", tmp_path / "e.pt", tmp_path / "f", "--to", "full", "--key", "net")[0] == 0
    optimizer = trained(build())
    torch.save({"model": build().state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "g.pt")
    assert (
        "no names of the model's parameters" in run("convert", tmp_path / "g.pt", tmp_path / "h", "--to", "sharded")[2]
    )


NUM_TENSORS, TENSOR_NBYTES, BUDGET = 64, 4 << 20, 32 << 20
# The first conversion imports what is imported at its first use. At the end a file is loaded into memory as a whole.
PROGRAM = """
import os, sys, time, torch
from pathlib import Path
from fsdp_flat.tools.command import main
os.chdir(sys.argv[1])
torch.save({"w": torch.ones(1)}, "tiny.pt")
main(["convert", "tiny.pt", "tiny", "--to", "dcp"])
Path("begun").touch()
for source, kind in (("in.pt", "dcp"), ("dcp", "safetensors"), ("safetensors", "full"), ("full", "sharded")):
    assert main(["convert", source, kind, "--to", kind, "--ranks", "3"]) == 0
    assert main(["diff", "in.pt", kind, "--key", "model"]) == 0
for source, file in (("dcp", "one.safetensors"), ("sharded", "one.pt")):
    assert main(["consolidate", source, file]) == 0
    assert main(["diff", "in.pt", file, "--key", "model"]) == 0
assert main(["reshard", "sharded", "of_two", "--ranks", "2"]) == 0
assert main(["verify", "of_two"]) == 0
Path("done").touch()
whole = torch.load("in.pt", weights_only=True)
time.sleep(0.1)
"""


def anonymous_nbytes(pid: int) -> int:
    """The memory of a process that is no page of a file: pages of files that it maps go back whenever they must."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


@pytest.mark.from_size("all", "converts a large file")
def test_converting_takes_an_eighth_of_the_memory_that_the_checkpoint_has(tmp_path: Path) -> None:
    assert NUM_TENSORS * TENSOR_NBYTES == 8 * BUDGET
    state = {f"w{i}": torch.full((TENSOR_NBYTES // 4096, 1024), float(i)) for i in range(NUM_TENSORS)}
    torch.save({"model": state}, tmp_path / "in.pt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    # By phase the most bytes that the process has had: until it has begun, until it is done, and at the end.
    peaks = [0, 0, 0]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            phase = (tmp_path / "begun").exists() + (tmp_path / "done").exists()
            peaks[phase] = max(peaks[phase], anonymous_nbytes(process.pid))
            time.sleep(0.0005)
    assert process.returncode == 0
    assert peaks[1] - peaks[0] < BUDGET
    assert peaks[2] - peaks[0] > 7 * BUDGET, "a file that is loaded as a whole is not seen"
    shutil.rmtree(tmp_path)
