"""Defines settings, presets, and the implementations by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


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


@dataclass(frozen=True)
class Implementation:
    """Describes one way to shard a model.

    Attributes:
        title: its name in tables.
        package: that of the classes; empty for a model that is not wrapped.
        is_wrapper: the interface is FSDP1's, not ``fully_shard``.
        use_orig_params: of a wrapper.
        strategy: of a wrapper, or what is the same with ``fully_shard``.
        has_budget: keep half of the parameters for backward.
        between_hosts: name of the dtype in which bytes cross from host to host; by default that of the parameters.
        num_prefetched: ``forward_prefetch=True``, or for ``fully_shard`` explicit prefetch of so many units each way.
    """

    title: str
    package: str = ""
    is_wrapper: bool = False
    use_orig_params: bool = True
    strategy: str = "FULL_SHARD"
    has_budget: bool = False
    between_hosts: str = ""
    num_prefetched: int = 0

    @property
    def is_sharded(self) -> bool:
        """True for what shards parameters."""
        return self.package in (TORCH, OURS)

    @property
    def is_ours(self) -> bool:
        """True for fsdp_flat."""
        return self.package == OURS


TORCH, OURS = "torch.distributed.fsdp", "fsdp_flat"
_GRAD_OP, _HYBRID = "SHARD_GRAD_OP", "HYBRID_SHARD"
_FLAT, _ORIG = "FULL_SHARD, use_orig_params=False", "FULL_SHARD, use_orig_params=True"
IMPLEMENTATIONS = {
    "local": Implementation("no communication"),
    "ddp": Implementation("DistributedDataParallel", "torch.nn.parallel"),
    "fsdp1-full-flat": Implementation(f"torch FSDP1, {_FLAT}", TORCH, True, use_orig_params=False),
    "fsdp1-full-orig": Implementation(f"torch FSDP1, {_ORIG}", TORCH, True),
    "fsdp1-grad-op": Implementation(f"torch FSDP1, {_GRAD_OP}, use_orig_params=True", TORCH, True, strategy=_GRAD_OP),
    "fsdp2": Implementation("torch fully_shard", TORCH),
    "fsdp2-no-reshard": Implementation("torch fully_shard, reshard_after_forward=False", TORCH, strategy=_GRAD_OP),
    "flat-full-flat": Implementation(f"fsdp_flat, {_FLAT}", OURS, True, use_orig_params=False),
    "flat-full-orig": Implementation(f"fsdp_flat, {_ORIG}", OURS, True),
    "flat-grad-op": Implementation(f"fsdp_flat, {_GRAD_OP}, use_orig_params=True", OURS, True, strategy=_GRAD_OP),
    "flat-budget": Implementation(
        "fsdp_flat, FULL_SHARD with a budget of half the model, use_orig_params=True", OURS, True, has_budget=True
    ),
    "flat-fully-shard": Implementation("fsdp_flat fully_shard", OURS),
    "flat-fully-shard-budget": Implementation(
        "fsdp_flat fully_shard, reshard_after_forward= half the model", OURS, has_budget=True
    ),
    "flat-fully-shard-no-reshard": Implementation(
        "fsdp_flat fully_shard, reshard_after_forward=False", OURS, strategy=_GRAD_OP
    ),
}
# Those that ``--hosts 2`` measures, and two for which ranks of a host are a shard group.
OVER_HOSTS = {
    **{name: IMPLEMENTATIONS[name] for name in ("fsdp1-full-flat", "fsdp1-full-orig", "fsdp2")},
    "fsdp1-hybrid": Implementation(f"torch FSDP1, {_HYBRID}, use_orig_params=True", TORCH, True, strategy=_HYBRID),
    **{name: IMPLEMENTATIONS[name] for name in ("flat-full-flat", "flat-full-orig", "flat-fully-shard")},
    "flat-hybrid": Implementation(f"fsdp_flat, {_HYBRID}, use_orig_params=True", OURS, True, strategy=_HYBRID),
    **{
        f"flat-full-{name}": Implementation(
            f"fsdp_flat, FULL_SHARD, {name} between hosts", OURS, True, between_hosts=name
        )
        for name in ("bfloat16", "int8")
    },
}
ALL = {**IMPLEMENTATIONS, **OVER_HOSTS}


def peers_of(name: str, implementations: Mapping[str, Implementation]) -> list[str]:
    """Return those of torch with which one of fsdp_flat is compared: all for the wrapper, else ``fully_shard``."""
    ours = implementations[name]
    return [
        key
        for key, each in implementations.items()
        if ours.is_ours and each.package == TORCH and each.strategy == ours.strategy
        if ours.is_wrapper or not each.is_wrapper
    ]
