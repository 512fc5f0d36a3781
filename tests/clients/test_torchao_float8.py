"""torchao's float8 linears are all-gathered in float8 by fully_shard, as torch's fully_shard does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.composable import MixedPrecisionPolicy
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.extended_tensors import assert_alike
from tests.support.peer import peer_fully_shard
from tests.support.steps import recorded, shared_memory

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of what it does not find on a CPU
BOTH = (fully_shard, peer_fully_shard)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layers(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)
        # Without a plain parameter torch's fully_shard sends float8 alone, which gloo cannot.
        self.norm = nn.Identity() if bias else nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model_of(*, float8: bool = True, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Layers(bias=bias) for _ in range(3)])
    if float8:
        # Matrix products are emulated: a CPU has none in float8.
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    return model


def sharded(model: nn.Module, shard: Callable[..., Any] = fully_shard, **kwargs: Any) -> nn.Module:
    for child in model:  # type: ignore[attr-defined]
        shard(child, **kwargs)
    shard(model, **kwargs)
    return model


def wrapped(model: nn.Module, **kwargs: Any) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Float8Linear, Layers}), **{"use_orig_params": True, **kwargs})


def trained(
    model: nn.Module,
    num_steps: int = 4,
    *,
    precomputes: bool,
    optimizer: Any = None,
    dtype: Any = None,
    first: int = 0,
    part: int | None = None,
) -> list[float]:
    """Train on the batches of this rank, or of rank ``part``, and return the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(first, first + num_steps):
        torch.manual_seed(100 * step + (dist.get_rank() if part is None else part))
        loss = model(torch.randn(16, 32, dtype=dtype)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        local = param._local_tensor.detach()
        found[name] = local._tensor if isinstance(local, WeightWithDynamicFloat8CastTensor) else local
    return found


@pytest.mark.parametrize("precomputes", [True, False], ids=["precomputed", "not_precomputed"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BFLOAT16], ids=["float32", "bfloat16"])
@on_ranks(2, 4)
def test_float8_linears_train_as_on_torchs_fully_shard(
    precomputes: bool, reshard_after_forward: bool, policy: Any
) -> None:
    options = {"reshard_after_forward": reshard_after_forward, "mp_policy": policy}
    models = [sharded(model_of(), shard, **options) for shard in BOTH]
    # Rounding to float8 makes more of a difference in the last bit, and AdamW much more of a small gradient's.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    results = [
        (trained(model, precomputes=precomputes, optimizer=optimizer), locals_of(model))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert_alike(*results, atol=1e-3, rtol=1e-2)
    scales = [
        param._local_tensor._precomputed_scale for name, param in models[0].named_parameters() if "weight" in name
    ]
    assert all((scale is not None) is precomputes for scale in scales)


@pytest.mark.parametrize("shared", [False, True], ids=["network", "shared_memory"])
@on_ranks(2, 4)
def test_a_float8_weight_is_sent_in_half_the_bytes_of_bfloat16(shared: bool) -> None:
    sent = {}
    with shared_memory(shared):
        for name, float8 in (("float8", True), ("bfloat16", False)):
            model = model_of(float8=float8)
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.bias = None
            sharded(model, mp_policy=BFLOAT16)
            trained(model, 1, precomputes=float8)
            with recorded() as record:
                model(torch.randn(16, 32)).sum().backward()
            # Without shared memory each rank broadcasts its part on a CPU.
            sent[name] = sum(call.sent for call in record.calls if call.name in ("gather", "broadcast"))
    assert sent["bfloat16"] > 0
    assert sent["float8"] == sent["bfloat16"] / 2


@on_ranks(4)
def test_float8_weights_of_tensor_parallelism_train_as_on_torchs_fully_shard() -> None:
    results = []
    for shard in BOTH:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = model_of()
        for layers in model:  # type: ignore[attr-defined]
            parallelize_module(layers, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharded(model, shard, mesh=mesh["dp"])
        results.append((trained(model, precomputes=True), locals_of(model)))
    assert_alike(*results)


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@on_ranks(2, 4)
def test_state_dicts_of_float8_linears_equal_torchs_and_are_loaded(full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    models = [sharded(model_of(), shard) for shard in BOTH]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        trained(model, 2, precomputes=True, optimizer=optimizer)
    ours, theirs = [get_model_state_dict(model, options=options) for model in models]
    assert {name: type(value) for name, value in ours.items()} == {name: type(value) for name, value in theirs.items()}
    for name, value in ours.items():
        pair = [each.to_local() if isinstance(each, DTensor) else each for each in (value, theirs[name])]
        pair = [each._tensor if isinstance(each, WeightWithDynamicFloat8CastTensor) else each for each in pair]
        assert_alike(*pair, atol=1e-3, rtol=1e-2)
    states = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0], options=options))
    again = sharded(model_of())
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    loaded = torch.optim.AdamW(again.parameters(), lr=1e-2)
    set_model_state_dict(again, ours, options=options)
    set_optimizer_state_dict(again, loaded, states, options=options)
    precompute_float8_dynamic_scale_for_fsdp(again)
    expected = trained(models[0], 2, precomputes=True, optimizer=optimizers[0], first=2)
    assert trained(again, 2, precomputes=True, optimizer=loaded, first=2) == expected


