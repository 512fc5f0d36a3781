"""``torch.nn.utils.clip_grad_norm_`` computes the norm of all ranks; gradients are plain tensors otherwise."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard
from fsdp_flat.compat import replace_torch_functions, restore_torch_functions
from tests.clipping.test_clip_grad_norm import TREES
from tests.support import assert_close, on_ranks
from tests.support.beside import FOUR_RANKS, ORIG_PARAMS, TWO_RANKS, WRAPPER_FRONTS, Beside, average_gradients, placed
from tests.support.experts import WIDTH, Meshes, clip
from tests.support.kit import full_grads, normal, square_loss
from tests.support.models import Moe, Stack
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer
from tests.tensor_parallel.test_tensor_parallel import batches, grid, net, on_grid


def trained(strategy: str = "FULL_SHARD", *, rank: int, **kwargs: Any) -> Any:
    """A wrapped model after one backward on data of this rank."""
    model = shard(seeded(), strategy, **kwargs)
    square_loss(model, batch(rank)).backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those that are there."""
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("norm_type", [0, 1, 2.0, float("inf"), -1])
@pytest.mark.parametrize("tree", TREES)
@on_ranks(4)
def test_torchs_function_clips_by_the_norm_of_all_ranks(tree: str, norm_type: float, rank: int) -> None:
    models = [TREES[tree](seeded()) for _ in range(2)]
    for model in models:
        (square_loss(model, batch(0)) * 5).backward()
    expected = models[0].clip_grad_norm_(0.05, norm_type)
    assert_close(clip_grad_norm_(models[1].parameters(), 0.05, norm_type), expected, rtol=1e-6, atol=0.0)
    assert_close(full_grads(models[1]), full_grads(models[0]), rtol=1e-6, atol=1e-9)


@ORIG_PARAMS
@on_ranks(2, 4)
def test_the_norm_of_some_parameters_counts_and_scales_their_gradients_alone(use_orig_params: bool, rank: int) -> None:
    plain = seeded()
    model = trained(rank=0, use_orig_params=use_orig_params)
    square_loss(plain, batch(0)).backward()
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.full((3,), 2.0)
    expected = get_total_norm([other.grad, *[param.grad for block in plain.blocks for param in block.parameters()]])
    params = [other, *[param for block in model.blocks for param in block.parameters()]]
    for given in (params, [param for param in params if param.grad is not None], (param for param in params)):
        assert_close(clip_grad_norm_(given, float("inf")), expected, rtol=1e-5, atol=0.0)
    clip_grad_norm_(params, 0.5 * float(expected))
    assert_close(other.grad, torch.ones(3), rtol=1e-4, atol=0.0)
    first = full_grads(model)["first.weight"]
    assert first is not None
    assert_close(first, plain.first.weight.grad, rtol=1e-5, atol=1e-7)
    one = params[1]
    assert clip_grad_norm_(one, float("inf")) > 0


@ORIG_PARAMS
@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked(use_orig_params: bool, rank: int) -> None:
    model = trained(rank=rank, use_orig_params=use_orig_params)
    if rank == 1:
        gradients(model)[-1].fill_(float("inf"))
    with pytest.raises(RuntimeError, match=r"all ranks is non-finite \(inf\)"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model.parameters(), 1.0).isinf()


@on_ranks(2)
def test_gradients_of_several_dtypes_have_one_norm(rank: int) -> None:
    def made() -> Any:
        model = seeded()
        model.blocks[0].double()
        model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.blocks[0].register_forward_hook(lambda _, args, output: output.float())
        return model

    plain, model = made(), shard(made(), use_orig_params=True)
    for each in (plain, model):
        square_loss(each, batch(0)).backward()
    expected = torch.stack([param.grad.double().norm() for param in plain.parameters()]).norm()
    assert_close(clip_grad_norm_(model.parameters(), 0.01).double(), expected, rtol=1e-6, atol=0.0)
    kept = shard(
        seeded(),
        use_orig_params=True,
        mixed_precision=MixedPrecision(*[torch.bfloat16] * 3, keep_low_precision_grads=True),
    )
    square_loss(kept, batch(0)).backward()
    assert {grad.dtype for grad in gradients(kept)} == {torch.bfloat16}
    expected = kept.clip_grad_norm_(float("inf"))
    assert expected.dtype == torch.bfloat16
    assert_close(clip_grad_norm_(kept.parameters(), 0.01), expected, rtol=0.0, atol=0.0)


