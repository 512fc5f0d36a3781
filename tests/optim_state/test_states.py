"""Optimizer states of all kinds: what is saved, what is refused, and by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_flat
from fsdp_flat import FullOptimStateDictConfig, OptimStateKeyType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import (
    LoadError,
    OptionError,
    OptionTypeError,
    PeerFailureError,
    RankMismatchError,
    UnsupportedError,
)
from tests.memory.test_memory import settled_bytes
from tests.optim_state.factored import factored, merge_rows, split_rows
from tests.state_dict.kit import FULL, LOCAL, OPTIMIZERS, SHARDED, TASKS, groups_of, load, save, train, wrapped
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.steps import recorded
from tests.support.wrapper_models import batch, seeded, shard

CODECS = pytest.mark.parametrize("kind", [FULL, LOCAL, SHARDED], ids=lambda kind: kind.name.split("_")[0].lower())
RANK0 = FullOptimStateDictConfig(rank0_only=True)
TASK = TASKS["uneven"]


class Noting(torch.optim.SGD):
    """Keeps numbers, None and tuples besides a momentum, and makes them in another order on each rank."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            extra: list[tuple[str, Any]] = [
                ("count", 3),
                ("rate", torch.tensor(0.5)),
                ("nothing", None),
                ("pair", (1, 2.5)),
                ("squares", torch.ones_like(param) * 2),
            ]
            order = extra if torch.distributed.get_rank() else extra[::-1]
            if param.grad is not None:
                self.state[param].update(order)


def pair(use_orig_params: bool, seed: int = 0, optim: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(seeded(seed=seed), use_orig_params=use_orig_params)
    make = optim or (lambda params: Noting(params, lr=0.05, momentum=0.9))
    optimizer = make(model.parameters())
    train(model, optimizer, TASK, range(2))
    return model, optimizer


@ORIG_PARAMS
@CODECS
@on_ranks(2)
def test_scalars_none_and_tuples_ride_along_whatever_order_ranks_made_them_in(kind: Any, use_orig_params: bool) -> None:
    model, optimizer = pair(use_orig_params)
    _, states = save(model, optimizer, kind)
    for row in states["state"].values():
        assert (row["count"], row["nothing"], row["pair"]) == (3, None, (1, 2.5))
        assert_equal(row["rate"], torch.tensor(0.5))
    other, other_optimizer = pair(use_orig_params, seed=1)
    with FSDP.state_dict_type(other, kind):
        other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, states))
    assert_equal(save(other, other_optimizer, FULL)[1], save(model, optimizer, FULL)[1])


