"""Files that were altered, or made to do harm: each is an error that names it, or is passed over with a warning."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp_flat import list_checkpoints, load_checkpoint, load_full, save_checkpoint, save_full, verify_checkpoint
from fsdp_flat.checkpoint.safetensors_files import PartialFile, read_safetensors
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError
from tests.checkpoint.test_checkpoints import write_with_record
from tests.support import assert_equal, on_ranks
from tests.support.selection import some
from tests.support.wrapper_models import seeded, shard, whole_state

FAILED = (LoadError, PeerFailureError)


# -- full models -----------------------------------------------------------------------------------------------------


def stored(path: Path, header: str | dict[str, Any], data: bytes) -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "F32", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header, text",
    [
        ({"a": entry(0, 8), "b": entry(4, 16)}, "invalid offset for tensor `b`"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, "invalid offset for tensor `b`"),
        ({"a": entry(0, 12)}, "file not fully covered"),
        ({"a": entry(0, 20)}, "file not fully covered"),
        ({"a": entry(0, 16, shape=[2**40])}, "invalid shape, data type, or offset for tensor"),
        ({"a": entry(0, 16, dtype="F64")}, "invalid shape, data type, or offset for tensor"),
        ({"a": entry(0, 16, dtype="F33")}, "unknown variant `F33`"),
        ({"a": entry(0, 16, dtype="F4", shape=[2, 16, 1])}, "is no safetensors file"),
        ({"a": entry(0, 16, shape=[True, 4])}, "invalid type: boolean `true`"),
        ({"a": entry(0, 16, shape=4)}, "is no safetensors file"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "missing field `data_offsets`"),
        ({"a": [1]}, "is no safetensors file"),
        ({"a": entry(0, 16), "__metadata__": {"a": 3}}, "invalid type: integer `3`, expected a string"),
        ({"a": entry(0, 16), "__metadata__": [3]}, "is no safetensors file"),
        ('{"a": {"dtype": "F32", "dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}', "duplicate field `dtype`"),
        ("[" * 100_000, "is no safetensors file"),
        ('["a"]', "is no safetensors file"),
        ('{"a"', "is no safetensors file"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, Infinity]}}', "is no safetensors file"),
    ],
)
def test_a_header_of_other_entries_than_the_file_has_is_named(
    header: str | dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = stored(tmp_path / "made.safetensors", header, bytes(16))
    with pytest.raises(LoadError, match=re.escape(text)) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


def test_a_header_longer_than_its_file_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "made.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(LoadError, match="header too large"):
        read_safetensors(path)


def test_entries_that_begin_at_any_byte_are_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {"flag": entry(0, 1, dtype="BOOL", shape=[]), "a": entry(1, 9), "none": entry(9, 9, shape=[0, 3])}
    found, _ = read_safetensors(stored(tmp_path / "made.safetensors", header, b"\1" + values.numpy().tobytes()))
    assert torch.equal(found["a"], values)
    assert found["flag"].item() is True
    assert found["none"].shape == (0, 3)


class Counted(nn.Module):
    """A layer with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.register_buffer("number", torch.tensor([3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize(
    "name, value, text",
    [
        (
            "fc.weight",
            torch.ones(2, 2, dtype=torch.int32),
            "'fc.weight' is of torch.int32 in the file, of torch.float32",
        ),
        ("fc.weight", torch.ones(2, 2, dtype=torch.complex64), "'fc.weight' is of torch.complex64 in the file"),
        ("number", torch.ones(1), "'number' is of torch.float32 in the file, of torch.int64 in the model"),
        ("number", torch.ones(1, dtype=torch.bool), None),
        ("fc.weight", torch.ones(2, 2, dtype=torch.float16), None),
    ],
)
@on_ranks(2)
def test_values_of_another_kind_are_refused(
    name: str, value: torch.Tensor, text: str | None, tmp_path: Path, rank: int
) -> None:
    state = {"fc.weight": torch.zeros(2, 2), "number": torch.tensor([5]), name: value}
    if rank == 0:
        torch.save(state, tmp_path / "state.pt")
    dist.barrier()
    model = shard(Counted(), by_blocks=False)
    before = whole_state(model)
    with contextlib.nullcontext() if text is None else pytest.raises(FAILED, match=re.escape(text)):
        load_full(model, tmp_path / "state.pt")
    assert_equal(whole_state(model)[name], before[name] if text else value.to(before[name].dtype))


@contextlib.contextmanager
def one_change(folder: Path, names: list[str], draw: random.Random, rank: int) -> Iterator[str]:
    """Change a bit of a file, or cut it off, inside the block; yields what was changed."""
    file = folder / draw.choice(names)
    data = file.read_bytes()
    at, bit, cut = draw.randrange(len(data)), 1 << draw.randrange(8), draw.random() < 0.2
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
    dist.barrier()
    yield f"byte {at} of {file.name}"
    dist.barrier()
    if rank == 0:
        file.write_bytes(data)
    dist.barrier()


@on_ranks(2)
def test_no_change_of_a_byte_goes_unseen_in_the_files_of_a_model(tmp_path: Path, rank: int) -> None:
    """A change is found, or the values are those that were saved."""
    model = shard(seeded(seed=1))
    save_full(model, tmp_path, max_file_bytes=400, spread=True)
    dist.barrier()
    expected = whole_state(model)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "model.safetensors.index.json" in names
    assert "model.checksums.json" in names
    draw, num_found = random.Random(0), 0
    loaded = shard(seeded())
    before = whole_state(loaded)
    changes = some(range(100), 1)
    for _ in changes:
        with one_change(tmp_path, names, draw, rank) as change:
            try:
                load_full(loaded, tmp_path)
            except FAILED:
                num_found += 1
                assert_equal(whole_state(loaded), before)
            else:
                assert change.endswith(" model.checksums.json"), change
                assert_equal(whole_state(loaded), expected)
                before = expected
    assert num_found > 0.75 * len(changes)


@on_ranks(2)
def test_a_file_that_was_replaced_on_purpose_is_named_with_the_checksums_to_remove(tmp_path: Path, rank: int) -> None:
    model, other = shard(seeded()), shard(seeded(seed=1))
    save_full(model, tmp_path / "a")
    save_full(other, tmp_path / "b")
    dist.barrier()
    if rank == 0:
        shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    dist.barrier()
    sums = tmp_path / "a" / "model.checksums.json"
    with pytest.raises(FAILED, match=rf"model.safetensors was altered.*on purpose, remove {re.escape(str(sums))}"):
        load_full(model, tmp_path / "a")
    dist.barrier()
    if rank == 0:
        sums.unlink()
    dist.barrier()
    load_full(model, tmp_path / "a")
    assert_equal(whole_state(model), whole_state(other))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("made", [fifo, device])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "model.checksums.json"])
@on_ranks(2)
def test_fifos_and_devices_are_no_files_of_a_model(
    name: str, made: Callable[[Path], None], tmp_path: Path, rank: int
) -> None:
    model = shard(seeded())
    save_full(model, tmp_path)
    dist.barrier()
    if rank == 0:
        (tmp_path / name).unlink(missing_ok=True)
        made(tmp_path / name)
    dist.barrier()
    with pytest.raises(FAILED, match=rf"{name} is no regular file"):
        load_full(model, tmp_path)
    if name == "model.safetensors":
        with pytest.raises(FAILED, match=rf"{name} is no regular file"):
            load_full(model, tmp_path / name)


@pytest.mark.parametrize(
    "name, text",
    [
        ("../other.safetensors", r"index.json names '../other.safetensors', outside of its directory"),
        ("/etc/passwd", r"index.json names '/etc/passwd', outside of its directory"),
        ("", "is no regular file"),
        ("..", "is no regular file"),
    ],
)
@on_ranks(2)
def test_an_index_names_files_of_its_directory_only(name: str, text: str, tmp_path: Path, rank: int) -> None:
    if rank == 0:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        (tmp_path / "other.safetensors").write_bytes(b"")
    dist.barrier()
    with pytest.raises(FAILED, match=text):
        load_full(shard(seeded()), tmp_path / "model")


@on_ranks(2)
def test_an_entry_in_two_files_of_a_model_is_named(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_full(model, tmp_path, max_file_bytes=400)
    dist.barrier()
    if rank == 0:
        first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
        shutil.copy(first, second)
        (tmp_path / "model.checksums.json").unlink()
    dist.barrier()
    with pytest.raises(
        FAILED, match=r"model-00002-of-.* has 'blocks.0.shift'.*, which another file of the model has too"
    ):
        load_full(model, tmp_path)


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk on which no file of a model can be longer."""

    def limited(call: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            # Other writes of the process, those of the store for instance, have no limit.
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
            try:
                call(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("append", "finish", "discard"):
            patch.setattr(PartialFile, name, limited(getattr(PartialFile, name)))
        yield


@pytest.mark.parametrize("largest", [10**9, 100])
@on_ranks(2)
def test_a_full_save_that_fails_leaves_no_files_at_any_size_of_the_disk(
    largest: int, tmp_path: Path, rank: int
) -> None:
    model, old = shard(seeded(seed=1)), shard(seeded())
    save_full(old, tmp_path, max_file_bytes=largest)
    dist.barrier()
    names = sorted(path.name for path in tmp_path.iterdir())
    sizes = sorted({path.stat().st_size for path in tmp_path.iterdir()})
    assert len(sizes) > 1
    for limit in (0, 1, 100, *(size - 40 for size in sizes if size > 40)):
        dist.barrier()
        with (
            pytest.raises((OSError, PeerFailureError), match=r"File too large: '.*\.partial'"),
            files_of_at_most(limit),
        ):
            save_full(model, tmp_path, max_file_bytes=largest)
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == names, limit
        loaded = shard(seeded(seed=2))
        load_full(loaded, tmp_path)
        assert_equal(whole_state(loaded), whole_state(old))


# -- checkpoints -----------------------------------------------------------------------------------------------------


def changed(**values: Any) -> Callable[[Path], None]:
    """Change what the record says, without its checksum."""

    def change(path: Path) -> None:
        body = json.loads(path.read_text())
        path.write_text(json.dumps({**body, **values}))

    return change


def older(**values: Any) -> Callable[[Path], None]:
    """Change a record as earlier versions have written it, without a checksum."""

    def change(path: Path) -> None:
        body = json.loads(path.read_text())
        del body["crc32"]
        path.write_text(json.dumps({**body, **values}))

    return change


def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


RECORDS = {
    "an order without end": (changed(order=float("inf")), "a number is no int"),
    "an order without end, before checksums": (older(order=float("inf")), "a number is no int"),
    "no number as an order": (older(order=float("nan")), "a number is no int"),
    "a negative order": (older(order=-3), "a number is no int, or is negative"),
    "a true step": (older(step=True), "a number is no int"),
    "deep lists": (lambda path: path.write_text("[" * 100_000), "cannot be read: RecursionError"),
    "deep dicts": (
        lambda path: path.write_text('{"format": 2, "a": ' + '{"a":' * 100_000),
        "cannot be read: Recursion",
    ),
    "a long number": (lambda path: path.write_text('{"format": ' + "1" * 10_000 + "}"), "cannot be read: ValueError"),
    "another order": (changed(order=99), "was altered"),
    "another step": (changed(step=99), "was altered"),
    "a text as a size": (older(files={"__0_0.distcp": {"size": "1", "crc32": 1}}), "a number is no int"),
    "a file elsewhere": (older(files={"../x": {"size": 1, "crc32": 1}}), "names ../x, outside of its directory"),
    "a file at the root": (older(files={"/etc/passwd": {"size": 1, "crc32": 1}}), "/etc/passwd, outside of its"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\xfd"), "cannot be read: UnicodeDecodeError"),
    "a fifo": (replaced(fifo), "commit.json is no regular file"),
    "a device": (replaced(device), "commit.json is no regular file"),
}


@pytest.mark.parametrize("how", RECORDS)
@on_ranks(2)
def test_a_bad_record_of_any_checkpoint_is_passed_over_and_blocks_no_other(how: str, tmp_path: Path, rank: int) -> None:
    change, text = RECORDS[how]
    model = shard(seeded())
    for step in range(3):
        save_checkpoint(tmp_path, model, extra=step, step=step)
    dist.barrier()
    if rank == 0:
        change(tmp_path / "step-00000001" / "commit.json")
    dist.barrier()
    with pytest.warns(UserWarning, match=f"passed over: .*{text}") if rank == 0 else contextlib.nullcontext():
        assert load_checkpoint(tmp_path, model).extra == 2
    assert [bool(found.problem) for found in list_checkpoints(tmp_path)] == [False, False, True]
    dist.barrier()
    assert save_checkpoint(tmp_path, model, extra="next", keep_last=2).step == 3
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002", "step-00000003"]
    with pytest.warns(UserWarning, match="passed over") if rank == 0 else contextlib.nullcontext():
        assert load_checkpoint(tmp_path, model).extra == "next"


@on_ranks(2)
def test_no_change_of_a_byte_goes_unseen_in_a_checkpoint(tmp_path: Path, rank: int) -> None:
    """An altered checkpoint is passed over, or loads what was saved."""
    old, new = shard(seeded()), shard(seeded(seed=1))
    save_checkpoint(tmp_path, old, extra="old")
    path = save_checkpoint(tmp_path, new, extra="new").wait()
    expected = {"old": whole_state(old), "new": whole_state(new)}
    loaded = shard(seeded(seed=2))
    dist.barrier()
    names = sorted(os.listdir(path))
    draw, num_passed_over = random.Random(1), 0
    changes = some(range(100), 1)
    for _ in changes:
        with one_change(path, names, draw, rank) as change:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Loading step-00000000; passed over")
                found = load_checkpoint(tmp_path, loaded)
            assert_equal(whole_state(loaded), expected[found.extra])
            assert found.step == {"old": 0, "new": 1}[found.extra]
            assert bool(found.skipped) == (found.extra == "old")
            assert found.extra == "old" or change.endswith(" commit.json"), change
            num_passed_over += found.extra == "old"
    assert num_passed_over > 0.75 * len(changes)


@on_ranks(2)
def test_a_checkpoint_without_a_checksum_of_its_record_is_loaded(tmp_path: Path, rank: int) -> None:
    """As versions before this checksum have written them."""
    model = shard(seeded(seed=1))
    save_checkpoint(tmp_path, model, extra="old", step=4)
    dist.barrier()
    if rank == 0:
        older()(tmp_path / "step-00000004" / "commit.json")
    dist.barrier()
    loaded = shard(seeded())
    assert load_checkpoint(tmp_path, loaded).extra == "old"
    assert_equal(whole_state(loaded), whole_state(model))


@on_ranks(2)
def test_a_folder_with_a_number_beyond_any_is_no_checkpoint_and_stops_no_save(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    if rank == 0:
        (tmp_path / "step-9999999999999999999").mkdir()
    dist.barrier()
    assert save_checkpoint(tmp_path, model).step == 0
    assert save_checkpoint(tmp_path, model).step == 1
    dist.barrier()
    assert load_checkpoint(tmp_path, model).step == 1
    with pytest.raises((OptionError, PeerFailureError), match=r"step must be an int of at most 18 digits; got 1000000"):
        save_checkpoint(tmp_path, model, step=10**18)
    assert save_checkpoint(tmp_path, model, step=10**18 - 1).step == 10**18 - 1
    assert save_checkpoint(tmp_path, model).step == 2, "nothing comes after the last of all numbers"


@pytest.mark.parametrize("make", [fifo, device])
@on_ranks(2)
def test_fifos_and_devices_are_no_files_of_a_checkpoint(
    make: Callable[[Path], None], tmp_path: Path, rank: int
) -> None:
    model = shard(seeded())
    path = save_checkpoint(tmp_path, model).wait()
    dist.barrier()
    if rank == 0:
        replaced(make)(path / "__1_0.distcp")
    dist.barrier()
    with pytest.raises(LoadError, match=r"__1_0.distcp is no regular file"):
        load_checkpoint(tmp_path, model)
    with pytest.raises(LoadError, match=r"__1_0.distcp is no regular file"):
        verify_checkpoint(path)


NAME = "model.first.weight"


def without_a_chunk(found: Metadata) -> None:
    entry = found.state_dict_metadata[NAME]
    del entry.chunks[-1]


def without_a_place(found: Metadata) -> None:
    entry = found.state_dict_metadata[NAME]
    del found.storage_data[MetadataIndex(NAME, entry.chunks[-1].offsets)]


def with_a_longer_place(found: Metadata) -> None:
    place_of(found).length = 10**12


def with_a_negative_offset(found: Metadata) -> None:
    place_of(found).offset = -1


def with_a_short_place(found: Metadata) -> None:
    place_of(found).length = 3


def elsewhere(found: Metadata) -> None:
    place_of(found).relative_path = "../step-00000000/__0_0.distcp"


def at_the_root(found: Metadata) -> None:
    place_of(found).relative_path = "/etc/passwd"


def larger(found: Metadata) -> None:
    found.state_dict_metadata[NAME].size = torch.Size([2**40, 5])


def chunk_outside(found: Metadata) -> None:
    entry = found.state_dict_metadata[NAME]
    chunk = entry.chunks[-1]
    place = found.storage_data.pop(MetadataIndex(NAME, chunk.offsets))
    chunk.offsets = torch.Size([1000, *chunk.offsets[1:]])
    found.storage_data[MetadataIndex(NAME, chunk.offsets)] = place


def without_a_plain_value(found: Metadata) -> None:
    del found.storage_data[MetadataIndex("plain")]


def of_another_type(found: Metadata) -> None:
    found.storage_data = None


def place_of(found: Metadata) -> Any:
    return found.storage_data[MetadataIndex(NAME, found.state_dict_metadata[NAME].chunks[-1].offsets)]


@pytest.mark.parametrize(
    "change, text",
    [
        (without_a_chunk, f"the parts of '{NAME}' are not all of shape"),
        (without_a_place, rf"the part of '{NAME}' at \(.*\) with shape \(.*\) is missing"),
        (with_a_longer_place, rf"'{NAME}' is in bytes \d+ to \d+ of __0_0.distcp, which has"),
        (with_a_negative_offset, f"'{NAME}' is in bytes -1 to"),
        (with_a_short_place, "does not fit in 3 bytes"),
        (elsewhere, f"'{NAME}' is in '../step-00000000/__0_0.distcp', which is no file of the checkpoint"),
        (at_the_root, f"'{NAME}' is in '/etc/passwd', which is no file of the checkpoint"),
        (larger, f"the parts of '{NAME}' are not all of shape"),
        (chunk_outside, "is outside of shape"),
        (without_a_plain_value, "'plain' is missing"),
        (of_another_type, "metadata cannot be read: AttributeError"),
    ],
)
@on_ranks(2)
def test_metadata_that_do_not_fit_the_files_are_an_error_and_nothing_is_loaded(
    change: Callable[[Metadata], None], text: str, tmp_path: Path, rank: int
) -> None:
    """With right checksums, as of a program that writes such files."""
    model = shard(seeded())
    path = save_checkpoint(tmp_path, model).wait()
    dist.barrier()
    if rank == 0:
        found = pickle.loads((path / ".metadata").read_bytes())
        change(found)
        write_with_record(path, ".metadata", pickle.dumps(found))
    dist.barrier()
    other = shard(seeded(seed=1))
    before = whole_state(other)
    with pytest.raises(FAILED, match=text):
        load_checkpoint(tmp_path, other)
    assert_equal(whole_state(other), before)
    with pytest.raises(LoadError, match=text):
        verify_checkpoint(path)
