"""What a package index shows and what an installation brings: metadata, files, one version, and the command line."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from fsdp_flat.version import __version__

ROOT = Path(__file__).parents[2]
# As pip's script for the command does.
COMMAND = [sys.executable, "-c", "import sys; from fsdp_flat.__main__ import main; sys.exit(main())"]
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "results")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('made'); build_meta.build_wheel('made')"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("build")
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=NOT_SOURCES)
    (sources / "made").mkdir()
    (folder / "torch.py").write_text("raise ImportError('a build has no torch')\n")
    path = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    command = [sys.executable, "-W", "ignore", "-c", path + BUILD]
    result = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return sources / "made"


@pytest.fixture(scope="module")
def metadata(made: Path) -> Message:
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


def test_a_build_without_torch_has_the_version_the_readme_and_the_classifiers(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_a_source_distribution_has_what_a_build_needs_and_nothing_else(made: Path) -> None:
    with tarfile.open(next(made.glob("*.tar.gz"))) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_flat").rglob("*") if path.suffix != ".pyc"}
    files = {name for name in package if (ROOT / name).is_file()}
    made_by_the_build = {"PKG-INFO", "setup.cfg"}
    top = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert {name for name in found if not name.startswith("fsdp_flat.egg-info/")} == files | top | made_by_the_build


def test_a_wheel_has_the_package_its_types_and_the_command(made: Path) -> None:
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        scripts = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "fsdp_flat/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"fsdp_flat", f"fsdp_flat-{__version__}.dist-info"}
    assert "fsdp-flat = fsdp_flat.__main__:main" in scripts


def run(*arguments: str, folder: Path, command: list[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.from_size("cover", "starts several programs that import torch")
@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-m", "fsdp_flat"]], ids=["installed", "module"])
def test_the_command_runs_a_script_or_a_module_of_the_working_directory_on_fsdp_flat(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch.distributed.fsdp as f; print(f.FullyShardedDataParallel.__module__, *sys.argv[1:])"
    )
    for arguments in (["run", "train.py", "--lr", "1"], ["run", "-m", "train", "--lr", "1"]):
        result = run(*arguments, folder=tmp_path, command=command)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "fsdp_flat.fully_sharded_data_parallel --lr 1\n"


@pytest.mark.from_size("cover", "starts a program that imports torch; tests/tools migrate a folder here")
def test_the_command_migrates_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n")
    result = run("migrate", ".", folder=tmp_path)
    assert result.returncode == 1, result.stderr
    assert "+from fsdp_flat import FullyShardedDataParallel as FSDP" in result.stdout


def test_the_command_says_its_version_and_its_use(tmp_path: Path) -> None:
    assert run("--version", folder=tmp_path).stdout == f"fsdp-flat {__version__}\n"
    shown = run("--help", folder=tmp_path)
    assert shown.returncode == 0
    assert "Run an FSDP1 script on fsdp_flat, unchanged." in shown.stdout
    for wrong, told in (([], shown.stdout), (["train"], "fsdp-flat train: No such command 'train'.\n")):
        result = run(*wrong, folder=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", told)


def test_the_shell_completes_commands() -> None:
    words = {"_FSDP_FLAT_COMPLETE": "complete_bash", "COMP_WORDS": "fsdp-flat con", "COMP_CWORD": "1"}
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **words}
    result = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["convert", "consolidate"]


@pytest.mark.from_size("cover", "starts several programs that import torch")
def test_without_the_extra_the_command_runs_and_migrates_and_names_the_extra_for_the_rest(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    (tmp_path / "train.py").write_text("print('trained')\n")
    hidden = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    command = [*COMMAND[:2], hidden + COMMAND[2]]
    assert run("run", "train.py", folder=tmp_path, command=command).stdout == "trained\n"
    assert run("migrate", ".", folder=tmp_path, command=command).returncode == 0
    assert run("--version", folder=tmp_path, command=command).stdout == f"fsdp-flat {__version__}\n"
    result = run("show", "run", folder=tmp_path, command=command)
    assert (result.returncode, result.stdout) == (2, "")
    assert "pip install typer rich tqdm" in result.stderr
