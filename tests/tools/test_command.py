"""The command ``fsdp-flat``: what it shows of checkpoints, how it fails, and what it does not run."""

from __future__ import annotations

import json
import os
import pickle
import re
import runpy
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_flat.errors import LoadError
from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from fsdp_flat.tools.torch_archives import read_archive
from tests.tools.conftest import Run, RunJson
from tests.tools.peer_files import build

RANK_FILES = ["fsdp2_files", "fsdp1_sharded_files", "fsdp1_full_files"]
WHOLE = ["fsdp2", "fsdp1", "run", "hub", "hub_of_two", "model.pt", "all.pt", *RANK_FILES]


def model_in(path: Path) -> dict[str, torch.Tensor]:
    """The model in a checkpoint, by name, read by the command's reader."""
    checkpoint = open_checkpoint(path)
    return {t.name: t.full() for t in checkpoint.below(checkpoint.model_keys()).tensors.values()}


@pytest.mark.parametrize("name", WHOLE)
def test_every_format_gives_the_values_that_torch_itself_loads(peer_files: Path, name: str) -> None:
    expected = torch.load(peer_files / "model.pt", weights_only=True)
    found = model_in(peer_files / name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value), key


def test_ls_lists_the_checkpoints_of_a_folder_with_their_kinds(peer_files: Path, run_json: RunJson, run: Run) -> None:
    status, found = run_json("ls", peer_files)
    kinds = {each["name"]: each["kind"] for each in found}
    assert status == 0
    assert {kinds[name] for name in ("fsdp1", "fsdp2")} == {"dcp"}
    assert kinds["hub"] == kinds["hub_of_two"] == "safetensors"
    assert kinds["all.pt"] == kinds["model.pt"] == "torch"
    _, text, _ = run("ls", peer_files / "run")
    assert text.split()[-6:-1] == ["step-00000003", "fsdp_flat", "27", "1.05", "kB"]


@pytest.mark.parametrize(
    ("name", "kind", "num_ranks"), [("fsdp2", "dcp", 2), ("fsdp1", "dcp", 2), ("run", "fsdp_flat", 2)]
)
def test_show_says_who_wrote_a_checkpoint_and_each_tensor(
    peer_files: Path, name: str, kind: str, num_ranks: int, run_json: RunJson
) -> None:
    status, found = run_json("show", peer_files / name)
    assert (status, found["kind"], found["num_ranks"]) == (0, kind, num_ranks)
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    expected = {f"model.{key}": list(value.shape) for key, value in build().state_dict().items()}
    assert {key: shape for key, shape in shapes.items() if key.startswith("model.")} == expected
    assert found["values"]["optim.param_groups.0.lr"] == "0.1"


def test_show_names_the_ranks_that_hold_a_tensor(peer_files: Path, run: Run) -> None:
    status, text, _ = run("show", peer_files / "fsdp2")
    line = next(line for line in text.splitlines() if line.startswith("model.0.weight "))
    assert (status, line.split()) == (0, ["model.0.weight", "float32", "7x5", "140", "B", "2", "0,1"])
    assert "\x1b" not in text


@pytest.mark.parametrize("name", WHOLE)
def test_verify_finds_nothing_in_a_good_checkpoint(peer_files: Path, name: str, run_json: RunJson) -> None:
    status, found = run_json("verify", peer_files / name)
    assert (status, found["problems"]) == (0, [])
    assert found["num_tensors"] in (9, 27)


@pytest.mark.parametrize("name", ["fsdp2", "run/step-00000003", "fsdp1_sharded_files"])
def test_verify_finds_a_changed_byte_in_the_middle_of_a_file(
    peer_files: Path, tmp_path: Path, name: str, run: Run
) -> None:
    copy = shutil.copytree(peer_files / name, tmp_path / Path(name).name)
    checkpoint = open_checkpoint(copy)
    tensor = next(t for t in checkpoint.tensors.values() if t.name == "model.0.weight")
    part = tensor.parts[0]
    before = part.elements().numpy().tobytes()
    data = part.file.read_bytes()
    assert data.count(before) == 1
    part.file.write_bytes(data.replace(before, before[:3] + bytes([before[3] ^ 1]) + before[4:]))
    status, text, _ = run("verify", copy)
    assert status == 1
    assert part.file.name in text


