"""Optimizers of whole matrices over sharded parameters: the same numbers as on the unwrapped model, and errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_flat
from fsdp_flat import CPUOffload, MatrixOptimizer, MixedPrecision, matrix_params
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import P2PChannels
from fsdp_flat.core import set_grad
from fsdp_flat.errors import OptionError, PeerFailureError, RankMismatchError, UnsupportedError, UsageError
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, SHARDED, groups_of, load, save
from tests.support import assert_equal, on_ranks
from tests.support.kit import full_grads, square_loss, train_on
from tests.support.models import Model, Tied
from tests.support.wrapper_models import batch, seeded, shard, whole_state

# Most tests train the matrices alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*are in no optimizer that has stepped")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD mesh"]
Muon = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(Muon is None, reason="torch has Muon from 2.9 on")
Adafactor = torch.optim.Adafactor


class Halving(torch.optim.Optimizer):
    """Takes its steps from a count that it keeps in its groups, and refuses what is told to fail."""

    fails = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    if self.fails:
                        raise ArithmeticError(f"no step on {tuple(param.shape)}")
                    param.data = param.data - group["lr"] / group["count"] * param.grad / param.grad.norm()


def wrapped(make: Any = Model, strategy: str = "FULL_SHARD", **kwargs: Any) -> tuple[Any, nn.Module]:
    """A model of ours and the plain one, with the same weights."""
    how = {**groups_of(strategy), **kwargs}
    return shard(seeded(make), strategy.removesuffix(" mesh"), use_orig_params=True, **how), seeded(make)


def hand_over_grads(model: Any, plain: nn.Module) -> None:
    """Give the plain model the gradients of ours, so that steps of both can be compared bit by bit."""
    kept = {param.grad.dtype for param in model.parameters() if param.grad is not None}
    low = torch.bfloat16 if kept == {torch.bfloat16} else None
    grads = {name: None if grad is None else grad.to(low or grad.dtype) for name, grad in full_grads(model).items()}
    for name, param in plain.named_parameters():
        grad = grads[name]
        set_grad(param, None if grad is None else grad.clone())


def assert_same_weights(model: Any, plain: nn.Module) -> None:
    __tracebackhide__ = True
    found = whole_state(model)
    assert_equal({name: found[name] for name, _ in plain.named_parameters()}, dict(plain.named_parameters()))


def compare(model: Any, plain: nn.Module, ours: Any, theirs: Any, rank: int, steps: int = 3) -> None:
    """Steps of both optimizers on the same gradients."""
    __tracebackhide__ = True
    before = whole_state(model)
    for step in range(steps):
        square_loss(model, batch(rank, step)).backward()
        hand_over_grads(model, plain)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(model, plain)
    assert any(not torch.equal(value, before[name]) for name, value in whole_state(model).items())


def matrices_of(plain: nn.Module) -> list[nn.Parameter]:
    return [param for param in plain.parameters() if param.dim() >= 2]


@needs_muon
@on_ranks(2, 3, 4)
def test_muon_steps_to_the_bit_as_on_the_unwrapped_model(rank: int) -> None:
    model, plain = wrapped()
    ours = MatrixOptimizer(model, Muon, lr=0.05, momentum=0.8)
    compare(model, plain, ours, Muon(matrices_of(plain), lr=0.05, momentum=0.8), rank)


@on_ranks(2, 3, 4)
def test_adafactor_steps_to_the_bit_as_on_the_unwrapped_model_vectors_too(rank: int) -> None:
    model, plain = wrapped()
    ours = MatrixOptimizer(model, Adafactor, params=model.parameters(), lr=0.05, weight_decay=0.1)
    compare(model, plain, ours, Adafactor(plain.parameters(), lr=0.05, weight_decay=0.1), rank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_every_strategy_steps_as_the_unwrapped_model(strategy: str, rank: int) -> None:
    model, plain = wrapped(strategy=strategy)
    ours = MatrixOptimizer(model, Adafactor, lr=0.05)
    compare(model, plain, ours, Adafactor(matrices_of(plain), lr=0.05), rank, steps=2)


@needs_muon
@on_ranks(2)
def test_the_documented_pair_of_optimizers_trains_all_parameters(rank: int) -> None:
    model, plain = wrapped()
    matrices = matrix_params(model)
    rest = [param for param in model.parameters() if param not in set(matrices)]
    assert len(matrices) == 6
    assert len(matrices) + len(rest) == len(list(plain.parameters()))
    ours = [MatrixOptimizer(model, Muon, params=matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    vectors = [param for param in plain.parameters() if param.dim() < 2]
    theirs = [Muon(matrices_of(plain), lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    for step in range(2):
        square_loss(model, batch(rank, step)).backward()
        hand_over_grads(model, plain)
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)


@on_ranks(3)
def test_every_element_has_one_owner_that_holds_some_of_it_and_ranks_share_them(rank: int, num_ranks: int) -> None:
    model = shard(
        nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(9))), by_blocks=False, use_orig_params=True
    )
    optimizer = MatrixOptimizer(model, Adafactor)
    owned = [0] * num_ranks
    for param, owner in optimizer.state_owners.items():
        owned[owner] += 64
        assert owner != rank or param.numel() > 0
    assert owned == [192, 192, 192]
    train_on(model, optimizer, [torch.ones(1, 8)])
    kept = {param for param, state in optimizer.state.items() if state}
    assert kept == {param for param, owner in optimizer.state_owners.items() if owner == rank}


@on_ranks(4)
def test_ranks_without_elements_and_ignored_parameters_take_part(rank: int) -> None:
    plain = seeded(lambda: nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 2), nn.Linear(2, 3)))
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 2), nn.Linear(2, 3)))
    ignored = list(module[2].parameters())
    model = shard(module, by_blocks=False, use_orig_params=True, ignored_states=ignored)
    ours = MatrixOptimizer(model, Adafactor, lr=0.05)
    assert [param for param in matrix_params(model) if param not in ours.state_owners] == [ignored[0]]
    theirs = Adafactor(matrices_of(plain), lr=0.05)
    for step in range(2):
        square_loss(model, batch(0, step)).backward()
        hand_over_grads(model, plain)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(model, plain)


class Scaled(nn.Module):
    """A scalar and a parameter without elements beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ torch.cat([self.weight, self.nothing]))


