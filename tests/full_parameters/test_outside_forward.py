"""Parameters used outside of a forward: errors that help, and the ways in which it works."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedEMA, ShardingStrategy, debug, register_forward_method, unshard_for
from fsdp_flat.composable import trace
from fsdp_flat.core import unsharded_shape
from tests.support import on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import full_params
from tests.support.models import NormedBlock
from tests.support.surface_models import (
    assert_near,
    batches,
    count_events,
    grads_or_zeros,
    mean_grads,
    mean_loss,
    plain_grads,
    sharded,
    small_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
WAYS_OUT = ("register_forward_method", "unshard_for", "summon_full_params")


def check_grads(
    model: nn.Module, plain: nn.Module, num_ranks: int, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    """The gradients on ``model`` are those of the mean over ranks of ``loss_of`` on the plain model."""
    expected = mean_grads(plain, loss_of(plain, batches(num_ranks)[dist.get_rank()]))
    assert_near(grads_or_zeros(model), expected, 1e-5, "gradients")


# ------------------------------------------------------------------------------------------------------------ errors


@ORIG_PARAMS
@pytest.mark.parametrize("when", ["before the first step", "after a step"])
@on_ranks(2)
def test_a_module_called_while_sharded_names_parameter_unit_and_ways_out(
    when: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), use_orig_params=use_orig_params)
    root = "Sequential"
    if when == "after a step":
        mean_loss(model, batches(num_ranks)[rank]).backward()
    for call, parameter, unit in (
        (lambda: model[0](torch.ones(2, 5)), "'0.weight' (7, 5)", root),
        (lambda: model[1].up(torch.ones(2, 7)), "'up.weight' (15, 7)", "1"),
        (lambda: model[1].module(torch.ones(2, 7)), "'norm.weight' (7,)", "1"),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        text = str(caught.value)
        assert parameter in text
        assert f"unit {unit!r}" in text
        assert all(way in text for way in WAYS_OUT)
    # The errors leave nothing behind.
    mean_loss(model, batches(num_ranks)[rank]).backward()


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul": lambda weight: weight * 2,
    "matmul": lambda weight: torch.ones(3, 3) @ weight,
    "linear": lambda weight: F.linear(torch.ones(2, 7), weight),
    "transposed": lambda weight: torch.ones(2, 7) @ weight.T,
    "data": lambda weight: torch.ones(2, 7) @ weight.data.t(),
    "item": lambda weight: weight.sum().item(),
    "index": lambda weight: weight[0],
    "cat": lambda weight: torch.cat([weight, weight]),
    "clone": lambda weight: weight.detach().clone(),
    "list": lambda weight: weight.tolist(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@on_ranks(2)
def test_a_flat_units_parameter_used_by_an_operation_names_itself(operation: str, rank: int, num_ranks: int) -> None:
    model = sharded(small_model(), use_orig_params=False)
    mean_loss(model, batches(num_ranks)[rank]).backward()
    with pytest.raises(RuntimeError) as caught:
        OPERATIONS[operation](model[3].weight)
    text = str(caught.value)
    assert "'3.weight' (3, 7)" in text
    assert "unit 'Sequential'" in text
    assert all(way in text for way in WAYS_OUT)


SHAPED_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda weight: F.linear(torch.ones(2, 7), weight=weight),
    "matmul": lambda weight: torch.ones(2, 7) @ weight.t(),
    "of two slices": lambda weight: weight @ weight.T,
    "in a list": lambda weight: torch.einsum("ij,kj->ik", torch.ones(2, 7), weight),
    "embedding": lambda weight: F.embedding(torch.tensor([1]), weight),
    "layer_norm": lambda weight: F.layer_norm(torch.ones(2, 7), (7,), weight),
    "transposed": lambda weight: weight.mT,
    # These would go through with the slice, and give a wrong number.
    "row": lambda weight: weight[1],
    "rows": lambda weight: weight[:2],
    "written row": lambda weight: weight.__setitem__(0, 1.0),
    "softmax": lambda weight: torch.softmax(weight, -1),
    "log_softmax": lambda weight: F.log_softmax(weight, dim=-1),
    "normalize": lambda weight: F.normalize(weight, dim=-1),
    "mean of a dim": lambda weight: weight.mean(-1),
    "sum of a dim": lambda weight: torch.sum(weight, dim=0),
    "norm of a dim": lambda weight: torch.linalg.vector_norm(weight, 2, dim=-1),
    "largest of a dim": lambda weight: weight.max(0),
    "index_select": lambda weight: weight.index_select(0, torch.tensor([0])),
    "index_add": lambda weight: weight.index_add(0, torch.tensor([0]), torch.ones(1)),
    "gather": lambda weight: weight.gather(0, torch.tensor([0])),
    "take": lambda weight: torch.take(weight, torch.tensor([0])),
    "sort": lambda weight: weight.sort(),
    "cumsum": lambda weight: weight.cumsum(0),
    "topk": lambda weight: weight.topk(1),
    "argmax": lambda weight: weight.argmax(),
    "flip": lambda weight: weight.flip(0),
    "masked_select": lambda weight: weight.masked_select(weight.detach() > 0),
    "dropout": lambda weight: F.dropout(weight, 0.5),
    "outer": lambda weight: torch.outer(weight, weight),
    "unsqueeze": lambda weight: weight.unsqueeze(0),
    "broadcast": lambda weight: weight * torch.ones(2, 1),
    # These would end in torch's words.
    "whole shape": lambda weight: weight.view(3, 7),
    "reshape": lambda weight: weight.reshape(7, 3),
    "svd": lambda weight: torch.linalg.svd(weight),
    "cat": lambda weight: torch.cat([weight, torch.ones(1)]),
    "stack": lambda weight: torch.stack([weight, weight]),
    "whole copied in": torch.no_grad()(lambda weight: weight.copy_(torch.ones(3, 7))),
    "whole added": lambda weight: weight + torch.ones(3, 7),
    "fan": lambda weight: nn.init.kaiming_uniform_(weight),
}


@on_ranks(2)
def test_in_debug_an_original_parameter_used_in_its_shape_while_sharded_names_itself(rank: int, num_ranks: int) -> None:
    model = sharded(small_model(), use_orig_params=True)
    before = full_params(model)
    for _ in range(2):
        with debug():
            for name, operation in SHAPED_OPERATIONS.items():
                with pytest.raises(RuntimeError) as caught:
                    operation(model[3].weight)
                text = str(caught.value)
                assert "'3.weight' (3, 7) of unit 'Sequential'" in text, name
                assert f"holds {model[3].weight.numel()} of its elements" in text, name
                assert all(way in text for way in WAYS_OUT), name
            mean_loss(model, batches(num_ranks)[rank]).backward()
    assert_near(full_params(model), before, 0.0, "weights, to which refused operations must not write")
    with debug():
        for way_out in (unshard_for(model), FSDP.summon_full_params(model)):
            with way_out:
                assert (torch.ones(2, 7) @ model[3].weight.t()).shape == (2, 3)


@on_ranks(2)
def test_without_debug_an_operation_on_a_sharded_original_parameter_is_that_of_torch(rank: int) -> None:
    weight = sharded(small_model(), use_orig_params=True)[3].weight
    assert torch.softmax(weight, -1).shape == weight.shape
    with pytest.raises(RuntimeError) as caught:
        F.linear(torch.ones(2, 7), weight)
    assert "while it is sharded" not in str(caught.value)


@ORIG_PARAMS
@on_ranks(2)
def test_in_debug_a_model_trains_and_is_clipped_averaged_saved_and_converted_as_outside_of_it(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    def run() -> torch.Tensor:
        model = sharded(small_model(), use_orig_params=use_orig_params)
        average = ShardedEMA(model, 0.5)
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            for foreach in (False, True):
                optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
                mean_loss(model, batches(num_ranks)[rank]).backward()
                model.clip_grad_norm_(0.1)
                optimizer.step()
                FSDP.optim_state_dict(model, optimizer)
                optimizer.zero_grad()
                average.update()
        model.load_state_dict(model.state_dict())
        with model.no_sync():
            mean_loss(model, batches(num_ranks)[rank]).backward()
        other = sharded(small_model(), use_orig_params=use_orig_params).double()
        mean_loss(other, batches(num_ranks)[rank].double()).backward()
        with average.swap(), torch.no_grad():
            return mean_loss(model, batches(num_ranks)[rank])

    outside = run()
    with debug():
        inside = run()
    assert torch.equal(inside, outside)


@ORIG_PARAMS
@on_ranks(2)
def test_parameters_of_a_wrapped_model_are_plain_parameters_in_steps_too(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), use_orig_params=use_orig_params)
    params = list(model.parameters())
    assert model[3].weight is params[-2] or not use_orig_params
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(all(type(param) is nn.Parameter for param in (*params, *model.parameters())))
        seen.append(not any(torch.overrides.has_torch_function_unary(param) for param in params))

    class Strict(torch.optim.SGD):
        """As some optimizers, it takes nothing but parameters of torch's own class."""

        def step(self, closure: Any = None) -> None:
            look()
            super().step()

    model[1].register_forward_hook(look)
    optimizer = Strict(params, lr=0.1)
    for _ in range(2):
        look()
        loss = mean_loss(model, batches(num_ranks)[rank])
        look()
        loss.backward()
        look()
        optimizer.step()
    model.double()
    look()
    assert len(seen) >= 20
    assert all(seen)


