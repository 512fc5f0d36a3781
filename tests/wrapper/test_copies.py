"""``copy.deepcopy`` of a wrapped model, and averages that are built on it."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, register_forward_method
from fsdp_flat.comm import torch_comm
from fsdp_flat.errors import OptionTypeError, PhaseError, UsageError
from fsdp_flat.runtime import own_unit, units_of
from tests.support import OWN_STATISTICS, assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss, train_on
from tests.support.reference import replicated_step
from tests.wrapper.lives import KINDS, assert_same, make, train, train_reference
from tests.wrapper.models import Block, batch, message, seeded, shard

# ------------------------------------------------------------------------------------------------------- copies


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("before", [0, 2])
@on_ranks(2)
def test_a_copy_and_its_original_train_apart_as_plain_models_do(
    use_orig_params: bool, strategy: str, kind: str, before: int
) -> None:
    model, plain = shard(make(kind), strategy, use_orig_params=use_orig_params), make(kind)
    train(model, range(before), kind)
    train_reference(plain, range(before), kind)

    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not {p.data_ptr() for p in twin.parameters() if p.numel()} & {p.data_ptr() for p in model.parameters()}
    assert twin.process_group is model.process_group

    train(twin, range(5, 7), kind)
    train_reference(plain_twin, range(5, 7), kind)
    assert_same(model, plain)
    assert_same(twin, plain_twin)
    train(model, range(8, 10), kind)
    train_reference(plain, range(8, 10), kind)
    assert_same(model, plain)
    assert_same(twin, plain_twin)


class Recurrent(nn.Module):
    """Its recurrent layer keeps its weights in a list too, and so does the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 4), nn.Linear(4, 2)
        self.held: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held[:] = [self.head.weight]
        return self.head(self.rnn(x)[0])