class Remembering(torch.optim.SGD):
    """Keeps a list and a dict, which it changes in place."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for row in self.state.values():
            row.setdefault("history", []).append(1)
            row.setdefault("notes", {"seen": []})["seen"].append(1)


@ORIG_PARAMS
@CODECS
@on_ranks(2)
def test_states_that_are_no_tensors_are_copies_in_a_state_dict_and_out_of_it(kind: Any, use_orig_params: bool) -> None:
    def append(states: Any, value: int) -> None:
        for row in states.values():
            row["history"].append(value)
            row["notes"]["seen"].append(value)

    def held(states: Any) -> list[Any]:
        return [(row["history"], row["notes"]) for row in states.values()]

    model, optimizer = pair(use_orig_params, optim=lambda params: Remembering(params, lr=0.05, momentum=0.9))
    saved = save(model, optimizer, kind)[1]["state"]
    expected = [([1, 1], {"seen": [1, 1]})] * len(saved)
    append(optimizer.state, 2)
    assert held(saved) == expected
    with FSDP.state_dict_type(model, kind):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, {"state": saved})["state"]
    append(loaded, 3)
    assert held(saved) == expected
    # No two parameters have one list, also if one flat parameter holds both.
    append(saved, 4)
    assert held(saved) == [([1, 1, 4], {"seen": [1, 1, 4]})] * len(saved)


@ORIG_PARAMS
@pytest.mark.parametrize("how", ["HYBRID_SHARD", "HYBRID_SHARD mesh"])
@on_ranks(4)
def test_hybrid_strategies_save_for_rank_zero_of_the_world_and_load_from_it(
    how: str, use_orig_params: bool, rank: int
) -> None:
    groups = groups_of(how)
    make = OPTIMIZERS["adamw"]
    model, other = (wrapped(TASK, how, groups, seed=seed, use_orig_params=use_orig_params) for seed in range(2))
    optimizer, other_optimizer = make(model.parameters()), make(other.parameters())
    for one, its in ((model, optimizer), (other, other_optimizer)):
        train(one, its, TASK, range(1))
    expected = save(model, optimizer, FULL)[1]
    with FSDP.state_dict_type(model, FULL, None, RANK0), FSDP.state_dict_type(other, FULL, None, RANK0):
        saved = FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (rank == 0)
        loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, saved or None)
        other_optimizer.load_state_dict(loaded)
        with pytest.raises(OptionError if rank == 0 else PeerFailureError):
            FSDP.optim_state_dict_to_load(other, other_optimizer, None)
    if rank == 0:
        assert_equal(saved, expected)
    assert_equal(save(other, other_optimizer, FULL)[1], expected)


@on_ranks(2)
def test_what_rank_zero_cannot_send_is_told_on_every_rank(rank: int) -> None:
    model, optimizer = pair(True)
    states = save(model, optimizer, FULL)[1]
    states["state"]["first.weight"]["strange"] = object()
    with FSDP.state_dict_type(model, FULL, None, RANK0):
        for given, kind in (
            (states, UnsupportedError),
            (None, OptionError),
            ({"param_groups": []}, OptionError),
            ({"state": {"first.weight": [1]}}, OptionError),
        ):
            text = (
                None if rank == 0 else f"Rank 0 of the group cannot share its optimizer state dict: {kind.__name__}: "
            )
            with pytest.raises(kind if rank == 0 else PeerFailureError, match=text):
                FSDP.optim_state_dict_to_load(model, optimizer, given if rank == 0 else None)


@on_ranks(2)
def test_rank_zero_sends_numbers_by_their_value_alone(rank: int) -> None:
    model, optimizer = pair(True)
    states = save(model, optimizer, FULL)[1]
    # The storage of a view is the tensor's; subclasses of numbers are no types that torch.load takes for plain.
    for row in states["state"].values():
        row["rate"] = torch.full((100_000,), 0.25)[7]
    states["param_groups"][0]["lr"] = np.float64(0.125)
    with FSDP.state_dict_type(model, FULL, None, RANK0), recorded() as record:
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, states if rank == 0 else None)
    assert max(call.nbytes for call in record.calls) < 50_000
    lr = loaded["param_groups"][0]["lr"]
    assert (lr, type(lr)) == (0.125, float)
    assert {float(row["rate"]) for row in loaded["state"].values()} == {0.25}


@on_ranks(2)
def test_states_of_an_ignored_parameter_from_rank_zero_take_their_own_memory_only(rank: int) -> None:
    module = seeded()
    module.table = nn.Parameter(torch.ones(1 << 16))
    model = shard(module, use_orig_params=True, ignored_states=[module.table])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    states = save(model, optimizer, FULL)[1]
    before = settled_bytes()
    peaks: list[int] = []
    with FSDP.state_dict_type(model, FULL, None, RANK0), recorded(on_call=lambda: peaks.append(settled_bytes())):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, states if rank == 0 else None)
    (table,) = [row["momentum_buffer"] for row in loaded["state"].values() if row["momentum_buffer"].numel() == 1 << 16]
    assert_equal(table, torch.ones(1 << 16))
    assert max(peaks) - before < 1.5 * table.nbytes


@ORIG_PARAMS
@on_ranks(2)
def test_parameters_without_state_and_frozen_ones_are_left_out_and_stay_so(use_orig_params: bool) -> None:
    module = seeded()
    module.blocks[0].requires_grad_(False)
    model = shard(module, use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=0.1, weight_decay=0.5
    )
    fresh = save(model, optimizer, FULL)[1]
    assert fresh["state"] == {}
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, fresh))
    train(model, optimizer, TASK, range(1))
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        assert not [name for name in states["state"] if name.startswith("blocks.0")]
        assert "blocks.1.up.weight" in states["state"]
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
    assert_equal(save(model, optimizer, FULL)[1], save(model, optimizer, FULL)[1])


@on_ranks(2)
def test_a_rank_whose_state_has_another_dtype_is_told(rank: int) -> None:
    model, optimizer = pair(True)
    for row in optimizer.state.values() if rank == 0 else ():
        row["squares"] = row["squares"].double()
    with pytest.raises(OptionError, match=r"'squares' of '[\w.]+' .* is torch\.float\d\d on rank"):
        FSDP.optim_state_dict(model, optimizer)


@ORIG_PARAMS
@pytest.mark.parametrize("kind", [LOCAL, SHARDED], ids=["local", "sharded"])
@on_ranks(2)
def test_a_load_of_chunks_that_fails_on_one_rank_fails_on_all_and_changes_nothing(
    kind: Any, use_orig_params: bool, rank: int
) -> None:
    model, optimizer = pair(use_orig_params)
    states = save(model, optimizer, kind)[1]
    before = save(model, optimizer, FULL)[1]
    broken = {**states, "state": {name: dict(row) for name, row in states["state"].items()}}
    if rank == 1:
        broken["state"]["blocks.1.up.weight"]["momentum_buffer"] = torch.ones(3)
    for given, own in ((broken, LoadError), ({"param_groups": []} if rank else states, OptionError)):
        with FSDP.state_dict_type(model, kind), pytest.raises(own if rank else PeerFailureError) as caught:
            FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
        assert ("'momentum_buffer' of 'blocks.1.up.weight'" in str(caught.value)) == (given is broken)
    assert_equal(save(model, optimizer, FULL)[1], before)


@ORIG_PARAMS
@pytest.mark.filterwarnings("ignore:The optimizer state dict to load has no state")
@on_ranks(2)
def test_a_rank_that_was_given_no_states_stops_those_that_were_given_chunks(use_orig_params: bool, rank: int) -> None:
    model, optimizer = pair(use_orig_params, optim=lambda params: torch.optim.AdamW(params, lr=0.05))
    states = save(model, optimizer, SHARDED)[1]
    steps = {name: {"step": row["step"]} for name, row in states["state"].items()}
    for own in ({}, steps):
        given = {**states, "state": own} if rank else states
        with FSDP.state_dict_type(model, SHARDED), pytest.raises(RankMismatchError, match="different entries"):
            FSDP.optim_state_dict_to_load(model, optimizer, given)
    # On every rank it is the state dict of an optimizer that has taken no step.
    with FSDP.state_dict_type(model, SHARDED):
        assert FSDP.optim_state_dict_to_load(model, optimizer, {**states, "state": {}})["state"] == {}


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = pair(True)
    other = torch.optim.AdamW(seeded().parameters())
    with pytest.raises(OptionError, match=r"a parameter of shape .* that is none of this model's"):
        FSDP.optim_state_dict(model, other)
    states = {"state": {}, "param_groups": []}
    with pytest.raises(OptionError, match="none of this model's"):
        FSDP.optim_state_dict_to_load(model, other, states)


@on_ranks(2)
def test_a_dict_with_too_few_groups_leaves_the_optimizer_as_it_was() -> None:
    model, optimizer = pair(True)
    states = save(model, optimizer, FULL)[1]
    before = save(model, optimizer, FULL)[1]
    with pytest.raises(ValueError):
        FSDP.optim_state_dict_to_load(model, optimizer, {**states, "param_groups": []}, load_directly=True)
    assert_equal(save(model, optimizer, FULL)[1], before)


@CODECS
@on_ranks(2)
def test_the_padding_of_a_flat_state_that_was_loaded_is_zero(kind: Any) -> None:
    model, optimizer = pair(use_orig_params=False)
    states = save(model, optimizer, kind)[1]
    # Memory that is not zero lies about, of every length that a shard may have.
    spoiled = [torch.full((size,), 7.0) for size in range(1, 500)]
    del spoiled
    with FSDP.state_dict_type(model, kind):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, states)
    for index, param in enumerate(optimizer.param_groups[0]["params"]):
        assert_equal(loaded["state"][index]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])


class Mastered(torch.optim.SGD):
    """Keeps copies of the parameters outside of ``state``, and adds them to its state dict."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.masters = [param.detach().clone() for param in self._held()]

    def _held(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:
        super().step()
        for master, param in zip(self.masters, self._held(), strict=True):
            master.add_(param.detach(), alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        given = super().state_dict()
        rows = {at: {**given["state"].get(at, {}), "master": master} for at, master in enumerate(self.masters)}
        return {**given, "state": rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for at, row in state_dict["state"].items():
            self.masters[at] = row["master"].clone()
        rows = {at: {"momentum_buffer": row["momentum_buffer"]} for at, row in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": rows})


@ORIG_PARAMS
@pytest.mark.parametrize("kind", [FULL, LOCAL, SHARDED, None], ids=["full", "local", "sharded", "checkpoint"])
@on_ranks(2)
def test_states_that_an_optimizer_adds_to_its_state_dict_are_saved_and_loaded(
    kind: Any, use_orig_params: bool, tmp_path: Path
) -> None:
    (model, optimizer), (other, other_optimizer) = (
        pair(use_orig_params, seed, lambda params: Mastered(params, lr=0.05, momentum=0.9)) for seed in range(2)
    )
    expected = save(model, optimizer, FULL)[1]
    assert {tuple(row) for row in expected["state"].values()} == {("master", "momentum_buffer")}
    assert not expected["state"]["last.bias"]["master"].equal(
        save(other, other_optimizer, FULL)[1]["state"]["last.bias"]["master"]
    )
    if kind is None:
        fsdp_flat.save_checkpoint(tmp_path, model, optimizer)
        fsdp_flat.load_checkpoint(tmp_path, other, other_optimizer)
    else:
        load(other, other_optimizer, kind, save(model, optimizer, kind))
    assert_equal(save(other, other_optimizer, FULL)[1], expected)


@ORIG_PARAMS
@on_ranks(2)
def test_hooks_of_an_optimizers_state_dict_run_and_decide(use_orig_params: bool, tmp_path: Path) -> None:
    model, optimizer = pair(use_orig_params, optim=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))

    def sevens(_: Any, given: Any) -> Any:
        rows = {key: {"momentum_buffer": row["momentum_buffer"] * 0 + 7} for key, row in given["state"].items()}
        return {**given, "state": rows}

    optimizer.register_state_dict_post_hook(sevens)
    calls: list[Any] = []
    optimizer.register_state_dict_pre_hook(calls.append)
    for row in save(model, optimizer, FULL)[1]["state"].values():
        assert (row["momentum_buffer"] == 7).all()
    fsdp_flat.save_checkpoint(tmp_path, model, optimizer)
    assert calls == [optimizer] * 2
    fsdp_flat.load_checkpoint(tmp_path, model, optimizer)
    # The padding of a flat parameter is zero.
    assert {value for row in optimizer.state.values() for value in row["momentum_buffer"].tolist()} <= {0.0, 7.0}


class Wrapped:
    """Shows a group more than its optimizer has, whose tensor is none of the model's, as mmengine's OptimWrapper."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.optimizer.param_groups, {"params": torch.tensor([0.0])}]

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "shown": 1}


@ORIG_PARAMS
@on_ranks(2)
def test_a_group_that_an_optimizer_shows_and_does_not_save_is_left_out(use_orig_params: bool) -> None:
    model, optimizer = pair(use_orig_params)
    saved: Any = FSDP.optim_state_dict(model, Wrapped(optimizer))  # type: ignore[arg-type]
    assert_equal(saved, FSDP.optim_state_dict(model, optimizer))


@on_ranks(2)
def test_states_of_no_parameter_are_left_out_with_a_warning() -> None:
    model, optimizer = pair(True, optim=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    expected = save(model, optimizer, FULL)[1]
    optimizer.state["total"] = 3  # type: ignore[index, assignment]
    for _ in range(2):
        with pytest.warns(UserWarning, match="SGD has states that belong to no parameter, total; they are left out"):
            assert_equal(save(model, optimizer, FULL)[1], expected)
        optimizer.register_state_dict_pre_hook(lambda _: None)


@on_ranks(2)
def test_state_dicts_of_other_forms_are_refused(tmp_path: Path) -> None:
    model, optimizer = pair(True)
    states = save(model, optimizer, FULL)[1]
    rows = states["state"]
    tensor, number = {**rows, "last.bias": torch.ones(2)}, {**rows, "last.bias": {5: torch.ones(2)}}
    for given, text in (
        (None, "got a NoneType"),
        ({"param_groups": []}, r"got \['param_groups'\]"),
        ({**states, "state": tensor}, "states of 'last.bias' must be a dict .* got a Tensor"),
        ({**states, "state": number}, r"states of 'last.bias' must be a dict .* got names \[5\]"),
    ):
        with pytest.raises(OptionError, match=text):
            FSDP.optim_state_dict_to_load(model, optimizer, given)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=text):
            FSDP.rekey_optim_state_dict(given, OptimStateKeyType.PARAM_ID, model)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has the key 999, which is no parameter"):
        FSDP.optim_state_dict(model, optimizer, {**optimizer.state_dict(), "state": {999: {}}})
    with pytest.raises(OptionError, match="has no 'param_groups', so load_directly"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": rows}, load_directly=True)
    assert list(FSDP.rekey_optim_state_dict({"state": rows}, OptimStateKeyType.PARAM_ID, model)) == ["state"]
    for row in optimizer.state.values():
        row[5] = torch.ones(3)
    for call in (
        lambda: FSDP.optim_state_dict(model, optimizer),
        lambda: fsdp_flat.save_checkpoint(tmp_path, model, optimizer),
    ):
        with pytest.raises(OptionError, match=r"a parameter of shape .* must be a dict .* 5\]"):
            call()


@on_ranks(2)
def test_arguments_of_other_types_or_in_the_order_of_torch_2_0_are_refused(tmp_path: Path) -> None:
    model, optimizer = pair(True)
    states = save(model, optimizer, FULL)[1]
    for optim in ("x", None, model):
        for call in (
            lambda optim=optim: FSDP.optim_state_dict(model, optim),
            lambda optim=optim: FSDP.optim_state_dict_to_load(model, optim, states),
        ):
            with pytest.raises(OptionTypeError, match="optim must be an optimizer, which has param_groups; got"):
                call()
    with pytest.raises(OptionTypeError, match=r"takes \(model, optim, optim_state_dict\); .* in torch 2\.0"):
        FSDP.optim_state_dict_to_load(states, model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match=r"takes a model, an nn\.Module; got Noting"):
        FSDP.optim_state_dict(optimizer, model)  # type: ignore[arg-type]
    for model_given in (None, "x"):
        with pytest.raises(OptionTypeError, match=r"takes a model, an nn\.Module; got"):
            FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, model_given)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- states of other shapes


@CODECS
@on_ranks(2, 4)
def test_a_registered_handler_saves_and_loads_factored_states(kind: Any, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    fsdp_flat.register_optim_state_handler(model, "row_sums", merge=merge_rows, split=split_rows)
    states = save(model, optimizer, kind)[1]
    plain = seeded()
    square_loss(plain, batch(0)).backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    assert sorted(states["state"]) == sorted(name for name in grads if name.endswith("weight"))
    for name, row in states["state"].items():
        torch.testing.assert_close(row["row_sums"], grads[name].square().sum(1), rtol=1e-4, atol=1e-7)
    with FSDP.state_dict_type(model, kind):
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, states)
    held = dict(enumerate(optimizer.param_groups[0]["params"]))
    for key, row in loaded["state"].items():
        optimizer.state[held[key]] = row
    again = save(model, optimizer, kind)[1]
    assert_equal(again["state"], states["state"])
    if kind is FULL:
        with FSDP.state_dict_type(model, FULL, None, RANK0):
            scattered = FSDP.optim_state_dict_to_load(model, optimizer, states if rank == 0 else None)
        assert_equal(scattered["state"], loaded["state"])


@on_ranks(2)
def test_a_state_of_another_shape_without_a_handler_is_told_by_name_at_the_first_save() -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = factored(model)
    for kind in (FULL, SHARDED):
        with FSDP.state_dict_type(model, kind), pytest.raises((UnsupportedError, PeerFailureError)) as caught:
            FSDP.optim_state_dict(model, optimizer)
        assert "State 'row_sums' of '" in str(caught.value)
        assert "register_optim_state_handler(model, 'row_sums'" in str(caught.value)


@on_ranks(2)
def test_handlers_that_make_no_sense_are_refused() -> None:
    model = shard(seeded(), use_orig_params=False)
    for name, merge in ((3, merge_rows), ("row_sums", None)):
        with pytest.raises(OptionTypeError, match="A handler has a name and two functions"):
            fsdp_flat.register_optim_state_handler(model, name, merge=merge, split=split_rows)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="nothing at or below this one is wrapped"):
        fsdp_flat.register_optim_state_handler(seeded(), "row_sums", merge=merge_rows, split=split_rows)
    fsdp_flat.register_optim_state_handler(model, "momentum_buffer", merge=merge_rows, split=split_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, TASK, range(2))
    with pytest.raises(UnsupportedError, match=r"belongs to a flat parameter of .* Pass use_orig_params=True"):
        FSDP.optim_state_dict(model, optimizer)