class Marked(nn.Parameter):
    """A class of parameters that some other library puts in a model."""


@on_ranks(2)
def test_a_parameter_of_a_class_of_its_own_keeps_it(rank: int, num_ranks: int) -> None:
    plain = small_model()
    plain[3].weight = Marked(plain[3].weight.data)
    model = sharded(plain, use_orig_params=True)
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert type(model[3].weight) is Marked


FREE_OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda weight: 1 - (2 * weight + weight * weight / 3) ** 2,
    "reflected": lambda weight: (2**weight, 1 / (weight.abs() + 1), 5 // (weight + 9), -weight),
    "of two slices": lambda weight: torch.maximum(weight, weight.detach()) + weight.where(weight > 0, weight.sign()),
    "in place": torch.no_grad()(
        lambda weight: weight.add_(0.0).mul_(1.0).lerp_(weight.detach(), 0.5).clamp_(-9, 9).copy_(weight.detach())
    ),
    "augmented": lambda weight: weight.data.__iadd__(0.0),
    "noise": lambda weight: weight + torch.randn_like(weight) * weight.new_ones(()),
    "foreach": lambda weight: torch._foreach_norm(torch._foreach_add([weight, weight], 1.0)),
    "norms": lambda weight: (weight.norm(), weight.norm(2), torch.norm(weight, 1), torch.linalg.vector_norm(weight, 2)),
    "sums": lambda weight: (weight.sum(), weight.mean(), weight.std(), weight.var(unbiased=False), weight.prod()),
    "logical": lambda weight: (weight.isnan().any(), weight.isfinite().all(), (weight == weight).all(), bool),
    "comparing": lambda weight: (torch.equal(weight, weight), torch.allclose(weight, weight), weight.eq(weight.data)),
    "looking": lambda weight: (weight.shape, weight.numel(), len(weight), weight.dtype, repr(weight), hash(weight)),
    "where it is": lambda weight: (weight.device, weight.is_cuda, weight.data_ptr(), weight.untyped_storage().nbytes()),
    "copies": lambda weight: (weight.clone(), weight.detach(), weight.data, copy.deepcopy(weight), weight.cpu()),
    "moves": lambda weight: (weight.to("cpu"), weight.double(), weight.to(torch.float16), weight.contiguous()),
    "as numbers": lambda weight: (weight.tolist(), weight.detach().numpy()),
    "flat": lambda weight: (
        weight.view(-1),
        weight.flatten(),
        weight.reshape(-1),
        nn.utils.parameters_to_vector([weight]),
    ),
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "autograd": lambda weight: weight.pow(2).sum().backward(),
    "flags": lambda weight: weight.requires_grad_(True).is_leaf,
    "hooks": lambda weight: weight.register_hook(print).remove(),
    "init": lambda weight: (nn.init.normal_(weight), nn.init.zeros_(weight), nn.init.uniform_(weight, -1, 1)),
}


