"""Whole models one parameter at a time: iterated, written as safetensors, and read slice by slice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import iter_full_state_dict, load_full, save_checkpoint, save_full
from fsdp_flat.checkpoint import dcp_files, full_save
from fsdp_flat.checkpoint import format as disk
from fsdp_flat.checkpoint.consensus import Consensus
from fsdp_flat.checkpoint.safetensors_files import FileWriter, divided, read_safetensors
from fsdp_flat.core import units_of
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, PeerFailureError, UnsupportedError
from tests.memory.test_memory import live_bytes
from tests.support import Ranks, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.models import Tied
from tests.support.patience import SECONDS
from tests.support.steps import recorded
from tests.support.wrapper_models import batch, mesh_options, seeded, shard, whole_state

RanksOf = Callable[..., Ranks]


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Everything in a safetensors file, read by the safetensors package."""
    return dict(pytest.importorskip("safetensors.torch", reason="reads with the other implementation").load_file(path))


ALONE = """
import sys
import torch, torch.distributed as dist
from fsdp_flat import FullyShardedDataParallel as FSDP, ShardingStrategy, save_full

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
save_full(FSDP(torch.nn.Linear(3, 4), sharding_strategy=ShardingStrategy.NO_SHARD), sys.argv[1])
"""


@pytest.mark.from_size("cover", "starts a program that imports torch")
def test_files_are_complete_where_asserts_are_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-O", "-W", "ignore", "-c", ALONE, str(tmp_path)], check=True)
    found, _ = read_safetensors(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {"weight": (4, 3), "bias": (4,)}


# -- iterating -----------------------------------------------------------------------------------------------------


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_iterating_gives_the_full_state_dict_in_its_order(strategy: str, use_orig_params: bool) -> None:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **mesh_options(strategy))
    expected = whole_state(model)
    assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)
    assert [name for name, _ in iter_full_state_dict(model)] == list(expected)


@on_ranks(2, 4)
def test_only_the_receiving_rank_gets_tensors(rank: int, num_ranks: int) -> None:
    model = shard(seeded(Tied))
    expected = whole_state(model)
    last = num_ranks - 1
    found = dict(iter_full_state_dict(model, dst=last))
    if rank == last:
        assert_equal(found, expected)
    else:
        assert [name for name, value in found.items() if value is not None] == ["block.shift"]


@on_ranks(2)
def test_a_rank_that_stops_early_leaves_no_other_waiting(rank: int) -> None:
    model = shard(seeded())
    expected = whole_state(model)
    found = {}
    for name, value in iter_full_state_dict(model, dst=0):
        found[name] = value
        if rank == 1 and len(found) == 2:
            break
    if rank == 0:
        assert_equal(found, expected)
    # Both are at the same collective again.
    assert_equal(whole_state(model), expected)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["values", "memory", "dtype"])
@on_ranks(2)
def test_an_error_of_one_rank_in_the_middle_is_raised_on_all_and_what_was_yielded_is_whole(
    where: str, failing: int, rank: int
) -> None:
    """It may lack the memory of a tensor, its part or the result, or of the result in another dtype."""
    layers = seeded(lambda: nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)]))
    # Messages that a rank has sent may be left in the group.
    model = FSDP(layers, process_group=dist.new_group())
    expected, made = whole_state(model), list[int]()
    name = {"values": "__init__", "memory": "begin", "dtype": "end"}[where]
    step = getattr(full_save._Gathering, name)

    def fails_at_the_third(self: Any, *args: Any) -> Any:
        made.append(1)
        if rank == failing and len(made) == 3:
            raise torch.OutOfMemoryError("no memory")
        return step(self, *args)

    begun, found = time.monotonic(), dict[str, torch.Tensor]()
    with (
        patch.object(full_save, "_LEAST_NBYTES", 0),
        patch.object(full_save._Gathering, name, fails_at_the_third),
        pytest.raises((torch.OutOfMemoryError, PeerFailureError), match="no memory"),
    ):
        found.update(iter_full_state_dict(model, dst=None))
    assert time.monotonic() - begun < SECONDS
    # The rank that has the result in its hands goes on until ranks meet again.
    assert len(found) == (3 if where == "dtype" and rank != failing else 2)
    assert_equal(found, {key: expected[key] for key in found})


