"""Defines settings, presets, and the implementations by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Describes one model and one way to train it.

    Attributes:
        layers, width, heads, vocab: sizes of the GPT.
        seq, batch: tokens per sequence, sequences per rank and micro-batch.
        ranks: processes, one thread each.
        hosts, gbit: with 2 hosts, ranks are on two network namespaces, joined by a link of ``gbit`` Gbit/s each way.
        steps, warmup: timed steps per process, and steps before them.
        bf16: compute in bf16, reduce in fp32, store fp32 master weights.
        accumulate: micro-batches per step; gradients are reduced in the last one only.
        checkpoint: recompute each block's activations in backward.
        fused: use the optimizer's fused implementation.
    """

    layers: int = 12
    width: int = 384
    heads: int = 6
    vocab: int = 8192
    seq: int = 128
    batch: int = 4
    ranks: int = 2
    hosts: int = 1
    gbit: int = 1
    steps: int = 6
    warmup: int = 2
    bf16: bool = False
    accumulate: int = 1
    checkpoint: bool = False
    fused: bool = False

    def small(self) -> Setting:
        """Return the setting with the same parameters and as few activations as possible, for counting bytes."""
        return replace(self, batch=1, accumulate=1)


PRESETS = {
    "compute": Setting(),
    "communication": Setting(layers=6, width=768, heads=12, vocab=4096, seq=64, batch=1, fused=True),
    "tiny": Setting(layers=24, width=48, heads=2, vocab=64, seq=16, batch=1, steps=20, warmup=5),
}

# Name: title on the page.
IMPLEMENTATIONS = {
    "local": "no communication",
    "ddp": "DistributedDataParallel",
    "fsdp1-full-flat": "torch FSDP1, FULL_SHARD, use_orig_params=False",
    "fsdp1-full-orig": "torch FSDP1, FULL_SHARD, use_orig_params=True",
    "fsdp1-grad-op": "torch FSDP1, SHARD_GRAD_OP, use_orig_params=True",
    "fsdp2": "torch fully_shard",
    "fsdp2-no-reshard": "torch fully_shard, reshard_after_forward=False",
    "flat-full-flat": "fsdp_flat, FULL_SHARD, use_orig_params=False",
    "flat-full-orig": "fsdp_flat, FULL_SHARD, use_orig_params=True",
    "flat-grad-op": "fsdp_flat, SHARD_GRAD_OP, use_orig_params=True",
    "flat-budget": "fsdp_flat, FULL_SHARD with a budget of half the model, use_orig_params=True",
    "flat-fully-shard": "fsdp_flat fully_shard",
    "flat-fully-shard-budget": "fsdp_flat fully_shard, reshard_after_forward= half the model",
    "flat-fully-shard-no-reshard": "fsdp_flat fully_shard, reshard_after_forward=False",
}


# Those that ``--hosts 2`` measures, and two for which ranks of a host are a shard group.
OVER_HOSTS = {
    **{name: IMPLEMENTATIONS[name] for name in ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2")},
    "fsdp1-hybrid": "torch FSDP1, HYBRID_SHARD, use_orig_params=True",
    **{name: IMPLEMENTATIONS[name] for name in ("flat-full-flat", "flat-full-orig", "flat-fully-shard")},
    "flat-hybrid": "fsdp_flat, HYBRID_SHARD, use_orig_params=True",
    "flat-full-bfloat16": "fsdp_flat, FULL_SHARD, bfloat16 between hosts",
    "flat-full-int8": "fsdp_flat, FULL_SHARD, int8 between hosts",
}


def is_fully_shard(name: str) -> bool:
    """Return whether an implementation has FSDP2's interface."""
    return name.startswith(("fsdp2", "flat-fully-shard"))


def title_of(name: str) -> str:
    """Return the title of an implementation on the page."""
    return {**IMPLEMENTATIONS, **OVER_HOSTS}[name]


@dataclass(frozen=True)
class Job:
    """Describes the work of one group of fresh processes.

    Attributes:
        implementation: a key of ``IMPLEMENTATIONS``.
        task: "time", "count" (bytes sent, bytes alive) or "states" (state dicts).
        setting: the setting.
    """

    implementation: str
    task: str
    setting: Setting

    def as_json(self) -> dict[str, Any]:
        """Return the job as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Create the job from plain values: the inverse of :meth:`as_json`."""
        return cls(values["implementation"], values["task"], Setting(**values["setting"]))
