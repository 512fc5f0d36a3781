"""Plans the training of a GPT of 6.6 billion parameters without memory, and records steps of a small one on two ranks.

    python examples/plan_and_record.py      no process group, no accelerator; the recording starts two ranks

The script writes `plan.txt`, `fit.txt` and `summary.txt`, the pictures `plan.png` and `step.png`, and `step.json` for
https://ui.perfetto.dev to the output folder. `docs/planning.md` shows them.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Block, GPTConfig, next_token_loss
from launch import compute_device, inside_rank, process_group, start_ranks

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, plan, record
from fsdp_flat.wrap import ModuleWrapPolicy

LARGE = GPTConfig(layers=32, width=4096, heads=32, seq_len=4096, vocab=32_000)
SMALL = GPTConfig(layers=6, width=256, heads=8, seq_len=128)
PRECISION = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean next-token loss of `tokens`, (batch, tokens + 1)."""
    return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def write(path: Path, text: str) -> None:
    """Prints a text, and writes it to a file."""
    print(f"{text}\n", flush=True)
    path.write_text(text + "\n")


def plan_large(out: Path) -> None:
    """Plans a step of the large model on 8 ranks as it is written, and then the best step that fits into 40 GB."""
    with torch.device("meta"):
        model = GPT(LARGE)
    arguments: dict[str, Any] = {
        "batch": torch.empty(2, LARGE.seq_len + 1, dtype=torch.long, device="meta"),
        "loss": loss_of,
        "mixed_precision": PRECISION,
        "bandwidth": 50e9,  # bytes a second
        "flops": 400e12,
    }
    planned = plan(model, 8, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)
    write(out / "plan.txt", planned.step_text())
    planned.save(out / "plan.png")
    write(out / "fit.txt", plan(model, 8, fit="40GB", **arguments).step_text())


def record_small(out: Path) -> None:
    """Trains the small model for four steps on every rank, of which rank 0 writes the recording of the last two."""
    device = compute_device()
    with process_group(device):
        torch.manual_seed(0)  # every rank starts from the same weights
        model = FSDP(GPT(SMALL), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, SMALL.vocab, (4, SMALL.seq_len + 1), device=device)

        def step() -> None:
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        with record(model) as recording:
            step()
            step()
        if dist.get_rank() == 0:
            write(out / "summary.txt", recording.summary())
            recording.save(out / "step.png")
            recording.save(out / "step.json")


def main(argv: list[str]) -> None:
    """Plans, and then starts the ranks that record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plan_and_record"), help="folder for what is written")
    args = parser.parse_args(argv)
    if inside_rank():
        record_small(args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    plan_large(args.out)
    start_ranks(__file__, argv, 2)


if __name__ == "__main__":
    main(sys.argv[1:])
