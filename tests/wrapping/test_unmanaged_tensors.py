"""Tensors that no unit manages, and settings that differ between ranks: named, or averaged where that is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, check_replicas, fully_shard
from fsdp_flat.core import averages
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError
from fsdp_flat.guards import unmanaged_tensors as unmanaged
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS, average_gradients
from tests.support.kit import square_loss
from tests.support.wrapper_models import batch, message, seeded, shard


@contextmanager
def warned(on_this_rank: bool = True) -> Iterator[list[str]]:
    """Collects texts of warnings inside the block: there has to be one, or none."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts.extend(str(warning.message) for warning in caught)
    assert len(texts) == on_this_rank, texts


def ignoring(use_orig_params: bool = True, make: Callable[[], Any] = seeded, **kwargs: Any) -> Any:
    """A wrapped model that leaves its last layer alone."""
    model = make()
    return FSDP(model, ignored_modules=[model.last], use_orig_params=use_orig_params, **kwargs)


def step(model: Any, data: torch.Tensor, *, between: Callable[[], object] = lambda: None) -> None:
    """One step of a new optimizer; ``between`` is called before it reads gradients."""
    square_loss(model, data).backward()
    between()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def assert_same_on_ranks(tensor: torch.Tensor) -> None:
    """Compares a tensor with that of the other rank."""
    gathered = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor.detach())
    assert_close(gathered[0], gathered[1], rtol=0.0, atol=0.0)


@contextmanager
def counted(name: str) -> Iterator[list[None]]:
    """Counts calls of a function that averages or compares inside the block, as the length of the list."""
    calls: list[None] = []
    module = averages if hasattr(averages, name) else unmanaged
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, call)
        yield calls


def average_by_hand(params: Any) -> None:
    """What scripts do that know that nobody averages these gradients."""
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def save_checkpoint_of(model: Any, folder: Path) -> None:
    fsdp_flat.save_checkpoint(folder, model)


SAVES: dict[str, Callable[[Any, Path], object]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "save_checkpoint": save_checkpoint_of,
    "save_full": lambda model, folder: fsdp_flat.save_full(model, folder),
}
ADDED = "blocks.0.down.1.weight"


@pytest.mark.of_guards
@pytest.mark.parametrize("save", SAVES)
@ORIG_PARAMS
@on_ranks(2)
def test_ignored_and_later_added_parameters_that_drift_apart_are_named_once_at_a_save(
    use_orig_params: bool, save: str, rank: int, tmp_path: Path
) -> None:
    model = ignoring(use_orig_params)
    torch.manual_seed(0)
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Linear(5, 5, bias=False))
    with warned():  # of the added one, at the first backward
        step(model, batch(rank))
    for _ in range(2):
        step(model, batch(rank))
    with warned(rank == 0) as texts:
        SAVES[save](model, tmp_path / "first")
    if rank == 0:
        assert f"'{ADDED}' (added after wrapping)" in texts[0]
        assert "'last.bias' (ignored), 'last.weight' (ignored)" in texts[0]
        assert "average_ignored_gradients()" in texts[0]
    step(model, batch(rank))
    SAVES[save](model, tmp_path / "second")


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(2)
def test_parameters_added_after_wrapping_are_named_once_at_the_first_backward(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), by_blocks=False, use_orig_params=use_orig_params)
    torch.manual_seed(0)
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Linear(5, 5, bias=False))
    with warned() as texts:
        step(model, batch(rank))
    assert f"1 parameter added after wrapping: '{ADDED}'" in texts[0]
    assert "average_ignored_gradients()" in texts[0]
    step(model, batch(rank))


@on_ranks(2)
def test_added_parameters_that_are_averaged_or_frozen_or_own_by_choice_are_not_warned_of(rank: int) -> None:
    def frozen(model: Any) -> None:
        model.blocks[0].down.requires_grad_(False)

    def hooked(model: Any) -> None:
        for param in model.blocks[0].down[1].parameters():
            param.register_post_accumulate_grad_hook(lambda param: average_by_hand([param]))

    def averaged(model: Any) -> None:
        model.average_ignored_gradients()

    def own(model: Any) -> None:
        model.average_ignored_gradients(False)

    for choose in (frozen, hooked, averaged, own):
        model = shard(seeded(), by_blocks=False, use_orig_params=True)
        torch.manual_seed(0)
        model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Linear(5, 5, bias=False))
        choose(model)
        with warned(on_this_rank=False):
            step(model, batch(rank))