@KINDS
@on_ranks(2)
def test_a_model_that_keeps_weights_in_lists_is_copied_after_a_step(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    model = FSDP(Recurrent(), use_orig_params=use_orig_params)
    x = torch.ones(3, 2, 4)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    twin = copy.deepcopy(model)
    assert_equal(twin(x).detach(), model(x).detach())
    held = twin.module.held[0]
    assert not any(held is param for param in model.module.held)


@on_ranks(4)
def test_a_copy_of_a_hybrid_model_shares_both_groups() -> None:
    model, plain = shard(seeded(), "HYBRID_SHARD"), seeded()
    train(model, range(1))
    train_reference(plain, range(1))
    twin = copy.deepcopy(model)
    assert twin.process_group is model.process_group
    assert twin._inter_node_pg is model._inter_node_pg
    train(twin, range(1, 3))
    train_reference(plain, range(1, 3))
    assert_same(twin, plain)


class Halves(nn.Module):
    """Frozen and trainable parameters in one unit, an ignored layer, and a list that holds a parameter too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.free = nn.Linear(5, 5)
        self.ignored = nn.Linear(5, 2)
        self.also = [self.free.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ignored(self.free(self.frozen(x)).relu())


@on_ranks(2)
def test_a_copy_keeps_frozen_parameters_frozen_and_references_to_parameters() -> None:
    plain, model = seeded(Halves), FSDP(seeded(Halves), use_orig_params=True)
    twin = copy.deepcopy(model)
    assert twin.module.also[0] is twin.module.free.weight
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    train(twin, range(2))
    train_reference(plain, range(2))
    assert_same(twin, plain)


@on_ranks(2)
def test_a_copy_has_copies_of_ignored_modules() -> None:
    module = seeded(Halves)
    model = FSDP(module, use_orig_params=True, ignored_modules=[module.ignored])
    twin = copy.deepcopy(model)
    assert twin._ignored_modules == {twin.module.ignored}
    assert twin._ignored_params == set(twin.module.ignored.parameters())
    with torch.no_grad():
        twin.module.ignored.weight.zero_()
    assert model.module.ignored.weight.count_nonzero() > 0


@KINDS
@on_ranks(2)
def test_a_model_and_its_optimizer_are_copied_in_one_call(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    pair = (model, torch.optim.Adam(model.parameters(), lr=0.01))
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    rank = dist.get_rank()
    for step in range(4):
        if step == 2:
            pair = copy.deepcopy(pair)
            held = pair[1].param_groups[0]["params"]
            assert all(a is b for a, b in zip(held, pair[0].parameters(), strict=True))
        pair[1].zero_grad()
        square_loss(pair[0], batch(rank, step)).backward()
        pair[1].step()
        replicated_step(plain, plain_optimizer, [batch(r, step) for r in range(2)], square_loss)
    assert_same(pair[0], plain)


@KINDS
@on_ranks(2)
def test_an_optimizer_copied_before_its_model_holds_the_copys_parameters(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer_twin, twin = copy.deepcopy((optimizer, model))
    held = optimizer_twin.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, twin.parameters(), strict=True))
    train_on(twin, optimizer_twin, [batch(dist.get_rank())])
    plain = seeded()
    replicated_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [batch(0), batch(1)], square_loss)
    assert_same(twin, plain)


@KINDS
@on_ranks(2)
def test_copying_between_forward_and_backward_on_one_rank_disturbs_nothing(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), "SHARD_GRAD_OP", use_orig_params=use_orig_params), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = square_loss(model, batch(dist.get_rank()))
    if dist.get_rank() == 0:
        copy.deepcopy(model)
    loss.backward()
    optimizer.step()
    replicated_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [batch(0), batch(1)], square_loss)
    assert_same(model, plain)


@on_ranks(2)
def test_a_module_that_holds_wrappers_is_copied_as_a_whole() -> None:
    model = nn.ModuleDict({"first": FSDP(seeded()), "second": FSDP(seeded(seed=1), use_orig_params=True)})
    twin = copy.deepcopy(model)
    for name, seed in (("first", 0), ("second", 1)):
        train(twin[name], range(2))
        plain = seeded(seed=seed)
        assert_same(model[name], plain)
        train_reference(plain, range(2))
        assert_same(twin[name], plain)


@on_ranks(2)
def test_a_nested_unit_is_copied_alone_and_is_its_own_root() -> None:
    model = shard(seeded())
    square_loss(model, batch(dist.get_rank())).backward()
    twin = copy.deepcopy(model.module.blocks[0])
    assert twin._is_root is None
    x = torch.randn(2, 5)
    assert_close(twin(x), seeded().blocks[0](x), rtol=1e-6, atol=1e-6)
    assert twin._is_root


class TiedBelow(nn.Module):
    """A weight of a block that the outermost unit holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(5, 11)
        self.head.weight = self.block.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


@KINDS
@on_ranks(2)
def test_a_unit_whose_parameter_an_outer_unit_holds_is_not_copied_alone(use_orig_params: bool) -> None:
    model = shard(seeded(TiedBelow), use_orig_params=use_orig_params)
    text = message(UsageError, RuntimeError, lambda: copy.deepcopy(model.module.block))
    assert "'weight'" in text
    assert "outermost" in text
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5)
    assert_close(twin(x), seeded(TiedBelow)(x), rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_a_copy_has_the_roots_hook_factor_and_forward_methods_of_its_own() -> None:
    model = shard(seeded())
    register_forward_method(model, "greet")
    model.set_gradient_divide_factor(1.0)
    twin = copy.deepcopy(model)
    model.set_gradient_divide_factor(None)
    assert twin.module is not model.module
    twin.module.config["width"] = 9
    assert twin.greet() == "model of width 9"
    assert model.greet() == "model of width 5"
    rank = dist.get_rank()
    square_loss(twin, batch(rank)).backward()
    square_loss(model, batch(rank)).backward()
    for whole_sum, mean in zip(twin.parameters(), model.parameters(), strict=True):
        assert_close(whole_sum.grad, 2 * mean.grad, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_a_copy_has_the_settings_of_resharding_and_order_with_its_own_modules() -> None:
    model: Any = nn.ModuleDict({"first": shard(seeded()), "second": shard(seeded(seed=1))})
    first, second = model["first"], model["second"]
    blocks = first.module.blocks
    first.set_reshard_after_forward(True, recurse=False)
    blocks[0].set_reshard_after_backward(False)
    blocks[1].set_unshard_in_backward(False)
    first.set_modules_to_forward_prefetch([blocks[1], second])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    second.set_modules_to_backward_prefetch([first])
    first.set_backend_collectives()

    twin: Any = copy.deepcopy(model)
    controls = [[unit.control for unit in units_of(each)] for each in (model, twin)]
    for control, copied in zip(*controls, strict=True):
        assert copied is not control
        assert replace(copied, forward_prefetch=(), backward_prefetch=()) == replace(
            control, forward_prefetch=(), backward_prefetch=()
        )
    own = twin["first"].module.blocks
    assert own_unit(twin["first"]).control.forward_prefetch == (own[1], twin["second"])
    assert own_unit(own[1]).control.backward_prefetch == (own[0],)
    assert own_unit(twin["second"]).control.backward_prefetch == (twin["first"],)
    assert own_unit(own[0]).collective_choice.backend

    alone = copy.deepcopy(first)
    assert own_unit(alone).control.forward_prefetch == (alone.module.blocks[1],)
    assert own_unit(copy.deepcopy(second)).control.backward_prefetch == ()
    # Settings of the copy are its own.
    alone.set_reshard_after_forward(False)
    assert own_unit(first).control.reshard_after_forward


@on_ranks(2)
def test_a_copy_begins_a_new_accumulation_as_it_has_no_gradients() -> None:
    model = shard(seeded())
    model.set_is_last_backward(False)
    with model.no_sync():
        twin = copy.deepcopy(model)
    train(twin, range(2))
    plain = seeded()
    train_reference(plain, range(2))
    assert_same(twin, plain)


class Gathers:
    """An all-gather of FSDP2's interface that counts its calls."""

    num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.num_calls += 1
        return torch_comm.all_gather_single(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


@on_ranks(2)
def test_a_copy_communicates_by_the_same_objects() -> None:
    model: Any = shard(seeded())
    gathers = Gathers()
    model.module.blocks[0].set_custom_all_gather(gathers)
    model.set_separate_reduce_scatter_group()
    twin = copy.deepcopy(model)
    assert own_unit(twin).collective_choice == own_unit(model).collective_choice
    train(twin, range(1))
    assert gathers.num_calls > 0
    plain = seeded()
    assert_same(model, plain)
    train_reference(plain, range(1))
    assert_same(twin, plain)


class Named(FSDP):
    """A user's subclass with something of its own."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.notes = ["a"]


@on_ranks(2)
def test_a_copy_of_a_subclass_has_its_class_and_attributes() -> None:
    model = Named(seeded())
    twin = copy.deepcopy(model)
    assert type(twin) is Named
    twin.notes.append("b")
    assert model.notes == ["a"]


@OWN_STATISTICS
@on_ranks(2)
def test_a_copy_of_a_mixed_precision_model_computes_alike() -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        full_precision_modules=(nn.LayerNorm,),
        _module_classes_to_ignore=(),
    )
    inner = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    model = FSDP(inner, mixed_precision=precision, use_orig_params=True)
    x = batch(dist.get_rank())
    expected = model(x)
    expected.float().mean().backward()
    twin = copy.deepcopy(model.eval())
    assert_equal(twin(x), model(x))
    assert twin.mixed_precision == precision


def copy_inside(where: str) -> Any:
    class Copying(nn.Linear):
        target: list[Any]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                copy.deepcopy(self.target[0])
            return super().forward(x)

    inner = Copying(3, 2)
    model = FSDP(inner)
    inner.target = [model]
    return model


@on_ranks(2)
def test_copying_inside_forward_or_summon_is_refused() -> None:
    model = copy_inside("forward")
    assert "in forward" in message(PhaseError, RuntimeError, lambda: model(batch(0)))
    model = copy_inside("nowhere")
    with FSDP.summon_full_params(model):
        text = message(PhaseError, RuntimeError, lambda: copy.deepcopy(model))
    assert "summon_full_params" in text
    copy.deepcopy(model)


@on_ranks(2)
def test_pickling_a_wrapped_model_says_what_to_save_instead() -> None:
    model = FSDP(nn.Linear(3, 2))
    for attempt in (lambda: pickle.dumps(model), lambda: copy.copy(model)):
        text = message(OptionTypeError, TypeError, attempt)
        assert "state_dict()" in text
        assert "unwrap" in text


# ----------------------------------------------------------------------------------------- averages by other means


@KINDS
@on_ranks(2)
def test_swa_utils_average_a_wrapped_model(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    plain_averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for step in range(3):
        train(model, range(step, step + 1))
        train_reference(plain, range(step, step + 1))
        averaged.update_parameters(model)
        plain_averaged.update_parameters(plain)
    assert_same(averaged.module, plain_averaged.module)
    x = batch(dist.get_rank())
    assert_close(averaged(x), plain_averaged(x), rtol=1e-5, atol=1e-6)


@KINDS
@on_ranks(2)
def test_a_users_average_over_zipped_parameters_is_right(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    average, plain_average = copy.deepcopy(model), copy.deepcopy(plain)
    train(model, range(2))
    train_reference(plain, range(2))
    with torch.no_grad():
        for target, source in ((average, model), (plain_average, plain)):
            for a, b in zip(target.parameters(), source.parameters(), strict=True):
                a.lerp_(b, 0.25)
    assert_same(average, plain_average)
    x = batch(dist.get_rank())
    assert_close(average(x), plain_average(x), rtol=1e-5, atol=1e-6)


@KINDS
@on_ranks(2)
def test_copied_and_pickled_parameters_are_plain_ones_of_the_same_values(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, range(1))
    params = list(model.parameters())
    stored = io.BytesIO()
    torch.save(params, stored)
    stored.seek(0)
    copied_optimizer = copy.deepcopy(optimizer)
    for twins in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        # A pickled flat parameter has the description that FSDP1 gives it, of a class of ours, as in FSDP1.
        torch.load(stored, weights_only=use_orig_params),
        copied_optimizer.param_groups[0]["params"],
    ):
        assert [type(twin) for twin in twins] == [nn.Parameter] * len(params)
        assert not (use_orig_params and any(any(vars(twin).values()) for twin in twins))
        marks = [getattr(twin, name, None) for twin in twins for name in ("_is_flat_param", "_fsdp_flattened")]
        assert not any(marks)
        assert_equal([twin.data for twin in twins], [param.data for param in params])
        # They belong to no unit, so torch's own functions work on them.
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        assert torch.nn.utils.clip_grad_norm_(twins, 1e9) == sum(twin.numel() for twin in twins) ** 0.5
    copied_optimizer.step()
    assert len(copied_optimizer.state) == len(params)
