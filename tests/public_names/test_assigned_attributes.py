"""An attribute of FSDP1 that a program assigns has its effect, or raises; none is made that nothing reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision as PeerMixedPrecision
from torch.distributed.fsdp import ShardingStrategy as PeerStrategy

from fsdp_flat import BackwardPrefetch, MixedPrecision, ShardedStateDictConfig, ShardingStrategy, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES, INSTEAD_OF_ASSIGNING
from fsdp_flat.errors import OptionError
from tests.support import assert_close, on_ranks
from tests.support.beside import WRAPPER_FRONTS, batch
from tests.support.kit import BLOCKS, mesh, seeded, square_loss, wrapped
from tests.support.peer import peer_fsdp

FACTORS = [(1.0, 1.0), (4.0, 2.0), (1.0, 8.0)]


def _x(rank: int, step: int = 0) -> torch.Tensor:
    return batch(rank, step).float()


def _grads(model: nn.Module) -> dict[str, Any]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _pair(strategy: str, dtype: torch.dtype | None, front: str) -> tuple[Any, Any]:
    """Return our wrapper and torch's of the same model."""
    options: dict[str, Any] = {"use_orig_params": front == "originals", "auto_wrap_policy": BLOCKS}
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = mesh(dist.get_world_size() // 2, 2)
    precision = [None if dtype is None else kind(reduce_dtype=dtype) for kind in (MixedPrecision, PeerMixedPrecision)]
    own = wrapped(seeded(), sharding_strategy=ShardingStrategy[strategy], mixed_precision=precision[0], **options)
    peer = peer_fsdp(seeded(), sharding_strategy=PeerStrategy[strategy], mixed_precision=precision[1], **options)
    return own, peer


def _units(model: Any) -> Any:
    return type(model).fsdp_modules(model)


def _assign(owner: Any, name: str, value: Any) -> bool:
    """Return whether an attribute can be assigned; the error names it if not."""
    try:
        setattr(owner, name, value)
    except AttributeError as error:
        if name not in str(error):
            raise
        return False
    return True


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
@on_ranks(2, 4)
def test_divide_factors_divide_as_on_fsdp1(dtype: torch.dtype | None, strategy: str, front: str, rank: int) -> None:
    """Gradients in 16 bits, which are divided before the sum, are a case of their own."""
    own, peer = _pair(strategy, dtype, front)
    for step, factors in enumerate(FACTORS):
        for model in (own, peer):
            for unit in _units(model):
                if step == 0:
                    assert (unit._gradient_predivide_factor, unit._gradient_postdivide_factor) == (
                        peer._gradient_predivide_factor,
                        peer._gradient_postdivide_factor,
                    )
            for unit in _units(model):
                unit._gradient_predivide_factor, unit._gradient_postdivide_factor = factors
                assert (unit._gradient_predivide_factor, unit._gradient_postdivide_factor) == factors
            model.zero_grad()
            square_loss(model, _x(rank, step)).backward()
        tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype is None else {"rtol": 4e-3, "atol": 1e-4}
        assert_close(_grads(own), _grads(peer), **tolerance, what=f"gradients divided by {factors}")


@on_ranks(2)
def test_a_divide_factor_divides_the_gradients_of_its_own_unit_alone(rank: int) -> None:
    own, plain = wrapped(seeded(), auto_wrap_policy=BLOCKS), wrapped(seeded(), auto_wrap_policy=BLOCKS)
    first = _units(own)[1]
    first._gradient_postdivide_factor = 8.0
    for model in (own, plain):
        square_loss(model, _x(rank)).backward()
    expected = _grads(plain)
    for name in expected:
        if name.startswith("_fsdp_wrapped_module.blocks.0."):
            expected[name] = expected[name] / 8
    assert_close(_grads(own), expected, rtol=1e-6, atol=1e-8, what="gradients")


@on_ranks(2)
def test_a_divide_factor_below_one_divides_nothing_as_on_fsdp1_and_warns(rank: int) -> None:
    own, plain = wrapped(seeded()), wrapped(seeded())
    with pytest.warns(UserWarning, match=r"0\.5 divides no gradients"):
        own._gradient_postdivide_factor = 0.5
    for model in (own, plain):
        square_loss(model, _x(rank)).backward()
    assert_close(_grads(own), _grads(plain), rtol=1e-6, atol=1e-8, what="gradients")
    for wrong in (0, -1.0, "2", True, None):
        with pytest.raises(OptionError, match="a number above 0"):
            own._gradient_predivide_factor = wrong


@WRAPPER_FRONTS
@on_ranks(2)
def test_no_attribute_of_fsdp1s_wrapper_can_be_made_that_nothing_reads(front: str, rank: int) -> None:
    """Every attribute that torch's wrapper has after a step, and every one of its class."""
    own, peer = _pair("FULL_SHARD", None, front)
    for model in (own, peer):
        square_loss(model, _x(rank)).backward()
    state = {name for name in (*vars(peer), *INSTEAD_OF_ASSIGNING) if name not in vars(nn.Module())}
    assert {"training_state", "_exec_order_data", "_fsdp_extension", "_sync_gradients"} <= state
    takes_effect = set()
    for name in sorted(state):
        try:
            value = getattr(own, name)
        except AttributeError:
            value = object()
        if not _assign(own, name, value):
            continue
        takes_effect.add(name)
        assert name not in vars(own), f"{name} is an attribute that nothing reads"
    assert takes_effect == {
        *("_comm_hook", "_comm_hook_state", "_gradient_postdivide_factor", "_gradient_predivide_factor", "_is_root"),
        *("_optim_state_dict_config", "_state_dict_config", "_state_dict_type", "_sync_gradients"),
        *("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
    }


@on_ranks(2)
def test_no_attribute_of_fsdp1s_handle_can_be_made_that_nothing_reads(rank: int) -> None:
    """The handle."""
    own, peer = _pair("FULL_SHARD", None, True)
    handle = own._handle
    own_names = set(vars(handle))
    for name in sorted({*ABSENT_ATTRIBUTES, *vars(peer._handle)} - {"_orig_param_dtype", "flat_param"}):
        if not name.startswith("__"):
            assert not _assign(handle, name, object()), f"{name} could be assigned"
    assert set(vars(handle)) == own_names


@on_ranks(2)
def test_refused_assignments_say_what_to_call(rank: int) -> None:
    model = wrapped(seeded())
    for name, hint in {
        "training_state": "summon_full_params",
        "_exec_order_data": "set_modules_to_forward_prefetch",
        "_fsdp_extension": "parallelize_module",
        "sharding_strategy": "constructor",
        "compute_device": "model.to",
    }.items():
        with pytest.raises(AttributeError, match=f"{name} of FullyShardedDataParallel .*{hint}"):
            setattr(model, name, None)


@on_ranks(2)
def test_a_programs_own_attributes_are_those_of_any_module(rank: int) -> None:
    model: Any = wrapped(seeded())
    model.my_flag = 1
    model._step_count = 2
    model.scale = nn.Parameter(torch.ones(2))
    model.register_buffer("mask", torch.ones(3))
    assert (model.my_flag, model._step_count) == (1, 2)
    assert dict(model.named_parameters())["scale"] is model.scale
    assert "my_flag" not in vars(model.module)


@on_ranks(2)
def test_assigned_switches_take_effect(rank: int) -> None:
    """What FSDP1 reads in each step and the engine has too."""
    model: Any = wrapped(seeded(), auto_wrap_policy=BLOCKS)
    for unit in _units(model):
        unit._sync_gradients = False
    x = _x(rank)
    square_loss(model, x).backward()
    assert model._flat_param.grad.numel() > model._flat_param.numel()  # this rank's own, unsharded
    model.zero_grad()
    seen: list[torch.Size] = []

    def hook(_state: object, full: torch.Tensor, shard: torch.Tensor) -> None:
        seen.append(full.shape)
        dist.all_reduce(full)
        shard.copy_(full.chunk(dist.get_world_size())[rank] / dist.get_world_size())

    reference = wrapped(seeded(), auto_wrap_policy=BLOCKS)
    square_loss(reference, x).backward()
    for unit in _units(model):
        unit._sync_gradients, unit._comm_hook = True, hook
    square_loss(model, x).backward()
    assert len(seen) == len(_units(model))
    assert_close(_grads(model), _grads(reference), rtol=1e-6, atol=1e-8, what="gradients")
    for unit in _units(model):
        unit._state_dict_type = StateDictType.SHARDED_STATE_DICT
        unit._state_dict_config = ShardedStateDictConfig(offload_to_cpu=True)
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert type(settings.optim_state_dict_config).__name__ == "ShardedOptimStateDictConfig"
    assert settings.state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
    assert all(hasattr(value, "local_shards") for name, value in model.state_dict().items() if "weight" in name)


@on_ranks(2)
def test_an_assigned_prefetch_mode_is_that_of_later_backwards(rank: int) -> None:
    model: Any = wrapped(seeded(), auto_wrap_policy=BLOCKS)
    x = _x(rank)
    prefetched = []
    for mode in (BackwardPrefetch.BACKWARD_PRE, None):
        for unit in _units(model):
            unit.backward_prefetch = mode
            assert unit.backward_prefetch is mode
        loss = square_loss(model, x)
        trace = model._fsdp_step().trace = []
        loss.backward()
        prefetched.append([event for event, _ in trace].count("backward_prefetch"))
    assert prefetched[0] > 0
    assert prefetched[1] == 0
    with pytest.raises(OptionError, match="backward_prefetch must be one of"):
        model.backward_prefetch = "later"