@ORIG_PARAMS
@on_ranks(4)
def test_parameters_that_tensor_parallelism_splits_too_have_one_norm(use_orig_params: bool, rank: int) -> None:
    mesh, plain = grid(), net()
    model = on_grid(copy.deepcopy(plain), mesh, "sequence", use_orig_params=use_orig_params)
    for each in (model, plain):
        square_loss(each, batches(0)[mesh["dp"].get_local_rank()]).backward()
    average_gradients(plain)
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(clip_grad_norm_(model.parameters(), 0.01), expected, rtol=1e-5, atol=0.0)
    assert_close(model.clip_grad_norm_(1.0), torch.tensor(0.01), rtol=1e-3, atol=0.0)


@on_ranks(4)
def test_parameters_of_fully_shard_on_several_meshes_have_one_norm(rank: int) -> None:
    """torch's function raises for gradients of more than one mesh."""
    model = Meshes.of(4, 2).shard(seeded(Moe), fully_shard)
    square_loss(model, normal(rank, 8, WIDTH)).backward()
    expected = clip(model.parameters(), float("inf"))  # mesh by mesh
    assert float(clip_grad_norm_(model.parameters(), 0.01)) == pytest.approx(expected, rel=1e-5)
    assert clip(model.parameters(), float("inf")) == pytest.approx(0.01, rel=1e-3)


@on_ranks(2)
def test_parameters_of_fully_shard_on_one_mesh_have_torchs_norm_also_beside_plain_ones(rank: int) -> None:
    plain = seeded()
    ignored = {plain.last.weight}
    model = copy.deepcopy(plain)
    fully_shard(model.blocks[0])
    fully_shard(model, ignored_params={model.last.weight})
    for each in (plain, model):
        square_loss(each, batch(0)).backward()
    all_but_ignored = [param for param in plain.parameters() if param not in ignored]
    found = clip_grad_norm_([param for param in model.parameters() if isinstance(param, DTensor)], float("inf"))
    assert isinstance(found, DTensor)
    assert_close(found.full_tensor(), clip_grad_norm_(all_but_ignored, float("inf")), rtol=1e-5, atol=0.0)
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(clip_grad_norm_(model.parameters(), 0.01), expected, rtol=1e-5, atol=0.0)
    assert_close(model.last.weight.grad, plain.last.weight.grad, rtol=1e-5, atol=1e-9)


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_inside_no_sync_torchs_function_clips_this_ranks_own_gradients(
    strategy: str, use_orig_params: bool, rank: int
) -> None:
    found = []
    for wrap in (shard, shard_by_peer):
        model = wrap(seeded(), strategy, use_orig_params=use_orig_params)
        with model.no_sync():
            square_loss(model, batch(rank)).backward()
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)]
        square_loss(model, batch(rank, 1)).backward()
        found.append([*norms, model.clip_grad_norm_(float("inf"))])
    assert_close(found[0], found[1], rtol=1e-5, atol=0.0)


