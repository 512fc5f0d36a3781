"""Defines the rows of the GPU's table, and the implementations in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.decoder import Decoder, DecoderBlock, DecoderSetting
from benchmarks.implementations import shard
from benchmarks.spec import OURS, TORCH, Implementation

# Units ahead whose all-gathers explicit prefetch begins, in each direction.
AHEAD = 2


def _variants(key: str, title: str, package: str) -> dict[str, Implementation]:
    return {
        f"{key}-{kind}{suffix}": Implementation(
            f"{title}, use_orig_params={kind == 'orig'}{text}", package, True, kind == "orig", num_prefetched=num
        )
        for suffix, text, num in (("", "", 0), ("-prefetch", ", forward_prefetch", 1))
        for kind in ("flat", "orig")
    }


def _fully_shard_variants(key: str, title: str, package: str) -> dict[str, Implementation]:
    explicit = f"{title}, explicit prefetch of {AHEAD} units"
    return {
        key: Implementation(title, package),
        f"{key}-prefetch": Implementation(explicit, package, num_prefetched=AHEAD),
    }


IMPLEMENTATIONS = {
    "local": Implementation("not sharded"),
    **_variants("fsdp1", "torch FSDP1", TORCH),
    **_fully_shard_variants("fsdp2", "torch fully_shard", TORCH),
    **_variants("flat", "fsdp_flat", OURS),
    **_fully_shard_variants("flat-fully-shard", "fsdp_flat fully_shard", OURS),
}


@dataclass(frozen=True)
class Row:
    """Describes one model, how it is sharded, and the link.

    Attributes:
        title: what is trained.
        model: the decoder.
        gbps: bandwidth of the emulated link in 1e9 bytes a second; None for one that takes no time.
        reshard: free parameters after forward (FULL_SHARD), or keep them for backward (SHARD_GRAD_OP).
        compiled: compile each block.
        offload: shards and the optimizer are on the host.
        without: implementations that this row cannot have.
        steps, warmup: steps that are timed in each of two ways, and steps before them.
        seconds: what one implementation is expected to take on an H200, the start of its process included.
    """

    title: str
    model: DecoderSetting
    gbps: float | None = None
    reshard: bool = True
    compiled: bool = False
    offload: bool = False
    without: tuple[str, ...] = field(default=())
    steps: int = 10
    warmup: int = 3
    seconds: float = 14.0

    @property
    def names(self) -> list[str]:
        """Implementations of this row."""
        return [name for name in IMPLEMENTATIONS if name not in self.without]

    def tiny(self) -> Row:
        """Return the row at a size for trying it out."""
        grouped = self.model.kv_heads != self.model.heads
        model = DecoderSetting(3, 32, 4, 2 if grouped else 4, 48, 64, 16, 2, self.model.recompute)
        return replace(self, model=model, steps=2, warmup=1, seconds=1.0)


def _wide(layers: int, **kwargs: Any) -> DecoderSetting:
    return DecoderSetting(layers, 2048, 16, 16, 8192, 32768, 2048, 2, **kwargs)


_BLOCKS_OF_512 = DecoderSetting(48, 512, 8, 8, 2048, 32768, 512, 1)
_LLAMA = DecoderSetting(32, 4096, 32, 8, 14336, 128256, 8192, 1, recompute=True)
# torch.compile refuses modules in FSDP1 without original parameters.
_ALL_FLAT = tuple(name for name, each in IMPLEMENTATIONS.items() if not each.use_orig_params)
# In order of weight: overlap behind a link and the largest model first.
ROWS = {
    "1.2B-60": Row("1.2B", _wide(16), gbps=60),
    "1.2B-150": Row("1.2B", _wide(16), gbps=150),
    # Unsharded, it needs 128 GB.
    "8B-350": Row(
        "8.0B (Llama 3 shape), sequence 8192, batch 1, recomputation",
        _LLAMA,
        gbps=350,
        without=("local",),
        steps=5,
        seconds=30.0,
    ),
    "1.2B-60-grad-op": Row("1.2B, SHARD_GRAD_OP (reshard_after_forward=False)", _wide(16), gbps=60, reshard=False),
    "1.2B": Row("1.2B, 16 blocks of 2048, sequence 2048, batch 2", _wide(16)),
    "0.67B-compiled": Row("0.67B, 8 compiled blocks of 2048", _wide(8), compiled=True, without=_ALL_FLAT, seconds=45.0),
    "0.24B": Row("0.24B, 48 blocks of 512, sequence 512, batch 1", _BLOCKS_OF_512),
    "0.54B-offload": Row("0.54B, 6 blocks of 2048, CPU offload", _wide(6), offload=True, without=("local",)),
}
# What is measured of a row where time is short.
FEW = ("fsdp1-orig", "fsdp2", "flat-orig", "flat-fully-shard")


def next_to_run(done: Mapping[str, int], seconds: Mapping[str, float], left_s: float, most: int = 1) -> str | None:
    """Return what to run next: of what ran the fewest times the first that can end in time; None if nothing can.

    Args:
        done: how many times each has run, in order of weight.
        seconds: what one run of each is expected to take.
        left_s: seconds that are left.
        most: how many times each may run.
    """
    fitting = [name for name, count in done.items() if count < most and seconds[name] <= left_s]
    return min(fitting, key=done.__getitem__, default=None)


def sharded(name: str, model: Decoder, row: Row, device: torch.device) -> Any:
    """Shard a fresh model on ``device`` as a row says. Every rank must call this."""
    for block in model.blocks if row.compiled else ():
        # The CPU tries out a row; compiling for it takes minutes.
        block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    each = replace(IMPLEMENTATIONS[name], strategy="FULL_SHARD" if row.reshard else "SHARD_GRAD_OP")
    return shard(each, model, {DecoderBlock}, bf16=True, offload=row.offload, device=device)