@on_ranks(2)
def test_in_debug_a_sharded_original_parameter_is_any_parameter_element_by_element(rank: int) -> None:
    params = sharded(small_model(), use_orig_params=True).parameters()
    weight = next(param for param in params if param.numel() not in (0, math.prod(unsharded_shape(param))))
    for name, operation in FREE_OPERATIONS.items():
        try:
            with debug():
                operation(weight)
        except Exception as error:
            raise AssertionError(name) from error
    assert weight.grad.shape == weight.shape


class Recurrent(nn.Module):
    """A module that keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(5, 4, num_layers=2, bidirectional=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(x)[0])


@ORIG_PARAMS
@on_ranks(2)
def test_a_recurrent_module_trains_after_a_conversion(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model = sharded(Recurrent(), classes=(nn.GRU,), use_orig_params=use_orig_params)
    for convert in (lambda module: module.double(), lambda module: module.to(torch.float32).double()):
        convert(model)
        model.zero_grad()
        mean_loss(model, batches(num_ranks)[rank].double()).backward()
        plain = Recurrent().double()
        check_grads(model, plain, num_ranks, lambda module, batch: mean_loss(module, batch.double()))


@on_ranks(2)
def test_an_embedding_that_renormalises_its_weight_is_refused_where_the_weight_is_sharded(rank: int) -> None:
    def build(kind: type[nn.Module]) -> nn.Sequential:
        return nn.Sequential(nn.Sequential(kind(6, 4, max_norm=1.0)), nn.Linear(4, 2))

    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match=rf"max_norm.*'0.0' \({kind.__name__}\).*ignored_modules"):
            FSDP(build(kind))
    plain = build(nn.Embedding)
    FSDP(plain, ignored_modules=[plain[0]])(torch.tensor([1, 2]))
    FSDP(build(nn.Embedding), sharding_strategy=ShardingStrategy.NO_SHARD)(torch.tensor([1, 2]))


@ORIG_PARAMS
@on_ranks(2)
def test_modules_of_units_that_are_not_sharded_run_by_themselves(use_orig_params: bool, rank: int) -> None:
    model = sharded(small_model(), "NO_SHARD", use_orig_params=use_orig_params)
    x = torch.ones(2, 5)
    assert torch.equal(model[0](x), small_model()[0](x))


# --------------------------------------------------------------------------------------------------- other methods


class Encoder(nn.Module):
    """Is used through two methods beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """The hidden state before the head, scaled."""
        return self.body[2](self.body[1](self.body[0](x))) * scale


