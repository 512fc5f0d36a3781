"""Defines a small GPT in plain PyTorch, without any code for sharding."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        layers: number of blocks.
        width: features of a token, divisible by `heads`.
        heads: attention heads per block.
        seq_len: longest sequence, in tokens.
        vocab: number of different tokens; 256 for bytes.
    """

    layers: int
    width: int
    heads: int
    seq_len: int
    vocab: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be divisible by heads, got width {self.width} and {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each token of `x`, (batch, tokens, width), with the tokens before it."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A pre-norm transformer block, wrapped as one unit."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, (batch, tokens, width), with attention and then the MLP added to it."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions, whose head is tied to its token embedding.

    Everything outside the blocks, including the tied embedding, belongs to the outermost unit.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialize(config)

    def _initialize(self, config: GPTConfig) -> None:
        """Initializes as GPT-2: small weights, and smaller ones where a block adds to the residual stream."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each next token, (batch, tokens, vocab), for integer `tokens`, (batch, tokens)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each sequence, (batch,), in fp32 and nats per token."""
    per_token = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return per_token.view_as(targets).mean(dim=1)