@pytest.mark.parametrize("name", ["fsdp2", "run/step-00000003", "hub_of_two"])
def test_verify_finds_a_missing_file(peer_files: Path, tmp_path: Path, name: str, run: Run) -> None:
    copy = shutil.copytree(peer_files / name, tmp_path / Path(name).name)
    gone = sorted(path for path in copy.iterdir() if path.suffix in (".distcp", ".safetensors"))[0]
    gone.unlink()
    status, text, _ = run("verify", copy)
    assert status == 1
    assert gone.name in text


def test_verify_finds_rows_that_no_rank_has_saved(peer_files: Path, tmp_path: Path, run: Run) -> None:
    copy = shutil.copytree(peer_files / "fsdp2", tmp_path / "copy")
    metadata = dcp.FileSystemReader(copy).read_metadata()
    lost = next(index for index in metadata.storage_data if index.fqn == "model.0.weight")
    del metadata.storage_data[lost]
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    status, text, _ = run("verify", copy)
    assert (status, text.count("\n")) == (1, 1)
    assert "model.0.weight" in text


@pytest.mark.parametrize("other", ["fsdp1", "hub", "hub_of_two", "run", "model.pt", *RANK_FILES])
def test_diff_finds_the_same_model_in_every_format(peer_files: Path, other: str, run: Run) -> None:
    assert run("diff", peer_files / "fsdp2", peer_files / other, "--key", "model")[:2] == (
        0,
        "9 tensors and 0 values are equal, bit by bit\n",
    )


def test_diff_names_shapes_values_and_what_is_missing(tmp_path: Path, run_json: RunJson) -> None:
    a = {"same": torch.ones(2), "shape": torch.ones(2), "gone": torch.ones(1), "w": torch.tensor([[3.0, 4.0], [0, 0]])}
    b = {**a, "shape": torch.ones(3), "w": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "nan": torch.tensor([float("nan")])}
    a["nan"] = b["nan"].clone()
    del b["gone"]
    torch.save({"model": a, "step": 1}, tmp_path / "a.pt")
    torch.save({"model": b, "step": 2}, tmp_path / "b.pt")
    status, found = run_json("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    by_name = {each["name"]: each for each in found["differences"]}
    assert status == 1
    assert sorted(by_name) == ["model.gone", "model.shape", "model.w", "step"]
    assert by_name["model.gone"]["what"] == "only in A"
    assert (by_name["model.shape"]["in_a"], by_name["model.shape"]["in_b"]) == ("(2,)", "(3,)")
    values = by_name["model.w"]
    assert (values["index"], values["in_a"], values["in_b"], values["largest"]) == ([1, 1], "0.0", "2.0", 2.0)
    assert (values["norm_a"], values["norm_b"]) == (5.0, pytest.approx(29**0.5))


def test_diff_counts_what_differs_and_takes_a_tolerance(tmp_path: Path, run: Run) -> None:
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.tensor([1.0, 100.0]), "b": torch.zeros(2)}, a)
    torch.save({"a": torch.tensor([1.0, 101.0]), "b": torch.tensor([0.0, 1e-3])}, b)

    def last(*options: object) -> tuple[int, str]:
        status, text, _ = run("diff", a, b, *options)
        return status, text.splitlines()[-1]

    assert last() == (1, "2 of 2 entries differ, values by at most 1, in a")
    assert last("--rtol", 0.01) == (1, "1 of 2 entries differ, values by at most 0.001, in b")
    assert last("--rtol", 0.01, "--atol", 0.01) == (
        0,
        "2 tensors and 0 values are equal, but for at most 0.01 + 0.01 times the value in B",
    )
    assert "--atol" in run("diff", a, b, "--atol", -1)[2]


def test_ls_shows_what_cannot_be_read_in_a_column_of_its_own(tmp_path: Path, run: Run) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"none")
    status, text, _ = run("ls", tmp_path)
    heads, good, bad = text.splitlines()
    assert (status, heads.split()) == (1, ["name", "kind", "tensors", "size", "ranks", "problem"])
    assert good.split() == ["a.pt", "torch", "1", "8", "B"]
    assert heads.index("problem") == bad.index(str(tmp_path / "b.pt"))


def test_files_of_local_state_dicts_are_merged_to_the_flat_parameters(peer_files: Path, run_json: RunJson) -> None:
    _, found = run_json("show", peer_files / "fsdp1_local_files")
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"] if "flat" in tensor["name"]}
    assert shapes == {"model._flat_param": [14], "model.0._flat_param": [42], "model.2._flat_param": [24]}
    expected = torch.load(peer_files / "model.pt", weights_only=True)
    flat = model_in(peer_files / "fsdp1_local_files")["0._flat_param"]
    assert torch.equal(flat, torch.cat([expected["0.weight"].reshape(-1), expected["0.bias"]]))