@on_ranks(2)
def test_training_of_float8_linears_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    models = [sharded(model_of()) for _ in range(2)]
    first, second = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    trained(models[0], 2, precomputes=True, optimizer=first)
    save_checkpoint(tmp_path, models[0], first)
    load_checkpoint(tmp_path, models[1], second)
    precompute_float8_dynamic_scale_for_fsdp(models[1])
    expected = trained(models[0], 2, precomputes=True, optimizer=first, first=2)
    assert trained(models[1], 2, precomputes=True, optimizer=second, first=2) == expected


@pytest.mark.parametrize("precomputes", [True, False], ids=["precomputed", "not_precomputed"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("low", [True, False], ids=["bfloat16", "float32"])
@on_ranks(2, 4)
def test_the_wrapper_trains_float8_linears_without_biases_as_torchs_fully_shard(
    precomputes: bool, use_orig_params: bool, low: bool
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    ours = wrapped(model_of(bias=False), use_orig_params=use_orig_params, mixed_precision=precision)
    theirs = sharded(model_of(bias=False), peer_fully_shard, mp_policy=BFLOAT16 if low else MixedPrecisionPolicy())
    results = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = trained(model, precomputes=precomputes, optimizer=optimizer)
        locals_ = {clean_fqn(n): p._local_tensor for n, p in model.named_parameters() if isinstance(p, DTensor)}
        weights = {n: each for n, each in locals_.items() if isinstance(each, WeightWithDynamicFloat8CastTensor)}
        assert len(weights) == 6
        assert all((each._precomputed_scale is not None) is precomputes for each in weights.values())
        results.append((losses, {name: each._tensor for name, each in weights.items()}))
    assert_alike(*results, atol=1e-3, rtol=1e-2)


@on_ranks(2)
def test_the_wrapper_refuses_float8_linears_with_biases_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'weight' is a WeightWithDynamicFloat8CastTensor.*unit of its own"):
        wrapped(model_of())


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@on_ranks(4)
def test_float8_linears_of_the_wrapper_go_on_at_another_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    def made(num_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh("cpu", (4 // num_ranks, num_ranks), mesh_dim_names=("others", "own"))["own"]
        model = wrapped(model_of(bias=False), device_mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (again, loaded) = made(before), made(after)
    trained(model, 2, precomputes=True, optimizer=optimizer, part=0)
    save_checkpoint(tmp_path / f"saved{dist.get_rank() // before}", model, optimizer)
    going_on = trained(model, 2, precomputes=True, optimizer=optimizer, first=2, part=0)
    dist.barrier()
    load_checkpoint(tmp_path / "saved0", again, loaded)
    precompute_float8_dynamic_scale_for_fsdp(again)
    losses = trained(again, 2, precomputes=True, optimizer=loaded, first=2, part=0)
    assert losses[0] == going_on[0]
    torch.testing.assert_close(losses, going_on, atol=1e-3, rtol=1e-2)
