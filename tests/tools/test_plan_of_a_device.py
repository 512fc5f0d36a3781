"""``plan`` beside the peaks that the allocator of one H200 has counted (torch 2.11, rank 0 of 8 pretended ranks).

The measured peaks have no process here to repeat them in; docs/planning.md has the same table.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import model as gpt
from benchmarks.spec import Setting
from fsdp_flat import MixedPrecision, ShardingStrategy, plan
from fsdp_flat.errors import OptionError
from fsdp_flat.tools.torch_tools import HAS_FUSED_RMS_NORM
from fsdp_flat.wrap import ModuleWrapPolicy

MB = 10**6
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Two handles of the library of matrix multiplications, one of the thread of backward, take 32 MiB each on that device.
WORKSPACES = 2 * 32 * 2**20


class Layer(nn.Module):
    """Has RMSNorm, grouped attention and SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        query, key, value = (
            each(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Has an embedding, layers, and an untied head."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, num_layers: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(*[Layer(width, heads, groups, hidden) for _ in range(num_layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.layers(self.tokens(tokens))))
        return logits


WIDE = Setting(layers=16, width=2048, heads=16, vocab=32768, seq=2048, batch=2)
SMALL = Setting(layers=12, width=2048, heads=16, vocab=32768, seq=2048, batch=2)
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
DECODERS: dict[str, Any] = {
    "1.2B": (partial(Decoder, 2048, 16, 16, 8192, 16, 32768), Layer, (2, 2049)),
    "8.0B": (partial(Decoder, 4096, 32, 8, 14336, 32, 128256), Layer, (1, 8193)),
    "0.94B": (partial(gpt.GPT, WIDE), gpt.Block, (2, 2049)),
    "0.74B": (partial(gpt.GPT, SMALL), gpt.Block, (2, 2049)),
}


def peak_of(name: str, strategy: ShardingStrategy, **arguments: Any) -> int:
    build, block, shape = DECODERS[name]
    with torch.device("meta"):
        model = build()
    return plan(
        model,
        8,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        batch=torch.empty(shape, dtype=torch.long, device="meta"),
        loss=gpt.loss_of,
        optimizer=partial(torch.optim.AdamW, fused=True),
        **{"mixed_precision": BF16, **arguments},
    ).peak_nbytes


@pytest.mark.parametrize(
    ("name", "strategy", "arguments", "measured"),
    [
        ("0.94B", FULL, {}, 7806),
        ("0.94B", GRAD_OP, {"use_orig_params": True}, 9317),
        ("1.2B", FULL, {"use_orig_params": True}, 10374),
        ("8.0B", FULL, {"checkpointing": True}, 29541),
    ],
)
def test_a_plan_and_the_workspaces_are_what_the_allocator_counts(
    name: str, strategy: ShardingStrategy, arguments: dict[str, Any], measured: int
) -> None:
    if name in ("1.2B", "8.0B") and not HAS_FUSED_RMS_NORM:
        pytest.skip("this torch has no fused RMSNorm, which the device had")
    assert (peak_of(name, strategy, **arguments) + WORKSPACES) / MB == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("build", [partial(nn.Dropout, 0.1), partial(nn.RMSNorm, 64)])
def test_functions_with_a_kernel_of_an_accelerator_keep_less_there(build: Any) -> None:
    if isinstance(build(), nn.RMSNorm) and not HAS_FUSED_RMS_NORM:
        pytest.skip("this torch has no fused RMSNorm")

    def activations(device_type: str, made: nn.Module | None) -> int:
        with torch.device("meta"):
            layers = [nn.Linear(64, 64), *([] if made is None else [made]), nn.Linear(64, 64)]
            model = nn.Sequential(*layers).to("meta", torch.bfloat16)
        batch = torch.empty(4096, 64, dtype=torch.bfloat16, device="meta")
        return plan(model, 1, batch=batch, device_type=device_type).phases[0].nbytes.activations

    rows = 4096 * 64
    plain = activations("cuda", None)
    on_accelerator, on_cpu = (activations(device, build()) for device in ("cuda", "cpu"))
    kept = {nn.Dropout: rows, nn.RMSNorm: 2 * rows + 4 * 4096}[type(build())]
    assert on_accelerator - plain == kept, "a mask of bytes; or the result, and one number a row"
    assert on_cpu > on_accelerator


def test_an_optimizer_that_cannot_be_made_for_these_parameters_is_named() -> None:
    rows = torch.empty(4, 8, device="meta")
    for make, told in ((torch.optim.LBFGS, "closure"), (torch.optim.Adafactor, "_local_scalar_dense")):
        with pytest.raises(OptionError, match=rf"{make.__name__} cannot run on parameters without values.*{told}"):
            plan(nn.Linear(8, 8, device="meta"), 2, batch=rows, optimizer=make)
