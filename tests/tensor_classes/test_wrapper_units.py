"""The wrapper class shards parameters of classes of their own in units that have no other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.extended_tensors import Holder, NewPair, SentInBfloat16, SentInInt8, held_by
from tests.support.kit import batch, mesh, wrapped


class Base(nn.Linear):
    """A linear whose weight is of a class of its own, without a bias."""


class Adapted(nn.Module):
    def __init__(self, kind: type[Holder], *, frozen: bool) -> None:
        super().__init__()
        self.base = Base(8, 8, bias=False)
        self.base.weight.requires_grad_(not frozen)
        held_by(self.base, kind)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(kind: type[Holder] = SentInInt8, *, frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(kind, frozen=frozen) for _ in range(3)])


POLICY = ModuleWrapPolicy({Base, Adapted})


def in_place(model: nn.Sequential, **kwargs: Any) -> nn.Module:
    for layers in model:
        fully_shard(layers.base, **kwargs)  # type: ignore[arg-type]
        fully_shard(layers, **kwargs)
    return fully_shard(model, **kwargs)  # type: ignore[return-value]


def trained(model: nn.Module, num_steps: int = 4, *, optimizer: Any = None, first: int = 0) -> list[float]:
    optimizer = optimizer or adam(model)
    losses = []
    for step in range(first, first + num_steps):
        loss = model(batch(dist.get_rank(), step)).float().pow(2).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@on_ranks(2, 4)
def test_frozen_weights_train_beside_adapters_as_with_fully_shard(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    expected = trained(in_place(model_of()))
    model = FSDP(model_of(), auto_wrap_policy=POLICY, sharding_strategy=strategy, use_orig_params=use_orig_params)
    close(trained(model), expected)
    kinds = {type(p._local_tensor) for p in model.parameters() if isinstance(p, DTensor)}
    assert kinds == {SentInInt8}


@on_ranks(2, 4)
def test_trained_weights_of_such_classes_train_as_with_fully_shard() -> None:
    for kind in (NewPair, SentInBfloat16):
        expected = trained(in_place(model_of(kind, frozen=False)))
        model = FSDP(model_of(kind, frozen=False), auto_wrap_policy=POLICY, use_orig_params=True)
        close(trained(model), expected)


@on_ranks(2)
def test_such_units_compute_in_the_wrappers_param_dtype() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(model_of(), auto_wrap_policy=POLICY, mixed_precision=precision, use_orig_params=True)
    dtypes: list[torch.dtype] = []
    model[0].base.module.register_forward_hook(lambda module, *_: dtypes.append(module.weight.dtype))
    losses = trained(model)
    assert dtypes == [torch.bfloat16] * 4
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(trained(in_place(model_of()))), atol=0.02, rtol=0.02)


@on_ranks(4)
def test_such_units_replicate_on_a_mesh_of_two_dims() -> None:
    pair = mesh(2, 2)
    model = FSDP(
        model_of(NewPair, frozen=False),
        auto_wrap_policy=POLICY,
        device_mesh=pair,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    close(trained(model), trained(in_place(model_of(NewPair, frozen=False))))


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2, 4)
def test_state_dicts_of_such_units_are_saved_and_loaded(use_orig_params: bool) -> None:
    def made() -> FSDP:
        return FSDP(model_of(SentInBfloat16, frozen=False), auto_wrap_policy=POLICY, use_orig_params=use_orig_params)

    model = made()
    optimizer = adam(model)
    trained(model, 2, optimizer=optimizer)
    plain = model_of(SentInBfloat16).state_dict()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state, optim = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert set(state) == set(plain)
        weight = state["0.base.weight"]
        assert tuple(weight.shape) == (8, 8)
        assert isinstance(weight, DTensor) is (kind is StateDictType.SHARDED_STATE_DICT)
        again = made()
        other = adam(again)
        trained(again, 1, optimizer=other, first=7)
        with FSDP.state_dict_type(again, kind):
            again.load_state_dict(state)
            other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, optim))
        found, saved = [{clean_fqn(n): inner_of(p) for n, p in m.named_parameters()} for m in (again, model)]
        assert_equal(found, saved)
        assert trained(again, 1, optimizer=other, first=2) == trained(model, 1, optimizer=optimizer, first=2)
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(state)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim))


def inner_of(param: torch.Tensor) -> list[torch.Tensor]:
    local = param._local_tensor.detach() if isinstance(param, DTensor) else param.detach()
    return local.inner() if isinstance(local, Holder) else [local]


@on_ranks(2)
def test_rank_0_alone_gets_a_full_state_dict_of_such_units() -> None:
    model = FSDP(model_of(SentInBfloat16), auto_wrap_policy=POLICY, use_orig_params=True)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert len(state) == (len(model_of().state_dict()) if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_rank_0s_values_of_such_units_are_broadcast() -> None:
    model = model_of()
    if dist.get_rank():
        with torch.no_grad():
            for param in model.parameters():
                for each in inner_of(param):
                    each.zero_()
    sharded = FSDP(model, auto_wrap_policy=POLICY, use_orig_params=True, sync_module_states=True)
    close(trained(sharded), trained(in_place(model_of())))


def emptied_and(*inits: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for each in inits:
            each(module)

    return init


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            for each in inner_of(param):
                each.fill_(0.1)


@on_ranks(2, 4)
def test_rank_0s_values_of_such_units_reach_ranks_on_the_meta_device(rank: int) -> None:
    model = model_of()
    if rank:
        model.to("meta")
    sharded = FSDP(
        model,
        auto_wrap_policy=POLICY,
        use_orig_params=True,
        sync_module_states=True,
        param_init_fn=emptied_and() if rank else None,
    )
    close(trained(sharded), trained(in_place(model_of())))


@pytest.mark.of_guards
@on_ranks(2)
def test_param_init_fn_gives_such_units_memory_and_values() -> None:
    plain = model_of()
    for module in plain.modules():
        fill(module)
    model = FSDP(model_of().to("meta"), auto_wrap_policy=POLICY, use_orig_params=True, param_init_fn=emptied_and(fill))
    close(trained(model), trained(in_place(plain)))
    base = FSDP(
        model_of()[0].base.to("meta"), auto_wrap_policy=POLICY, use_orig_params=True, param_init_fn=emptied_and()
    )
    with pytest.warns(UserWarning, match="never written and so NaN: 'weight'"):
        assert base(batch(0, 0)).isnan().all()


@on_ranks(2)
def test_a_unit_with_plain_parameters_too_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'0.base.weight' is a SentInInt8.*unit of its own"):
        FSDP(model_of(), use_orig_params=True)


@on_ranks(2)
def test_a_strategy_that_shards_nothing_refuses_such_units() -> None:
    with pytest.raises(UnsupportedError, match=r"NO_SHARD.*ignored_states"):
        wrapped(model_of(), auto_wrap_policy=POLICY, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