@on_ranks(2, 4)
def test_one_parameter_that_lies_whole_on_one_rank_is_clipped_there(rank: int) -> None:
    """As on FSDP1, where a loop may pass over parameters that have no gradient on a rank."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(0)
    wrapped = shard(model, by_blocks=False, use_orig_params=True)
    square_loss(wrapped, batch(0)).backward()
    whole = [param for name, param in wrapped.named_parameters() if name.endswith("bias")]
    for param in whole:
        if param.grad is not None:
            before = param.grad.norm()
            assert_close(clip_grad_norm_(param, 1e-3), before, rtol=1e-6, atol=0.0)
            assert_close(param.grad.norm(), torch.tensor(1e-3), rtol=1e-2, atol=0.0)


@ORIG_PARAMS
@on_ranks(2, 4)
def test_a_norm_may_be_put_together_by_hand_from_local_ones(use_orig_params: bool, rank: int) -> None:
    """``get_total_norm`` is local, as on FSDP1."""
    plain, model = seeded(), trained(rank=0, use_orig_params=use_orig_params)
    square_loss(plain, batch(0)).backward()
    squares = get_total_norm(gradients(model)) ** 2
    dist.all_reduce(squares)
    expected = clip_grad_norm_(plain.parameters(), 0.01)
    assert_close(squares.sqrt(), expected, rtol=1e-5, atol=0.0)
    clip_grads_with_norm_(model.parameters(), 0.01, squares.sqrt())
    assert_close(
        full_grads(model), {name: param.grad for name, param in plain.named_parameters()}, rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("tree", TREES)
@on_ranks(4)
def test_torchs_function_that_was_kept_before_the_first_unit_clips_by_the_norm_of_all_ranks(
    tree: str, rank: int
) -> None:
    restore_torch_functions()  # as before the first unit
    try:
        kept = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.05)
        assert kept.func.__module__ == "torch.nn.utils.clip_grad"
    finally:
        replace_torch_functions()
    models = [TREES[tree](seeded()) for _ in range(2)]
    for model in models:
        (square_loss(model, batch(0)) * 5).backward()
    expected = models[0].clip_grad_norm_(0.05)
    assert_close(kept(models[1].parameters()), expected, rtol=1e-6, atol=0.0)
    assert_close(full_grads(models[1]), full_grads(models[0]), rtol=1e-6, atol=1e-9)
    plain = seeded()
    (square_loss(plain, batch(0)) * 5).backward()
    whole = get_total_norm(gradients(plain))
    assert_close(kept(plain.parameters()), whole, rtol=0.0, atol=0.0)
    assert_close(get_total_norm(gradients(plain)), torch.tensor(0.05), rtol=1e-4, atol=0.0)


@on_ranks(2)
def test_torchs_own_function_can_be_restored_in_every_module(rank: int) -> None:
    model = trained(rank=0, use_orig_params=True)
    whole = model.clip_grad_norm_(float("inf"))
    client = ModuleType("client_of_torch")
    client.clip = torch.nn.utils.clip_grad_norm_  # type: ignore[attr-defined]
    sys.modules["client_of_torch"] = client
    try:
        restore_torch_functions()
        for clip in (client.clip, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_):
            assert float(clip(model.parameters(), float("inf"))) < 0.999 * float(whole)
        trained(rank=0)  # a new model does not replace them again
        assert torch.nn.utils.clip_grad_norm_.__module__ == "torch.nn.utils.clip_grad"
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))) < 0.999 * float(whole)
    finally:
        replace_torch_functions()
        del sys.modules["client_of_torch"]
    for clip in (client.clip, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_):
        assert_close(clip(model.parameters(), float("inf")), whole, rtol=1e-6, atol=0.0)
    assert fsdp_flat.compat.replace_torch_functions is replace_torch_functions


@ORIG_PARAMS
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


@ORIG_PARAMS
@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_gradients_are_plain_tensors(use_orig_params: bool, foreach: bool, rank: int) -> None:
    model = shard(seeded(), "FULL_SHARD", use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    for _ in range(2):
        square_loss(model, batch(rank)).backward()
        with model.no_sync():
            square_loss(model, batch(rank)).backward()
            assert {type(grad) for grad in gradients(model)} == {torch.Tensor}
        square_loss(model, batch(rank)).backward()
        assert {type(grad) for grad in gradients(model)} == {torch.Tensor}
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def check_norms(layout: str, front: str) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    cases = itertools.product((2.0, 1.0, 3.0, math.inf), (1e-3, 1e3))
    for step, (norm_type, max_norm) in enumerate(cases):
        beside.backward(step=step)
        norm = beside.ours.clip_grad_norm_(max_norm, norm_type)
        expected = nn.utils.clip_grad_norm_(beside.plain.parameters(), max_norm, norm_type)
        assert expected.dtype is torch.float64
        assert_close(norm, expected, rtol=1e-12, atol=0.0, what=f"norm of order {norm_type}")
        beside.check_gradients("clipped gradients")
        beside.step()


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", TWO_RANKS)
@on_ranks(2)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm(layout: str, front: str) -> None:
    check_norms(layout, front)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", FOUR_RANKS)
@on_ranks(4)
def test_the_norm_of_fp64_gradients_is_torchs_fp64_norm_on_four_ranks(layout: str, front: str) -> None:
    check_norms(layout, front)


class WithOwn(nn.Module):
    """Has a layer that all ranks share, and one of this rank's own."""

    def __init__(self, own_dtype: torch.dtype) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4).to(own_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x).to(self.own.weight.dtype))


@pytest.mark.filterwarnings("ignore:.*differ")
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2, 4)
def test_ranks_with_a_module_in_fp64_agree_with_those_without(by_torch: bool, rank: int) -> None:
    torch.manual_seed(0)
    model = WithOwn(torch.float64 if rank == 1 else torch.float32)
    wrapped = FSDP(model, ignored_modules=[model.own], use_orig_params=True)
    square_loss(wrapped, normal(0, 3, 4)).backward()
    found = nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9) if by_torch else wrapped.clip_grad_norm_(1e9)
    assert found.dtype == (torch.float64 if rank == 1 else torch.float32)
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(totals, found.double())
    assert_close(totals, totals[:1] * len(totals), rtol=1e-5, atol=0.0)
