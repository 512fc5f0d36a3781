"""Optimizers that grew or shrank since their states were made, or since a state dict of them was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.errors import OptionError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, SHARDED, TASKS, save
from tests.state_dict.kit import train as train_task
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.wrapper_models import seeded, shard

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    train_task(model, optimizer, TASKS["uneven"], range(step, step + 1))


def halves(model: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters outside of the last block, and those of it."""
    named = list(model.named_parameters())
    return [p for name, p in named if "blocks.1" not in name], [p for name, p in named if "blocks.1" in name]


def model_and_halves(use_orig_params: bool, seed: int = 0) -> tuple[Any, Any, Any]:
    model = shard(seeded(seed=seed), use_orig_params=use_orig_params)
    return model, *halves(model)


def adam(*groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": group, "lr": 0.1 / 2**at} for at, group in enumerate(groups)])


def to_load(model: Any, optimizer: torch.optim.Optimizer, kind: Any, states: Any) -> Any:
    with FSDP.state_dict_type(model, kind):
        return FSDP.optim_state_dict_to_load(model, optimizer, states)


@ORIG_PARAMS
@on_ranks(2)
def test_an_optimizer_that_grew_is_saved_and_resumes(use_orig_params: bool, tmp_path: Path) -> None:
    model, body, head = model_and_halves(use_orig_params)
    optimizer = adam(body)
    train(model, optimizer, 0)
    optimizer.add_param_group({"params": head, "lr": 0.05})
    # Before its first step, and after it: the new parameters have no states, then some.
    for step, num_states in ((None, 7), (1, 10)):
        if step is not None:
            train(model, optimizer, step)
        expected = save(model, optimizer, FULL)[1]
        assert len(expected["state"]) == num_states
        assert [group["lr"] for group in expected["param_groups"]] == [0.1, 0.05]
        assert [len(group["params"]) for group in expected["param_groups"]] == [7, 3]
        save_checkpoint(tmp_path, model, optimizer)
        for kind in (FULL, SHARDED, None):
            other, other_body, other_head = model_and_halves(use_orig_params, seed=1)
            resumed = adam(other_body, other_head)
            if kind is None:
                load_checkpoint(tmp_path, other, resumed)
            else:
                resumed.load_state_dict(to_load(other, resumed, kind, save(model, optimizer, kind)[1]))
            assert_equal(save(other, resumed, FULL)[1], expected)


@ORIG_PARAMS
@on_ranks(2)
def test_states_from_before_the_growth_do_not_load_and_the_lacking_names_are_told(
    use_orig_params: bool, tmp_path: Path
) -> None:
    model, body, head = model_and_halves(use_orig_params)
    optimizer = adam(body)
    train(model, optimizer, 0)
    saved = {kind: save(model, optimizer, kind)[1] for kind in (FULL, SHARDED)}
    save_checkpoint(tmp_path, model, optimizer)
    unfrozen = adam([*body, *head])
    optimizer.add_param_group({"params": head})
    train(model, optimizer, 1)
    train(model, unfrozen, 2)
    before = save(model, optimizer, FULL), save(model, unfrozen, FULL)
    for grown, what in ((optimizer, r"1 parameter group\(s\) for 2; no group with "), (unfrozen, "no group with ")):
        text = rf"other parameter groups.* it has {what}'blocks\.1\.up\.weight' \(group \d\).* add_param_group"
        for kind in (FULL, SHARDED):
            # A caller may add to the groups, as on FSDP1, so they are refused where they are loaded.
            with pytest.warns(UserWarning, match=text):
                loaded = to_load(model, grown, kind, saved[kind])
            with pytest.raises(ValueError, match="loaded state dict"):
                grown.load_state_dict(loaded)
            with FSDP.state_dict_type(model, kind), pytest.raises(OptionError, match=text):
                FSDP.optim_state_dict_to_load(model, grown, saved[kind], load_directly=True)
        with pytest.raises(OptionError, match=text):
            load_checkpoint(tmp_path, model, grown)
    assert_equal((save(model, optimizer, FULL), save(model, unfrozen, FULL)), before)


@ORIG_PARAMS
@on_ranks(2)
def test_states_from_before_the_growth_load_by_name_as_the_error_says(use_orig_params: bool) -> None:
    model, body, head = model_and_halves(use_orig_params)
    optimizer = adam(body)
    train(model, optimizer, 0)
    expected = save(model, optimizer, FULL)[1]["state"]
    grown = adam(head, body)
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        del states["param_groups"]
        loaded = to_load(model, grown, kind, states)
        grown.load_state_dict({**grown.state_dict(), "state": loaded["state"]})
        assert_equal(save(model, grown, FULL)[1]["state"], expected)


@ORIG_PARAMS
@on_ranks(2)
def test_parameters_that_changed_groups_are_refused_though_the_groups_have_the_same_sizes(
    use_orig_params: bool,
) -> None:
    # The states of one block would go to the other one, which has the same shapes.
    model = shard(seeded(), use_orig_params=use_orig_params)
    first, second = (
        [param for name, param in model.named_parameters() if f"blocks.{block}" in name] for block in (0, 1)
    )
    optimizer, swapped = adam(first, second), adam(second, first)
    train(model, optimizer, 0)
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        with pytest.raises(OptionError, match=r"other groups for 'blocks\.1\.up\.weight' \(group 0, there 1\)"):
            to_load(model, swapped, kind, states)


@ORIG_PARAMS
@on_ranks(2)
def test_states_of_parameters_that_an_optimizer_no_longer_has_are_left_out(
    use_orig_params: bool, tmp_path: Path
) -> None:
    model, body, head = model_and_halves(use_orig_params)
    optimizer = adam(body, head)
    train(model, optimizer, 0)
    everything = {kind: save(model, optimizer, kind)[1] for kind in (FULL, SHARDED)}
    optimizer.param_groups.pop()
    expected = {name: row for name, row in everything[FULL]["state"].items() if "blocks.1" not in name}
    for kind in (FULL, SHARDED):
        states = save(model, optimizer, kind)[1]
        assert set(states["state"]) == set(expected)
        assert [len(group["params"]) for group in states["param_groups"]] == [7]
    save_checkpoint(tmp_path, model, optimizer)
    smaller = adam(body)
    load_checkpoint(tmp_path, model, smaller)
    assert_equal(save(model, smaller, FULL)[1]["state"], expected)
    # A load of all of them says what it leaves out.
    for states in everything.values():
        del states["param_groups"][1]
        smaller = adam(body)
        with pytest.warns(UserWarning, match=r"states of \d parameter\(s\) that this optimizer does not hold, 'blocks"):
            loaded = to_load(model, smaller, SHARDED, states)
        smaller.load_state_dict(loaded)
        assert_equal(save(model, smaller, FULL)[1]["state"], expected)


@ORIG_PARAMS
@on_ranks(2)
@pytest.mark.parametrize("replaces", [False, True])
def test_units_that_an_optimizer_gets_later_are_gathered_after_its_steps(use_orig_params: bool, replaces: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(2)])
    model: Any = FSDP(
        copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    # Kept unsharded, a rank without elements of a weight has to hear of the step from the optimizer.
    model.set_reshard_after_backward(False)
    x = torch.ones(2, 1)
    optimizers = [torch.optim.SGD(each[0].parameters(), lr=0.1) for each in (plain, model.module)]
    for step in range(4):
        losses = [each(x).square().mean() for each in (plain, model)]
        assert_close({"loss": losses[1]}, {"loss": losses[0]}, rtol=1e-5, atol=1e-6, what=f"step {step}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        if step == 1:
            for optimizer, each in zip(optimizers, (plain, model.module), strict=True):
                if replaces:
                    optimizer.param_groups[0]["params"] = list(each[1].parameters())
                else:
                    optimizer.add_param_group({"params": list(each[1].parameters())})
        for each in (plain, model):
            each.zero_grad()
