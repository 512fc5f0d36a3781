"""torchtitan's function that shards a decoder, from the released package, unchanged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.clients.kit import on_both
from tests.support import assert_close, on_ranks

WIDTH, VOCABULARY = 16, 32


def sharding() -> ModuleType:
    """Import torchtitan/distributed/fsdp.py alone: the package needs libraries that sharding does not."""
    name = "torchtitan_distributed_fsdp"
    if name not in sys.modules:
        package = importlib.util.find_spec("torchtitan")
        assert package is not None
        assert package.submodule_search_locations
        file = Path(next(iter(package.submodule_search_locations))) / "distributed" / "fsdp.py"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Has the members of torchtitan's decoders that the function reads."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(3)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def run(policy: str, tied: bool, hybrid: bool, param_dtype: torch.dtype, rank: int, num_ranks: int) -> list[Any]:
    """Train six steps; return losses and norms of gradients."""
    shape, names = ((2, num_ranks // 2), ("dp_replicate", "fsdp")) if hybrid else ((num_ranks,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = Decoder(tied=tied)
    sharding().apply_fsdp_to_decoder(
        model, mesh, param_dtype, torch.float32, pp_enabled=False, reshard_after_forward_policy=policy
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # torch's has no divide factor over gloo without it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(6):
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
        logits = model(tokens).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens.roll(-1, 1).flatten(), reduction="sum") / (16 * num_ranks)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.full_tensor().item()]
    return found


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", ["default", "always", "never"])
@on_ranks(2, 4)
def test_a_decoder_sharded_by_torchtitan_trains_as_on_torch(
    policy: str, tied: bool, param_dtype: torch.dtype, rank: int, num_ranks: int
) -> None:
    sharding()
    for hybrid in (False, True) if num_ranks == 4 else (False,):
        options = {"policy": policy, "tied": tied, "hybrid": hybrid, "param_dtype": param_dtype}
        theirs, ours = on_both(run, fully_shard=True, rank=rank, num_ranks=num_ranks, **options)
        tolerance = 1e-5 if param_dtype is torch.float32 else 1e-2
        assert_close(ours.result, theirs.result, rtol=tolerance, atol=tolerance)
