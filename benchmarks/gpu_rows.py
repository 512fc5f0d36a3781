"""Defines the rows of the GPU's table, and the implementations in each."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.decoder import Decoder, DecoderBlock, DecoderSetting
from benchmarks.implementations import quiet

# Units ahead whose all-gathers explicit prefetch begins, in each direction.
AHEAD = 2


@dataclass(frozen=True)
class Implementation:
    """Describes one way to shard a model.

    Attributes:
        title: its name in the table.
        package: that of the classes; empty for a model that is not sharded.
        is_wrapper: the interface is FSDP1's, not ``fully_shard``.
        use_orig_params: of a wrapper.
        prefetch: ``forward_prefetch=True``, or for ``fully_shard`` explicit prefetch of ``AHEAD`` units each way.
    """

    title: str
    package: str = ""
    is_wrapper: bool = False
    use_orig_params: bool = True
    prefetch: bool = False

    @property
    def is_ours(self) -> bool:
        """True for fsdp_flat."""
        return self.package == "fsdp_flat"


def _variants(key: str, title: str, package: str) -> dict[str, Implementation]:
    found = {}
    for prefetch in (False, True):
        for kind, use_orig_params in (("flat", False), ("orig", True)):
            name = f"{key}-{kind}{'-prefetch' if prefetch else ''}"
            text = f"{title}, use_orig_params={use_orig_params}{', forward_prefetch' if prefetch else ''}"
            found[name] = Implementation(text, package, True, use_orig_params, prefetch)
    return found


def _fully_shard_variants(key: str, title: str, package: str) -> dict[str, Implementation]:
    explicit = f"{title}, explicit prefetch of {AHEAD} units"
    return {
        key: Implementation(title, package),
        f"{key}-prefetch": Implementation(explicit, package, prefetch=True),
    }


_PEER = "torch.distributed.fsdp"
IMPLEMENTATIONS = {
    "local": Implementation("not sharded"),
    **_variants("fsdp1", "torch FSDP1", _PEER),
    **_fully_shard_variants("fsdp2", "torch fully_shard", _PEER),
    **_variants("flat", "fsdp_flat", "fsdp_flat"),
    **_fully_shard_variants("flat-fully-shard", "fsdp_flat fully_shard", "fsdp_flat"),
}
_TORCH = tuple(name for name, each in IMPLEMENTATIONS.items() if each.package == _PEER)
# For each of fsdp_flat's, those of torch of which the best counts: all for the wrapper, fully_shard for fully_shard.
PEERS = {
    name: _TORCH if each.is_wrapper else tuple(peer for peer in _TORCH if not IMPLEMENTATIONS[peer].is_wrapper)
    for name, each in IMPLEMENTATIONS.items()
    if each.is_ours
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


def shard(name: str, model: Decoder, row: Row, device: torch.device) -> nn.Module:
    """Shard ``model`` by the implementation ``name``. Every rank must call this.

    Args:
        name: a key of ``IMPLEMENTATIONS``.
        model: a fresh model, on ``device``.
        row: how.
        device: device of compute.
    """
    each = IMPLEMENTATIONS[name]
    if row.compiled:
        for block in model.blocks:
            # The CPU tries out a row; compiling for it takes minutes.
            block.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    if not each.package:
        return model
    library: Any = importlib.import_module(each.package)
    return (_wrapped if each.is_wrapper else _fully_sharded)(library, each, model, row, device)


def _wrapped(library: Any, each: Implementation, model: Decoder, row: Row, device: torch.device) -> nn.Module:
    policy = importlib.import_module(f"{each.package}.wrap").ModuleWrapPolicy({DecoderBlock})
    # torch's pins offloaded shards, which a machine without an accelerator cannot do.
    offloads = row.offload and (each.is_ours or device.type != "cpu")
    with quiet():
        wrapped: nn.Module = library.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            sharding_strategy=library.ShardingStrategy["FULL_SHARD" if row.reshard else "SHARD_GRAD_OP"],
            mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            cpu_offload=library.CPUOffload(offload_params=True) if offloads else None,
            forward_prefetch=each.prefetch,
            limit_all_gathers=True,
            use_orig_params=each.use_orig_params,
            device_id=device,
        )
    return wrapped


def _fully_sharded(library: Any, each: Implementation, model: Decoder, row: Row, device: torch.device) -> nn.Module:
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
        "mp_policy": library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": row.reshard,
    }
    if row.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=device.type != "cpu")
    units = list(model.blocks)
    for block in units:
        library.fully_shard(block, **options)
    root: Any = library.fully_shard(model, **options)
    if each.prefetch:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + AHEAD])
            unit.set_modules_to_backward_prefetch(units[max(0, index - AHEAD) : index][::-1])
        root.set_modules_to_forward_prefetch(units[:AHEAD])
        root.set_modules_to_backward_prefetch(units[-AHEAD:][::-1])
    return root