@pytest.mark.of_guards
@on_ranks(2)
def test_check_replicas_returns_the_names_that_differ_on_every_rank_whatever_a_warning_has_named(rank: int) -> None:
    model = ignoring()
    torch.manual_seed(0)
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Linear(5, 5, bias=False))
    model.register_buffer("count", torch.zeros(1))
    assert check_replicas(model) == []
    with warned():  # of the added one, at the first backward
        step(model, batch(rank))
    model.count += rank
    names = [ADDED, "count", "last.bias", "last.weight"]
    assert check_replicas(model) == names
    model.average_ignored_gradients(False)
    assert check_replicas(nn.ModuleList([model])) == [f"0.{name}" for name in names]
    model.last.requires_grad_(False)
    assert check_replicas(model) == names[:2]


@on_ranks(4)
def test_check_replicas_compares_all_ranks_of_a_mesh_under_fully_shard_too(rank: int) -> None:
    for shard_it in (
        lambda module: fully_shard(module, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))),
        lambda module: FSDP(module, device_mesh=init_device_mesh("cpu", (2, 2))),
    ):
        model: Any = shard_it(Normed())
        assert check_replicas(model) == []
        norm = model.get_submodule("body.1")
        norm.running_mean += rank == 3
        assert check_replicas(model) == ["body.1.running_mean"]


@on_ranks(1, 2)
def test_check_replicas_takes_a_sharded_model_and_one_rank_has_nothing_to_compare(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="takes a sharded model; a Model without a unit was given"):
        check_replicas(seeded())
    with pytest.raises(TypeError):
        check_replicas([seeded()])  # type: ignore[arg-type]
    assert check_replicas(shard(seeded())) == []


@pytest.mark.of_guards
@on_ranks(2)
def test_ignored_parameters_that_do_not_drift_are_not_warned_about(rank: int) -> None:
    """The same data, an average by hand, experts of each rank's own, and those of which a caller has said so."""
    same, by_hand, experts, declared = (ignoring() for _ in range(4))
    with torch.no_grad():
        experts.last.weight += rank
        experts.last.bias += rank
    declared.average_ignored_gradients(False)
    for _ in range(3):
        step(same, batch(0))
        step(by_hand, batch(rank), between=lambda: average_by_hand(by_hand.last.parameters()))
        step(experts, batch(rank))
        step(declared, batch(rank))
    for model in (same, by_hand, experts, declared):
        model.state_dict()


