"""The examples run unchanged on a machine with a GPU, over gloo and over NCCL."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.accelerator import ON_ACCELERATOR

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "1", "--width", "8", "--heads", "1", "--seq-len", "8", "--batch-size", "6", "--validate-every", "3"]
TIMEOUT_S = 240.0
# NCCL alone writes its version to the output.
OF_NCCL = {"NCCL_DEBUG": "VERSION", "NCCL_SOCKET_IFNAME": "lo"}


def run_ranks(backend: str, folder: Path, *words: str, num_ranks: int = 2) -> str:
    """Run a program on ranks that share this machine's first GPU, if there is one; return what all of them print.

    Over gloo there are more ranks than GPUs. For NCCL each rank is the only one of a machine with one GPU.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        **OF_NCCL,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
    }
    processes = []
    for rank in range(num_ranks):
        place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks), "RANK": str(rank)}
        if backend == "nccl":
            place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"rank{rank}"}
        command = [sys.executable, *words]
        processes.append(
            subprocess.Popen(
                command, cwd=folder, env=common | place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = []
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    assert any("NCCL version" in output for output in outputs) == (backend == "nccl")
    return "".join(outputs)


def losses_in(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]


NO_NCCL = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs CUDA devices")
OVER_GLOO = pytest.param("gloo", marks=ON_ACCELERATOR, id="accelerator-gloo")
OVER_NCCL = pytest.param("nccl", marks=(*ON_ACCELERATOR, NO_NCCL), id="accelerator-nccl")
on_accelerator = pytest.mark.parametrize("backend", [OVER_GLOO, OVER_NCCL])
anywhere = pytest.mark.parametrize("backend", [pytest.param("gloo", id="cpu"), OVER_GLOO, OVER_NCCL])


@pytest.mark.from_size("cover", "starts several programs that import torch")
@anywhere
def test_the_shortest_program_learns_and_saves_the_whole_model_on_the_cpu(backend: str, tmp_path: Path) -> None:
    losses = losses_in(run_ranks(backend, tmp_path, str(ROOT / "examples" / "minimal.py")))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    saved = torch.load(tmp_path / "minimal.pt", weights_only=True)
    assert {value.device.type for value in saved.values()} == {"cpu"}
    assert saved["3.2.weight"].shape == (16, 64)


@on_accelerator
def test_the_shortest_program_with_fully_shard_learns(backend: str, tmp_path: Path) -> None:
    losses = losses_in(run_ranks(backend, tmp_path, str(ROOT / "examples" / "fully_shard.py")))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    assert any((tmp_path / "checkpoints" / "fully_shard").iterdir())


@on_accelerator
@pytest.mark.parametrize("front", ["FSDP", "fully_shard"])
def test_the_program_of_the_first_page_learns(backend: str, front: str, tmp_path: Path) -> None:
    program, block, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    if front == "fully_shard":
        start = program.index("model = FSDP(")
        program = program[:start] + block + program[start:].partition("\n")[2]
    (tmp_path / "program.py").write_text(program)
    losses = losses_in(run_ranks(backend, tmp_path, "program.py"))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


@on_accelerator
def test_checkpoints_are_saved_and_loaded_in_every_form(backend: str, tmp_path: Path) -> None:
    output = run_ranks(backend, tmp_path, str(ROOT / "examples" / "checkpoints.py"), "--out", str(tmp_path))
    assert output.count("same values") == 9, output


@on_accelerator
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_train_gpt_trains_and_goes_on_from_its_checkpoint(
    backend: str, strategy: str, precision: str, tmp_path: Path
) -> None:
    script, options = str(ROOT / "examples" / "train_gpt.py"), ["--out", str(tmp_path), "--strategy", strategy]
    options += ["--precision", precision, "--batch-size", "6"]
    options += ["--replicas", "2"] if strategy == "hybrid_shard" else []
    assert "before training" in run_ranks(backend, tmp_path, script, *options, *TINY[:8], *TINY[10:], "--steps", "3")
    resumed = run_ranks(backend, tmp_path, script, *options, "--steps", "3", "--resume")
    assert "resumed at step 3" in resumed


@on_accelerator
def test_adapters_are_fine_tuned(backend: str, tmp_path: Path) -> None:
    losses = losses_in(run_ranks(backend, tmp_path, str(ROOT / "examples" / "finetune_adapters.py")))
    assert losses[-1] < losses[0]
    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert {value.device.type for value in saved.values()} == {"cpu"}


@on_accelerator
def test_steps_are_recorded(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_ranks(backend, tmp_path, str(ROOT / "examples" / "plan_and_record.py"), "--out", str(tmp_path))
    assert {"summary.txt", "step.png", "step.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("client", ["accelerate", "lightning"])
@pytest.mark.parametrize("backend", [OVER_NCCL])
def test_the_examples_of_clients_learn(client: str, backend: str, tmp_path: Path) -> None:
    """Clients choose the backend themselves, NCCL on GPUs."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    output = run_ranks(backend, tmp_path, "-m", "fsdp_flat.run", str(ROOT / "examples" / f"{client}_fsdp.py"))
    losses = losses_in(output)
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 3
