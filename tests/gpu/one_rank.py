"""Steps of one rank of many that only pretend to communicate, in several ways: ``python -m tests.gpu.one_rank``.

With ``TORCH_CUDA_SANITIZER=1`` in the environment torch looks for memory that two streams of a CUDA device use without
order; the program then ends with an error and a text that contains ``CSAN``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.gpu.accelerator import FACTOR, Recomputed, compute_device
from tests.support.kit import BLOCKS, ROWS, WIDTH, wrapped
from tests.support.models import Stack

NUM_RANKS = 8
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Arguments of OneRank by name.
WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {"sharding_strategy": FULL},
    "shard_grad_op": {"sharding_strategy": GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"sharding_strategy": FULL, "mixed_precision": LOW},
    "bf16_shard_grad_op": {"sharding_strategy": GRAD_OP, "mixed_precision": LOW},
    "fp16": {"sharding_strategy": FULL, "mixed_precision": MixedPrecision(torch.float16, torch.float16)},
    "offload": {"sharding_strategy": FULL, "cpu_offload": CPUOffload(offload_params=True)},
    "forward_prefetch": {"sharding_strategy": FULL, "forward_prefetch": True},
    "accumulated": {"sharding_strategy": FULL, "micro_batches": 3},
    "clipped": {"sharding_strategy": FULL, "clips": True},
    "recomputed": {"sharding_strategy": FULL, "build": functools.partial(Recomputed, use_reentrant=False)},
    "recomputed_reentrant": {"sharding_strategy": FULL, "build": functools.partial(Recomputed, use_reentrant=True)},
}


@contextmanager
def pretended_group(num_ranks: int = NUM_RANKS) -> Iterator[None]:
    """Make this process rank 1 of ``num_ranks`` that only pretend to communicate, inside the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OneRank:
    """A sharded model and its optimizer on one rank.

    Args:
        where: ``"cpu"`` or ``"accelerator"``.
        build: makes the model from its width.
        micro_batches: forwards and backwards of a step; all but the last are inside ``no_sync``.
        clips: gradients are clipped before the optimizer's step.
        kwargs: the wrapper's arguments.
    """

    def __init__(
        self,
        where: str,
        *,
        build: Callable[[int], nn.Module] = lambda width: Stack(width=width),
        micro_batches: int = 1,
        clips: bool = False,
        **kwargs: Any,
    ) -> None:
        self.device = compute_device(where)
        self._micro_batches = micro_batches
        self._clips = clips
        factor = FACTOR[where]
        with self.device:
            module = build(WIDTH * factor)
        self.model: FSDP = wrapped(module, auto_wrap_policy=BLOCKS, device_id=self.device, **kwargs)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._rows = torch.randn(ROWS * factor, WIDTH * factor, device=self.device)

    def step(self) -> None:
        """Train one step. Nothing in it asks the device for a value."""
        for index in range(self._micro_batches):
            with nullcontext() if index == self._micro_batches - 1 else self.model.no_sync():
                self.model(self._rows).float().pow(2).mean().backward()
        if self._clips:
            self.model.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _race(device: torch.device) -> None:
    """Use memory on two streams without order."""
    rows = torch.randn(512, 512, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        rows.mul_(2.0)


def main(argv: list[str] | None = None) -> None:
    """Train in every way, or make a mistake on purpose."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.one_rank", description=__doc__)
    parser.add_argument("--where", choices=tuple(FACTOR), default="accelerator")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--race", action="store_true", help="use memory on two streams without order")
    args = parser.parse_args(argv)
    if args.race:
        _race(compute_device(args.where))
    num_steps = 0
    with pretended_group():
        for options in WAYS.values():
            for use_orig_params in (False, True):
                rank = OneRank(args.where, use_orig_params=use_orig_params, **options)
                for _ in range(args.steps):
                    rank.step()
                    num_steps += 1
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    print(f"{num_steps} steps trained")


if __name__ == "__main__":
    main()
