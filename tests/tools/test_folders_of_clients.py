"""Folders that accelerate, the Trainer and Lightning write, and the nested layout of torch's tutorial."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.tools.conftest import Run, RunJson

COMMANDS = ["verify", "show", "convert", "ls"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def state_of_optimizer() -> dict[str, Any]:
    """Optimizer states by names, as FSDP.optim_state_dict and get_optimizer_state_dict give them."""
    params = dict(net().named_parameters())
    states = {name: {"step": torch.tensor(1.0), "exp_avg": value + 1} for name, value in params.items()}
    return {"state": states, "param_groups": [{"lr": 0.1, "params": list(params)}]}


def as_dcp(content: Any, folder: Path, run: Run) -> None:
    """Write a folder of torch.distributed.checkpoint."""
    torch.save(content, folder.with_suffix(".made"))
    status, _, errors = run("convert", folder.with_suffix(".made"), folder, "--to", "dcp", "--ranks", 2)
    assert status == 0, errors
    folder.with_suffix(".made").unlink()


def write_others(folder: Path) -> None:
    for rank in range(2):
        torch.save({"python": random.getstate(), "cpu": torch.random.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    torch.save({"last_epoch": 2}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")


@pytest.fixture(params=["sharded", "full"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Path:
    """A checkpoint's folder as the Trainer lays it out, of FSDP's SHARDED or FULL state dicts."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    if request.param == "sharded":
        as_dcp({"model": net().state_dict()}, folder / "pytorch_model_fsdp_0", run)
        as_dcp({"optimizer": state_of_optimizer()}, folder / "optimizer_0", run)
    else:
        torch.save(net().state_dict(), folder / "pytorch_model_fsdp.bin")
        torch.save(state_of_optimizer(), folder / "optimizer.bin")
    write_others(folder)
    return folder


