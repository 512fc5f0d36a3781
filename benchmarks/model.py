"""Defines the GPT that every implementation trains: plain PyTorch, with an untied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.spec import Setting


class Block(nn.Module):
    """Applies attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int, *, recompute: bool) -> None:
        super().__init__()
        self.heads = heads
        self.recompute = recompute
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)


class GPT(nn.Module):
    """Applies embeddings, blocks and an untied head. Modules outside the blocks belong to the outermost unit."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.tokens = nn.Embedding(setting.vocab, width)
        self.positions = nn.Embedding(setting.seq, width)
        self.blocks = nn.ModuleList(
            Block(width, setting.heads, recompute=setting.checkpoint) for _ in range(setting.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, setting.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(setting: Setting, rank: int, index: int, device: str = "cpu") -> torch.Tensor:
    """Return token ids (batch, seq + 1) of one rank and one micro-batch."""
    generator = torch.Generator().manual_seed(10_000 * rank + index)
    return torch.randint(0, setting.vocab, (setting.batch, setting.seq + 1), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss, in fp32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
