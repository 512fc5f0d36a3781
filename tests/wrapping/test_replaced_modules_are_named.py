"""A module replaced after wrapping (``resize_token_embeddings``) is named before it trains, and where it is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard, save_checkpoint
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import full_params, seeded
from tests.support.peer import PeerFSDP

REPLACED = (
    "Modules were replaced after wrapping, and no unit manages the new trainable parameters: 'embed.weight' (unit"
)
DRIFTED = (
    "Trainable parameters that no unit manages differ between ranks, and a state dict holds rank 0's: 'embed.weight'"
)


class Words(nn.Module):
    """An embedding that can grow, and a head."""

    def __init__(self, num_words: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))

    def resize(self) -> None:
        """Replace the embedding by a longer one, the same on every rank."""
        torch.manual_seed(1)
        self.embed = nn.Embedding(12, 4)


FRONTS: dict[str, Callable[[nn.Module], Any]] = {
    "flat": lambda model: FSDP(model),
    "originals": lambda model: FSDP(model, use_orig_params=True),
    "fully_shard": lambda model: fully_shard(model),
}


def step(model: Any, rank: int) -> None:
    words = torch.randint(0, 10, (8,), generator=torch.Generator().manual_seed(rank))
    model(words).pow(2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@contextmanager
def warned(*beginnings: str) -> Iterator[None]:
    """Expect these warnings inside the block, in this order, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in caught]
    assert [text[: len(beginning)] for text, beginning in zip(texts, beginnings, strict=True)] == [*beginnings], texts


@pytest.mark.of_guards
@pytest.mark.parametrize("front", FRONTS)
@on_ranks(2)
def test_a_replaced_module_is_named_once_on_every_rank_before_the_first_step(front: str, rank: int) -> None:
    model = FRONTS[front](seeded(Words))
    getattr(model, "module", model).resize()
    with torch.no_grad(), warned():
        model(torch.arange(3))
    with warned(REPLACED):
        model(torch.arange(3))
    with warned():
        model(torch.arange(3))


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_it_trains_as_on_fsdp1_by_default_and_like_the_whole_model_where_its_gradients_are_averaged(
    use_orig_params: bool, rank: int
) -> None:
    ours, theirs, averaged = (
        kind(seeded(Words), use_orig_params=use_orig_params, **kwargs)
        for kind, kwargs in ((FSDP, {}), (PeerFSDP, {"device_id": torch.device("cpu")}), (FSDP, {}))
    )
    for model in (ours, theirs, averaged):
        model.module.resize()
    averaged.average_ignored_gradients()
    with warned(REPLACED):
        step(ours, rank)
    step(theirs, rank)
    assert_equal(ours.module.embed.weight, theirs.module.embed.weight)
    step(averaged, rank)
    plain: Any = seeded(Words)
    plain.resize()
    inputs = [torch.randint(0, 10, (8,), generator=torch.Generator().manual_seed(each)) for each in range(2)]
    plain(torch.cat(inputs)).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(full_params(averaged), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("front", FRONTS)
@on_ranks(2)
def test_a_module_replaced_in_mid_run_is_named_by_the_save_that_keeps_rank_zeros(
    front: str, rank: int, tmp_path: Path
) -> None:
    model = FRONTS[front](seeded(Words))
    step(model, rank)
    getattr(model, "module", model).resize()
    step(model, rank)
    with warned(*[DRIFTED] * (rank == 0)):
        save_checkpoint(tmp_path, model)
    if front != "fully_shard":
        other = FRONTS[front](seeded(Words))
        step(other, rank)
        other.module.resize()
        step(other, rank)
        with warned(*[DRIFTED] * (rank == 0)):
            other.state_dict()


@pytest.mark.parametrize("front", FRONTS)
@on_ranks(2)
def test_adapters_frozen_modules_removed_ones_and_a_declared_choice_are_not_warned_of(front: str, rank: int) -> None:
    models = [FRONTS[front](seeded(Words)) for _ in range(4)]
    adapted, frozen, removed, declared = (getattr(model, "module", model) for model in models)
    adapted.head = nn.Sequential(adapted.head, nn.Linear(10, 10))
    frozen.resize()
    frozen.embed.requires_grad_(False)
    removed.head = nn.Identity()
    declared.resize()
    with warned():
        for model in models[:3]:
            model(torch.arange(3))
        if front != "fully_shard":
            models[3].average_ignored_gradients(False)
            models[3](torch.arange(3))
