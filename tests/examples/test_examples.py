"""The examples run as their docstrings say, on tiny sizes, and end with a reason when a rank is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.scripts import printed_losses, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--layers", "1", "--width", "8", "--heads", "1", "--seq-len", "8", "--batch-size", "6", "--validate-every", "3"]
TIMEOUT_S = 240.0
needs_pictures = pytest.mark.skipif(
    not all(map(find_spec, ("tqdm", "matplotlib"))), reason="train_gpt.py needs tqdm and matplotlib: the extra demo"
)


def environment() -> dict[str, str]:
    # torchrun says nothing about threads then, and small machines are not asked for more than they have.
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a process that has to end well."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def ranks_of(pid: int) -> dict[int, int]:
    """The process id of each rank that a process has started."""
    found: dict[int, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        rank = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{child}/environ").read_bytes())
        if rank is not None:
            found[int(rank[1])] = int(child)
    return found


def losses_of(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"validation loss[^\n]*?(\d+\.\d{4})", output)]


@pytest.mark.from_size("cover", "trains a whole example")
def test_checkpoints_are_saved_and_loaded_in_every_form_and_at_another_number_of_ranks(tmp_path: Path) -> None:
    losses = []
    for num_ranks in (2, 3):
        output = run_program(num_ranks, tmp_path, EXAMPLES / "checkpoints.py", "--out", tmp_path)
        assert output.count("same values") == 9, output
        losses += printed_losses(output)
    assert "went on from step-00000009 with 3 ranks" in output
    assert losses[1] < losses[0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000009", "step-00000019"]


@pytest.mark.from_size("cover", "starts torchrun, whose ranks import torch")
@needs_pictures
def test_train_gpt_trains_with_two_ranks_and_resumes_with_three(tmp_path: Path) -> None:
    script, out = EXAMPLES / "train_gpt.py", ("--out", tmp_path, "--steps", "3")
    trained = run_program(2, tmp_path, script, *out, *TINY)
    assert "full_shard over 2 ranks" in trained
    # The script itself refuses to go on if the loss after resuming is not the one that was saved.
    resumed = run_program(3, tmp_path, script, *out, "--batch-size", "6", "--resume")
    assert "resumed at step 3" in resumed
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 6
    assert "_fsdp_wrapped_module" not in "".join(checkpoint["model"])


@pytest.mark.from_size("cover", "starts torchrun, whose ranks import torch")
@needs_pictures
@pytest.mark.skipif(sys.platform != "linux", reason="reads the ranks of a job in /proc")
def test_a_killed_rank_ends_the_job_within_seconds_with_its_number(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--out", str(tmp_path), *TINY]
    process = start([*command, "--ranks", "2", "--steps", "100000"], tmp_path)
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "before training" in line:
                break
        pids = ranks_of(process.pid)
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=60)
    finally:
        process.terminate()
    assert process.returncode == 1
    assert time.monotonic() - killed < 30
    assert f"Signal 9 (SIGKILL) received by PID {pids[1]}" in output
    assert re.search(r"rank +: 1 ", output)
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.from_size("all", "starts torchrun, whose ranks import torch")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the ranks of a job in /proc")
def test_elastic_goes_on_from_its_last_checkpoint_after_a_rank_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(EXAMPLES / "elastic.py"))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the example says
    process = start([*command, "--out", str(tmp_path / "run"), "--steps", "150"], tmp_path)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step  49"):
            os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
            break
    output = "".join(lines) + finish(process)
    begins = [int(step) for step in re.findall(r"2 ranks begin at step (\d+)", output)]
    assert begins in ([0, 50], [0, 100])
    assert "step 149" in output


@pytest.mark.from_size("all", "starts torchrun, whose ranks import torch")
def test_minimal_runs_on_two_nodes_through_one_rendezvous_and_saves_the_whole_model(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = torchrun(
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "examples"),
        *("--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", "is_host=false", "--local-addr", "localhost"),
        str(EXAMPLES / "minimal.py"),
    )
    nodes = [start(command, tmp_path) for _ in range(2)]
    losses = [float(text) for node in nodes for text in re.findall(r"loss (\d+\.\d+)", finish(node))]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    saved = torch.load(tmp_path / "minimal.pt", weights_only=True)
    assert saved["3.2.weight"].shape == (16, 64)
    assert len(saved) == 16


@pytest.mark.from_size("cover", "trains a whole example")
def test_fully_shard_trains_and_saves_a_checkpoint_that_a_plain_model_reads(tmp_path: Path) -> None:
    losses = printed_losses(run_program(2, tmp_path, EXAMPLES / "fully_shard.py"))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    state = {"model": {"3.2.weight": torch.zeros(16, 64)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=tmp_path / "checkpoints" / "fully_shard", no_dist=True)
    assert state["model"]["3.2.weight"].abs().sum() > 0


@pytest.mark.from_size("cover", "trains a whole example")
def test_the_example_trains_adapters_on_two_ranks_and_saves_them_alone(tmp_path: Path) -> None:
    output = run_program(2, tmp_path, EXAMPLES / "finetune_adapters.py")
    held = re.findall(r"rank (\d): ([\d,]+) bytes frozen in bf16, ([\d,]+) bytes trainable in fp32", output)
    assert [rank for rank, _, _ in held] == ["0", "1"]
    frozen, trainable = (sum(int(row[column].replace(",", "")) for row in held) for column in (1, 2))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] - 0.4

    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert len(saved) == 16
    assert all(".adapter_" in name for name in saved)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert sum(value.nbytes for value in saved.values()) == trainable
    assert frozen > 5 * trainable
    assert any(value.abs().max() > 0 for name, value in saved.items() if name.endswith("adapter_up"))
