"""Mixed precision gives torch FSDP1's values in torch FSDP1's dtypes, for every setting and strategy."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer_library
import torch.distributed.fsdp.wrap as peer_wrap
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.errors import UsageError
from fsdp_flat.wrap import CustomPolicy
from tests.support import OWN_STATISTICS, assert_equal, on_ranks
from tests.support.models import NormedBlock
from tests.support.surface_models import (
    ALL_STRATEGIES,
    STRATEGIES,
    WIDTH,
    assert_near,
    batches,
    grads_or_zeros,
    mean_grads,
    sgd_step,
    sharded,
    sharded_by_peer,
    small_model,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# torch 2.13 says so of its own NO_SHARD, and we do of ours.
pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "reduced in bf16": {"reduce_dtype": BF16},
    "fp16": {"param_dtype": FP16},
    "bf16, reduced in fp16": {"param_dtype": BF16, "reduce_dtype": FP16},
    "bf16 buffers": {"param_dtype": BF16, "buffer_dtype": BF16},
    "only bf16 buffers": {"buffer_dtype": BF16},
    "bf16 gradients": {"param_dtype": BF16, "keep_low_precision_grads": True},
    "every unit casts": {"param_dtype": BF16, "cast_forward_inputs": True},
    "the root does not cast": {"param_dtype": BF16, "cast_root_forward_inputs": False},
    "no batch norm exempt": {"param_dtype": BF16, "buffer_dtype": BF16, "_module_classes_to_ignore": ()},
    "layer norm exempt": {"param_dtype": BF16, "_module_classes_to_ignore": (_BatchNorm, nn.LayerNorm)},
    "nothing": {},
}


class Downcast(nn.Module):
    """Feeds the layers below in bf16, for roots that do not cast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(BF16))


