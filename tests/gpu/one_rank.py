"""Steps of one rank of many that only pretend to communicate, in several ways: ``python -m tests.gpu.one_rank``.

With ``TORCH_CUDA_SANITIZER=1`` in the environment torch looks for memory that two streams of a CUDA device use without
order; the program then ends with an error and a text that contains ``CSAN``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard, offload_activations, offload_optimizer
from fsdp_flat.composable import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.gpu.accelerator import FACTOR, Recomputed, compute_device
from tests.support.beside import OURS
from tests.support.extended_tensors import Pair, SentInInt8
from tests.support.kit import BLOCKS, ROWS, WIDTH, wrapped
from tests.support.models import Block, Stack

NUM_RANKS = 8
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# What a part of a quantized weight is a multiple of.
_QUANTIZED_WIDTH = 64


class Bare(nn.Module):
    """Two linears without biases, whose weights may be of a class of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(nn.Module):
    """A frozen linear in 4 bits beside an adapter that is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        # Blocks must not cross the parts of ranks.
        weight = _torchao("quantization").NF4Tensor.from_tensor(
            self.base.weight.detach(), block_size=32, scaler_block_size=4
        )
        self.base.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def _extended(width: int, kind: Any) -> nn.Module:
    model = Stack(width=width, block=Bare)
    for block in model.blocks:
        for linear in block.children():
            linear.weight = nn.Parameter(kind(*[linear.weight.detach().clone() for _ in kind._NAMES]))
    return model


def _torchao(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it does not find here
        return importlib.import_module(f"torchao.{name}")


def _float8(width: int) -> nn.Module:
    float8 = _torchao("float8")
    model = Stack(width=max(width, _QUANTIZED_WIDTH), num_outputs=16, block=Bare)
    # Matrix products are emulated where there are none in float8.
    emulates = not torch.accelerator.is_available()
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulates)
    float8.convert_to_float8_training(model.blocks, config=config)
    return model


def _nf4(width: int) -> nn.Module:
    return Stack(width=max(width, _QUANTIZED_WIDTH), block=Adapted)


ALL = OURS
WRAPPERS, FULLY_SHARD = OURS[:2], OURS[2:]
# The fronts and arguments of OneRank by name.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "full_shard": (ALL, {}),
    "shard_grad_op": (ALL, {"strategy": GRAD_OP}),
    "no_shard": (WRAPPERS, {"strategy": ShardingStrategy.NO_SHARD}),
    "hybrid_shard": (ALL, {"strategy": ShardingStrategy.HYBRID_SHARD}),
    "budget": (ALL, {"budget": "5MB"}),
    "bf16": (ALL, {"precision": LOW}),
    "bf16_shard_grad_op": (ALL, {"strategy": GRAD_OP, "precision": LOW}),
    "fp16": (ALL, {"precision": MixedPrecision(torch.float16, torch.float16)}),
    "offload": (ALL, {"offloads": True}),
    "offloaded_activations": (ALL, {"offloads_activations": True}),
    "offloaded_states": (ALL, {"offloads_states": True}),
    "forward_prefetch": (WRAPPERS, {"forward_prefetch": True}),
    "explicit_prefetch": (FULLY_SHARD, {"num_ahead": 2}),
    "accumulated": (ALL, {"micro_batches": 3}),
    "clipped": (ALL, {"clips": True}),
    "recomputed": (ALL, {"build": functools.partial(Recomputed, use_reentrant=False)}),
    "recomputed_reentrant": (WRAPPERS, {"build": functools.partial(Recomputed, use_reentrant=True)}),
    "pairs": (FULLY_SHARD, {"build": functools.partial(_extended, kind=Pair)}),
    "int8": (FULLY_SHARD, {"build": functools.partial(_extended, kind=SentInInt8), "precision": LOW}),
    "float8": (FULLY_SHARD, {"build": _float8, "precision": LOW}),
    "nf4": (FULLY_SHARD, {"build": _nf4, "precision": LOW}),
}
NEED_TORCHAO = ("float8", "nf4")
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
EVERY = [
    (way, front) for way, (fronts, _) in WAYS.items() if HAS_TORCHAO or way not in NEED_TORCHAO for front in fronts
]


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
        way: a key of ``WAYS``.
        front: one of the way's.
    """

    def __init__(self, where: str, way: str = "full_shard", front: str = "flat") -> None:
        self.device = compute_device(where)
        self._front, options = front, dict(WAYS[way][1])
        build: Callable[[int], nn.Module] = options.pop("build", lambda width: Stack(width=width))
        self._micro_batches, self._clips = options.pop("micro_batches", 1), options.pop("clips", False)
        self._offloads_activations = options.pop("offloads_activations", False)
        offloads_states = options.pop("offloads_states", False)
        with self.device:
            module: Any = build(WIDTH * FACTOR[where])
        shape = (ROWS * FACTOR[where], module.first.in_features)
        self.model: Any = _sharded(module, front, self.device, **options)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        if offloads_states:
            offload_optimizer(self._optimizer)
        self._rows = torch.randn(shape, device=self.device)

    def step(self) -> None:
        """Train one step. Nothing in it asks the device for a value."""
        for index in range(self._micro_batches):
            with self._reduces(is_last=index == self._micro_batches - 1):
                with offload_activations(self.model, min_nbytes=1) if self._offloads_activations else nullcontext():
                    loss = self.model(self._rows).float().pow(2).mean()
                loss.backward()
        if self._clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _reduces(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self._front == "fully_shard":
            self.model.set_requires_gradient_sync(is_last)
            return nullcontext()
        context: AbstractContextManager[None] = nullcontext() if is_last else self.model.no_sync()
        return context


def _sharded(
    module: Any,
    front: str,
    device: torch.device,
    *,
    strategy: ShardingStrategy = FULL,
    budget: str = "",
    precision: MixedPrecision | None = None,
    offloads: bool = False,
    num_ahead: int = 0,
    **kwargs: Any,
) -> nn.Module:
    is_hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh(device.type, (2, NUM_RANKS // 2) if is_hybrid else (NUM_RANKS,))
    if front != "fully_shard":
        return wrapped(
            module,
            auto_wrap_policy=BLOCKS,
            use_orig_params=front == "originals",
            sharding_strategy=f"{strategy.name}:{budget}" if budget else strategy,
            mixed_precision=precision,
            cpu_offload=CPUOffload(offload_params=offloads),
            device_id=device,
            device_mesh=mesh if is_hybrid else None,
            **kwargs,
        )
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": budget or (False if strategy is GRAD_OP else None),
    }
    if precision is not None:
        dtypes = {name: asdict(precision)[name] for name in ("param_dtype", "reduce_dtype")}
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    blocks = [each for each in module.modules() if isinstance(each, (Block, Bare, Adapted))]
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    for index, block in enumerate(blocks if num_ahead else ()):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + num_ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - num_ahead) : index][::-1])
    sharded: nn.Module = module
    return sharded


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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--race", action="store_true", help="use memory on two streams without order")
    args = parser.parse_args(argv)
    if args.race:
        _race(compute_device(args.where))
    num_steps = 0
    with pretended_group():
        for way, front in EVERY:
            if way not in args.ways:
                continue
            print(f"{way}, {front}", flush=True)
            rank = OneRank(args.where, way, front)
            for _ in range(args.steps):
                rank.step()
                num_steps += 1
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    if not HAS_TORCHAO:
        print(f"left out, since torchao is not installed: {', '.join(NEED_TORCHAO)}")
    print(f"{num_steps} steps trained")


if __name__ == "__main__":
    main()
