"""Every member of FSDP1's wrapper class is here, and the older ones can be called."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.compat.torch_names import PEER
from fsdp_flat.errors import OptionError
from fsdp_flat.fully_sharded_data_parallel import HandleTrainingState, ProcessGroupType, TrainingState
from tests.support import on_ranks
from tests.support.wrapper_models import seeded, shard

needs_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the list is of torch 2.13, and this is {torch.__version__}"
)


@needs_torch_2_13
def test_the_wrapper_has_every_member_of_fsdp1s() -> None:
    theirs: Any = importlib.import_module(PEER).FullyShardedDataParallel
    assert [name for name in dir(theirs) if not hasattr(FSDP, name)] == []


def test_the_type_of_process_groups_is_that_of_the_argument() -> None:
    assert ProcessGroupType == importlib.import_module(f"{PEER}._init_utils").ProcessGroupType


@on_ranks(2)
def test_a_caller_may_set_the_state_of_the_step(rank: int) -> None:
    model = shard(seeded())
    for state in ((TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD), (TrainingState.IDLE,) * 2):
        wanted = state[0], HandleTrainingState[state[1].name]
        with model._use_training_state(*wanted):
            assert (model.training_state, model._handle._training_state) == wanted
        assert model.training_state is TrainingState.IDLE
    with (
        pytest.raises(OptionError, match="do not occur together"),
        model._use_training_state(TrainingState.IDLE, HandleTrainingState.FORWARD),
    ):
        pass


def test_the_warnings_of_older_arguments_can_be_called() -> None:
    FSDP._warn_optim_input(None)
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP._warn_optim_input([nn.Parameter(torch.ones(1))])
    with pytest.warns(FutureWarning, match="old is an older form of new"):
        FSDP._warn_legacy_optim_state_dict("old", "new")