@on_ranks(2)
def test_small_tensors_are_sent_together_and_large_ones_by_themselves(rank: int) -> None:
    """Ranks meet before each transfer, so many small ones would cost more to meet for than to send."""
    sizes = [300, 300, 4, 4, 4, 300]
    model = shard(seeded(lambda: nn.Sequential(*[nn.Linear(300, size, bias=False) for size in sizes])), by_blocks=False)
    expected = whole_state(model)  # connects the ranks
    with patch.object(full_save, "_LEAST_NBYTES", 1 << 18), recorded() as record:
        assert [name for name, _ in iter_full_state_dict(model)] == [f"{at}.weight" for at in range(6)]
    assert record.counts()["all_gather"] == 5
    with patch.object(full_save, "_LEAST_NBYTES", 3 << 20), recorded() as record:
        assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)
    assert record.counts()["all_gather"] == 2


@on_ranks(2)
def test_streaming_holds_no_more_than_two_parameters(rank: int) -> None:
    model = shard(nn.Sequential(*[nn.Linear(1100, 1100, bias=False) for _ in range(8)]), by_blocks=False)
    biggest = 1100 * 1100 * 4
    whole = 8 * biggest
    for _ in iter_full_state_dict(model):
        pass
    before = live_bytes()
    peak = 0
    for _, _value in iter_full_state_dict(model):
        peak = max(peak, live_bytes() - before)
    assert peak <= 2 * biggest + 64_000 < whole / 3
    assert rank == 0 or peak <= biggest


@on_ranks(2)
def test_adapters_alone_can_be_picked_and_converted() -> None:
    model = seeded()
    for name, param in model.named_parameters():
        param.requires_grad_("up" in name)
    wrapped = shard(model, use_orig_params=True)
    found = dict(iter_full_state_dict(wrapped, dst=None, trainable_only=True, dtype=torch.bfloat16))
    assert list(found) == [f"blocks.{i}.up.{what}" for i in (0, 1) for what in ("weight", "bias")]
    expected = whole_state(wrapped)
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in found.items())
    assert list(dict(iter_full_state_dict(wrapped, keep=lambda name: "shift" in name))) == [
        "blocks.0.shift",
        "blocks.1.shift",
    ]


@on_ranks(2)
def test_a_receiver_outside_of_the_group_is_an_error() -> None:
    model = shard(seeded())
    with pytest.raises(OptionError, match="dst must be a rank of the shard group, 0 to 1"):
        next(iter_full_state_dict(model, dst=2))


@on_ranks(2)
def test_units_over_different_groups_cannot_be_streamed_to_one_rank() -> None:
    model = seeded()
    model.blocks[0] = FSDP(model.blocks[0], process_group=dist.new_group([0, 1]))
    with pytest.raises(UnsupportedError, match="different process groups"):
        next(iter_full_state_dict(FSDP(model)))


# -- files ---------------------------------------------------------------------------------------------------------


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("spread", [False, True])
@on_ranks(4)
def test_a_saved_model_equals_its_full_state_dict(
    strategy: str, use_orig_params: bool, spread: bool, tmp_path: Path, rank: int
) -> None:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **mesh_options(strategy))
    save_full(model, tmp_path, max_file_bytes=250, spread=spread)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    expected = whole_state(model)
    names = sorted(set(index["weight_map"].values()))
    found = {name: value for file in names for name, value in tensors_in(tmp_path / file).items()}
    assert_equal({name: found[name] for name in expected}, expected)
    assert set(found) == set(expected) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert len(names) > 2
    assert not list(tmp_path.glob("*.partial"))
    assert all((tmp_path / name).stat().st_size < 250 + 2000 for name in names)


