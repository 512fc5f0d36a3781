"""The command line and conversions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tools.conftest import Run, RunJson


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["run", "--help"], ["migrate", "--help"], ["convert", "--help"], ["plan", "-h"]],
)
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    """Torch is not imported for them, nor for the help of a command."""
    program = (
        "import sys\nfrom fsdp_flat.tools.command import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[-1] == "False"


def test_json_before_a_command_is_refused_not_ignored(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    """JSON where it is accepted, and ``--version``."""
    status, text, errors = run("--json", "ls", tmp_path)
    assert (status, text) == (2, "")
    assert "--json comes after the command" in errors
    assert run_json("--version")[1].keys() == {"version"}


@pytest.mark.parametrize("name", ["final-3.pt", "model.safetensors"])
def test_ls_lists_a_single_file_beside_folders_of_checkpoints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, run_json: RunJson
) -> None:
    """``ls`` lists both, and a file of safetensors, as the Trainer leaves one."""
    torch.save({"a": torch.ones(2)}, tmp_path / "one.pt")
    assert run("convert", tmp_path / "one.pt", tmp_path / "checkpoint-10", "--to", "dcp")[0] == 0
    if name.endswith(".pt"):
        (tmp_path / "one.pt").rename(tmp_path / name)
    else:
        assert run("consolidate", tmp_path / "one.pt", tmp_path / name)[0] == 0
        (tmp_path / "one.pt").unlink()
    monkeypatch.chdir(tmp_path)
    status, found = run_json("ls", ".")
    assert (status, [each["name"] for each in found]) == (0, ["checkpoint-10", name])


@pytest.mark.parametrize("command", ["show", "verify", "ls"])
def test_a_folder_of_dcp_without_metadata_is_named_for_what_it_is(command: str, tmp_path: Path, run: Run) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "one.pt")
    run("convert", tmp_path / "one.pt", tmp_path / "dcp", "--to", "dcp")
    (tmp_path / "dcp" / ".metadata").unlink()
    status, text, errors = run(command, tmp_path if command == "ls" else tmp_path / "dcp")
    assert status != 0
    assert "without its file .metadata" in " ".join((text + errors).split())


@pytest.mark.parametrize("options", [[], ["--allow-pickle"]])
@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_pickled_module_is_named_for_what_it_is(
    options: list[str], module: nn.Module, tmp_path: Path, run: Run
) -> None:
    """It is read with ``--allow-pickle``."""
    torch.save(module, tmp_path / "net.pt")
    status, _, errors = run("show", tmp_path / "net.pt", *options)
    assert status == 2
    assert "is a pickled module, torch.nn.modules." in errors


def test_safetensors_come_with_the_config_that_from_pretrained_needs(tmp_path: Path, run: Run) -> None:
    """It is given by ``--config``, or found beside the source; else it is said. ``--dtype`` casts."""
    weights = {"a": torch.randn(3, 2), "n": torch.tensor(7)}
    torch.save(weights, tmp_path / "model.pt")
    status, text, _ = run("convert", tmp_path / "model.pt", tmp_path / "without", "--to", "safetensors")
    assert status == 0
    assert "from_pretrained will not know the model" in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "torch_dtype": "float32"}))
    options = ["--to", "safetensors", "--dtype", "bfloat16"]
    status, text, _ = run("convert", tmp_path / "model.pt", tmp_path / "found", *options)
    assert (status, "from_pretrained" in text) == (0, False)
    assert json.loads((tmp_path / "found" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    from fsdp_flat.tools.checkpoint_readers import open_checkpoint

    written = {tensor.name: tensor.full() for tensor in open_checkpoint(tmp_path / "found").tensors.values()}
    assert written["n"].dtype == torch.int64
    assert torch.equal(written["a"], weights["a"].bfloat16())
    (tmp_path / "other.json").write_text('{"model_type": "opt"}')
    options = ["--to", "safetensors", "--config", str(tmp_path / "other.json")]
    assert run("convert", tmp_path / "model.pt", tmp_path / "given", *options)[0] == 0
    assert json.loads((tmp_path / "given" / "config.json").read_text()) == {"model_type": "opt"}


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--dtype", "float"], ["--config", "missing.json"]])
def test_a_wrong_dtype_or_config_writes_nothing(options: list[str], tmp_path: Path, run: Run) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    before = sorted(tmp_path.iterdir())
    status, _, errors = run("convert", tmp_path / "model.pt", tmp_path / "hub", "--to", "safetensors", *options)
    is_alias = options[1] == "float"  # torch.float is float32
    assert status == (0 if is_alias else 2), errors
    assert (sorted(tmp_path.iterdir()) == before) == (not is_alias)


def test_help_after_the_script_is_an_argument_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """``run`` passes on what comes after the script."""
    found: list[list[str]] = []
    monkeypatch.setattr("fsdp_flat.run.main", found.append)
    monkeypatch.setattr("sys.path", [*sys.path])
    for words in (["train.py", "--help"], ["--json", "train.py", "-h"], ["-m", "train", "--help"]):
        assert run("run", *words) == (0, "", "")
    assert found == [["train.py", "--help"], ["--json", "train.py", "-h"], ["-m", "train", "--help"]]
