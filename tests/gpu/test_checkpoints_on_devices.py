"""State dicts and checkpoints of models on a device come back to the bit, and training goes on with them."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch

from fsdp_flat import CPUOffload, ShardingStrategy, StateDictType, load_checkpoint, save_checkpoint
from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.gpu.accelerator import Trainer, on_devices
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import full_params, square_loss

BOTH_KINDS = [False, True]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
KINDS = list(itertools.product([FULL, SHARDED], BOTH_KINDS, [False, True]))


def case_id(value: Any) -> str | None:
    """Make ids of flags readable."""
    return str(value) if isinstance(value, bool) else None


def trainer_of(where: str, use_orig_params: bool, offload: bool = False, **kwargs: Any) -> Trainer:
    """Make a model with AdamW, whose state has several tensors and a number."""
    return Trainer(
        where,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=True) if offload else None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        **kwargs,
    )


def train(trainer: Trainer, steps: range) -> None:
    """Train the sharded model alone."""
    for step in steps:
        square_loss(trainer.ours, trainer.batch(step)).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def assert_train_alike(one: Trainer, other: Trainer) -> None:
    """Compare the parameters of two models before and after one more step of each."""
    assert_equal(full_params(other.ours), full_params(one.ours), what="loaded parameters")
    for trainer in (one, other):
        train(trainer, range(7, 8))
    assert_equal(full_params(other.ours), full_params(one.ours), what="parameters after another step")


@on_devices("kind, use_orig_params, offload", KINDS, [(FULL, True, False), (SHARDED, False, False)], case_id)
@on_ranks(2)
def test_state_dicts_of_model_and_optimizer_come_back(
    where: str, kind: StateDictType, use_orig_params: bool, offload: bool
) -> None:
    saved = trainer_of(where, use_orig_params, offload)
    train(saved, range(2))
    torch.manual_seed(1)
    loaded = trainer_of(where, use_orig_params, offload)
    assert not torch.equal(full_params(loaded.ours)["first.weight"], full_params(saved.ours)["first.weight"])
    with FSDP.state_dict_type(saved.ours, kind), FSDP.state_dict_type(loaded.ours, kind), warnings.catch_warnings():
        # torch's ShardedTensor, which sharded state dicts are made of, is deprecated in some versions.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        state = saved.ours.state_dict()
        optim_state = FSDP.optim_state_dict(saved.ours, saved.optimizer)
        loaded.ours.load_state_dict(state)
        own = FSDP.optim_state_dict_to_load(loaded.ours, loaded.optimizer, optim_state)
        loaded.optimizer.load_state_dict(own)
    if kind is FULL:
        assert_equal(
            {name: value.cpu() for name, value in state.items()},
            {name: value.cpu() for name, value in full_params(saved.ours).items()},
            what="full state dict",
        )
    assert_train_alike(saved, loaded)


@on_devices(
    "background, use_orig_params",
    list(itertools.product([False, True], BOTH_KINDS)),
    [(False, True), (True, False)],
    case_id,
)
@on_ranks(2)
def test_a_checkpoint_is_saved_and_loaded(where: str, background: bool, use_orig_params: bool, tmp_path: Path) -> None:
    saved = trainer_of(where, use_orig_params)
    train(saved, range(2))
    save = save_checkpoint(tmp_path, saved.ours, saved.optimizer, {"step": 2}, background=background)
    before = full_params(saved.ours)
    if background:
        # The save has copied what it writes: training goes on meanwhile.
        train(saved, range(2, 4))
    save.wait()
    torch.manual_seed(1)
    loaded = trainer_of(where, use_orig_params, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    found = load_checkpoint(tmp_path, loaded.ours, loaded.optimizer)
    assert found is not None
    assert_equal(full_params(loaded.ours), before, what="loaded parameters")
    if background:
        train(loaded, range(2, 4))
    assert_close(full_params(loaded.ours), full_params(saved.ours), rtol=0, atol=0)
    assert_train_alike(saved, loaded)