class RecordingApi:
    """Stands for a ``huggingface_hub.HfApi``: holds what it was called with, and fails in the named call."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._failing = failing

    def _note(self, name: str, given: dict[str, Any]) -> None:
        self.calls.append((name, given))
        if name == self._failing:
            raise OSError("no such host")

    def create_repo(self, repo_id: str, **given: Any) -> None:
        self._note("create_repo", {"repo_id": repo_id, **given})

    def upload_folder(self, **given: Any) -> None:
        given["files"] = sorted(path.name for path in Path(given["folder_path"]).iterdir())
        self._note("upload_folder", given)


@on_ranks(2)
def test_one_rank_uploads_the_complete_files_and_an_error_of_it_is_raised_on_all(tmp_path: Path, rank: int) -> None:
    model, api = shard(seeded()), RecordingApi()
    (tmp_path / "notes.txt").touch()
    save_full(model, tmp_path, max_file_bytes="600B", push_to_hub="me/model", hub_api=api)
    if rank == 0:
        (created, repo), (uploaded, given) = api.calls
        assert (created, repo) == ("create_repo", {"repo_id": "me/model", "exist_ok": True})
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        written = {*index["weight_map"].values(), "model.safetensors.index.json", "model.checksums.json"}
        assert uploaded == "upload_folder"
        assert len(written) == 4
        assert set(given.pop("allow_patterns")) == written == set(given.pop("files")) - {"notes.txt"}
        # Of an earlier model in the repository, with another number of files, nothing stays.
        earlier = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
        assert given == {"repo_id": "me/model", "folder_path": tmp_path, "delete_patterns": earlier}
    else:
        assert api.calls == []
    with pytest.raises(OSError if rank == 0 else PeerFailureError, match="no such host"):
        save_full(model, tmp_path, push_to_hub="me/model", hub_api=RecordingApi("upload_folder"))


@on_ranks(2)
def test_ranks_meet_while_one_of_them_uploads_for_long(tmp_path: Path, rank: int) -> None:
    model, begun = shard(seeded()), threading.Event()

    class SlowApi(RecordingApi):
        def create_repo(self, repo_id: str, **_: Any) -> None:
            assert begun.wait(SECONDS)  # until ranks have met once since

    met = Consensus.integers

    def integers(*args: Any) -> Any:
        rows = met(*args)
        if [0] in rows:
            begun.set()
        return rows

    with patch.object(full_save, "_MEETING_S", 0.01), patch.object(Consensus, "integers", integers):
        save_full(model, tmp_path, push_to_hub="me/model", hub_api=SlowApi())
    assert begun.is_set()


def test_a_save_to_a_hub_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"push_to_hub=\.\.\.\) uploads by huggingface_hub: pip install"):
        full_save._new_hub_api()


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own() -> None:
    """As huggingface_hub divides them, with which tests/clients/test_hugging_face.py compares."""
    sizes = {"a": 5, "large": 20, "b": 5, "c": 1, "huge": 30}
    assert list(divided(sizes, 10).values()) == [["large"], ["a", "b"], ["huge"], ["c"]]


@on_ranks(2)
def test_a_small_model_is_one_file_with_tied_names_in_its_header(tmp_path: Path) -> None:
    model = shard(seeded(Tied), use_orig_params=True)
    save_full(model, tmp_path / "new", dtype=torch.bfloat16)
    assert sorted(os.listdir(tmp_path / "new")) == ["model.checksums.json", "model.safetensors"]
    found = tensors_in(tmp_path / "new" / "model.safetensors")
    assert "embed.weight" in found
    assert "head.weight" not in found
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    _, metadata = read_safetensors(tmp_path / "new" / "model.safetensors")
    assert metadata == {"format": "pt", "head.weight": "embed.weight"}
    other = shard(seeded(Tied, seed=3), use_orig_params=True)
    assert load_full(other, tmp_path / "new") == ([], [])
    expected = {name: value.bfloat16().float() for name, value in whole_state(model).items()}
    assert_equal(whole_state(other), expected)


@on_ranks(2)
def test_a_save_into_a_used_folder_leaves_nothing_of_the_old_model(tmp_path: Path, rank: int) -> None:
    old, new = shard(seeded()), shard(seeded(seed=1))
    for first, second in ((250, 10**9), (10**9, 250), (250, 500)):
        save_full(old, tmp_path, max_file_bytes=first)
        save_full(new, tmp_path, max_file_bytes=second)
        dist.barrier()
        loaded = shard(seeded(seed=2))
        load_full(loaded, tmp_path)
        assert_equal(whole_state(loaded), whole_state(new))
        dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize("spread", [False, True])
def test_units_of_different_strategies_are_written_whole(spread: bool, tmp_path: Path) -> None:
    model = seeded()
    model.blocks[0] = shard(model.blocks[0], by_blocks=False)
    model = shard(model, "NO_SHARD", by_blocks=False)
    save_full(model, tmp_path, max_file_bytes=250, spread=spread)
    found = {name: value for path in tmp_path.glob("*.safetensors") for name, value in tensors_in(path).items()}
    assert_equal({name: found.get(name) for name in whole_state(model)}, whole_state(model))


@on_ranks(2)
def test_a_tied_parameter_is_read_under_whichever_name_the_file_has(tmp_path: Path, rank: int) -> None:
    if rank == 0:
        torch.save({"head.weight": torch.ones(7, 5)}, tmp_path / "part.pt")
    dist.barrier()
    model = shard(seeded(Tied))
    missing, unexpected = load_full(model, tmp_path / "part.pt", strict=False)
    assert unexpected == []
    assert "block.up.weight" in missing
    assert torch.equal(whole_state(model)["embed.weight"], torch.ones(7, 5))


def save_and_show(path: str, num_files: int) -> dict[str, torch.Tensor]:
    model = shard(seeded())
    save_full(model, path, max_file_bytes=5_000_000_000 if num_files == 1 else 600)
    return whole_state(model)


def load_and_show(path: str, use_orig_params: bool, by_blocks: bool) -> dict[str, torch.Tensor]:
    model = shard(seeded(seed=4), use_orig_params=use_orig_params, by_blocks=by_blocks)
    load_full(model, path)
    loss = square_loss(model, batch(0))
    loss.backward()
    return whole_state(model)


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize(
    "use_orig_params, by_blocks, num_ranks", [(True, True, 4), (False, False, 4), (True, False, 2)]
)
def test_saved_files_are_loaded_at_any_number_of_ranks_and_wrapping(
    ranks: RanksOf, tmp_path: Path, num_files: int, use_orig_params: bool, by_blocks: bool, num_ranks: int
) -> None:
    expected = ranks(2).run(save_and_show, str(tmp_path), num_files)[0]
    for found in ranks(num_ranks).run(load_and_show, str(tmp_path), use_orig_params, by_blocks):
        assert_equal(found, expected)


@on_ranks(2)
def test_a_file_of_torch_save_is_loaded_slice_by_slice(tmp_path: Path, rank: int) -> None:
    plain = seeded(seed=7)
    if rank == 0:
        torch.save(plain.state_dict(), tmp_path / "model.pt")
    dist.barrier()
    model = shard(seeded())
    load_full(model, tmp_path / "model.pt")
    assert_equal(whole_state(model), dict(plain.state_dict()))


def broken(path: Path, how: str) -> str:
    """A file that is not right; what the error says."""
    state = dict(seeded(seed=7).state_dict())
    text = ""
    if how == "missing name":
        del state["last.bias"]
        text = "missing: 'last.bias'"
    elif how == "unknown name":
        state["extra"] = torch.ones(2)
        text = "not in the model: 'extra'"
    elif how == "wrong shape":
        state["last.bias"] = torch.ones(3)
        text = r"'last.bias' has shape \(3,\) in the file, \(2,\) in the model"
    writer = FileWriter(path, state, {"format": "pt"})
    for name, value in state.items():
        writer.write(name, value)
    writer.commit()
    if how == "truncated":
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 4)
        text = "truncated or was altered"
    elif how == "no header":
        path.write_bytes(b"\x00" * 64)
        text = "is no safetensors file"
    return text


@pytest.mark.parametrize("how", ["missing name", "unknown name", "wrong shape", "truncated", "no header"])
@on_ranks(2)
def test_files_that_do_not_fit_are_named_on_every_rank_and_nothing_is_loaded(
    how: str, tmp_path: Path, rank: int
) -> None:
    """One rank alone meets the bad file, as on a machine with its own disk."""
    model = shard(seeded())
    before = whole_state(model)
    path = tmp_path / f"{rank}.safetensors"
    text = broken(path, how if rank == 0 else "not at all")
    with pytest.raises(LoadError if rank == 0 else PeerFailureError, match=text if rank == 0 else "Rank 0"):
        load_full(model, path)
    assert_equal(whole_state(model), before)


@on_ranks(2)
def test_names_may_be_missing_or_too_many_if_the_caller_says_so(tmp_path: Path, rank: int) -> None:
    if rank == 0:
        torch.save({"last.bias": torch.ones(2), "other": torch.ones(1)}, tmp_path / "part.pt")
    dist.barrier()
    model = shard(seeded())
    missing, unexpected = load_full(model, tmp_path / "part.pt", strict=False)
    assert "first.weight" in missing
    assert unexpected == ["other"]
    assert torch.equal(whole_state(model)["last.bias"], torch.ones(2))


@on_ranks(2)
def test_bad_arguments_of_a_full_save_are_named(tmp_path: Path) -> None:
    model = shard(seeded())
    with pytest.raises(OptionError, match="max_file_bytes must be positive; got 0"):
        save_full(model, tmp_path, max_file_bytes=0)
    with pytest.raises(OptionError, match=r"max_file_bytes must be a number of bytes with a unit.* got '5'"):
        save_full(model, tmp_path, max_file_bytes="5")
    with pytest.raises(OptionError, match="Nothing to save"):
        save_full(model, tmp_path, keep=lambda name: False)
    with pytest.raises(OptionError, match=r"dtype must be a floating-point torch.dtype or None; got torch.int8"):
        save_full(model, tmp_path, dtype=torch.int8)
    for bad, text in (
        ({"dtype": "bf16"}, "dtype must be a floating-point torch.dtype or None; got 'bf16'"),
        ({"max_file_bytes": [5]}, r"max_file_bytes must be a number; got \[5\]"),
        ({"keep": "layer"}, "keep must be a function of a name, or None; got 'layer'"),
    ):
        with pytest.raises(OptionTypeError, match=text):
            save_full(model, tmp_path, **bad)
    for bad, text in (({"dtype": "bf16"}, "dtype must be"), ({"dst": "0"}, "dst must be a rank")):
        with pytest.raises(OptionTypeError, match=text):
            list(iter_full_state_dict(model, **bad))
    for call in (lambda: save_full(model, None), lambda: load_full(model, None)):
        with pytest.raises(OptionTypeError, match="must be a path, as a str or a Path; got None"):
            call()
    for call in (
        lambda: save_full(None, tmp_path),
        lambda: load_full(None, tmp_path),
        lambda: list(iter_full_state_dict(None)),
    ):
        with pytest.raises(OptionTypeError, match=r"takes a model, an nn\.Module; got NoneType"):
            call()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match="holds no FullyShardedDataParallel"):
        load_full(nn.Linear(2, 2), tmp_path)


@on_ranks(2)
def test_files_that_ranks_write_to_different_directories_are_an_error(tmp_path: Path, rank: int) -> None:
    """As disks of two machines that have the same path."""
    model = shard(seeded())
    save_full(model, tmp_path / "0")
    with pytest.raises(OptionError if rank == 0 else PeerFailureError, match=r"Rank 0 finds no file at .*they share"):
        save_full(model, tmp_path / str(rank), max_file_bytes=40, spread=True)
    dist.barrier()
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["model.checksums.json", "model.safetensors"]
    assert list((tmp_path / "1").iterdir()) == []


@on_ranks(2)
def test_a_dtype_that_the_format_lacks_is_refused_on_every_rank_before_anything_is_written(tmp_path: Path) -> None:
    inner = nn.Linear(2, 2)
    inner.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(
        UnsupportedError, match=r"'phases' is of torch\.complex128, which safetensors files cannot hold"
    ):
        save_full(FSDP(inner), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "index, text",
    [
        (None, "holds neither model.safetensors nor"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors does not exist, although the index names it"),
        ('{"weight_map": 3}', "is no index of a model's files"),
    ],
)
@on_ranks(2)
def test_a_directory_without_the_files_of_a_model_is_refused(
    index: str | None, text: str, tmp_path: Path, rank: int
) -> None:
    if rank == 0 and index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    dist.barrier()
    for path, message in ((tmp_path, text), (tmp_path / "nowhere", "nowhere does not exist.")):
        with pytest.raises(LoadError, match=re.escape(message)):
            load_full(FSDP(nn.Linear(2, 2)), path)


# -- what a save of a checkpoint reads and keeps ---------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_a_checkpoint_is_written_without_being_read_back(background: bool, tmp_path: Path, rank: int) -> None:
    """The checksum is computed as bytes are written."""
    model, read = shard(seeded()), list[str]()

    def record(path: Path, *args: Any) -> Any:
        read.append(path.name)
        return computed(path, *args)

    computed = disk.record_of
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dcp_files, "record_of", record)
        path = save_checkpoint(tmp_path, model, background=background).wait()
    assert read == [".metadata"] * (rank == 0)
    commit = disk.read_commit(path)
    assert {name for name in commit.files if name.endswith(".distcp")} == {f"__{each}_0.distcp" for each in range(3)}
    assert commit.files == disk.records_of(path, "__*") | disk.records_of(path, ".metadata")


@on_ranks(2)
def test_a_checkpoint_is_written_with_one_copy_of_a_tensor_at_a_time(tmp_path: Path) -> None:
    """Torch's writer keeps copies of all tensors of a file."""
    model, copies, most = shard(seeded()), list[weakref.ref[torch.Tensor]](), 0
    own = {
        each.untyped_storage().data_ptr()
        for unit in units_of(model)
        for each in (unit.param_groups[0].flat_param.data,)
    }

    def save(value: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal most
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
            copies.append(weakref.ref(value))
        most = max(most, sum(each() is not None for each in copies))
        saved(value, *args, **kwargs)

    saved = torch.save
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "save", save)
        save_checkpoint(tmp_path, model)
    assert len(copies) > 3
    assert most <= 2
