"""torch's own models and helpers for testing FSDP1, as torch ships them, with our class in place of FSDP1's."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import _common_utils as peer_utils
from torch.distributed.fsdp import fully_sharded_data_parallel as peer_module

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_sharded_data_parallel
from fsdp_flat import wrap as fsdp_flat_wrap
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from tests.state_dict.kit import FULL, SHARDED, peer_quiet, single_rank_allowed
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import no_shard_allowed, square_loss
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer, whole_state


@contextmanager
def shipped() -> Iterator[Any]:
    """``torch.testing._internal.common_fsdp`` with our class under the name that its models and helpers use."""
    if "expecttest" not in sys.modules:
        # torch's test classes derive from this package's, of which nothing here is used.
        placeholder = types.ModuleType("expecttest")
        placeholder.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = placeholder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_fsdp
    with (
        mock.patch.object(common_fsdp, "FSDP", FSDP),
        mock.patch.object(common_fsdp, "ShardedGradScaler", ShardedGradScaler),
        no_shard_allowed(),
    ):
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        yield common_fsdp


def suite_of(common_fsdp: Any) -> Any:
    """The shipped test class's helpers, on the processes that run already."""

    class Suite(common_fsdp.FSDPTestMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
        process_group = dist.group.WORLD

        def assertEqual(self, first: Any, second: Any, **kwargs: Any) -> None:
            if isinstance(first, (torch.Tensor, list)):
                torch.testing.assert_close(first, second)
            else:
                assert first == second

    return Suite()


@ORIG_PARAMS
@on_ranks(2, timeout=150.0)
def test_shipped_models_train_as_under_ddp_by_the_shipped_helper(use_orig_params: bool, rank: int) -> None:
    with shipped() as common:
        suite = suite_of(common)
        names = ["NestedWrappedModule", "AlwaysWrapNestedWrappedModule", "TransformerWithSharedParams"]
        # The units of the last one mix frozen and trainable parameters.
        for name in [*names, "NonUniformReqGradNWM"] if use_orig_params else names:
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
                suite._test_fsdp_parity(
                    getattr(common, name),
                    common.FSDPInitMode.RECURSIVE,
                    common.DEVICEInitMode.DEVICE_BEFORE,
                    sharding_strategy=common.ShardingStrategy[strategy],
                    backward_prefetch=common.BackwardPrefetch.BACKWARD_PRE,
                    use_orig_params=use_orig_params,
                )
        with single_rank_allowed():
            suite._test_fsdp_parity(
                common.MixtureOfExperts,
                common.FSDPInitMode.RECURSIVE,
                common.DEVICEInitMode.DEVICE_BEFORE,
                # Its experts differ between ranks; it reduces the gradients of the rest by itself.
                ref_init_fn=common.DummyDDP,
                use_orig_params=use_orig_params,
                init_kwargs={"delay_before_free_ms": 1},
            )


@ORIG_PARAMS
@on_ranks(2, timeout=150.0)
def test_shipped_helpers_take_our_models(use_orig_params: bool, rank: int) -> None:
    with shipped() as common:
        model = common.TransformerWithSharedParams.init(
            dist.group.WORLD,
            common.FSDPInitMode.RECURSIVE,
            common.DEVICEInitMode.DEVICE_BEFORE,
            {"use_orig_params": use_orig_params},
            deterministic=True,
        )
        before = common.get_full_params(model)
        state = common._broadcast_state_dict(rank, dict(common._get_state_dict(model)))
        with FSDP.summon_full_params(model):
            common._assert_module_states(model, dist.group.WORLD, torch.testing.assert_close)
        common._zero_model(model, zero_buffers=True)
        assert not any(param.any() for param in common.get_full_params(model))
        model.load_state_dict(state)
        assert_equal(common.get_full_params(model), before)
        suite = suite_of(common)
        suite._check_cpu_offload(model, model.cpu_offload)
        suite._check_backward_prefetch(model, model.backward_prefetch)
        suite._check_forward_prefetch(model, False)
        with (
            mock.patch.object(common, "wrap", fsdp_flat_wrap.wrap),
            fsdp_flat_wrap.enable_wrap(wrapper_cls=FSDP, use_orig_params=use_orig_params),
        ):
            skipping = FSDP(common.SkipModel(double_nest=True), use_orig_params=use_orig_params)
        skipping(torch.ones(2, 10)).sum().backward()
        assert len(FSDP.fsdp_modules(skipping)) == 3


# -- names that they and clients read -------------------------------------------------------------------------------


@ORIG_PARAMS
@on_ranks(2)
def test_a_wrapper_tells_its_state_as_the_peer_does(use_orig_params: bool, rank: int) -> None:
    for make in (shard, shard_by_peer):
        model = make(seeded(), use_orig_params=use_orig_params)
        for state in (peer_utils.TrainingState, fsdp_flat.fully_sharded_data_parallel.TrainingState):
            if make is shard_by_peer and state is not peer_utils.TrainingState:
                continue
            model._assert_state(state.IDLE)
            model._assert_state([state.IDLE, state.FORWARD_BACKWARD])
            with pytest.raises(ValueError, match="SUMMON_FULL_PARAMS"):
                model._assert_state(state.SUMMON_FULL_PARAMS)
            with type(model).summon_full_params(model):
                model._assert_state(state.SUMMON_FULL_PARAMS)
        assert not model._low_precision_hook_enabled()
        assert not model._mixed_precision_enabled_for_buffers()
        model.register_comm_hook(None, bf16_compress_hook)
        assert model._low_precision_hook_enabled()
    low = shard(seeded(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    assert low._mixed_precision_enabled_for_buffers()


@ORIG_PARAMS
@on_ranks(2)
def test_a_handle_shows_the_gradient_of_its_shard(use_orig_params: bool, rank: int) -> None:
    shards = []
    for make in (shard, shard_by_peer):
        model = make(seeded(), use_orig_params=use_orig_params)
        handles = [wrapper._handle for wrapper in type(model).fsdp_modules(model)]
        assert [handle.sharded_grad for handle in handles] == [None] * 3
        square_loss(model, batch(rank)).backward()
        shards.append([handle.sharded_grad for handle in handles])
    for ours, theirs in zip(*shards, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ORIG_PARAMS
@on_ranks(2)
def test_a_unit_is_gathered_ahead_of_its_forward(use_orig_params: bool, rank: int) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    assert model.check_is_root()
    waiting = model.blocks[1]._unshard(async_op=True)
    assert model.blocks[0]._unshard() is None
    waiting.wait()
    waiting.wait()
    assert [wrapper._handle.needs_unshard() for wrapper in FSDP.fsdp_modules(model)] == [True, False, False]
    assert_close(model(batch(rank)), plain(batch(rank)), rtol=1e-6, atol=1e-7)
    square_loss(model, batch(rank)).backward()
    # A caller that gathers ahead calls this after its optimizer's step.
    with torch.no_grad():
        for each in (*model.parameters(), *plain.parameters()):
            each.mul_(2.0)
    model._wait_unshard_streams_on_current_stream()
    model.blocks[1]._unshard(async_op=True)
    assert_close(model(batch(rank)), plain(batch(rank)), rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_flat_parameters_are_shown_in_place_of_original_ones(rank: int) -> None:
    for make in (shard_by_peer, shard):
        model = make(seeded(), use_orig_params=True)
        before = [name for name, _ in model.named_parameters()]
        with model._deregister_orig_params_ctx():
            names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
            assert names == ["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param"]
            with torch.no_grad():
                for param in model.parameters():
                    param.data.mul_(2.0)
        assert sorted(name for name, _ in model.named_parameters()) == sorted(before)
    assert [name for name, _ in model.named_parameters()] == before
    doubled = {name: value if "shift" in name else 2 * value for name, value in seeded().state_dict().items()}
    assert_equal(whole_state(model), doubled)
    with pytest.raises(AssertionError), shard(seeded())._deregister_orig_params_ctx():
        pytest.fail("entered")


@ORIG_PARAMS
@on_ranks(2)
def test_what_the_methods_for_optimizer_states_share_is_called_by_its_own_name(
    use_orig_params: bool, rank: int
) -> None:
    with peer_quiet():
        keys = []
        for make in (shard, shard_by_peer):
            model = make(seeded(), use_orig_params=use_orig_params)
            fsdp = type(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            square_loss(model, batch(rank)).backward()
            optimizer.step()
            states = fsdp._optim_state_dict_impl(
                model, optimizer, optimizer.state_dict(), rank0_only=False, cpu_offload=False
            )
            loaded = fsdp._optim_state_dict_to_load_impl(states, model, None, optimizer)
            optimizer.load_state_dict(loaded)
            keys.append((list(states["state"]), sorted(loaded["state"])))
            chunks = fsdp._optim_state_dict_impl(
                model, optimizer, optimizer.state_dict(), rank0_only=False, full_state_dict=False
            )
            fsdp._optim_state_dict_to_load_impl(chunks, model, None, optimizer, full_state_dict=False)
            for full, rank0_only, expected in ((True, False, None), (False, True, AssertionError)):
                if expected is not None:
                    with pytest.raises(expected):
                        fsdp._optim_state_dict_impl(model, optimizer, {}, rank0_only=rank0_only, full_state_dict=full)
            assert [
                fsdp._is_using_optim_input(*given) for given in ((None, None), (None, optimizer), ([], optimizer))
            ] == [
                True,
                False,
                True,
            ]
        assert keys[0] == keys[1]


def test_functions_of_the_module_are_the_peers() -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    plain(torch.ones(2, 3)).sum().backward()
    plain[0].bias.grad = None
    mine, theirs = fully_sharded_data_parallel, peer_module
    zero, cpu = torch.zeros(()), torch.device("cpu")
    for norm_type in (1.0, 2.0, float("inf")):
        arguments = (list(plain.parameters()), norm_type, zero, cpu)
        assert_close(mine._get_grad_norm(*arguments), theirs._get_grad_norm(*arguments), rtol=1e-6, atol=0)
    assert mine._get_grad_norm([], 2.0, zero, cpu) is zero
    assert mine._get_param_to_fqn(plain) == theirs._get_param_to_fqn(plain)
    assert mine._get_fqn_to_param(plain) == theirs._get_fqn_to_param(plain)
    for kind in (FULL, SHARDED):
        settings = kind.name.split("_")[0].title()
        assert mine._state_dict_type_to_config[kind].__name__ == f"{settings}StateDictConfig"
        assert mine._optim_state_dict_type_to_config[kind].__name__ == f"{settings}OptimStateDictConfig"
