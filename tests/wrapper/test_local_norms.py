"""``torch.nn.utils``' norms over gradients of which each rank holds a part: an error, never one rank's number."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import square_loss
from tests.wrapper.models import batch, message, seeded, shard

KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
# foreach=False, and what torch falls back to for classes of tensors that it does not list.
FOREACH = (None, True, False)


def trained(strategy: str = "FULL_SHARD", *, rank: int, **kwargs: Any) -> Any:
    """A wrapped model after one backward on data of this rank."""
    model = shard(seeded(), strategy, **kwargs)
    square_loss(model, batch(rank)).backward()
    return model


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text with which ``call(*args, **kwargs)`` is refused."""
    return message(UsageError, RuntimeError, partial(call, *args, **kwargs))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those that are there."""
    return [param.grad for param in model.parameters() if param.grad is not None]


@KINDS
@on_ranks(2)
def test_norms_of_torch_nn_utils_name_the_method_that_is_right(use_orig_params: bool, rank: int) -> None:
    model = trained(rank=rank, use_orig_params=use_orig_params)
    before = [grad.clone() for grad in gradients(model)]
    plain = nn.Parameter(torch.ones(3))
    plain.grad = torch.ones(3)
    for foreach in FOREACH:
        for norm_type in (2.0, 1, float("inf")):
            # The largest element of no elements is no number.
            some = [param for param in model.parameters() if param.grad is not None and param.grad.numel()]
            for params in (some, [plain, *some], [*some, plain]):
                text = refused(clip_grad_norm_, params, 0.1, norm_type, foreach=foreach)
                assert "model.clip_grad_norm_(max_norm)" in text
                assert "This rank holds" in text
                assert "elements of the gradient of" in text
                refused(get_total_norm, [param.grad for param in params], norm_type, foreach=foreach)
    one = next(param for param in model.parameters() if param.grad is not None)
    refused(clip_grad_norm_, one, 0.1)
    assert_close(gradients(model), before, rtol=0.0, atol=0.0)
    assert_close(plain.grad, torch.ones(3), rtol=0.0, atol=0.0)


@KINDS
@on_ranks(2)
def test_norms_stay_refused_after_steps_accumulation_conversion_and_unscaling(use_orig_params: bool, rank: int) -> None:
    model = trained(rank=rank, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    square_loss(model, batch(rank)).backward()
    refused(clip_grad_norm_, model.parameters(), 0.1)
    with model.no_sync():
        square_loss(model, batch(rank)).backward()
        assert "not reduced yet" in refused(clip_grad_norm_, model.parameters(), 0.1, foreach=False)
    square_loss(model, batch(rank)).backward()
    refused(clip_grad_norm_, model.parameters(), 0.1)
    optimizer.zero_grad()
    with model.no_sync():
        square_loss(model, batch(rank)).backward()
        optimizer.zero_grad(set_to_none=False)
    square_loss(model, batch(rank)).backward()
    model.double()
    refused(get_total_norm, gradients(model))
    with FSDP.summon_full_params(model, with_grads=True):
        whole = get_total_norm(gradients(model))
    assert_close(model.clip_grad_norm_(float("inf")), whole, rtol=1e-6, atol=0.0)
    optimizer.zero_grad()
    assert clip_grad_norm_(model.parameters(), 0.1) == 0.0


@on_ranks(2)
def test_norms_are_refused_if_a_gradient_was_there_before_the_reduction(rank: int) -> None:
    """Autograd makes the gradient of a penalty on sharded weights, a caller zeros, and a step leaves a plain one."""
    model = shard(seeded(), use_orig_params=True)
    params = list(model.parameters())
    (square_loss(model, batch(rank)) + sum(param.square().sum() for param in params)).backward()
    refused(clip_grad_norm_, params, 0.1)
    for param in params:
        param.grad = torch.zeros_like(param)
    square_loss(model, batch(rank)).backward()
    refused(clip_grad_norm_, params, 0.1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    square_loss(model, batch(rank)).backward()
    refused(clip_grad_norm_, params, 0.1)


class Keeps(torch.optim.Optimizer):
    """Keeps gradients in its state, and compiles its update of one parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.update = torch.compile(lambda param, grad: param.sub_(grad, alpha=0.1), backend="aot_eager")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].update(last=param.grad, converted=param.grad.float())
                    self.update(param.detach(), param.grad)


