"""``summon_full_params``: whole parameters and gradients, every flag, both kinds of parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import FsdpFlatError, PhaseError, UnsupportedError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import average_gradients
from tests.support.both_sides import Layout
from tests.support.kit import full_grads, square_loss
from tests.support.models import Tied
from tests.support.peer import peer_warnings_silenced
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides
from tests.support.wrapper_models import (
    WIDTH,
    assert_same_grads,
    batch,
    message,
    seeded,
    shard,
    shard_by_peer,
    whole_state,
)

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])
STRATEGIES = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def enter(model: nn.Module, **flags: Any) -> Callable[[], None]:
    def call() -> None:
        with FSDP.summon_full_params(model, **flags):
            pytest.fail("entered")

    return call


@BOTH
@STRATEGIES
@on_ranks(2, 4)
def test_whole_parameters_are_those_of_the_plain_model(strategy: str, use_orig_params: bool) -> None:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model):
        shown = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert isinstance(model.first.weight, nn.Parameter)
    assert_equal(shown, dict(seeded().named_parameters()))
    assert_equal({name: param.detach() for name, param in model.named_parameters()}, before)


@BOTH
@STRATEGIES
@pytest.mark.parametrize("writeback", [True, False])
@on_ranks(2)
def test_changes_are_kept_with_writeback_and_dropped_without(
    writeback: bool, strategy: str, use_orig_params: bool, rank: int
) -> None:
    model, plain = shard(seeded(), strategy, use_orig_params=use_orig_params), seeded()
    peer = shard_by_peer(seeded(), strategy, use_orig_params=use_orig_params)
    square_loss(model, batch(rank))  # the outermost unit stays gathered
    for which in (model, peer):
        with type(which).summon_full_params(which, writeback=writeback), torch.no_grad():
            for param in which.parameters():
                param.mul_(2.0)
            which.blocks[0].up.weight.fill_(1.0)
    assert_equal(whole_state(model), whole_state(peer))
    if writeback:
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(2.0)
            plain.blocks[0].up.weight.fill_(1.0)
    if writeback or strategy != "NO_SHARD":
        # Without sharding the whole parameter is the parameter: as in FSDP1, nothing can be dropped.
        assert_equal(whole_state(model), dict(plain.state_dict()))
        assert_equal(model(batch(rank)), plain(batch(rank)))


@BOTH
@on_ranks(2)
def test_each_rank_keeps_its_own_changes_to_its_own_part(use_orig_params: bool, rank: int) -> None:
    ours = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    for model in (ours, theirs):
        with type(model).summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.fill_(float(rank + 1))
    state = whole_state(ours)
    assert_equal(state, whole_state(theirs))
    assert set(torch.cat([state[name].reshape(-1) for name, _ in seeded().named_parameters()]).tolist()) == {1.0, 2.0}


@BOTH
@on_ranks(2)
def test_a_parameter_or_data_that_the_user_puts_in_is_written_back(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    new = torch.full((WIDTH, 3), 7.0)
    with FSDP.summon_full_params(model):
        model.first.weight = nn.Parameter(new)
        model.last.bias.data = torch.ones(2)
    state = whole_state(model)
    assert_equal(state["first.weight"], new)
    assert_equal(state["last.bias"], torch.ones(2))
    expected = seeded()
    expected.first.weight = nn.Parameter(new)
    expected.last.bias.data = torch.ones(2)
    assert_equal(model(batch(rank)), expected(batch(rank)))
    assert len(list(model.parameters())) == len(list(shard(seeded(), use_orig_params=use_orig_params).parameters()))


@BOTH
@pytest.mark.parametrize("how", ["data", "parameter"])
@on_ranks(2, 4)
def test_a_parameter_of_another_shape_is_an_error_on_every_rank_that_names_it(
    how: str, use_orig_params: bool, rank: int
) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)

    def replace() -> None:
        with FSDP.summon_full_params(model), torch.no_grad():
            model.last.bias.add_(1.0)
            if how == "data":
                model.blocks[0].up.weight.data = torch.zeros(2, 2)
            else:
                model.blocks[0].up.weight = nn.Parameter(torch.zeros(2, 2))

    # FSDP1 raises RuntimeError, on the ranks that own a local shard of the parameter, and the others hang.
    text = message(FsdpFlatError, RuntimeError, replace)
    assert "'up.weight'" in text
    assert "(2, 2)" in text
    assert "(11, 5)" in text
    assert_equal(whole_state(model)["blocks.0.up.weight"], seeded().blocks[0].up.weight.detach())
    assert square_loss(model, batch(rank)).isfinite()


@BOTH
@on_ranks(2)
def test_names_are_the_plain_models_also_of_modules_whose_names_end_as_a_wrappers(use_orig_params: bool) -> None:
    names = ("x_orig_mod", "my_fsdp_wrapped_module", "checkpointed")
    plain = nn.Sequential(OrderedDict((name, nn.BatchNorm1d(3)) for name in names))
    model = copy.deepcopy(plain)
    model.checkpointed = checkpoint_wrapper(FSDP(model.checkpointed, use_orig_params=use_orig_params))
    model = FSDP(model, use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        for method in ("named_parameters", "named_buffers", "named_modules"):
            found = dict.fromkeys(name for name, _ in getattr(model, method)())
            assert list(found) == [name for name, _ in getattr(plain, method)()]


@pytest.mark.parametrize("how", ["none", "deleted"])
@BOTH
@on_ranks(2)
def test_a_parameter_that_is_removed_is_an_error_that_names_it(how: str, use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)

    def remove() -> None:
        with FSDP.summon_full_params(model):
            if how == "none":
                model.last.bias = None
            else:
                del model.last.bias

    assert "Parameter 'last.bias' of unit" in message(FsdpFlatError, RuntimeError, remove)
    assert square_loss(model, batch(rank)).isfinite()
    assert_equal(whole_state(model), dict(seeded().state_dict()))


@pytest.mark.parametrize("recurse", [True, False])
@on_ranks(2)
def test_parameter_identity_inside_is_fsdp1s(recurse: bool) -> None:
    for wrapped in (shard, shard_by_peer):
        originals = seeded()
        weight = originals.first.weight
        model = wrapped(originals, use_orig_params=True)
        assert model.first.weight is weight
        with type(model).summon_full_params(model, recurse=recurse):
            assert model.first.weight is weight
        assert model.first.weight is weight
        flat = wrapped(seeded(), use_orig_params=False)
        seen = []
        for _ in range(2):
            with type(flat).summon_full_params(flat, recurse=recurse):
                seen.append(flat.first.weight)
        assert seen[0] is not seen[1]
        assert "weight" not in flat.first._parameters


@BOTH
@on_ranks(2)
def test_without_recurse_only_the_given_wrapper_shows_whole_parameters(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model, recurse=False):
        assert model.first.weight.shape == (WIDTH, 3)
        names = {name: param.dim() for name, param in model.named_parameters()}
        assert names["first.weight"] == 2
        inner = "blocks.0.up.weight" if use_orig_params else "blocks.0._flat_param"
        assert names[inner] == 1
        # The nested unit is not summoned, so it may be.
        with FSDP.summon_full_params(model.blocks[0]):
            assert model.blocks[0].up.weight.shape == (2 * WIDTH + 1, WIDTH)


@BOTH
@on_ranks(2)
def test_on_a_plain_parent_every_wrapper_below_shows_whole_parameters(use_orig_params: bool) -> None:
    parent = nn.Sequential(shard(seeded(), use_orig_params=use_orig_params), FSDP(nn.Linear(2, 3)))
    with FSDP.summon_full_params(parent):
        assert parent[0].blocks[1].up.weight.shape == (2 * WIDTH + 1, WIDTH)
        assert parent[1].weight.shape == (3, 2)
    with FSDP.summon_full_params(parent, recurse=False):
        assert parent[1]._parameters == {}
        assert len(list(parent[1].parameters())) == 1


@on_ranks(2)
def test_on_a_module_without_wrappers_nothing_happens() -> None:
    plain = nn.Linear(2, 2)
    weight = plain.weight
    with FSDP.summon_full_params(plain):
        assert plain.weight is weight
    assert plain.weight is weight


@BOTH
@STRATEGIES
@on_ranks(2)
def test_rank0_only_shows_whole_parameters_on_rank_zero(strategy: str, use_orig_params: bool, rank: int) -> None:
    ours = shard(seeded(), strategy, use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), strategy, use_orig_params=use_orig_params)
    found = []
    for model in (ours, theirs):
        with type(model).summon_full_params(model, rank0_only=True, writeback=False):
            found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert {name: value.shape for name, value in found[0].items()} == {n: v.shape for n, v in found[1].items()}
    if rank == 0:
        assert_equal(found[0], dict(seeded().named_parameters()))
    assert_equal(whole_state(ours), dict(seeded().state_dict()))


@BOTH
@pytest.mark.parametrize("rank0_only", [True, False])
@on_ranks(2)
def test_offload_to_cpu_shows_whole_parameters_on_the_cpu(rank0_only: bool, use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    flags = {"offload_to_cpu": True, "writeback": not rank0_only, "rank0_only": rank0_only}

    def look() -> None:
        with FSDP.summon_full_params(model, **flags):
            if rank == 0 or not rank0_only:
                found = {name: param.detach().clone() for name, param in model.named_parameters()}
                assert_equal(found, dict(seeded().named_parameters()))
            if not rank0_only:
                with torch.no_grad():
                    model.last.bias.fill_(3.0)

    if rank0_only:
        look()
    else:
        with pytest.warns(UserWarning, match=r"offload_to_cpu=True, rank0_only=False"):
            look()
        assert_equal(whole_state(model)["last.bias"], torch.full((2,), 3.0))


@BOTH
@STRATEGIES
@on_ranks(2, 4)
def test_with_grads_shows_whole_gradients_and_keeps_changes_to_them(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params)
    square_loss(model, batch(rank)).backward()
    plain = seeded()
    sum(square_loss(plain, batch(other)) for other in range(num_ranks)).div(num_ranks).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters()):
            assert_close(param.grad, other.grad, rtol=1e-4, atol=1e-6, what=name)
            param.grad.mul_(3.0)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters()):
            assert_close(param.grad, 3.0 * other.grad, rtol=1e-4, atol=1e-6, what=name)
            if strategy != "NO_SHARD":
                param.grad.zero_()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for param in plain.parameters():
        param.grad.mul_(3.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(whole_state(model), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_with_grads_shows_none_for_a_frozen_parameter(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    model.blocks[0].up.bias.requires_grad_(False)
    square_loss(model, batch(rank)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert [name for name, param in model.named_parameters() if param.grad is None] == ["blocks.0.up.bias"]


@BOTH
@on_ranks(2)
def test_with_grads_raises_where_gradients_are_not_reduced_yet(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    with model.no_sync():
        square_loss(model, batch(rank)).backward()
    with pytest.raises(PhaseError, match=r"gradients of unit '.*' are not reduced"):  # noqa: SIM117
        with FSDP.summon_full_params(model, with_grads=True):
            pass
    with FSDP.summon_full_params(model):
        pass
    square_loss(model, batch(rank)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(param.grad is not None for param in model.parameters())


@BOTH
@on_ranks(2)
def test_gradients_survive_a_summon_without_them(use_orig_params: bool, rank: int) -> None:
    ours = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    for model in (ours, theirs):
        square_loss(model, batch(rank)).backward()
        with type(model).summon_full_params(model):
            pass
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize(
    "flags",
    [
        {"writeback": True, "rank0_only": True},
        {"with_grads": True, "offload_to_cpu": True},
    ],
)
@on_ranks(2)
def test_flags_that_exclude_each_other_are_not_implemented(flags: dict[str, bool]) -> None:
    model = shard(seeded(), use_orig_params=True)
    text = message(UnsupportedError, NotImplementedError, enter(model, **flags))
    assert all(name in text for name in flags)
    peer = shard_by_peer(seeded(), use_orig_params=True)
    with pytest.raises(NotImplementedError), type(peer).summon_full_params(peer, **flags):
        pass


@BOTH
@on_ranks(2)
def test_summon_inside_summon_is_an_error_that_names_the_unit(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        assert "'blocks.1'" in message(PhaseError, AssertionError, enter(model.blocks[1]))
        assert "'Model'" in message(PhaseError, AssertionError, enter(model))
        assert model.first.weight.shape == (WIDTH, 3)
    assert_equal(whole_state(model), dict(seeded().state_dict()))


@BOTH
@pytest.mark.parametrize("where", ["root", "nested"])
@on_ranks(2)
def test_forward_inside_summon_is_an_error_and_the_model_runs_afterwards(
    where: str, use_orig_params: bool, rank: int
) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    assert model.check_is_root()  # from here on units are called by their place in the tree
    with FSDP.summon_full_params(model):
        if where == "root":
            text = message(PhaseError, AssertionError, lambda: model(batch(rank)))
            assert "'Model'" in text
        else:
            text = message(PhaseError, AssertionError, lambda: model.blocks[0](torch.ones(1, WIDTH)))
            assert "'blocks.0'" in text
        assert model.first.weight.shape == (WIDTH, 3)
    assert_equal(model(batch(rank)), seeded()(batch(rank)))


@BOTH
@on_ranks(2)
def test_a_state_dict_inside_summon_is_the_whole_one(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model), torch.no_grad():
        model.last.bias.fill_(4.0)
        state = whole_state(model)
        assert model.last.bias.shape == (2,)
        assert model.first.weight.shape == (WIDTH, 3)
    assert sorted(state) == sorted(seeded().state_dict())
    expected = dict(seeded().state_dict())
    expected["last.bias"] = torch.full((2,), 4.0)
    assert_equal(state, expected)
    assert_equal(whole_state(model), expected)


@BOTH
@on_ranks(2)
def test_an_exception_inside_leaves_the_model_sharded_and_usable(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    shapes = [param.shape for param in model.parameters()]
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    assert [param.shape for param in model.parameters()] == shapes
    assert_equal(model(batch(rank)), seeded()(batch(rank)))


@BOTH
@on_ranks(2)
def test_tied_parameters_are_one_object_inside(use_orig_params: bool) -> None:
    model = shard(seeded(Tied), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert model.embed.weight is model.head.weight
        model.head.weight.fill_(2.0)
    state = whole_state(model)
    assert bool((state["embed.weight"] == 2.0).all())
    assert_equal(state["embed.weight"], state["head.weight"])


@BOTH
@on_ranks(2)
def test_values_assigned_to_sharded_parameters_are_shown_and_saved(use_orig_params: bool, rank: int) -> None:
    ours = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    states = []
    for model in (ours, theirs):
        for param in model.parameters():
            param.data = torch.full_like(param, float(rank + 5))
        states.append(whole_state(model))
        with type(model).summon_full_params(model, writeback=False):
            assert set(model.first.weight.flatten().tolist()) <= {5.0, 6.0}
    assert_equal(states[0], states[1])


@BOTH
@on_ranks(2)
def test_a_state_dict_inside_a_summon_of_rank_zero_only_is_whole_on_every_rank(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    shapes = [param.shape for param in model.parameters()]
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        inside = [param.shape for param in model.parameters()]
        assert_equal(whole_state(model), dict(seeded().state_dict()))
        assert [param.shape for param in model.parameters()] == inside
    assert [param.shape for param in model.parameters()] == shapes


@BOTH
@pytest.mark.parametrize("writeback", [True, False])
@on_ranks(2)
def test_a_summon_between_forward_and_backward_leaves_the_root_gathered_if_it_writes_nothing(
    writeback: bool, use_orig_params: bool, rank: int
) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    peer = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    gathered = []
    for which in (model, peer):
        loss = square_loss(which, batch(rank))
        with type(which).summon_full_params(which, writeback=writeback):
            pass
        wrappers = type(which).fsdp_modules(which)
        gathered.append([wrapper._flat_param._full_param_padded.untyped_storage().size() > 0 for wrapper in wrappers])
        loss.backward()
    # A unit may keep its memory for the backward besides; the root does, unless its shards may be newer from here on.
    assert [each[:2] for each in gathered] == [[not writeback, False], [True, False]]
    square_loss(plain, batch(rank)).backward()
    average_gradients(plain)
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6, what=name)


@BOTH
@on_ranks(2)
def test_changes_of_one_rank_inside_a_summon_reach_the_next_forward_of_a_root_that_stayed_gathered(
    use_orig_params: bool, rank: int
) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    square_loss(model, batch(rank))
    with FSDP.summon_full_params(model), torch.no_grad():
        if rank == 1:
            model.last.weight.data.fill_(3.0)
    plain = seeded()
    plain.load_state_dict(whole_state(model))
    assert_equal(model(batch(rank)), plain(batch(rank)))
    assert (plain.last.weight == 3.0).any()


@BOTH
@on_ranks(2)
def test_the_root_is_known_after_a_summon(use_orig_params: bool, rank: int) -> None:
    for make in (shard, shard_by_peer):
        model = make(seeded(), use_orig_params=use_orig_params)
        with peer_warnings_silenced(), type(model).summon_full_params(model):
            pass
        wrappers = type(model).fsdp_modules(model)
        assert [wrapper._is_root for wrapper in wrappers] == [True, False, False]
    nested = shard(seeded(), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(nested.blocks[0]):
        assert nested.blocks[0]._is_root is None
    assert nested.check_is_root()


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_summon_leaves_what_the_graph_of_a_gradient_needs(strategy: str, rank: int) -> None:
    model, plain = shard(seeded(), strategy), seeded()
    penalties = []
    for which in (model, plain):
        x = batch(rank).requires_grad_()
        (grad,) = torch.autograd.grad(square_loss(which, x), x, create_graph=True)
        if which is model:
            with FSDP.summon_full_params(model):
                pass
        grad.square().sum().backward()
        penalties.append(grad.detach())
    assert_close(penalties[0], penalties[1], rtol=1e-5, atol=1e-6)
    replica = {name: param.grad for name, param in plain.named_parameters()}
    for grad in replica.values():
        if grad is not None:
            dist.all_reduce(grad)
    for name, grad in full_grads(model).items():
        other = replica[name]
        assert_close(grad, torch.zeros_like(grad) if other is None else other / 2, rtol=1e-5, atol=1e-6, what=name)


@BOTH
@on_ranks(2)
def test_parameters_that_were_unsharded_are_so_again_after_a_summon(use_orig_params: bool, rank: int) -> None:
    """Between a forward and a backward that adds a penalty on weights."""
    model = shard(seeded(), "SHARD_GRAD_OP", use_orig_params=use_orig_params)
    plain = seeded()
    loss = square_loss(model, batch(rank))
    shapes = {name: param.shape for name, param in model.named_parameters()}
    with FSDP.summon_full_params(model, writeback=False):
        pass
    assert {name: param.shape for name, param in model.named_parameters()} == shapes
    weights = [each.blocks[0].up.weight for each in (model, plain)]
    assert weights[0].shape == weights[1].shape
    (loss + weights[0].square().sum()).backward()
    (square_loss(plain, batch(rank)) + weights[1].square().sum()).backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
    for name, grad in full_grads(model).items():
        assert_close(grad, dict(plain.named_parameters())[name].grad / 2, rtol=1e-5, atol=1e-6, what=name)


class Caller(nn.Module):
    """Summons its own unit in forward, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.summon: Any = None
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.summon()
        y = self.linear(x)
        if self.where == "backward":
            y.register_hook(lambda _grad: self.summon())
        return y


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_summon_inside_forward_or_backward_is_refused(
    side: Side, layout: Layout, use_orig_params: bool, where: str
) -> None:
    caller = Caller()
    model = side.wrap(nn.Sequential(caller, nn.Linear(5, 1)), layout, units=(Caller,), use_orig_params=use_orig_params)

    def summon() -> None:
        with side.FSDP.summon_full_params(model):
            pass

    caller.summon, caller.where = summon, where
    with pytest.raises((ValueError, AssertionError)):
        model(torch.ones(2, 5)).sum().backward()