@on_ranks(2, 3)
def test_scalars_step_and_resume_beside_parameters_without_elements(rank: int) -> None:
    model, plain = wrapped(Scaled, by_blocks=False)
    ours = MatrixOptimizer(model, torch.optim.Adam, params=model.parameters(), lr=0.05)
    compare(model, plain, ours, torch.optim.Adam(plain.parameters(), lr=0.05), rank)
    other, _ = wrapped(Scaled, by_blocks=False)
    resumed = MatrixOptimizer(other, torch.optim.Adam, params=other.parameters(), lr=0.05)
    for kind in (FULL, SHARDED):
        load(other, resumed, kind, save(model, ours, kind))
        assert_equal(save(other, resumed, FULL), save(model, ours, FULL))


@on_ranks(2)
def test_frozen_and_unused_parameters_are_skipped_and_join_when_they_get_gradients(rank: int) -> None:
    model, plain = wrapped(Tied)
    tokens = torch.tensor([1, 2, 3])
    model.block.up.weight.requires_grad_(False)
    plain.block.up.weight.requires_grad_(False)
    ours, theirs = MatrixOptimizer(model, Adafactor, lr=0.05), Adafactor(matrices_of(plain), lr=0.05)
    for step in range(3):
        if step == 2:
            model.block.up.weight.requires_grad_(True)
            plain.block.up.weight.requires_grad_(True)
        model(tokens).square().mean().backward()
        hand_over_grads(model, plain)
        if step == 1:
            model.embed.weight.grad = plain.embed.weight.grad = None
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(model, plain)


@on_ranks(2)
def test_groups_have_options_of_their_own_and_schedulers_and_added_groups_work(rank: int) -> None:
    model, plain = wrapped()
    made = []
    for one, make in ((model, lambda groups: MatrixOptimizer(model, Adafactor, params=groups)), (plain, Adafactor)):
        params = matrix_params(one)
        optimizer = make([{"params": params[:2], "lr": 0.1}, {"params": params[2:4], "weight_decay": 0.3}])
        optimizer.add_param_group({"params": params[4:], "lr": 0.01})
        made.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    (ours, our_schedule), (theirs, their_schedule) = made
    options = [{key: value for key, value in group.items() if key != "params"} for group in theirs.param_groups]
    assert [{key: value for key, value in g.items() if key != "params"} for g in ours.param_groups] == options
    assert ours.defaults == theirs.defaults
    for _ in range(2):
        compare(model, plain, ours, theirs, rank, steps=1)
        our_schedule.step()
        their_schedule.step()
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
    with pytest.raises(ValueError, match="appear in more than one"):
        ours.add_param_group({"params": matrix_params(model)[:1]})