@pytest.mark.of_guards
@on_ranks(2)
def test_an_ignored_head_that_drifts_above_frozen_units_is_named(rank: int) -> None:
    def frozen() -> Any:
        model = seeded().requires_grad_(False)
        model.last.requires_grad_(True)
        return model

    model = ignoring(make=frozen, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for _ in range(3):
        step(model, batch(rank))
    with warned(rank == 0) as texts:
        model.state_dict()
    assert rank or "'last.bias' (ignored), 'last.weight' (ignored)" in texts[0]
    model = ignoring(make=frozen)
    model.average_ignored_gradients()
    for _ in range(3):
        step(model, batch(rank))
    gathered = [torch.zeros_like(model.last.weight) for _ in range(2)]
    dist.all_gather(gathered, model.last.weight.detach())
    assert_close(gathered[0], gathered[1], rtol=0.0, atol=0.0)


@ORIG_PARAMS
@on_ranks(2)
def test_gradients_of_ignored_parameters_are_averaged_where_that_is_asked_for(use_orig_params: bool, rank: int) -> None:
    model, plain = ignoring(use_orig_params), seeded()
    model.average_ignored_gradients()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, plain)]
    for index in range(2):
        with model.no_sync():
            square_loss(model, batch(2 * index + rank)).backward()
        for _ in range(2):
            square_loss(model, batch(7 + rank)).backward()
        square_loss(plain, batch(2 * index + rank)).backward()
        for _ in range(2):
            square_loss(plain, batch(7 + rank)).backward()
        average_gradients(plain)
        assert_close(model.last.weight.grad, plain.last.weight.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.of_guards
@on_ranks(2, timeout=30)
def test_a_warning_of_drift_that_raises_on_the_first_rank_leaves_the_other_waiting_for_nothing(rank: int) -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = FSDP(body, ignored_modules=[body[2]])
    model.average_ignored_gradients()
    loss = square_loss(model, batch(rank))
    if rank == 0:
        with pytest.raises(UserWarning, match="Buffers differ"):
            loss.backward()
    else:
        loss.backward()
    assert_same_on_ranks(body[2].weight.grad)
    square_loss(model, batch(rank)).backward()


@on_ranks(2, timeout=30)
def test_an_average_asked_for_on_one_rank_only_above_frozen_units_is_refused_on_both(rank: int) -> None:
    module = seeded().requires_grad_(False)
    module.last.requires_grad_(True)
    model = FSDP(module, ignored_modules=[module.last])
    if rank == 0:
        model.average_ignored_gradients()
    refused = message(RankMismatchError, ValueError, lambda: square_loss(model, batch(rank)).backward())
    assert "average_ignored_gradients() not called" in refused


@on_ranks(4)
def test_experts_of_each_replica_above_frozen_units_are_not_warned_about(rank: int) -> None:
    module = seeded().requires_grad_(False)
    module.last.requires_grad_(True)
    with torch.no_grad():
        module.last.weight += rank // 2
        module.last.bias += rank // 2
    mesh = init_device_mesh("cpu", (2, 2))
    model = shard(module, "HYBRID_SHARD", device_mesh=mesh, ignored_modules=[module.last])
    for _ in range(3):
        step(model, batch(rank // 2))
    model.state_dict()


@on_ranks(2)
def test_gradients_are_averaged_where_everything_is_ignored(rank: int) -> None:
    module = seeded()
    model = FSDP(module, ignored_modules=list(module.children()))
    model.average_ignored_gradients()
    square_loss(model, batch(rank)).backward()
    assert_same_on_ranks(module.last.weight.grad)


@on_ranks(2)
def test_a_wrapper_put_around_a_root_goes_on_averaging_its_ignored_gradients(rank: int) -> None:
    module = seeded()
    inner = FSDP(module, ignored_modules=[module.last])
    inner.average_ignored_gradients()
    square_loss(inner, batch(rank)).backward()
    inner.zero_grad()
    outer = FSDP(nn.Sequential(inner, nn.Linear(2, 2)), ignored_modules=[module.last])
    square_loss(outer, batch(rank)).backward()
    assert_same_on_ranks(module.last.weight.grad)
    outer.average_ignored_gradients(False)
    outermost = FSDP(nn.Sequential(outer, nn.Linear(2, 2)), ignored_modules=[module.last])
    outermost.zero_grad()
    square_loss(outermost, batch(rank)).backward()
    gathered = [torch.zeros_like(module.last.weight) for _ in range(2)]
    dist.all_gather(gathered, module.last.weight.grad)
    assert not torch.equal(*gathered)


@pytest.mark.of_guards
@on_ranks(2)
def test_steps_compare_values_at_the_end_of_the_first_backward_alone(rank: int) -> None:
    model = ignoring()
    with counted("_differing") as comparisons:
        for _ in range(20):
            square_loss(model, batch(rank)).backward()
            with torch.no_grad():
                model.last.weight += 0
            model.zero_grad()
    assert len(comparisons) == 1


@on_ranks(2)
def test_parameters_that_are_added_after_the_first_steps_and_drift_are_named_at_a_save(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = FSDP(module)
    for index in range(4):
        if index == 2:
            torch.manual_seed(0)
            module[1] = nn.Sequential(module[1], nn.Linear(2, 2))
        step(model, batch(rank))
    with warned(rank == 0) as texts:
        model.state_dict()
    assert rank or "'1.1.weight' (added" in texts[0]


class Branching(nn.Module):
    """A model whose last layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, with_last: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) if with_last else x


@on_ranks(2)
def test_an_average_counts_zeros_where_one_rank_has_no_gradient_and_leaves_none_where_no_rank_has(rank: int) -> None:
    model = ignoring(make=Branching)
    model.average_ignored_gradients()
    model.last.bias.requires_grad_(False)
    model(batch(0), with_last=rank == 0).square().mean().backward()
    gradients = [torch.zeros(2, 3) for _ in range(2)]
    dist.all_gather(gradients, model.last.weight.grad)
    assert_close(gradients[0], gradients[1], rtol=0.0, atol=0.0)
    assert gradients[0].abs().min() > 0
    assert model.last.bias.grad is None


@on_ranks(2)
def test_an_average_is_refused_where_units_are_summed_or_ranks_average_different_parameters(rank: int) -> None:
    model = ignoring()
    if rank == 0:
        model.average_ignored_gradients()
    refused = message(RankMismatchError, ValueError, lambda: square_loss(model, batch(rank)).backward())
    assert "average_ignored_gradients() not called" in refused
    model.average_ignored_gradients()
    square_loss(model, batch(rank)).backward()
    model.set_gradient_divide_factor(1.0)
    refused = message(UsageError, RuntimeError, lambda: square_loss(model, batch(rank)).backward())
    assert "average_ignored_gradients(False)" in refused


class Normed(nn.Module):
    """A layer with running statistics, and a buffer that is the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.shift


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(2)
def test_statistics_that_drift_apart_are_named_and_averaged_on_demand(use_orig_params: bool, rank: int) -> None:
    model = FSDP(Normed(), use_orig_params=use_orig_params)
    with warned(rank == 0) as texts:
        for _ in range(2):
            square_loss(model, batch(rank)).backward()
    if rank == 0:
        assert "'body.1.running_mean', 'body.1.running_var'. " in texts[0]
        assert "average_buffers()" in texts[0]
    mean = model.module.body[1].running_mean
    gathered = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(gathered, mean)
    assert not torch.equal(*gathered)
    model.average_buffers()
    assert_close(mean, (gathered[0] + gathered[1]) / 2, rtol=1e-6, atol=0.0)
    assert int(model.module.body[1].num_batches_tracked) == 2
    # Statistics of the same batches, and of none, do not drift.
    square_loss(FSDP(Normed(), use_orig_params=use_orig_params), batch(0)).backward()
    square_loss(FSDP(Normed().eval(), use_orig_params=use_orig_params), batch(rank)).backward()


@on_ranks(2)
def test_buffers_in_a_compute_dtype_are_averaged_in_it(rank: int) -> None:
    module = nn.Sequential(nn.Linear(3, 4))
    module.register_buffer("stat", torch.full((4,), 1.0 + rank))
    model = FSDP(module, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(batch(rank))
    model.average_buffers()
    assert module.stat.dtype == torch.bfloat16
    assert_close(model.state_dict()["stat"], torch.full((4,), 1.5), rtol=0.0, atol=0.0)


@on_ranks(2)
def test_buffers_of_one_dtype_are_averaged_in_one_collective(rank: int) -> None:
    module = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(3)])
    module.register_buffer("counts", torch.full((2, 2), float(rank)).to_sparse())
    module.register_buffer("mask", torch.tensor([rank == 0]))
    module.register_buffer("own", torch.tensor([float(rank)]), persistent=False)
    module.register_buffer("none", None)
    model = FSDP(module)
    model(batch(rank))
    with counted("begin_all_reduce") as calls:
        model.average_buffers()
    assert len(calls) == 2
    assert_same_on_ranks(torch.cat([norm.running_mean for norm in module]))
    assert_close(module.counts.to_dense(), torch.full((2, 2), 0.5), rtol=0.0, atol=0.0)
    assert bool(module.mask) == (rank == 0)
    assert float(module.own) == rank, "buffers that are not persistent are a rank's own"


@on_ranks(2)
def test_ranks_that_average_different_buffers_raise_with_both(rank: int) -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 4)))
    # Of one size, so that a collective would mix them.
    model.module.register_buffer("shift" if rank else "scale", torch.ones(4))
    with pytest.raises(RankMismatchError, match=r"different buffers.*buffer 'scale' \(4,\).*buffer 'shift' \(4,\)"):
        model.average_buffers()
    assert_equal(dict(model.module.named_buffers()), {"shift" if rank else "scale": torch.ones(4)})


