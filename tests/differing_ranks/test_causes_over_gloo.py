"""Ranks that part in a step, most without shared memory: each gets the cause, with rank and unit, not gloo's text."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import OptionError, PeerFailureError
from tests.support import on_ranks
from tests.support.beside import batch
from tests.support.kit import BLOCKS, square_loss, wrapped
from tests.support.models import Stack
from tests.support.patience import LATE_S, SECONDS, give_up_soon, impatient, logged, wait_until

TRANSPORTS = pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])


class Moody(Stack):
    """Raises before block ``bad``."""

    bad: int | None = None

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index == self.bad:
                raise ValueError("an odd batch. Look at the sampler.")
            x = block(x)
        return x


def ready(*, shared: bool = False) -> FSDP:
    """A model that has made a step over a group of its own."""
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = str(int(shared))
    group = dist.new_group()
    model = wrapped(Moody().double(), auto_wrap_policy=BLOCKS, process_group=group, use_orig_params=True)
    square_loss(model, batch(dist.get_rank())).backward()
    return model


@on_ranks(2, 3, timeout=50)
def test_ranks_that_wait_for_one_that_raised_get_its_error_and_their_unit(rank: int) -> None:
    model = ready()
    give_up_soon(model.process_group)
    if rank == 1:
        model.module.bad = 1
        with pytest.raises(ValueError, match="an odd batch"):
            model(batch(rank))
    else:
        with pytest.raises(PeerFailureError) as caught:
            square_loss(model, batch(rank)).backward()
        text = str(caught.value)
        assert f"Rank {rank} of the group was in the all-gather of unit 'blocks." in text, text
        assert "rank 1 raised ValueError: an odd batch" in text, text
    assert all(unit.is_sharded and unit.phase.value == "idle" for unit in model._unit.step.units)
    dist.barrier()


@on_ranks(2, timeout=50)
@TRANSPORTS
def test_a_rank_that_cannot_build_a_unit_is_named_by_the_others_first_forward(shared: bool, rank: int) -> None:
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = str(int(shared))
    group = dist.new_group()
    give_up_soon(group)
    with torch.inference_mode(rank == 1):
        model = Stack()
    if rank == 1:
        with pytest.raises(OptionError, match=r"created inside torch.inference_mode\(\)"):
            FSDP(model, process_group=group, use_orig_params=True)
    else:
        built = FSDP(model, process_group=group, use_orig_params=True)
        with (
            impatient(),
            pytest.raises(PeerFailureError, match=r"rank 1 raised OptionError: Parameter 'first\.weight' of unit"),
        ):
            built(batch(rank).float())
    dist.barrier()


@on_ranks(3, timeout=50)
def test_the_text_has_each_cause_and_the_advice_once(rank: int) -> None:
    model = ready()
    if rank == 1:
        model.module.bad = 1
        with pytest.raises(ValueError, match="an odd batch"):
            model(batch(rank))
    else:
        # Each waits for the reports of both others.
        with impatient(REPORT_TIMEOUT_S=SECONDS), pytest.raises(PeerFailureError) as caught:
            square_loss(model, batch(rank)).backward()
        text = str(caught.value)
        assert ".." not in text, text
        assert "remote worker" not in text, text
        assert text.count("Every rank must run the same units") == 1, text
        assert text.count("rank 1 raised ValueError: an odd batch. Look at the sampler") == 1, text
        assert text.count("Of the others") == 1, text
        assert text.endswith("that came first."), text
        assert f"rank {2 - rank} was in the all-gather of unit 'blocks." in text, text
    dist.barrier()


@on_ranks(2, timeout=50)
def test_a_rank_that_makes_fewer_steps_leaves_the_others_with_their_unit_and_its_number(rank: int) -> None:
    model = ready()
    give_up_soon(model.process_group)
    if rank == 0:
        with (
            impatient(),
            pytest.raises(PeerFailureError, match=r"all-gather of unit 'Moody'.*rank\(s\) \[1\] reported nothing"),
        ):
            square_loss(model, batch(rank)).backward()
    dist.barrier()


@on_ranks(2, timeout=50)
def test_a_rank_that_waits_long_says_once_for_which_rank_and_unit(rank: int) -> None:
    model = ready()
    if rank == 1:
        wait_until("rank 0 has waited")
        time.sleep(LATE_S)  # rank 0 looks several times more
    with impatient(real=rank == 1), logged(f"rank {rank} has waited") as said:
        square_loss(model, batch(rank)).backward()
    assert sum("has waited 0 s for rank(s) [1] in the all-gather of unit 'Moody'" in text for text in said) == 1 - rank


@TRANSPORTS
@on_ranks(2, timeout=50)
def test_a_wait_for_a_rank_that_has_raised_ends_before_the_timeout_of_the_group(shared: bool, rank: int) -> None:
    waits_for_one_that_raised(shared, rank)


@pytest.mark.from_size("all", "waits for as long as a program")
@TRANSPORTS
@on_ranks(2, timeout=50)
def test_such_a_wait_ends_with_the_patience_of_the_library_too(shared: bool, rank: int) -> None:
    waits_for_one_that_raised(shared, rank, real=True)


def waits_for_one_that_raised(shared: bool, rank: int, *, real: bool = False) -> None:
    model = ready(shared=shared)
    if rank == 1:
        model.module.bad = 0
        with pytest.raises(ValueError, match="an odd batch"):
            model(batch(rank))
    else:
        with impatient(real=real), pytest.raises(PeerFailureError, match="rank 1 raised ValueError: an odd batch"):
            square_loss(model, batch(rank)).backward()
    dist.barrier()


@TRANSPORTS
@on_ranks(2, timeout=50)
def test_an_error_that_every_rank_has_caught_ends_no_wait_of_another_model(shared: bool, rank: int) -> None:
    model = ready(shared=shared)
    other = wrapped(Stack().double(), auto_wrap_policy=BLOCKS, process_group=model.process_group, use_orig_params=True)
    model.module.bad = 0
    with pytest.raises(ValueError, match="an odd batch"):
        model(batch(rank))
    with impatient():
        for pause in (0.0, LATE_S):
            time.sleep(pause * (1 - rank))
            square_loss(other, batch(rank)).backward()