def test_a_file_of_one_rank_shows_what_it_lacks(peer_files: Path, run: Run) -> None:
    status, text, _ = run("verify", peer_files / "fsdp2_files" / "rank1.pt")
    assert status == 1
    assert "0.weight: the files hold 15 of 35 elements" in text


class Writes:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_is_run_that_a_file_names_unless_it_is_allowed(tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "trace"
    torch.save({"model": {"w": torch.ones(2)}, "args": Writes(str(trace))}, tmp_path / "bad.pt")
    for command in ("show", "verify"):
        status, *_ = run(command, tmp_path / "bad.pt")
        assert status == 0
        assert not trace.exists()
    assert "not unpickled" in run("show", tmp_path / "bad.pt")[1]
    assert run("show", tmp_path / "bad.pt", "--allow-pickle")[0] == 0
    assert trace.exists()


def test_a_file_cannot_reach_code_by_attributes_of_what_it_may_make(tmp_path: Path) -> None:
    program = b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nV__init__\ntR."
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(LoadError, match="asks for the attribute '__init__'"):
        read_archive(tmp_path / "bad.pt")


def test_a_file_cannot_change_functions_of_torch(tmp_path: Path) -> None:
    before = torch._utils._rebuild_tensor_v2.__defaults__
    program = b"ctorch._utils\n_rebuild_tensor_v2\n(N(dV__defaults__\nNstb."
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")
    assert read_archive(tmp_path / "bad.pt").__defaults__ is None
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before == (None,)


class Setting:
    """An object that torch.load(weights_only=True) refuses."""

    class Inner:
        """An object whose class is pickled as an attribute of another."""


# Those that torch has no class of typed storages for.
NEW_DTYPES = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.every_value_in_quick("dtypes that few tests have")
@pytest.mark.parametrize("dtype", NEW_DTYPES)
@pytest.mark.parametrize("allowed", [False, True])
def test_tensors_of_new_dtypes_are_read_beside_an_object(dtype: torch.dtype, allowed: bool, tmp_path: Path) -> None:
    value = torch.arange(3, dtype=torch.float32).to(dtype)
    torch.save({"a": value, "o": Setting()}, tmp_path / "in.pt")
    found = open_checkpoint(tmp_path / "in.pt", allow_pickle=allowed).tensors["a",].full()
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("allowed", [False, True])
def test_an_untyped_storage_is_read_beside_an_object(allowed: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0).untyped_storage(), "o": Setting()}, tmp_path / "in.pt")
    found = read_archive(tmp_path / "in.pt", allow_pickle=allowed)["a"]
    with warnings.catch_warnings():
        # torch.load makes a typed storage of it.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        assert bytes(found.tolist()) == torch.arange(3.0).numpy().tobytes()


