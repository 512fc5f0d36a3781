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
from tests.support.experts import WIDTH, clip
from tests.support.models import Experts
from tests.support.transport import rank_device

VOCABULARY = 32


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


class MoeLayer(nn.Module):
    """Has the members of torchtitan's mixtures of experts that the function reads."""

    moe_enabled = True

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), nn.Module()
        self.moe.router, self.moe.routed_experts = nn.Linear(WIDTH, WIDTH), nn.Module()
        self.moe.routed_experts.inner_experts = Experts(num_experts)

    @property
    def experts(self) -> Experts:
        return self.moe.routed_experts.inner_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.moe.router(self.norm(x)).view(self.experts.num_experts, -1, WIDTH)
        return x + self.experts(tokens).reshape(x.shape)


class Decoder(nn.Module):
    """Has the members of torchtitan's decoders that the function reads."""

    def __init__(self, *, tied: bool, num_experts: int = 0) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        layers = [Layer(), *[MoeLayer(num_experts) if num_experts else Layer() for _ in range(2)]]
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def run(
    policy: str,
    tied: bool,
    hybrid: bool,
    param_dtype: torch.dtype,
    rank: int,
    num_ranks: int,
    num_experts: int = 0,
    ep_degree: int = 1,
) -> list[Any]:
    """Train six steps; return losses and norms of gradients."""
    replicas, names = ((2,), ("dp_replicate",)) if hybrid else ((), ())
    num_shards = num_ranks // (2 if hybrid else 1)
    mesh = init_device_mesh(rank_device().type, (*replicas, num_shards), mesh_dim_names=(*names, "fsdp"))
    model, edp_mesh = Decoder(tied=tied, num_experts=num_experts), None
    if ep_degree > 1:
        sizes = (*replicas, num_shards // ep_degree, ep_degree)
        sparse = init_device_mesh(rank_device().type, sizes, mesh_dim_names=(*names, "efsdp", "ep"))
        edp_mesh = sparse[(*names, "efsdp")]
        for layer in model.layers.values():
            if isinstance(layer, MoeLayer):
                layer.experts.split(sparse["ep"])
    sharding().apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype,
        torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=policy,
        ep_degree=ep_degree,
        edp_mesh=edp_mesh,
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
        norm = clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm]
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


@pytest.mark.parametrize(("num_experts", "ep_degree"), [(4, 1), (4, 2), (2, 2), (4, 4)])
@pytest.mark.parametrize("policy", ["default", "always", "never"])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2, 4)
def test_expert_parallel_decoders_sharded_by_torchtitan_train_as_on_torch(
    policy: str, num_experts: int, ep_degree: int, param_dtype: torch.dtype, rank: int, num_ranks: int
) -> None:
    sharding()
    if ep_degree > num_ranks:
        pytest.skip(f"{ep_degree} groups of experts do not go on {num_ranks} ranks")
    for hybrid in (False, True) if num_ranks == 4 and ep_degree < 4 else (False,):
        options = {"policy": policy, "tied": False, "hybrid": hybrid, "param_dtype": param_dtype}
        options |= {"num_experts": num_experts, "ep_degree": ep_degree}
        theirs, ours = on_both(run, fully_shard=True, rank=rank, num_ranks=num_ranks, **options)
        tolerance = 1e-5 if param_dtype is torch.float32 else 1e-2
        assert_close(ours.result, theirs.result, rtol=tolerance, atol=tolerance)
