"""Training on shards equals training of a replicated model, and torch's FSDP1, and so does evaluation between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch

from tests.support import OWN_STATISTICS, Ranks, assert_close, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS
from tests.support.both_sides import LAYOUTS, OTHER_MESHES, PLAIN, Layout, beside_case, train_case
from tests.support.zoo import CASES

RanksOf = Callable[..., Ranks]

KINDS = {True: "originals", False: "flat"}
TORCHS = {"originals": "fsdp1", "flat": "fsdp1_flat"}


def layouts(by_num_ranks: Mapping[int, Iterable[Layout]]) -> list[object]:
    return [
        pytest.param(num_ranks, layout, id=f"{num_ranks}ranks-{layout}")
        for num_ranks, some in by_num_ranks.items()
        for layout in some
    ]


def models(names: Iterable[str] = CASES, *, with_peer: bool = False) -> list[object]:
    return [
        pytest.param(
            name, KINDS[kind], id=f"{name}-{KINDS[kind]}", marks=OWN_STATISTICS if name in WITH_STATISTICS else ()
        )
        for name in names
        for kind in CASES[name].kinds
        if not with_peer or kind not in CASES[name].peer_cannot
    ]


# Models whose buffers follow the rank's own batches.
WITH_STATISTICS = {"buffers", "batch norm", "batch norm as units"}
# One of each kind, for the whole product of strategies; its variants go with the first strategy.
CHIEF = [
    "uneven sizes",
    "nested units",
    "tied inside a unit",
    "tied across units",
    "buffers",
    "batch norm",
    "unused branch",
    "unit used three times",
    "output in list in tuple in dict",
    "frozen middle unit",
    "adapters inside units",
    "mixed dtypes",
]
FIRST = {num_ranks: some[:1] for num_ranks, some in LAYOUTS.items()}


@pytest.mark.parametrize("name, front", models(CHIEF))
@pytest.mark.parametrize("num_ranks, layout", layouts(LAYOUTS))
def test_training_on_shards_equals_training_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, name: str, front: str
) -> None:
    ranks(num_ranks).run(train_case, name, layout, front)


@pytest.mark.parametrize("name, front", models(name for name in CASES if name not in CHIEF))
@pytest.mark.parametrize("num_ranks, layout", layouts(FIRST))
def test_training_variants_of_the_models_equals_training_them_replicated(
    ranks: RanksOf, num_ranks: int, layout: Layout, name: str, front: str
) -> None:
    ranks(num_ranks).run(train_case, name, layout, front)


@pytest.mark.parametrize("name, front", models(["uneven sizes", "tied across units"]))
@pytest.mark.parametrize("num_ranks, layout", layouts(OTHER_MESHES))
def test_meshes_of_every_shape_train_as_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, name: str, front: str
) -> None:
    ranks(num_ranks).run(train_case, name, layout, front)


@pytest.mark.parametrize("name, front", models(with_peer=True))
def test_every_model_trains_as_in_torch_fsdp1_where_that_can_run_it(ranks: RanksOf, name: str, front: str) -> None:
    ranks(2).run(train_case, name, Layout("FULL_SHARD"), front, TORCHS[front])


PEER_LAYOUTS = {
    2: [*PLAIN[1:], Layout("HYBRID_SHARD", (1, 2))],
    4: [Layout("FULL_SHARD"), Layout("HYBRID_SHARD", (2, 2)), Layout("_HYBRID_SHARD_ZERO2", (2, 2))],
}


@pytest.mark.parametrize("name, front", models(["uneven sizes", "nested units"], with_peer=True))
@pytest.mark.parametrize("num_ranks, layout", layouts(PEER_LAYOUTS))
def test_every_strategy_trains_as_in_torch_fsdp1(
    ranks: RanksOf, num_ranks: int, layout: Layout, name: str, front: str
) -> None:
    ranks(num_ranks).run(train_case, name, layout, front, TORCHS[front])


# -- evaluation ---------------------------------------------------------------------------------------------------


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("name", [pytest.param("batch norm", marks=OWN_STATISTICS), "transformer", "nested units"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation_before_and_between_steps_sees_the_current_parameters_and_buffers(
    name: str, front: str, strategy: str
) -> None:
    beside = beside_case(name, front, Layout(strategy))
    for step in range(3):
        losses = []
        for model in beside.models:
            model.eval()
            with torch.no_grad():
                losses.append(CASES[name].loss_of(model, beside.batch(100 + step)))
            model.train()
        assert_close(losses[0], losses[1], **CLOSE, what=f"evaluation {step}")
        beside.train()
    beside.check_state_dict()