def test_what_was_converted_with_objects_is_read_without_them(tmp_path: Path, run: Run) -> None:
    torch.save({"model": {"w": torch.arange(3.0)}, "o": Setting()}, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch", "--allow-pickle")[0] == 0
    found = open_checkpoint(tmp_path / "out.pt")
    assert "Setting, not unpickled" in repr(found.values["o",])
    assert torch.equal(found.tensors["model", "w"].full(), torch.arange(3.0))


def test_a_file_cannot_change_the_storages_of_torch(tmp_path: Path) -> None:
    program = b"ctorch.storage\nUntypedStorage\n(N(dVdtype\nVfloat\nstb."
    for module in (b"torch.storage", b"torch"):
        with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
            archive.writestr("archive/data.pkl", program.replace(b"torch.storage", module))
            archive.writestr("archive/version", "3\n")
        with pytest.raises(LoadError, match="cannot be read"):
            read_archive(tmp_path / "bad.pt")
    assert not hasattr(torch.UntypedStorage, "dtype")


class Quantized(torch.Tensor):
    """A tensor that consists of another one and a factor."""

    codes: torch.Tensor
    factor: float

    @staticmethod
    def of(value: torch.Tensor) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(Quantized, value.shape, dtype=value.dtype)
        made.codes, made.factor = (value * 8).round().to(torch.int8), 0.125
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a quantized tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Quantized({self.codes.tolist()})"


class Named(torch.Tensor):
    """A tensor with storage of its own, and a name."""

    name_of: str


def test_allowed_tensors_of_other_classes_are_what_torch_makes_of_them(tmp_path: Path, run: Run) -> None:
    named = torch.ones(3).as_subclass(Named)
    named.name_of = "n"
    state = {"w": Quantized.of(torch.tensor([[0.5, 1.0]])), "named": named, "b": torch.ones(2)}
    torch.save(state, tmp_path / "w.pt")
    found = open_checkpoint(tmp_path / "w.pt", allow_pickle=True)
    assert torch.equal(found.tensors["b",].full(), torch.ones(2))
    made = found.values["w",]
    assert (type(made), made.shape, made.dtype) == (Quantized, (1, 2), torch.float32)
    assert (made.codes.tolist(), made.factor) == ([[4, 8]], 0.125)
    assert (type(found.values["named",]), found.values["named",].name_of) == (Named, "n")
    assert "Quantized([[4, 8]])" in run("show", tmp_path / "w.pt", "--allow-pickle")[1]
    described = open_checkpoint(tmp_path / "w.pt")
    assert torch.equal(described.tensors["b",].full(), torch.ones(2))
    assert "Quantized, not unpickled" in repr(described.values["w",])


def test_allowed_objects_of_nested_classes_are_made(tmp_path: Path) -> None:
    torch.save({"o": Setting.Inner()}, tmp_path / "in.pt")
    assert type(read_archive(tmp_path / "in.pt", allow_pickle=True)["o"]) is Setting.Inner


def test_without_the_safetensors_package_a_command_says_what_to_install(
    peer_files: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    status, text, errors = run("show", peer_files / "hub")
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert errors.endswith("model.safetensors is read by safetensors: pip install safetensors.\n")


def test_metadata_of_a_checkpoint_that_names_other_classes_is_refused_with_the_option_to_allow_it(
    peer_files: Path, tmp_path: Path, run: Run
) -> None:
    copy = shutil.copytree(peer_files / "fsdp2", tmp_path / "copy")
    trace = tmp_path / "trace"
    metadata = dcp.FileSystemReader(copy).read_metadata()
    metadata.planner_data["step"] = Writes(str(trace))
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    status, text, errors = run("show", copy)
    assert (status, text) == (2, "")
    assert "--allow-pickle" in errors
    assert not trace.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "nothing"], "fsdp-flat show: nothing does not exist.\n"),
        (["show"], "fsdp-flat show: Missing argument 'PATH'.\n"),
        (["show", "a", "--bad"], "fsdp-flat show: No such option: --bad\n"),
        (["ls", "text.pt"], "fsdp-flat ls: text.pt is no folder; show one checkpoint by: fsdp-flat show text.pt\n"),
        (["show", "empty"], "fsdp-flat show: empty is no checkpoint: it holds nothing."),
        (["show", "text.pt"], "fsdp-flat show: text.pt is no file of torch.save"),
        (["migrate"], "fsdp-flat migrate: the following arguments are required: PATH; see fsdp-flat migrate --help\n"),
        (["migrate", "--bad", "a"], "fsdp-flat migrate: unrecognized arguments: --bad; "),
        (["run"], "fsdp_flat.run: no script given; see "),
        (["lst"], "fsdp-flat lst: No such command 'lst'."),
    ],
)
def test_bad_input_is_one_line_and_status_two(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Run,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no archive")
    Path("empty").mkdir()
    try:
        status, text, errors = run(*arguments)
    except SystemExit as ended:
        status, (text, errors) = ended.code, capsys.readouterr()
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(told)


def test_every_command_has_help_with_an_example_and_an_option_for_json(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = run("--help")[1].partition("Commands:")[2].partition("\n\n")[0]
    commands = [line.split()[0] for line in listed.strip().splitlines()]
    assert {"run", "migrate", "ls", "show", "verify", "diff"} <= set(commands)
    for command in commands:
        try:
            status, text, _ = run(command, "--help")
        except SystemExit as ended:
            status, text = ended.code, capsys.readouterr().out
        assert status == 0
        program = r"torchrun .* -m fsdp_flat\.run" if command == "run" else f"fsdp-flat {command}"
        assert re.search(f"Example: {program} ", " ".join(text.split()))
        assert "--json" in text


def test_a_command_needs_no_process_group_and_shows_plain_text_in_a_pipe(
    peer_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "show", str(peer_files / "run"), "--json"])
    monkeypatch.delitem(sys.modules, "fsdp_flat.__main__", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("fsdp_flat", run_name="__main__")
    shown = capsys.readouterr()
    assert (caught.value.code, shown.err) == (0, "")
    assert json.loads(shown.out)["step"] == 3