def model_for(setting: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(5, WIDTH), NormedBlock(), NormedBlock(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
    )
    return layers if setting.get("cast_root_forward_inputs", True) else Downcast(layers)


def train(model: nn.Module, rank: int, num_ranks: int) -> list[dict[str, Any]]:
    """What a caller sees in two steps and a forward in eval mode."""
    seen: list[dict[str, Any]] = []
    for step in range(2):
        output = model(batches(num_ranks, step=step)[rank])
        output.float().pow(2).mean().backward()
        params = [param for param in model.parameters() if param.numel()]
        seen.append(
            {
                "output": output.detach(),
                "gradients": {i: param.grad.clone() for i, param in enumerate(params) if param.grad is not None},
            }
        )
        sgd_step(list(model.parameters()))
        seen[-1]["parameters"] = {i: param.detach().clone() for i, param in enumerate(params)}
        seen[-1]["buffers"] = {
            name.replace("_fsdp_wrapped_module.", ""): b.clone() for name, b in model.named_buffers()
        }
    model.eval()
    with torch.no_grad():
        seen.append({"output": model(batches(num_ranks)[rank])})
    with warnings.catch_warnings():
        # torch: that NO_SHARD has full state dicts, and that the interface is deprecated.
        warnings.simplefilter("ignore")
        saved = model.state_dict()
    seen.append({"state dict": {key: value.clone() for key, value in saved.items()}})
    return seen


def low_dtypes(setting: dict[str, Any]) -> set[torch.dtype]:
    return {dtype for dtype in setting.values() if isinstance(dtype, torch.dtype)} & {BF16, FP16}


def compare_with_peer(setting: dict[str, Any], strategy: str, use_orig_params: bool, rank: int, num_ranks: int) -> None:
    with warnings.catch_warnings():
        # Both say that the exempt modules become units of their own.
        warnings.simplefilter("ignore", UserWarning)
        ours = sharded(
            model_for(setting), strategy, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(**setting)
        )
    theirs = sharded_by_peer(
        model_for(setting),
        strategy,
        use_orig_params=use_orig_params,
        mixed_precision=peer_library.MixedPrecision(**setting),
    )
    relative = 1e-2 if low_dtypes(setting) else 1e-5
    for step, (got, expected) in enumerate(
        zip(train(ours, rank, num_ranks), train(theirs, rank, num_ranks), strict=True)
    ):
        assert_near(got, expected, relative, f"step {step}")


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("setting", SETTINGS)
@OWN_STATISTICS
@on_ranks(2)
def test_two_ranks_give_the_peers_values_and_dtypes(
    setting: str, strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    compare_with_peer(SETTINGS[setting], strategy, use_orig_params, rank, num_ranks)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@pytest.mark.parametrize("setting", ["bf16, reduced in fp32", "fp16", "bf16 gradients"])
@OWN_STATISTICS
@on_ranks(4)
def test_four_ranks_give_the_peers_values_and_dtypes(
    setting: str, strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    compare_with_peer(SETTINGS[setting], strategy, use_orig_params, rank, num_ranks)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@pytest.mark.parametrize("setting", ["bf16", "bf16, reduced in fp32", "bf16 gradients"])
@on_ranks(2)
def test_accumulation_under_no_sync_gives_the_peers_gradients(
    setting: str, strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    results = []
    for library, build in ((MixedPrecision, sharded), (peer_library.MixedPrecision, sharded_by_peer)):
        model = build(
            small_model(), strategy, use_orig_params=use_orig_params, mixed_precision=library(**SETTINGS[setting])
        )
        with model.no_sync():
            for step in range(2):
                model(batches(num_ranks, step=step)[rank]).float().pow(2).mean().backward()
        model(batches(num_ranks, step=2)[rank]).float().pow(2).mean().backward()
        params = [param for param in model.parameters() if param.numel()]
        results.append({i: param.grad.clone() for i, param in enumerate(params) if param.grad is not None})
    assert_near(results[0], results[1], 1e-2, "gradients")


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@on_ranks(2)
def test_a_custom_policy_overrides_precision_unit_by_unit(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    results, inside = [], []
    for library, policy, build in (
        (MixedPrecision, CustomPolicy, lambda module, **options: FSDP(module, **options)),
        (peer_library.MixedPrecision, peer_wrap.CustomPolicy, lambda m, **kw: sharded_by_peer(m, "FULL_SHARD", **kw)),
    ):
        plain = small_model()
        seen: list[torch.dtype] = []
        for block in plain[1:3]:
            block.up.register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(out.dtype))
        plain[3] = Downcast(plain[3])
        own = {"mixed_precision": library(param_dtype=FP16, reduce_dtype=FP32, cast_forward_inputs=True)}
        model = build(
            plain,
            auto_wrap_policy=policy(lambda module, own=own: own if isinstance(module, NormedBlock) else False),
            mixed_precision=library(param_dtype=BF16),
            use_orig_params=use_orig_params,
        )
        results.append(train(model, rank, num_ranks))
        inside.append(seen)
    assert inside[0] == inside[1]
    assert set(inside[0]) == {FP16}
    assert_near(results[0][0], results[1][0], 1e-2, "first step")
    assert_near(results[0][3], results[1][3], 1e-2, "saved")


def with_rounded_buffers(module: nn.Module) -> nn.Module:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(buffer.to(BF16))
    return module


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_full_precision_in_eval_equals_the_plain_model(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    low = {"param_dtype": BF16, "buffer_dtype": BF16}
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(**low))
    peer = sharded_by_peer(
        small_model(),
        strategy,
        use_orig_params=use_orig_params,
        mixed_precision=peer_library.MixedPrecision(**low),
    )
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    plain = with_rounded_buffers(small_model()).eval()
    x = batches(num_ranks)[rank]

    def dtypes(module: nn.Module) -> tuple[torch.dtype, set[torch.dtype]]:
        return module(x).dtype, {buffer.dtype for buffer in module.buffers()}

    for training in (True, False, True, False):
        model.train(training)
        peer.train(training)
        with torch.no_grad():
            assert dtypes(model) == dtypes(peer) == ((BF16, {BF16}) if training else (FP32, {FP32}))
    assert_near(model(x).detach(), plain(x).detach(), 1e-5, "eval output")

    # A backward of an eval forward runs in full precision too.
    model(x).pow(2).mean().backward()
    expected = mean_grads(plain, plain(x).pow(2).mean())
    assert_near(grads_or_zeros(model), expected, 1e-5, "gradients")
    # ... and the next training forward in the low one again.
    assert model.train()(x).dtype == BF16


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_weight_assigned_before_an_evaluation_in_full_precision_is_used(
    strategy: str, rank: int, num_ranks: int
) -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    low = MixedPrecision(param_dtype=BF16)
    model = sharded(small_model(), strategy, use_orig_params=True, mixed_precision=low)
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    x = batches(num_ranks)[rank]
    model(x).float().pow(2).mean().backward()
    first, plain = model.module[0], small_model()
    for layer in (first, plain[0]):
        layer.weight = nn.Parameter(torch.full((layer.out_features, layer.in_features), 0.25))
    with torch.no_grad():
        assert_near(model.eval()(x), plain.eval()(x), 1e-5, "eval output")


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@on_ranks(2)
def test_a_first_evaluation_in_full_precision_and_inference_mode_leaves_training_right(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    low = MixedPrecision(param_dtype=BF16)
    model = sharded(small_model(), "FULL_SHARD", use_orig_params=use_orig_params, mixed_precision=low)
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    plain = small_model().eval()
    x = batches(num_ranks)[rank]
    with torch.inference_mode():
        assert_near(model.eval()(x), plain(x), 1e-5, "eval output")
    model(x).pow(2).mean().backward()
    assert_near(grads_or_zeros(model), mean_grads(plain, plain(x).pow(2).mean()), 1e-5, "gradients")


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@on_ranks(2)
def test_buffers_are_low_in_compute_and_in_their_own_dtype_in_saved_and_loaded_states(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    plain = small_model()
    plain[1].register_buffer("count", torch.tensor(3))
    rounded = {name: buffer.clone() for name, buffer in with_rounded_buffers(copy.deepcopy(plain)).named_buffers()}
    low = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = sharded(plain, use_orig_params=use_orig_params, mixed_precision=low)
    assert model[1].shift.dtype == FP32  # cast with the first use, not before
    model(batches(num_ranks)[rank])
    assert model[1].shift.dtype == BF16
    assert model[1].count.dtype == torch.int64
    with FSDP.summon_full_params(model):
        assert model[1].shift.dtype == BF16
    saved = model.state_dict()
    assert_equal({name: saved[name] for name in rounded}, rounded)
    saved["1.shift"] = saved["1.shift"] + 1
    model.load_state_dict(saved)
    assert model[1].shift.dtype == BF16
    assert_near(model.state_dict()["1.shift"], rounded["1.shift"] + 1, 1e-2, "loaded buffer")


@on_ranks(2)
def test_parameters_are_gathered_in_the_low_dtype_and_sharded_in_the_full_one(rank: int, num_ranks: int) -> None:
    plain = small_model()
    seen: list[torch.dtype] = []
    plain[1].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    model = sharded(plain, use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=BF16))
    model(batches(num_ranks)[rank]).sum().backward()
    assert seen == [BF16]
    assert {param.dtype for param in model.parameters()} == {FP32}
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {FP32}
    unit = model.module[1]._unit
    assert unit.param_groups[0].output.tensors[0].dtype == BF16
    assert unit.param_groups[0].output.nbytes == 0


@on_ranks(2)
def test_a_weight_of_one_rank_in_the_low_dtype_raises_between_steps_where_its_memory_is_freed(rank: int) -> None:
    model = FSDP(
        nn.Linear(4, 4),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        mixed_precision=MixedPrecision(param_dtype=BF16),
        use_orig_params=False,
    )
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"'weight' \(4, 4\) of unit 'Linear'"):
        model.module.weight.detach().clone()


@pytest.mark.parametrize(
    "precision, error",
    [
        ("bf16", TypeError),
        (MixedPrecision(param_dtype="bf16"), TypeError),  # type: ignore[arg-type]
        (MixedPrecision(reduce_dtype=torch.int32), ValueError),
        (MixedPrecision(master_dtype=torch.int8), ValueError),
    ],
)
@on_ranks(2)
def test_a_precision_that_is_none_is_refused_by_name(precision: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"mixed_precision|MixedPrecision"):
        FSDP(nn.Linear(2, 2), mixed_precision=precision)
