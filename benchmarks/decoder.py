"""Defines the decoder that GPUs train: RMSNorm, SwiGLU, grouped heads, and an untied head; plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class DecoderSetting:
    """Describes a decoder and its batch.

    Attributes:
        layers, width, heads, vocab: sizes.
        kv_heads: heads of keys and values, each for several of queries.
        hidden: width inside the MLP.
        seq, batch: tokens of a sequence, sequences of a rank.
        recompute: compute each block's activations again in backward.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    seq: int
    batch: int
    recompute: bool = False


class DecoderBlock(nn.Module):
    """Applies causal attention and a gated MLP, each after a norm and with a residual connection."""

    def __init__(self, setting: DecoderSetting) -> None:
        super().__init__()
        width, size = setting.width, setting.width // setting.heads
        self.head_size = size
        self.grouped = setting.kv_heads != setting.heads
        self.recompute = setting.recompute
        self.norm1 = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, setting.kv_heads * size, bias=False)
        self.value = nn.Linear(width, setting.kv_heads * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, setting.hidden, bias=False)
        self.up = nn.Linear(width, setting.hidden, bias=False)
        self.down = nn.Linear(setting.hidden, width, bias=False)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)


class Decoder(nn.Module):
    """Applies an embedding, blocks and a head, without positions. The outermost unit has what is outside the blocks."""

    def __init__(self, setting: DecoderSetting) -> None:
        super().__init__()
        self.tokens = nn.Embedding(setting.vocab, setting.width)
        self.blocks = nn.ModuleList(DecoderBlock(setting) for _ in range(setting.layers))
        self.norm = nn.RMSNorm(setting.width)
        self.head = nn.Linear(setting.width, setting.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