def cut(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.truncate(500)


def model_file(folder: Path) -> Path:
    sharded = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    return sharded if sharded.exists() else folder / "pytorch_model_fsdp.bin"


def test_a_folder_of_the_trainer_is_its_model_and_its_optimizer(trainer: Path, run: Run, run_json: RunJson) -> None:
    status, shown = run_json("show", trainer)
    names = {each["name"] for each in shown["tensors"]}
    expected = {f"model.{name}" for name in net().state_dict()}
    expected |= {f"optimizer.state.{name}.{key}" for name in net().state_dict() for key in ("step", "exp_avg")}
    assert (status, names, shown["kind"]) == (0, expected, "accelerate")
    status, text, _ = run("ls", trainer.parent)
    assert status == 0
    assert "accelerate" in text
    for kind in ("full", "sharded"):
        assert run("convert", trainer, trainer.parent / kind, "--to", kind)[0] == 0
    torch.testing.assert_close(torch.load(trainer.parent / "full"), dict(net().state_dict()), rtol=0, atol=0)
    assert run_json("show", trainer.parent / "sharded")[1]["num_tensors"] == len(expected)


def test_verify_of_a_folder_of_the_trainer_reads_its_parts_and_names_what_it_did_not_check(
    trainer: Path, run: Run
) -> None:
    status, text, _ = run("verify", trainer)
    assert status == 0
    assert f"{trainer}: 12 tensors complete and undamaged" in text
    assert "not checked: trainer_state.json" in text


def test_verify_finds_a_cut_model_in_a_folder_of_the_trainer(trainer: Path, run: Run) -> None:
    cut(model_file(trainer))
    status, text, _ = run("verify", trainer)
    assert status == 1
    assert model_file(trainer).name in text
    assert "undamaged" not in text


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state_1.pth"])
def test_verify_finds_a_cut_file_beside_the_model(trainer: Path, name: str, run: Run) -> None:
    file = trainer / name
    file.write_bytes(file.read_bytes()[:-100])
    status, text, _ = run("verify", trainer)
    assert status == 1
    assert name in text


def test_a_cut_model_is_one_line_in_every_other_command(trainer: Path, run: Run) -> None:
    cut(model_file(trainer))
    for words in (["show", trainer], ["convert", trainer, trainer.parent / "made", "--to", "full"]):
        status, _, errors = run(*words)
        assert (status, errors.count("\n")) == (2, 1)
        assert model_file(trainer).name in errors
    assert run("ls", trainer.parent)[0] == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_several_kinds_are_not_taken_for_those_of_ranks(command: str, tmp_path: Path, run: Run) -> None:
    """As where the model's folder is lost, or has a name that nobody knows."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    write_others(folder)
    more = [tmp_path / "made", "--to", "full"] if command == "convert" else []
    status, text, errors = run(command, folder, *more)
    if command == "ls":  # which lists file by file
        assert (status, "rng_state_0.pth" in text) == (0, True)
        return
    assert status == 2
    assert "is no checkpoint" in errors
    assert "scheduler.pt" in errors


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_an_object_inside_a_tuple_is_named_by_convert(kind: str, tmp_path: Path, run: Run) -> None:
    """As numpy's random state has one, which ended in a traceback."""
    torch.save({"numpy": numpy.random.get_state(), "epoch": 1}, tmp_path / "rng_state_0.pth")
    status, _, errors = run("convert", tmp_path / "rng_state_0.pth", tmp_path / "made", "--to", kind)
    assert (status, errors.count("\n")) == (2, 1)
    assert "numpy: objects of classes" in errors


@pytest.mark.parametrize("command", ["verify", "show", "convert"])
def test_random_states_beside_an_unknown_folder_of_a_model_are_no_checkpoint(
    command: str, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    as_dcp({"model": net().state_dict()}, folder / "weights", run)
    write_others(folder)
    (folder / "scheduler.pt").unlink()
    more = [tmp_path / "made", "--to", "full"] if command == "convert" else []
    status, _, errors = run(command, folder, *more)
    assert status == 2
    assert f"Pass one of those inside: {folder / 'weights'}" in errors


def test_several_models_of_accelerate_are_asked_for_by_name(tmp_path: Path, run: Run) -> None:
    for number in range(2):
        as_dcp({"model": net().state_dict()}, tmp_path / f"pytorch_model_fsdp_{number}", run)
    status, _, errors = run("show", tmp_path)
    assert status == 2
    assert "pytorch_model_fsdp_0 and pytorch_model_fsdp_1" in errors


def test_a_folder_of_lightning_is_checked_with_its_other_values(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    folder = tmp_path / "epoch=0-step=2.ckpt"
    folder.mkdir()
    as_dcp({"model": net().state_dict(), "optimizer_0": state_of_optimizer()}, tmp_path / "made", run)
    shutil.copytree(tmp_path / "made", folder, dirs_exist_ok=True)
    torch.save({"epoch": 0, "lr_schedulers": []}, folder / "meta.pt")
    assert run("verify", folder)[0] == 0
    assert run("convert", folder, tmp_path / "run", "--to", "sharded")[0] == 0
    names = {each["name"] for each in run_json("show", tmp_path / "run")[1]["tensors"]}
    assert "optim.state.0.weight.exp_avg" in names
    file = folder / "meta.pt"
    file.write_bytes(file.read_bytes()[:-100])
    status, text, _ = run("verify", folder)
    assert (status, "meta.pt" in text) == (1, True)


def test_verify_of_an_outer_folder_of_the_trainer_says_that_it_read_the_model_alone(tmp_path: Path, run: Run) -> None:
    torch.save(net().state_dict(), tmp_path / "made.pt")
    assert run("consolidate", tmp_path / "made.pt", tmp_path / "out" / "model.safetensors")[0] == 0
    (tmp_path / "out" / "checkpoint-10").mkdir()
    torch.save({}, tmp_path / "out" / "training_args.bin")
    status, text, _ = run("verify", tmp_path / "out")
    assert status == 0
    assert "not checked: checkpoint-10, training_args.bin" in text
    assert "undamaged" not in text  # safetensors has no checksums


def test_a_hubs_files_beside_others_are_its_model(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    for number, part in enumerate(net(), 1):
        state = {f"{number - 1}.{name}": value for name, value in part.state_dict().items()}
        torch.save(state, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    status, shown = run_json("show", tmp_path)
    assert (status, {each["name"] for each in shown["tensors"]}) == (0, set(net().state_dict()))
    assert run("convert", tmp_path, tmp_path / "hub", "--to", "safetensors")[0] == 0
    assert "not checked: hub, training_args.bin" in run("verify", tmp_path)[1]


def test_verify_compares_the_checksums_that_save_full_wrote(peer_files: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(peer_files / "hub", tmp_path / "hub")
    assert "undamaged" in run("verify", tmp_path / "hub")[1]
    file = tmp_path / "hub" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, text, _ = run("verify", tmp_path / "hub")
    assert (status, "was altered" in text) == (1, True)


# -- {"app": AppState} -------------------------------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path: Path, run: Run) -> Path:
    as_dcp({"app": {"model": net().state_dict(), "optim": state_of_optimizer(), "epoch": 3}}, tmp_path / "app", run)
    return tmp_path / "app"


@pytest.mark.parametrize("options", [[], ["--key", "app.model"]])
def test_model_and_optimizer_are_found_below_one_key(
    options: list[str], app: Path, tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    assert run("convert", app, tmp_path / "run", "--to", "sharded", *options)[0] == 0
    shown = run_json("show", tmp_path / "run")[1]
    names = {each["name"] for each in shown["tensors"]}
    assert {f"model.{name}" for name in net().state_dict()} <= names
    assert {f"optim.state.{name}.exp_avg" for name in net().state_dict()} <= names
    assert shown["values"]["optim.param_groups.0.lr"] == "0.1"
    assert shown["values"]["extra.0.app.epoch"] == "3"


def test_the_model_alone_is_found_below_one_key(app: Path, tmp_path: Path, run: Run) -> None:
    assert run("convert", app, tmp_path / "full", "--to", "full")[0] == 0
    torch.testing.assert_close(torch.load(tmp_path / "full"), dict(net().state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["full", "sharded", "safetensors"])
def test_a_model_with_param_groups_in_it_is_refused(kind: str, app: Path, tmp_path: Path, run: Run) -> None:
    status, _, errors = run("convert", app, tmp_path / "made", "--to", kind, "--key", "app")
    assert status == 2
    assert "an optimizer" in errors
    assert "--key app.model" in errors
    assert not (tmp_path / "made").exists()


def test_two_models_below_keys_are_asked_for_by_name(tmp_path: Path, run: Run) -> None:
    two = {name: {"model": net().state_dict()} for name in ("generator", "critic")}
    as_dcp(two, tmp_path / "two", run)
    status, _, errors = run("convert", tmp_path / "two", tmp_path / "made", "--to", "full")
    assert status == 2
    assert "--key generator.model" in errors


@pytest.mark.parametrize(
    "content", [{"net": net().state_dict(), "opt": state_of_optimizer()}], ids=["optimizer of another name"]
)
def test_an_optimizer_of_any_name_beside_the_model_comes_along(
    content: dict[str, Any], tmp_path: Path, run: Run, run_json: RunJson
) -> None:
    as_dcp(content, tmp_path / "there", run)
    assert run("convert", tmp_path / "there", tmp_path / "run", "--to", "sharded", "--key", "net")[0] == 0
    names = {each["name"] for each in run_json("show", tmp_path / "run")[1]["tensors"]}
    assert "optim.state.0.weight.exp_avg" in names


def test_several_optimizers_are_refused_not_dropped(tmp_path: Path, run: Run) -> None:
    """A checkpoint of this library has one."""
    optimizers = [state_of_optimizer(), state_of_optimizer()]
    content = {"model": net().state_dict(), "optimizer_states": optimizers}
    torch.save(content, tmp_path / "all.ckpt")
    status, _, errors = run("convert", tmp_path / "all.ckpt", tmp_path / "run", "--to", "sharded")
    assert status == 2
    assert "2 optimizers" in errors
    optimizers.pop()
    torch.save(content, tmp_path / "one.ckpt")
    assert run("convert", tmp_path / "one.ckpt", tmp_path / "run", "--to", "sharded")[0] == 0


def test_convert_makes_no_folder_named_as_a_url(
    app: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, errors = run("convert", app, "s3://bucket/full", "--to", "full")
    assert status == 2
    assert "The target must be a local path" in errors
    assert not (tmp_path / "s3:").exists()
