"""What autograd saves goes to the host and comes back: the same gradients, and memory that is given back.

On the CPU nothing is to be offloaded. These tests let the host's memory stand for the accelerator's too, with copies
that are made at once; tests/rehearsal/test_offload.py shows their order on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, offload_activations, unshard_for
from fsdp_flat.composable import fully_shard
from fsdp_flat.core import step_of, units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.runtime.activation_offload import ActivationOffload, storages_of
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.beside import blocks_and_root, children_and_root
from tests.support.host_swap import HostSwapOnCpu
from tests.support.kit import BLOCKS, Block, Stack, batch, full_grads, seeded, square_loss, wrapped

FRONTS = pytest.mark.parametrize("front", ["wrapper", "fully_shard"])


class Checkpointed(Stack):
    """Recomputes its blocks in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(5)
        self.use_reentrant = use_reentrant

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Stack(5),
    "recomputed": lambda: Checkpointed(use_reentrant=False),
    "recomputed, reentrant": lambda: Checkpointed(use_reentrant=True),
}


def sharded(front: str, build: Callable[[], nn.Module] = MODELS["plain"]) -> Any:
    if front == "fully_shard":
        return blocks_and_root(seeded(build), fully_shard)
    return wrapped(seeded(build), auto_wrap_policy=BLOCKS)


@contextmanager
def offloaded(model: nn.Module, *, keep: int = 1, min_nbytes: int = 0) -> Iterator[HostSwapOnCpu]:
    """Offload as on an accelerator."""
    swap, step = HostSwapOnCpu(), step_of(model, units_of(model)[0])
    offload = ActivationOffload(step, swap, storages_of(model, step), keep=keep, min_nbytes=min_nbytes)  # type: ignore[arg-type]
    try:
        with saved_tensors_hooks(offload.pack, offload.unpack):
            yield swap
    finally:
        offload.close()


def grads_of(model: nn.Module) -> dict[str, Any]:
    found = full_grads(model)
    model.zero_grad()
    return found


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_gradients_are_those_without_to_the_bit(front: str, name: str, keep: int, rank: int) -> None:
    model = sharded(front, MODELS[name])
    for step in range(3):
        square_loss(model, batch(rank, step)).backward()
        expected = grads_of(model)
        with offloaded(model, keep=keep) as swap:
            loss = square_loss(model, batch(rank, step))
        sent = swap.num_to_host
        assert sent > 0
        loss.backward()
        assert (swap.num_to_host, swap.num_to_device) == (sent, sent)
        assert_equal(grads_of(model), expected)


@on_ranks(2)
@FRONTS
def test_forwards_and_backwards_inside_one_block_in_any_order(front: str, rank: int) -> None:
    def losses(model: nn.Module) -> None:
        first = square_loss(model, batch(rank))
        square_loss(model, batch(rank, 1)).backward()
        first.backward()
        (square_loss(model, batch(rank, 2)) + square_loss(model, batch(rank, 3))).backward()

    model = sharded(front)
    losses(model)
    expected = grads_of(model)
    with offloaded(model):
        losses(model)
    assert_equal(grads_of(model), expected)


@on_ranks(2)
@FRONTS
@pytest.mark.parametrize("keep", [0, 1])
def test_gradients_accumulated_over_many_backwards_inside_one_block_are_those_without(
    front: str, keep: int, rank: int
) -> None:
    """A backward gives memory back, whose address another microbatch's activation may get."""
    for num_layers in range(3, 7):

        def build(num_layers: int = num_layers) -> nn.Module:
            return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(num_layers)])

        if front == "fully_shard":
            model: Any = children_and_root(seeded(build), fully_shard)
        else:
            model = wrapped(seeded(build), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

        def accumulate(model: nn.Module = model) -> dict[str, Any]:
            for step in range(8):
                square_loss(model, batch(rank, step, 64, 128)).backward()
            return grads_of(model)

        expected = accumulate()
        with offloaded(model, keep=keep):
            found = accumulate()
        assert_equal(found, expected)


@on_ranks(2)
@FRONTS
def test_a_graph_that_is_kept_gives_the_same_gradients_again(front: str, rank: int) -> None:
    model = sharded(front)
    square_loss(model, batch(rank)).backward()
    expected = grads_of(model)
    with offloaded(model):
        loss = square_loss(model, batch(rank))
    loss.backward(retain_graph=True)
    assert_equal(grads_of(model), expected)
    loss.backward()
    assert_equal(grads_of(model), expected)


@on_ranks(2)
@FRONTS
def test_only_the_kept_layers_and_one_more_are_on_the_accelerator_after_a_forward(front: str, rank: int) -> None:
    class Noting(Stack):
        """Notes references to the outputs of each block, which the next one saves."""

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                swap.note(x)
            return x

    swap = HostSwapOnCpu()
    model = sharded(front, lambda: Noting(5))
    alive = []
    for keep in (None, 1, 1):
        swap.noted.clear()
        if keep is None:
            loss = square_loss(model, batch(rank))
        else:
            with offloaded(model, keep=keep):
                loss = square_loss(model, batch(rank))
        alive.append(swap.noted_alive())
        loss.backward()
    # The output of a block is saved by the next one, and that of the last by the head. After the first forward with
    # offloading the last block is known: it and the first one keep what they have saved.
    assert alive[0] == [True] * 5
    assert alive[2] == [False, False, False, True, True]


@on_ranks(2)
def test_a_saved_tensor_that_is_changed_in_place_raises_in_backward(rank: int) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.changes = nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.up(x))
            z = y * y
            if self.changes:
                y.add_(1.0)
            return z

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Changing() for _ in range(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = blocks_and_root(seeded(Model), fully_shard)
    square_loss(model, batch(rank)).backward()
    model.blocks[2].changes = True
    with offloaded(model):
        loss = square_loss(model, batch(rank))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
@FRONTS
def test_on_a_cpu_nothing_is_copied_and_gradients_are_the_same(front: str, rank: int) -> None:
    model = sharded(front)
    square_loss(model, batch(rank)).backward()
    expected = grads_of(model)
    with offload_activations(model, min_nbytes=0):
        loss = square_loss(model, batch(rank))
    loss.backward()
    assert_equal(grads_of(model), expected)


@on_ranks(2)
def test_a_model_without_layers_of_its_own_units_is_refused(rank: int) -> None:
    plain, one_unit, layers = Stack(), wrapped(Block()), Stack()
    for block in layers.blocks:
        fully_shard(block)
    for model, message in ((plain, "holds no"), (one_unit, "several units"), (layers, "several units")):
        with pytest.raises(OptionError, match=message), offload_activations(model):
            pass
    whole = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    with pytest.raises(OptionError, match="integers from 0; got keep=-1"), offload_activations(whole, keep=-1):
        pass


@on_ranks(2)
def test_a_block_that_is_called_and_never_entered_says_so_where_it_is_called() -> None:
    model = sharded("wrapper")
    for block in (
        offload_activations,
        unshard_for,
        FSDP.summon_full_params,
        FSDP.no_sync,
        partial(FSDP.state_dict_type, state_dict_type=StateDictType.SHARDED_STATE_DICT),
    ):
        with pytest.warns(UserWarning, match="called and not entered") as told:
            block(model)
        assert told[0].filename == __file__

    @offload_activations(model)
    def forward() -> torch.Tensor:
        return model(batch(0))

    for _ in range(2):
        forward().sum().backward()
