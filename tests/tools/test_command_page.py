"""docs/command.md shows what the commands print: each of its console blocks is run on the checkpoints of the tests."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.tools.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "command.md"
PROGRAM = {
    "train.py": """\
import contextlib

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from model import Block, Model, batches, ema_of


def main():
    model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch in enumerate(batches()):
        is_last = number % 4 == 3
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(batch).mean().backward()
        if is_last:
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), ema_of(model)


if __name__ == "__main__":
    main()
""",
    "model.py": """\
def ema_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
""",
    "fsdp.yaml": """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_transformer_layer_cls_to_wrap: Block
mixed_precision: 'no'
""",
}
"""The program that the page moves to fully_shard."""
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def steps_of(text: str) -> list[tuple[str, str]]:
    """The commands in console blocks, each with the output below it."""
    shown = "".join(_BLOCK.findall(text))
    parts = re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]
    return [(line, output) for line, _, output in (part.partition("\n") for part in parts)]


def test_each_command_of_the_page_prints_what_the_page_shows(
    peer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(shutil.copytree(peer_files, tmp_path / "copy"))
    Path("src").mkdir()
    for name, text in PROGRAM.items():
        Path("src", name).write_text(text)
    steps = steps_of(PAGE.read_text())
    assert len(steps) > 3
    for command, expected in steps:
        program, *arguments = shlex.split(command)
        assert program == "fsdp-flat"
        _, output, errors = run(*arguments)
        assert output + errors == expected, command


def test_a_block_is_a_command_and_the_lines_below_it() -> None:
    assert steps_of("a\n```console\n$ x 1\ny\n$ z\n```\nb\n") == [("x 1", "y\n"), ("z", "")]