@KINDS
@on_ranks(2)
def test_an_optimizer_sees_plain_gradients_during_its_step(use_orig_params: bool, rank: int) -> None:
    model = trained(rank=rank, use_orig_params=use_orig_params)
    optimizer = Keeps(model.parameters())
    before = [param.detach().clone() for param in model.parameters()]
    grads = [None if param.grad is None else param.grad.detach().clone() for param in model.parameters()]
    optimizer.step()
    kept = [each for state in optimizer.state.values() for each in state.values()]
    assert {type(each) for each in kept} == {torch.Tensor}
    for param, old, grad in zip(model.parameters(), before, grads, strict=True):
        assert_close(param.detach(), old if grad is None else old - 0.1 * grad, rtol=1e-6, atol=1e-7)


@KINDS
@on_ranks(4)
def test_gradients_that_are_whole_are_clipped_by_torch_nn_utils(use_orig_params: bool, rank: int) -> None:
    plain = seeded()
    square_loss(plain, torch.cat([batch(index) for index in range(4)])).backward()
    expected = clip_grad_norm_(plain.parameters(), 0.05)
    # Whole with NO_SHARD, and where the shard group is of one rank.
    for strategy, mesh in (("NO_SHARD", None), ("HYBRID_SHARD", (4, 1)), ("HYBRID_SHARD", (2, 2))):
        groups = {} if mesh is None else {"device_mesh": init_device_mesh("cpu", mesh)}
        model = trained(strategy, rank=rank, use_orig_params=use_orig_params, **groups)
        if mesh == (2, 2):
            refused(clip_grad_norm_, model.parameters(), 0.05)
            continue
        assert_close(clip_grad_norm_(model.parameters(), 0.05), expected, rtol=1e-5, atol=0.0)


@KINDS
@on_ranks(2)
def test_gradients_are_read_scaled_copied_and_saved_as_any_tensor(use_orig_params: bool, rank: int) -> None:
    model = trained(rank=rank, use_orig_params=use_orig_params)
    grads = gradients(model)
    # As loggers read them: one gradient's norm, all of them stacked, and the norm over ranks by hand.
    norms = [grad.norm() for grad in grads if grad.numel()]
    assert f"{norms[0]:.3f}" == f"{norms[0].item():.3f}"
    assert float(torch.linalg.vector_norm(grads[-1])) == pytest.approx(float(grads[-1].norm()))
    assert torch.stack(norms).max() == max(norms)
    squares = torch.stack([torch.linalg.vector_norm(grad.detach()) for grad in grads]).norm() ** 2
    torch.distributed.all_reduce(squares)
    total = model.clip_grad_norm_(float("inf"))
    assert_close(squares.sqrt(), total, rtol=1e-5, atol=0.0)
    # A norm over all ranks may be handed to torch's function that scales by it.
    clip_grads_with_norm_(model.parameters(), 0.5 * float(total), total)
    assert_close(model.clip_grad_norm_(float("inf")), 0.5 * total, rtol=1e-4, atol=0.0)
    assert isinstance(grads[0], torch.Tensor)
    stored = io.BytesIO()
    torch.save(grads, stored)
    stored.seek(0)
    for twins in (copy.deepcopy(grads), pickle.loads(pickle.dumps(grads)), torch.load(stored, weights_only=True)):
        assert {type(twin) for twin in twins} == {torch.Tensor}
        assert_close(twins, [grad.detach() for grad in grads], rtol=0.0, atol=0.0)
    assert {type(grad * 2) for grad in grads} == {torch.Tensor}
    # What is read is the stored gradient itself: writing, replacing and putting back reach the optimizer.
    assert all(param.grad is param.grad for param in model.parameters())
    param = next(param for param in model.parameters() if param.grad is not None and param.grad.numel())
    expected = param.grad.detach() * 6
    param.grad.mul_(2)
    param.grad.data = param.grad.data * 3
    kept, param.grad = param.grad, None
    assert param.grad is None
    param.grad = kept
    assert_close(param.grad.detach(), expected, rtol=1e-6, atol=0.0)


@KINDS
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_nothing_that_is_computed_from_gradients_keeps_their_class(
    use_orig_params: bool, foreach: bool, rank: int
) -> None:
    kinds = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop)
    for kind in (*kinds, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adamax, torch.optim.ASGD):
        model = shard(seeded(), "FULL_SHARD", use_orig_params=use_orig_params)
        momentum = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
        optimizer = kind(model.parameters(), lr=0.01, foreach=foreach, **momentum)
        for _ in range(2):
            square_loss(model, batch(rank)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        held = [value for state in optimizer.state.values() for value in state.values()]
        assert {type(value) for value in held if isinstance(value, torch.Tensor)} == {torch.Tensor}, kind
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    grad = gradients(model)[-1]
    for result in (grad.clone(), grad.detach(), torch.zeros_like(grad), grad.view(-1), grad[:1], grad + grad, -grad):
        assert type(result) is torch.Tensor
    assert grad.mul_(2.0) is grad
    assert not grad.is_sparse