@pytest.mark.of_guards
@on_ranks(4)
def test_one_rank_of_a_mesh_that_differs_is_named_on_its_first_rank(rank: int) -> None:
    """Rank 3 is in neither group of rank 0."""
    model = FSDP(Normed().eval(), device_mesh=init_device_mesh("cpu", (2, 2)))
    model.module.shift += rank == 3
    with warned(rank == 0) as texts:
        square_loss(model, batch(0)).backward()
    assert rank or "rank 0's: 'shift'. " in texts[0]


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(2)
def test_a_parameter_that_is_frozen_on_one_rank_only_is_named_on_all(use_orig_params: bool, rank: int) -> None:
    for name in ["blocks.0", "first", ""] if use_orig_params else ["blocks.0", ""]:
        model = shard(seeded(), use_orig_params=use_orig_params)
        with torch.no_grad():
            model(batch(0))
        if rank == 1:
            model.get_submodule(name).requires_grad_(False)
        text = message(RankMismatchError, ValueError, lambda: model(batch(0)))  # noqa: B023
        assert "requires_grad=True" in text
        assert "rank 1 has parameter" in text
        assert ("'up.weight' of unit 'blocks.0'" if name == "blocks.0" else "'first.weight' of unit 'Model'") in text
        model.get_submodule(name).requires_grad_(True)
        square_loss(model, batch(rank)).backward()


