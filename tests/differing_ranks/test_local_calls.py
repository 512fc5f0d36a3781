"""Calls that need no other rank: made on one rank at a time, with barriers between, on torch's class and on ours.

A call that communicated would wait for a rank that stands at the barrier; the time limit of the tests is the watchdog.
``docs/communication.md`` has the whole table.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import LoadError
from tests.optim_state.factored import factored, merge_rows, split_rows
from tests.state_dict.kit import peer_quiet
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import train_on
from tests.support.peer import mend_peer
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer

LIBRARIES = {"ours": fsdp_flat, "peer": peer_library}
BOTH = pytest.mark.parametrize("library", ["ours", "peer"])
WATCHDOG_S = 30.0


def dst_round_robin(rank: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call on rank 0 and then on rank 1, while the other waits in a barrier; this rank's result."""
    result = None
    for turn in range(dist.get_world_size()):
        if rank == turn:
            result = call(*args, **kwargs)
        dist.barrier()
    return result


class Trained:
    """A model of either library after one step, with its whole state dicts, loaded or trained by every rank at once."""

    def __init__(self, library: str, rank: int, use_orig_params: bool, strategy: str = "FULL_SHARD", seed: int = 0):
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        warnings.filterwarnings("ignore", message=r"Unit .* is not sharded, so its entries")
        warnings.filterwarnings("ignore", message=".*older form of", category=FutureWarning)
        if library == "peer":
            mend_peer()
        self.library: ModuleType = LIBRARIES[library]
        make = shard if library == "ours" else shard_by_peer
        self.model: Any = make(seeded(seed=seed), strategy, use_orig_params=use_orig_params)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        train_on(self.model, self.optimizer, [batch(rank, seed)])

    @property
    def fsdp(self) -> Any:
        return self.library.FullyShardedDataParallel

    def kind(self, name: str, **configs: Any) -> Any:
        """The context of a state-dict type, with optimizer states where they are computed."""
        lib = self.library
        optim = getattr(lib, f"{name.title()}OptimStateDictConfig")(offload_to_cpu=False)
        return self.fsdp.state_dict_type(self.model, lib.StateDictType[f"{name}_STATE_DICT"], None, optim)

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole state dicts of the model and the optimizer. Every rank must call this."""
        with self.kind("FULL"):
            states = copy.deepcopy(self.fsdp.optim_state_dict(self.model, self.optimizer))
            return {name: value.clone() for name, value in self.model.state_dict().items()}, states


@BOTH
@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_whole_optimizer_states_are_loaded_rank_by_rank(library: str, use_orig_params: bool, rank: int) -> None:
    with peer_quiet():
        source = Trained(library, rank, use_orig_params)
        expected = source.saved()[1]
        for kind in ("FULL", "SHARDED", "LOCAL"):
            one = Trained(library, rank, use_orig_params, seed=1)
            with one.kind(kind):
                load = one.fsdp.optim_state_dict_to_load
                loaded = dst_round_robin(rank, load, one.model, one.optimizer, copy.deepcopy(expected))
            one.optimizer.load_state_dict(loaded)
            assert_equal(one.saved()[1], expected)
        directly = Trained(library, rank, use_orig_params, seed=1)
        load = directly.fsdp.optim_state_dict_to_load
        dst_round_robin(rank, load, directly.model, directly.optimizer, copy.deepcopy(expected), load_directly=True)
        assert_equal(directly.saved()[1], expected)


@BOTH
@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_older_forms_for_whole_optimizer_states_are_called_rank_by_rank(
    library: str, use_orig_params: bool, rank: int
) -> None:
    with peer_quiet():
        source = Trained(library, rank, use_orig_params)
        expected = source.saved()[1]
        for form in ("shard_full_optim_state_dict", "flatten_sharded_optim_state_dict"):
            one = Trained(library, rank, use_orig_params, seed=1)
            load = getattr(one.fsdp, form)
            loaded = dst_round_robin(rank, load, copy.deepcopy(expected), one.model, optim=one.optimizer)
            one.optimizer.load_state_dict(loaded)
            assert_equal(one.saved()[1], expected)
        kinds = source.library.OptimStateKeyType
        if use_orig_params:
            by_id = dst_round_robin(rank, source.fsdp.rekey_optim_state_dict, expected, kinds.PARAM_ID, source.model)
            again = dst_round_robin(rank, source.fsdp.rekey_optim_state_dict, by_id, kinds.PARAM_NAME, source.model)
            assert_equal(again["state"], expected["state"])


@BOTH
@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_summoned_models_are_saved_and_loaded_rank_by_rank(library: str, use_orig_params: bool, rank: int) -> None:
    with peer_quiet():
        one = Trained(library, rank, use_orig_params)
        expected = one.saved()[0]
        with one.fsdp.summon_full_params(one.model):
            assert_equal(dst_round_robin(rank, one.model.state_dict), expected)
        summoned = one.fsdp.summon_full_params(one.model)
        summoned.__enter__()
        dst_round_robin(rank, summoned.__exit__, None, None, None)
        assert_equal(one.saved()[0], expected)


@BOTH
@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_without_sharding_everything_about_weights_is_called_rank_by_rank(
    library: str, use_orig_params: bool, rank: int
) -> None:
    with peer_quiet():
        one = Trained(library, rank, use_orig_params, "NO_SHARD")
        expected = dst_round_robin(
            rank, lambda: {name: value.clone() for name, value in one.model.state_dict().items()}
        )
        for kind in ("FULL", "SHARDED", "LOCAL"):
            other = Trained(library, rank, use_orig_params, "NO_SHARD", seed=1)
            with one.kind(kind), other.kind(kind):
                state = dst_round_robin(rank, one.model.state_dict)
                assert_equal(dict(state), expected)
                dst_round_robin(rank, other.model.load_state_dict, state)
            assert_equal(other.saved()[0], expected)

        def summon() -> None:
            with one.fsdp.summon_full_params(one.model, with_grads=use_orig_params):
                pass

        dst_round_robin(rank, summon)
        norms = dst_round_robin(rank, one.model.clip_grad_norm_, 1.0)
        assert norms > 0


@BOTH
@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_settings_and_questions_are_called_rank_by_rank(library: str, use_orig_params: bool, rank: int) -> None:
    with peer_quiet():
        make = shard if library == "ours" else shard_by_peer
        model: Any = make(seeded(), use_orig_params=use_orig_params)
        lib = LIBRARIES[library]
        fsdp = lib.FullyShardedDataParallel

        def ask() -> None:
            assert fsdp.fsdp_modules(model, root_only=True) == [model]
            assert model.check_is_root()
            assert model._is_root
            fsdp.set_state_dict_type(model, lib.StateDictType.SHARDED_STATE_DICT)
            assert fsdp.get_state_dict_type(model).state_dict_type is lib.StateDictType.SHARDED_STATE_DICT
            with model.no_sync():
                pass
            model.register_comm_hook(None, lambda state, grad, out: None)
            assert list(model.named_parameters())
            assert list(model.named_buffers())
            model.zero_grad()
            model.train(False)

        dst_round_robin(rank, ask)


@BOTH
@on_ranks(2, timeout=WATCHDOG_S)
def test_flat_shards_are_loaded_rank_by_rank(library: str, rank: int) -> None:
    with peer_quiet():
        one, other = (Trained(library, rank, False, seed=seed) for seed in range(2))
        expected = one.saved()[0]
        with one.kind("LOCAL"), other.kind("LOCAL"):
            state = one.model.state_dict()
            dst_round_robin(rank, other.model.load_state_dict, state)
        assert_equal(other.saved()[0], expected)


# -- where FSDP1 communicates, and we do not -------------------------------------------------------------------------


@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_whole_weights_are_loaded_and_flat_shards_saved_rank_by_rank(use_orig_params: bool, rank: int) -> None:
    source = Trained("ours", rank, use_orig_params)
    expected = source.saved()[0]
    for kind in ("FULL", "SHARDED"):
        one = Trained("ours", rank, use_orig_params, seed=1)
        with one.kind(kind):
            dst_round_robin(rank, one.model.load_state_dict, expected)
        assert_equal(one.saved()[0], expected)
    # Below a plain module, and a part of the names.
    plain = nn.Sequential(*(shard(seeded(seed=seed), use_orig_params=use_orig_params) for seed in (2, 3)))
    for wrapper in plain:
        FSDP.set_state_dict_type(wrapper, fsdp_flat.StateDictType.SHARDED_STATE_DICT)
    some = {f"{at}.{name}": value for at in range(2) for name, value in expected.items() if "blocks" in name}
    keys = dst_round_robin(rank, plain.load_state_dict, some, strict=False)
    assert keys.unexpected_keys == []
    assert not [name for name in keys.missing_keys if "blocks" in name]
    with source.kind("LOCAL"):
        state = dst_round_robin(rank, source.model.state_dict)
        other = Trained("ours", rank, use_orig_params, seed=1)
        with other.kind("LOCAL"):
            other.model.load_state_dict(state)
    assert_equal(other.saved()[0], expected)


@on_ranks(2, timeout=WATCHDOG_S)
def test_states_with_a_handler_are_loaded_rank_by_rank(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    fsdp_flat.register_optim_state_handler(model, "row_sums", merge=merge_rows, split=split_rows)
    states = FSDP.optim_state_dict(model, optimizer)
    dst_round_robin(rank, FSDP.optim_state_dict_to_load, model, optimizer, states, load_directly=True)
    assert_equal(FSDP.optim_state_dict(model, optimizer), states)


@ORIG_PARAMS
@on_ranks(2, timeout=WATCHDOG_S)
def test_a_whole_value_that_does_not_fit_is_an_error_of_its_rank_and_changes_nothing_there(
    use_orig_params: bool, rank: int
) -> None:
    source, one = (Trained("ours", rank, use_orig_params, seed=seed) for seed in range(2))
    weights, states = source.saved()
    before, states_before = one.saved()
    bad_weights = {**weights, "last.weight": torch.ones(1, 1)}
    bad_states = copy.deepcopy(states)
    bad_states["state"]["last.weight"]["exp_avg"] = torch.ones(3)
    for kind in ("FULL", "SHARDED"):
        with one.kind(kind):
            if rank == 1:
                with pytest.raises(RuntimeError, match=r"size mismatch for last\.weight"):
                    one.model.load_state_dict(bad_weights)
                with pytest.raises(LoadError, match=r"'exp_avg' of 'last\.weight' has shape \(3,\)"):
                    FSDP.optim_state_dict_to_load(one.model, one.optimizer, bad_states, load_directly=True)
            dist.barrier()
        assert_equal(one.saved()[0], before)
        assert_equal(one.saved()[1], states_before)
    dst_round_robin(rank, one.model.load_state_dict, weights)
    dst_round_robin(rank, FSDP.optim_state_dict_to_load, one.model, one.optimizer, states, load_directly=True)
    assert_equal(one.saved(), (weights, states))
