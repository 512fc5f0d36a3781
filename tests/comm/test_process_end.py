"""A program that ends right after a collective ends well, as after the last exchange of a save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from fsdp_flat.comm import RankGroup, begin_all_reduce

dist.init_process_group("gloo", init_method="file://{store}", rank=int(sys.argv[1]), world_size=2)
sys.setswitchinterval(60)  # the main thread keeps the interpreter to the end
reduced = torch.ones(1)
begin_all_reduce(reduced.view(1), RankGroup.of(dist.group.WORLD))
while reduced.numpy()[0] != 2:
    pass
end = time.monotonic() + 1
while time.monotonic() < end:
    pass  # now gloo's thread waits for the interpreter, to release the view that it was given
"""


@pytest.mark.from_size("cover", "starts several programs that import torch")
def test_threads_of_gloo_that_wait_for_the_interpreter_do_not_abort_the_process(tmp_path: Path) -> None:
    script = SCRIPT.format(store=tmp_path / "store")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ended = [(process.communicate(timeout=120)[1], process.returncode) for process in ranks]
    assert ended == [("", 0)] * 2


def test_a_process_that_only_imports_the_library_does_not_wait_at_its_end() -> None:
    script = """
import atexit, time
registered = []
atexit.register = lambda function, *args: registered.append(function) or function
import fsdp_flat
assert time.sleep not in registered
"""
    subprocess.run([sys.executable, "-c", script], check=True)