@on_ranks(2)
def test_a_parameter_that_one_rank_freezes_between_steps_is_named_before_the_next_forward(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    square_loss(model, batch(rank)).backward()
    model.first.weight.requires_grad_(rank == 0)
    square_loss(model, batch(rank)).backward()
    text = message(RankMismatchError, ValueError, lambda: model(batch(rank)))
    assert "'first.weight' of unit 'Model' with requires_grad=True" in text
    assert "if an optimizer has stepped since, weights are wrong" in text
    model.first.weight.requires_grad_(False)
    square_loss(model, batch(rank)).backward()


@pytest.mark.of_guards
@on_ranks(4)
def test_a_parameter_that_one_replica_has_frozen_is_named_on_all_ranks(rank: int) -> None:
    for strategy in ("NO_SHARD", "HYBRID_SHARD"):
        mesh = {} if strategy == "NO_SHARD" else {"device_mesh": init_device_mesh("cpu", (2, 2))}
        model = shard(seeded(), strategy, use_orig_params=True, **mesh)
        if rank >= 2:
            model.blocks[0].requires_grad_(False)
        loss = square_loss(model, batch(rank))
        text = message(RankMismatchError, ValueError, loss.backward)
        assert "'up.weight' of unit 'blocks.0' with requires_grad=False" in text
        model.blocks[0].requires_grad_(True)
        square_loss(model, batch(rank)).backward()


@on_ranks(2)
def test_buffers_that_differ_at_the_start_are_broadcast_or_refused(rank: int) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(Normed(), Normed())
        model[1].shift += rank
        return model

    for policy in (None, ModuleWrapPolicy({Normed})):
        model = FSDP(build(), auto_wrap_policy=policy, sync_module_states="auto")
        assert_close(model.module[1].shift, torch.ones(4), rtol=0.0, atol=0.0)
    assert "rank 1 has another '1.shift'" in message(
        RankMismatchError, ValueError, lambda: FSDP(build(), sync_module_states="raise")
    )


@pytest.mark.of_guards
@on_ranks(4)
def test_a_tensor_left_unwritten_by_one_unit_is_told_to_ranks_that_share_another_unit_alone(rank: int) -> None:
    """The first unit that was on meta is sharded over pairs, the second, whose values two ranks lack, over all."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with torch.device("meta"):
        first, second = nn.Linear(3, 8, bias=False), nn.Linear(8, 8, bias=False)
    model = FSDP(
        nn.Sequential(
            FSDP(first, process_group=pairs[rank // 2], param_init_fn=lambda m: m.to_empty(device="cpu")),
            FSDP(second, use_orig_params=False, param_init_fn=lambda m: m.to_empty(device="cpu")),
        )
    )
    for index, is_written in enumerate((True, rank < 2)):
        if is_written:
            model.module[index]._handle.flat_param.data.fill_(0.1)
    kind, builtin = (PeerFailureError, RuntimeError) if rank < 2 else (UsageError, RuntimeError)
    assert "'weight' of unit '1'" in message(kind, builtin, lambda: model(batch(0)))
    model.module[1]._handle.flat_param.data.fill_(0.1)
    square_loss(model, batch(rank)).backward()