@on_ranks(3, 4)
def test_a_bound_on_memory_cuts_the_step_and_counts_in_groups_stay_right(rank: int) -> None:
    model, plain = wrapped(lambda: Model(6))
    ours = MatrixOptimizer(model, Halving, max_nbytes=1, lr=0.2)
    seen: list[int] = []
    ours._inner.register_step_pre_hook(lambda *_: seen.append(1))
    theirs = Halving(matrices_of(plain), lr=0.2)
    compare(model, plain, ours, theirs, rank)
    assert len(seen) > 3
    assert ours.param_groups[0]["count"] == theirs.param_groups[0]["count"] == 3


@on_ranks(4)
def test_ranks_with_other_experts_than_others_may_take_more_rounds(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    width = [60, 12][rank // 2]

    def experts() -> nn.Sequential:
        torch.manual_seed(0)
        sides = [nn.Linear(12, 12, bias=False) for _ in range(2)]
        pair = [nn.Linear(12, width, bias=False), nn.Linear(width, 12, bias=False)]
        return nn.Sequential(sides[0], *pair, *copy.deepcopy(pair), sides[1])

    plain, module = experts(), experts()
    for index, layer in enumerate(module):
        group = pairs[rank // 2] if 0 < index < 5 else None
        module[index] = FSDP(layer, process_group=group, use_orig_params=True)
    model = FSDP(module, use_orig_params=True)
    ours = MatrixOptimizer(model, torch.optim.SGD, max_nbytes=3000, lr=0.1)
    assert len(ours._rounds) == [2, 1][rank // 2]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        square_loss(model, torch.ones(3, 12)).backward()
        hand_over_grads(model, plain)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(model, plain)


@on_ranks(2)
def test_parameters_that_no_unit_manages_are_updated_once_in_a_step_of_several_rounds(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model = FSDP(
        layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, ignored_modules=[layers[3]]
    )
    optimizer = MatrixOptimizer(model, torch.optim.SGD, params=model.parameters(), max_nbytes=1, lr=0.1)
    weight = layers[3].weight
    before = weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert_equal(weight.detach(), before - 0.1 * weight.grad)


@on_ranks(3)
def test_a_step_is_one_exchange_to_the_owners_and_one_back_whatever_the_number_of_matrices(rank: int) -> None:
    model, _ = wrapped(lambda: Model(4))
    optimizer = MatrixOptimizer(model, Adafactor)
    square_loss(model, batch(rank)).backward()
    with mock.patch.object(P2PChannels, "wait", autospec=True, side_effect=P2PChannels.wait) as exchanges:
        optimizer.step()
    assert exchanges.call_count == 2


@on_ranks(2)
def test_a_closure_is_called_once_and_its_loss_returned(rank: int) -> None:
    model, plain = wrapped()
    ours, theirs = MatrixOptimizer(model, Adafactor, lr=0.05), Adafactor(matrices_of(plain), lr=0.05)
    losses = []

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = square_loss(model, batch(rank))
        loss.backward()
        hand_over_grads(model, plain)
        losses.append(loss.detach())
        return loss

    returned = ours.step(closure)
    theirs.step()
    assert len(losses) == 1
    assert_equal(returned.detach(), losses[0])
    assert_same_weights(model, plain)


@on_ranks(2)
def test_clipping_and_a_gradient_scaler_work_before_it(rank: int) -> None:
    model, plain = wrapped()
    ours, theirs = MatrixOptimizer(model, Adafactor, lr=0.05), Adafactor(matrices_of(plain), lr=0.05)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    for step in range(3):
        data = batch(rank, step) * (float("inf") if step == 1 and rank == 1 else 1.0)
        before = whole_state(model)
        scaler.scale(square_loss(model, data)).backward()
        scaler.unscale_(ours)
        if step != 1:
            model.clip_grad_norm_(0.1)
            hand_over_grads(model, plain)
            theirs.step()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if step == 1:
            assert_equal(whole_state(model), before)
        assert_same_weights(model, plain)


@pytest.mark.parametrize("how", ["low gradients", "low weights", "offload"])
@on_ranks(2)
def test_low_precision_and_offload_step_as_the_unwrapped_optimizer_on_the_same_gradients(how: str, rank: int) -> None:
    options: dict[str, Any] = {
        "low gradients": {
            "mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=True)
        },
        "low weights": {},
        "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    }[how]
    module, plain = seeded(), seeded()
    if how == "low weights":
        warnings.filterwarnings("ignore", message=r".* is sharded in torch\.bfloat16")
        for each in (module, plain):
            # A unit with weights of two dtypes.
            each.blocks[0].down.to(torch.bfloat16)
            each.blocks[0].down.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
            each.blocks[0].down.register_forward_hook(lambda _, args, out: out.float())
    model = shard(module, use_orig_params=True, **options)
    # Without eps torch's Adafactor takes that of its first parameter's dtype for all.
    settings: dict[str, Any] = {"lr": 0.05, "eps": (1e-8, 1e-3)}
    ours, theirs = MatrixOptimizer(model, Adafactor, **settings), Adafactor(matrices_of(plain), **settings)
    compare(model, plain, ours, theirs, rank)


@pytest.mark.parametrize("make", [Adafactor, torch.optim.Adagrad, torch.optim.SGD], ids=["adafactor", "adagrad", "sgd"])
@on_ranks(2)
def test_torchs_state_dict_functions_work_on_a_rank_that_owns_nothing(make: Any, rank: int) -> None:
    model = shard(nn.Sequential(nn.Linear(3, 4, bias=False)), by_blocks=False, use_orig_params=True)
    optimizer = MatrixOptimizer(model, make)
    assert len(set(optimizer.state_owners.values())) == 1
    with fsdp_flat.installed():
        if make is torch.optim.Adagrad:
            # It makes its states when it is constructed.
            get_optimizer_state_dict(model, optimizer)
        train_on(model, optimizer, [batch(rank)])
        optimizer.zero_grad()
        found = get_optimizer_state_dict(model, optimizer)
        assert bool(found["state"]) == (make is not torch.optim.SGD)
        fresh = MatrixOptimizer(model, make)
        set_optimizer_state_dict(model, fresh, found)
        full = StateDictOptions(full_state_dict=True)
        states = [get_optimizer_state_dict(model, each, options=full)["state"] for each in (fresh, optimizer)]
        assert_equal(*states)


# -- errors ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_flat_parameters_are_refused_with_the_option_to_pass() -> None:
    model = shard(seeded())
    with pytest.raises(OptionError, match="use_orig_params=True"):
        matrix_params(model)
    with pytest.raises(
        OptionError, match=r"flat parameter of unit 'Model', with 'first.weight' in it.*orig_params=True"
    ):
        MatrixOptimizer(model, Adafactor, params=model.parameters())


@on_ranks(2)
def test_what_the_inner_class_refuses_is_refused_on_every_rank() -> None:
    model, _ = wrapped()
    with pytest.raises(ValueError, match="Learning rate"):
        MatrixOptimizer(model, Adafactor, lr=-1.0)
    with pytest.raises(OptionError, match=r"max_nbytes must be.*got 0"):
        MatrixOptimizer(model, Adafactor, max_nbytes=0)
    with pytest.raises(OptionError, match="none of this model's"):
        MatrixOptimizer(model, Adafactor, params=[nn.Parameter(torch.ones(2, 2))])


@on_ranks(2)
def test_parameters_that_differ_between_ranks_are_found_when_they_are_given(rank: int) -> None:
    model, _ = wrapped()
    params = matrix_params(model)
    with pytest.raises(RankMismatchError, match="different parameters to a MatrixOptimizer"):
        MatrixOptimizer(model, Adafactor, params=params[rank:])
    with pytest.raises(ValueError if rank else PeerFailureError):
        MatrixOptimizer(model, Adafactor, params=[] if rank else params)
    optimizer = MatrixOptimizer(model, Adafactor, params=params[:2])
    with pytest.raises(RankMismatchError, match=r"last\.weight"):
        optimizer.add_param_group({"params": params[-1 - rank :]})
    # Nothing was added, so the right ones can be.
    optimizer.add_param_group({"params": params[2:]})
    assert len(optimizer.state_owners) == len(params)


@on_ranks(2)
def test_bounds_on_memory_that_differ_between_ranks_are_found_at_construction(rank: int) -> None:
    model, _ = wrapped()
    with pytest.raises(RankMismatchError, match=r"max_nbytes=1, rank 1 .* max_nbytes=2"):
        MatrixOptimizer(model, Adafactor, max_nbytes=1 + rank)


@on_ranks(2)
def test_a_removed_group_is_an_error_of_every_rank_before_anything_moves(rank: int) -> None:
    model, _ = wrapped()
    params = matrix_params(model)
    optimizer = MatrixOptimizer(model, Adafactor, params=[{"params": params[:3]}, {"params": params[3:]}])
    square_loss(model, batch(rank)).backward()
    before = whole_state(model)
    removed = optimizer.param_groups.pop() if rank == 1 else None
    expected = PeerFailureError if removed is None else UsageError
    with pytest.raises(
        expected, match=r"param_groups .*given 2 groups.*now 1 groups?.*Construct a new MatrixOptimizer"
    ):
        optimizer.step()
    assert_equal(whole_state(model), before)
    assert all(entry.whole.grad is None for entry in optimizer._owned)
    if removed is not None:
        optimizer.param_groups.append(removed)
    optimizer.step()


@on_ranks(2)
def test_a_gradient_that_some_ranks_lack_is_named_on_every_rank_before_anything_moves(rank: int) -> None:
    # Of one matrix in a unit, each rank has a half.
    model = shard(nn.Sequential(nn.Linear(3, 4, bias=False)), by_blocks=False, use_orig_params=True)
    optimizer = MatrixOptimizer(model, Adafactor)
    square_loss(model, batch(rank)).backward()
    before = whole_state(model)
    if rank == 1:
        model.module[0].weight.grad = None
    with pytest.raises(UsageError, match=r"'0.weight' of unit .* gradient on ranks \[0\].*none on ranks \[1\]"):
        optimizer.step()
    assert_equal(whole_state(model), before)


@pytest.mark.parametrize("how", ["HYBRID_SHARD mesh", "pairs"])
@on_ranks(4)
def test_a_gradient_that_one_rank_lacks_is_an_error_of_the_ranks_of_other_groups_too(how: str, rank: int) -> None:
    # Of the first matrix, each rank of a pair has a part.
    first = seeded(lambda: nn.Linear(3, 3, bias=False))
    if how == "pairs":
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        inner = FSDP(first, process_group=pairs[rank // 2], use_orig_params=True)
        model = FSDP(nn.Sequential(inner, nn.Linear(3, 3)), use_orig_params=True, sync_module_states=True)
    else:
        model = shard(first, "HYBRID_SHARD", by_blocks=False, use_orig_params=True, **groups_of(how))
    optimizer = MatrixOptimizer(model, Adafactor)
    square_loss(model, batch(rank)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    if rank == 1:
        first.weight.grad = None
    with pytest.raises(UsageError, match=r"gradient on ranks .* and none on ranks") as caught:
        optimizer.step()
    assert isinstance(caught.value, PeerFailureError) == (rank > 1)
    assert_equal([param.detach() for param in model.parameters()], before)


@on_ranks(2)
def test_a_copy_is_refused_with_what_to_do_instead() -> None:
    model, _ = wrapped()
    with pytest.raises(UnsupportedError, match="new one for a copy of the model"):
        copy.deepcopy(MatrixOptimizer(model, Adafactor))


@on_ranks(2)
def test_a_step_inside_summon_full_params_is_refused() -> None:
    model, _ = wrapped()
    optimizer = MatrixOptimizer(model, Adafactor)
    match = r"'first\.weight' .*outside of summon_full_params"
    with FSDP.summon_full_params(model), pytest.raises(UsageError, match=match):
        optimizer.step()


@on_ranks(2)
def test_an_inner_step_that_fails_on_an_owner_leaves_no_rank_waiting(rank: int) -> None:
    model, plain = wrapped()
    optimizer = MatrixOptimizer(model, Halving, max_nbytes=1)
    assert set(optimizer.state_owners.values()) == {0, 1}
    optimizer._inner.fails = rank == 0  # type: ignore[attr-defined]
    square_loss(model, batch(rank)).backward()
    if rank == 0:
        with pytest.raises(ArithmeticError, match="no step on"):
            optimizer.step()
    else:
        optimizer.step()
    changed = {name for name, value in whole_state(model).items() if not torch.equal(value, plain.state_dict()[name])}
    names = {param: name.replace("_fsdp_wrapped_module.", "") for name, param in model.named_parameters()}
    assert changed == {names[param] for param, owner in optimizer.state_owners.items() if owner == 1}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@on_ranks(4)
def test_tensor_parallel_parameters_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = FSDP(module, device_mesh=mesh["dp"], use_orig_params=True)
    with pytest.raises(UnsupportedError, match=r"'up\.weight' of unit 'Pair' is split by tensor parallelism"):
        MatrixOptimizer(model, Adafactor)


@on_ranks(2)
def test_parameters_that_no_optimizer_steps_are_named_once(rank: int) -> None:
    def steps(model: Any, *optimizers: Any) -> None:
        for number in range(3):
            square_loss(model, batch(rank, number)).backward()
            for optimizer in optimizers:
                optimizer.step()

    model, _ = wrapped()
    with pytest.warns(UserWarning, match=r"are in no optimizer that has stepped: .*matrix_params leaves out") as told:
        steps(model, MatrixOptimizer(model, Halving))
    assert len(told) == 1
    model, _ = wrapped()
    matrices = matrix_params(model)
    others = [param for param in model.parameters() if param not in set(matrices)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, MatrixOptimizer(model, Halving), torch.optim.SGD(others, lr=0.1))