@ORIG_PARAMS
@on_ranks(2)
def test_a_registered_method_runs_and_trains_as_forward_does(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    torch.manual_seed(0)
    model, plain = sharded(Encoder(), use_orig_params=use_orig_params), Encoder()
    x = batches(num_ranks)[rank]
    with pytest.raises(RuntimeError, match="register_forward_method"):
        model.encode(x)
    register_forward_method(model, "encode")
    assert_near(model.encode(x, scale=2.0).detach(), plain.encode(x, scale=2.0).detach(), 1e-6, "output")
    model.encode(x, scale=2.0).pow(2).mean().backward()
    check_grads(model, plain, num_ranks, lambda module, batch: module.encode(batch, scale=2.0).pow(2).mean())
    with torch.no_grad():
        model.encode(x)
    assert all(unit.is_sharded for unit in model._unit.step.units)


@on_ranks(2)
def test_registering_a_method_is_harmless_on_plain_modules_and_refused_where_there_is_none(rank: int) -> None:
    plain = Encoder()
    register_forward_method(plain, "encode")
    assert "encode" not in plain.__dict__
    with pytest.raises(ValueError, match="Encoder has no method 'generate'"):
        register_forward_method(sharded(Encoder()), "generate")


# ------------------------------------------------------------------------------------------------------ unshard_for


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_loss_may_use_weights_inside_unshard_for(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = module[2](module[1](module[0](batch)))
        fused = F.linear(hidden, module[3].weight, module[3].bias)  # what fused loss kernels do with the head
        return fused.pow(2).mean() + module[1].up.weight.pow(3).sum() + module(batch).mean()

    for _ in range(2):
        model.zero_grad()
        with unshard_for(model):
            assert model[3].weight.shape == (3, 7)
            loss = loss_of(model, batches(num_ranks)[rank])
        loss.backward()
        assert all(unit.is_sharded or not unit.needs_all_gather for unit in model._unit.step.units)
        check_grads(model, small_model(), num_ranks, loss_of)


@ORIG_PARAMS
@on_ranks(2)
def test_unshard_for_covers_what_is_below_a_module_and_nests(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model = sharded(small_model(), use_orig_params=use_orig_params)
    model.check_is_root()
    with unshard_for(model[1]):
        assert model[1].up.weight.shape == (15, 7)
        with unshard_for(model):
            loss = model[1].up.weight.pow(2).sum() + model[3].weight.sum()
        assert model[1].up.weight.shape == (15, 7), "the inner block does not free what the outer one holds"
        loss = loss + model[1].down.weight.pow(2).sum()
    assert_near(loss.detach(), outside_loss(small_model()).detach(), 1e-5, "loss")
    loss.backward()
    plain = small_model()
    outside_loss(plain).backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5, "gradients")


def outside_loss(module: nn.Module) -> torch.Tensor:
    return module[1].up.weight.pow(2).sum() + module[3].weight.sum() + module[1].down.weight.pow(2).sum()


@ORIG_PARAMS
@on_ranks(2)
def test_unshard_for_without_gradients_frees_at_its_end(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model = sharded(small_model(), use_orig_params=use_orig_params)
    with torch.no_grad(), trace(model) as events:
        with unshard_for(model):
            total = sum(block.up.weight.sum() for block in model[1:3])
        assert set(count_events(events, "reshard")) == {"Sequential", "1", "2"}
    assert_near(total, sum(block.up.weight.sum() for block in small_model()[1:3]).detach(), 1e-5, "sum")
    assert not any(unit.param_groups[0].output.nbytes for unit in model._unit.step.units)


@ORIG_PARAMS
@on_ranks(2)
def test_an_exception_inside_unshard_for_leaves_the_model_usable(
    use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), use_orig_params=use_orig_params)
    with pytest.raises(ZeroDivisionError), unshard_for(model):
        raise ZeroDivisionError
    mean_loss(model, batches(num_ranks)[rank]).backward()
    check_grads(model, small_model(), num_ranks, mean_loss)


@on_ranks(2)
def test_unshard_for_is_refused_inside_summon_full_params(rank: int) -> None:
    model = sharded(small_model())
    with (
        FSDP.summon_full_params(model),
        pytest.raises(RuntimeError, match="inside summon_full_params"),
        unshard_for(model),
    ):
        pass


# ----------------------------------------------------------------------------------- how backward may reach a unit


@dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


class Caching(nn.Module):
    """Keeps inner tensors, from which a loss may be made without its output."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.block = NormedBlock()
        self.store = store
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.block.up(x)
        kinds = {"tensor": hidden, "list": [hidden], "dict": {"a": (hidden,)}, "dataclass": Result(hidden)}
        self.cache = kinds[self.store]
        return self.block(x) + hidden.mean()

    def cached(self) -> torch.Tensor:
        """The tensor in whatever it is kept in."""
        cache = self.cache
        while not isinstance(cache, torch.Tensor):
            if isinstance(cache, Result):
                cache = cache.hidden
            else:
                cache = next(iter(cache.values() if isinstance(cache, dict) else cache))
        return cache


@ORIG_PARAMS
@pytest.mark.parametrize("with_output", [False, True], ids=["cache only", "cache and output"])
@pytest.mark.parametrize("store", ["tensor", "list", "dict", "dataclass"])
@on_ranks(2)
def test_a_loss_on_tensors_that_modules_keep_trains(
    store: str, with_output: bool, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), Caching(store), Caching(store), nn.Linear(7, 3))

    def loss_of(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = module(batch)
        loss = sum(module[index].cached().pow(2).mean() for index in (1, 2))
        return loss + output.pow(2).mean() if with_output else loss

    model = sharded(build(), classes=(Caching,), use_orig_params=use_orig_params)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batches(num_ranks)[rank]).backward()
        check_grads(model, build(), num_ranks, loss_of)
        assert all(unit.is_sharded for unit in model._unit.step.units)
