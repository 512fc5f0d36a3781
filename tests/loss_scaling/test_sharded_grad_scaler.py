"""ShardedGradScaler: one decision for all ranks, from one exchange, whatever the gradients look like."""

from __future__ import annotations

import math
import pickle
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as PeerScaler
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_flat.errors import FsdpFlatError, OptionError, OptionTypeError, PhaseError, UsageError
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler, _exchange_device
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss
from tests.support.steps import recorded
from tests.support.wrapper_models import batch, message, seeded, shard, shard_by_peer, whole_state

INF, NAN = float("inf"), float("nan")
# Which ranks overflow in which step; the rest are clean.
OVERFLOWS: dict[int, tuple[int, ...]] = {1: (1,), 2: (0, 1), 5: (0,)}
FUSED = [torch.optim.AdamW, torch.optim.SGD]


def scaler_of(**kwargs: Any) -> ShardedGradScaler:
    """An enabled scaler for the CPU whose scale moves soon."""
    return ShardedGradScaler(**{"device": "cpu", "init_scale": 1024.0, "growth_interval": 2, **kwargs})


def started(**kwargs: Any) -> ShardedGradScaler:
    """A scaler that has scaled something, so has a scale."""
    scaler = scaler_of(**kwargs)
    scaler.scale(torch.ones(()))
    return scaler


def param_with(grad: torch.Tensor | None, data: torch.Tensor | None = None) -> nn.Parameter:
    """A parameter that holds a hand-made gradient."""
    if data is None:
        data = torch.ones(2) if grad is None else torch.ones(grad.shape, dtype=grad.dtype)
    param = nn.Parameter(data)
    param.grad = grad
    return param


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def overflow(params: Iterable[nn.Parameter], value: float = INF) -> None:
    """Put one inf (or NaN) into what this rank holds of the gradients."""
    grad = next(param.grad for param in params if param.grad is not None and param.grad.numel() > 0)
    grad.view(-1)[0] = value


def found(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[float]:
    return [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()]


# -- one decision for all ranks --------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_steps_and_collectives_are_counted_one_exchange_of_four_bytes_an_unscale(rank: int) -> None:
    param, scaler = param_with(None), scaler_of()
    optimizer = sgd([param])
    num_steps = 0

    def count(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1

    optimizer.register_step_post_hook(count)
    with recorded() as record:
        for step in range(7):
            scaler.scale(torch.ones(()))
            param.grad = torch.ones(2)
            if rank in OVERFLOWS.get(step, ()):
                overflow([param])
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert num_steps == 7 - len(OVERFLOWS)
    assert record.counts() == {"all_reduce": 7}
    assert {call.nbytes for call in record.calls} == {4}


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scales_and_gradients_follow_the_peers_for_every_dtype(rank: int, dtype: torch.dtype) -> None:
    options = {"device": "cpu", "init_scale": 256.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
    histories = []
    for kind in (PeerScaler, ShardedGradScaler):
        scaler = kind(**options)
        params = [param_with(torch.ones(3, dtype=dtype)), param_with(None), param_with(torch.ones((), dtype=dtype))]
        optimizer = torch.optim.SGD(params, lr=0.25)
        history = []
        for step in range(9):
            scaler.scale(torch.ones((), dtype=dtype))
            for param in params[::2]:
                param.grad = torch.full_like(param, 2.0 * rank + step)
            if rank in OVERFLOWS.get(step, ()):
                overflow(params)
            if step % 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            values = [(param.detach().clone(), param.grad.clone()) for param in params[::2]]
            history.append({"state": scaler.state_dict(), "values": values})
        histories.append(history)
    assert_equal(histories[1], histories[0])
    assert len({record["state"]["scale"] for record in histories[1]}) > 2


@on_ranks(2)
def test_a_sharded_model_trains_as_the_peers_does_through_overflows(rank: int) -> None:
    ours, theirs = shard(seeded()), shard_by_peer(seeded())
    runs = []
    for model, kind in ((ours, ShardedGradScaler), (theirs, PeerScaler)):
        scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scales = []
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(square_loss(model, batch(rank, step))).backward()
            if rank in OVERFLOWS.get(step, ()):
                overflow(model.parameters())
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(10.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append(scales)
    assert runs[0] == runs[1] == [1024.0, 512.0, 256.0, 256.0, 512.0, 256.0, 256.0, 512.0]
    assert_close(whole_state(ours), whole_state(theirs), rtol=1e-5, atol=1e-6)


@on_ranks(2, 4)
@pytest.mark.parametrize("optimizer_class", FUSED)
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
def test_fused_optimizers_skip_with_all_others(
    rank: int, optimizer_class: Any, explicit: bool, everywhere: bool
) -> None:
    scaler, param = started(), param_with(torch.full((2,), 1024.0))
    optimizer = optimizer_class([param], lr=1.0, fused=True)
    if everywhere or rank == 0:
        overflow([param])
    for expected in (1.0, 0.0):
        if explicit:
            scaler.unscale_(optimizer)
        with recorded() as record:
            scaler.step(optimizer)
        assert record.counts() == ({} if explicit else {"all_reduce": 1})
        assert found(scaler, optimizer) == [expected]
        scaler.update()
        assert scaler.get_scale() == 512.0
        assert torch.equal(param, torch.ones(2)) == bool(expected)
        param.grad = torch.full((2,), 512.0)
    assert (param < 1.0).all()


@on_ranks(2, 4)
@pytest.mark.parametrize("overflows", [True, False])
def test_a_rank_without_any_gradient_takes_part(rank: int, overflows: bool) -> None:
    scaler = started()
    params = [param_with(torch.ones(3) if rank == 1 else None), param_with(torch.ones(0), torch.ones(0))]
    optimizer = sgd(params)
    if rank == 1 and overflows:
        overflow(params)
    with recorded() as record:
        scaler.step(optimizer)
    assert record.counts() == {"all_reduce": 1}
    assert found(scaler, optimizer) == [float(overflows)]
    scaler.update()
    assert scaler.get_scale() == (512.0 if overflows else 1024.0)


@on_ranks(2, 4)
def test_each_of_two_optimizers_decides_for_itself_and_the_scale_backs_off_once(rank: int) -> None:
    scaler = started()
    first, second = param_with(torch.full((2,), 1024.0)), param_with(torch.full((2,), 2048.0))
    optimizers = sgd([first]), sgd([second])
    if rank == 0:
        overflow([first])
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert [found(scaler, optimizer) for optimizer in optimizers] == [[1.0], [0.0]]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(first.detach(), torch.ones(2))
    assert_equal(second.detach(), torch.full((2,), -1.0))


@on_ranks(4)
def test_a_group_decides_without_the_ranks_outside(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler, param = started(process_group=groups[rank // 2]), param_with(torch.ones(2))
    if rank == 3:
        overflow([param])
    scaler.step(sgd([param]))
    scaler.update()
    assert scaler.get_scale() == (1024.0 if rank < 2 else 512.0)


@on_ranks(2)
def test_a_group_of_one_rank_exchanges_nothing(rank: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    scaler, param = started(process_group=groups[rank]), param_with(torch.ones(2))
    if rank == 0:
        overflow([param])
    with recorded() as record:
        scaler.step(sgd([param]))
        scaler.update()
    assert record.calls == []
    assert scaler.get_scale() == (512.0 if rank == 0 else 1024.0)


def test_one_process_without_a_process_group_works_like_a_plain_scaler() -> None:
    assert not dist.is_initialized()
    plain = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    histories = []
    for scaler in (plain, scaler_of()):
        param = param_with(None)
        optimizer, history = sgd([param]), []
        for step in range(6):
            scaler.scale(torch.ones(()))
            param.grad = torch.full((2,), float(step))
            if step in OVERFLOWS:
                overflow([param])
            scaler.step(optimizer)
            scaler.update()
            history.append([scaler.state_dict(), param.detach().clone()])
        histories.append(history)
    assert_equal(histories[1], histories[0])


def test_a_simulated_group_is_taken_by_what_it_offers() -> None:
    class Alone:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    scaler, param = started(process_group=Alone()), param_with(torch.full((2,), 1024.0))
    scaler.step(sgd([param]))
    assert_equal(param.detach(), torch.zeros(2))


def test_flags_of_several_devices_become_one_that_is_zero_or_one() -> None:
    scaler = started()
    for flags, expected in (([1.0, 1.0], 1.0), ([0.0, 1.0], 1.0), ([0.0, 0.0], 0.0)):
        agreed = scaler._agree({index: torch.tensor(flag) for index, flag in enumerate(flags)})
        assert_equal(agreed, {torch.device("cpu"): torch.tensor(expected)})


@on_ranks(2)
def test_the_exchange_is_on_the_device_of_the_scale_where_the_group_can_reduce_there() -> None:
    class AcceleratorOnly:
        """A group like one of NCCL's: no CPU tensors."""

        def _get_backend(self, device: torch.device) -> str:
            if device.type == "cpu":
                raise RuntimeError("No backend type associated with device type cpu")
            return "nccl"

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert _exchange_device(dist.group.WORLD, cpu, "cuda") == cpu
    assert _exchange_device(AcceleratorOnly(), cuda, "cpu") == cuda
    assert _exchange_device(AcceleratorOnly(), cpu, "cuda") == cuda


@on_ranks(2)
def test_gradients_that_are_dtensors_are_unscaled_beside_plain_ones(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    scaler = started()
    params = [
        param_with(
            distribute_tensor(torch.full((4,), 1024.0), mesh, [Shard(0)]),
            distribute_tensor(torch.ones(4), mesh, [Shard(0)]),
        ),
        param_with(torch.full((2,), 1024.0)),
    ]
    optimizer = sgd(params)
    scaler.unscale_(optimizer)
    assert_equal(params[0].grad.to_local(), torch.ones(2))
    assert_equal(params[1].grad, torch.ones(2))
    scaler.update()
    if rank == 1:
        overflow([param_with(params[0].grad.to_local())])
    scaler.unscale_(optimizer)
    assert found(scaler, optimizer) == [1.0]


# -- what gradients look like ----------------------------------------------------------------------------------------


def test_gradients_that_are_views_of_one_tensor_are_unscaled_in_place_once() -> None:
    flat = torch.full((8,), 1024.0)
    params = [param_with(flat[0:2]), param_with(flat[2:2]), param_with(flat[2:6].view(2, 2).t()), param_with(flat[7:8])]
    scaler = started()
    scaler.unscale_(sgd(params))
    assert_equal(flat, torch.tensor([1.0, 1, 1, 1, 1, 1, 1024, 1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.0, INF, NAN])
def test_every_dtype_is_unscaled_and_checked(dtype: torch.dtype, value: float) -> None:
    scaler, param = started(), param_with(torch.full((3,), 1024.0).to(dtype))
    param.grad[0] = value
    optimizer = sgd([param])
    scaler.unscale_(optimizer)
    assert found(scaler, optimizer) == [0.0 if math.isfinite(value) else 1.0]
    assert_equal(param.grad[1:], torch.ones(2, dtype=dtype))


def sparse(indices: list[int], values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A sparse gradient of three elements."""
    return torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64), torch.tensor(values, dtype=dtype), (3,), check_invariants=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_gradients_are_unscaled_by_their_values_as_the_peers(dtype: torch.dtype) -> None:
    inv_scale = torch.tensor(1.0 / 1024.0)
    for kind in (PeerScaler, ShardedGradScaler):
        param = param_with(sparse([0, 2, 0], [1024.0, 2048.0, 1024.0], dtype), torch.ones(3, dtype=dtype))
        scaler = kind("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        flags = scaler._unscale_grads_(sgd([param]), inv_scale, torch.zeros(()))
        assert_equal(flags, {torch.device("cpu"): torch.zeros(())})
        assert param.grad.is_sparse
        assert_equal(param.grad.float().to_dense(), torch.tensor([2.0, 0.0, 2.0]))


@pytest.mark.parametrize(
    ("grad", "expected"),
    [
        (sparse([1, 1], [40000.0, 40000.0], torch.float16), 1.0),
        (sparse([1, 1], [40000.0, 40000.0]), 0.0),
        (sparse([1, 2], [1.0, INF]), 1.0),
        (sparse([], []), 0.0),
    ],
    ids=["fp16 entries that overflow when added up", "the same in fp32", "an inf", "no entries"],
)
def test_sparse_gradients_are_checked(grad: torch.Tensor, expected: float) -> None:
    scaler, optimizer = started(), sgd([param_with(grad.clone(), torch.ones(3, dtype=grad.dtype))])
    scaler.unscale_(optimizer)
    assert found(scaler, optimizer) == [expected]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("overflowing", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_gradients_on_the_cpu_and_on_an_accelerator_are_decided_on_together(
    overflowing: tuple[int, ...], home: str
) -> None:
    scaler = ShardedGradScaler(init_scale=1024.0)
    scaler.scale(torch.ones((), device=home))
    params = [param_with(torch.full((2,), 1024.0, device=device)) for device in ("cpu", "cuda")]
    for index in overflowing:
        overflow([params[index]])
    optimizer = sgd(params)
    scaler.step(optimizer)
    assert found(scaler, optimizer) == [float(bool(overflowing))]
    for param in params:
        assert_equal(param.detach().cpu(), torch.ones(2) if overflowing else torch.zeros(2))
    scaler.update()
    assert scaler.get_scale() == (512.0 if overflowing else 1024.0)


# -- scale -----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["loss", "extra"])


def structures() -> list[Any]:
    half, single = torch.full((2,), 3.0).half(), torch.tensor(5.0)
    return [half, single, torch.tensor(2), torch.empty(0), [half, single], (half, [single, (half,)]), [], (single,) * 2]


@pytest.mark.parametrize("index", range(len(structures())))
def test_scaled_structures_and_dtypes_are_the_peers(index: int) -> None:
    value = structures()[index]
    ours, theirs = scaler_of(), PeerScaler("cpu", init_scale=1024.0)
    assert_equal(ours.scale(value), theirs.scale(value))


def test_other_iterables_become_iterators_and_a_named_tuple_stays_one() -> None:
    scaler = scaler_of()
    scaled: Any = scaler.scale(torch.tensor(float(i)) for i in range(3))
    assert not isinstance(scaled, (list, tuple))
    assert [tensor.item() for tensor in scaled] == [0.0, 1024.0, 2048.0]
    pair: Any = scaler.scale(Pair(torch.tensor(1.0), [torch.tensor(2.0)]))
    assert_equal(pair, Pair(torch.tensor(1024.0), [torch.tensor(2048.0)]))


def test_gradients_flow_through_a_scaled_half_precision_loss() -> None:
    leaf = torch.ones(2, dtype=torch.float16, requires_grad=True)
    scaled = scaler_of().scale(leaf.sum())
    assert scaled.dtype == torch.float16
    scaled.backward()
    assert_equal(leaf.grad, torch.full((2,), 1024.0).half())


# -- the next scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_scale", [8.0, 8, torch.tensor(8.0), torch.tensor([8.0])])
def test_a_given_scale_is_used_and_starts_a_new_iteration(new_scale: Any) -> None:
    scaler, param = started(), param_with(torch.ones(2))
    optimizer = sgd([param])
    scaler.unscale_(optimizer)
    scaler.update(new_scale)
    assert scaler.get_scale() == 8.0
    scaler.unscale_(optimizer)
    if isinstance(new_scale, torch.Tensor):
        new_scale.fill_(3.0)
    assert scaler.get_scale() == 8.0


def test_a_scale_never_grows_to_inf() -> None:
    scaler = started(init_scale=2.0**127, growth_interval=1)
    for _ in range(2):
        scaler.step(sgd([param_with(torch.zeros(2))]))
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_an_interval_made_shorter_than_the_count_is_met_by_the_next_step() -> None:
    scaler = started(growth_interval=10)
    scales = []
    for step in range(5):
        if step == 3:
            scaler.set_growth_interval(2)
        scaler.step(sgd([param_with(torch.zeros(2))]))
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0]


@pytest.mark.parametrize("before_first_use", [True, False])
def test_a_state_dict_goes_to_the_peer_and_back(before_first_use: bool) -> None:
    saved = scaler_of(growth_factor=3.0, backoff_factor=0.25)
    for _ in range(3):
        saved.scale(torch.ones(()))
        saved.step(sgd([param_with(torch.zeros(2))]))
        saved.update()
    expected = saved.state_dict()
    assert expected == {
        "scale": 3072.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }
    state = expected
    for kind in (PeerScaler, ShardedGradScaler):
        scaler = kind("cpu")
        if not before_first_use:
            scaler.scale(torch.ones(()))
        scaler.load_state_dict(state)
        scaler.scale(torch.ones(()))
        state = scaler.state_dict()
        assert state == expected


def test_a_scaler_can_be_pickled_between_iterations() -> None:
    scaler = started()
    scaler.step(sgd([param_with(torch.zeros(2))]))
    scaler.update()
    copied = pickle.loads(pickle.dumps(scaler))
    assert type(copied) is ShardedGradScaler
    assert copied.state_dict() == scaler.state_dict()


# -- names and errors --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA; this one has it")
def test_the_default_device_without_cuda_warns_and_disables_as_the_peers() -> None:
    for kind in (PeerScaler, ShardedGradScaler):
        with pytest.warns(UserWarning, match="CUDA is not available"):
            scaler = kind()
        assert not scaler.is_enabled()


@on_ranks(2)
def test_a_disabled_scaler_does_nothing_but_the_step() -> None:
    scaler, param = scaler_of(enabled=False), param_with(torch.full((2,), INF))
    optimizer = sgd([param])
    outputs = {"anything": 1}
    with recorded() as record:
        assert scaler.scale(outputs) is outputs  # type: ignore[call-overload]
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler.update("nonsense")  # type: ignore[arg-type]
    assert record.calls == []
    assert_equal(param.detach(), torch.full((2,), -INF))
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


def peer_raises(builtin: type[Exception], call: Callable[[Any], object]) -> None:
    """FSDP1 raises the built-in type for the same misuse."""
    peer = PeerScaler("cpu", init_scale=1024.0)
    with pytest.raises(builtin) as caught:
        call(peer)
    assert not isinstance(caught.value, FsdpFlatError)


@on_ranks(2)
def test_unscaling_twice_or_after_the_step_is_refused_until_the_update() -> None:
    def twice(scaler: Any) -> None:
        optimizer = sgd([param_with(torch.ones(2))])
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    def timeout_error(scaler: Any) -> None:
        optimizer = sgd([param_with(torch.ones(2))])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.unscale_(optimizer)

    def stepping_twice(scaler: Any) -> None:
        optimizer = sgd([param_with(torch.ones(2))])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.step(optimizer)

    peer_raises(RuntimeError, twice)
    peer_raises(RuntimeError, timeout_error)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        twice(scaler_of())
    with pytest.raises(RuntimeError, match="after step"):
        timeout_error(scaler_of())
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        stepping_twice(scaler_of())

    scaler, optimizer = started(), sgd([param_with(torch.ones(2))])
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("unscale_", lambda scaler: scaler.unscale_(sgd([param_with(torch.ones(2))]))),
        ("step", lambda scaler: scaler.step(sgd([param_with(torch.ones(2))]))),
        ("step", lambda scaler: scaler.step(torch.optim.SGD([param_with(torch.ones(2))], lr=1.0, fused=True))),
        ("update", lambda scaler: scaler.update()),
        ("update", lambda scaler: scaler.update(2.0)),
    ],
)
def test_a_call_before_anything_was_scaled_is_refused(name: str, call: Callable[[Any], object]) -> None:
    peer_raises(AssertionError, call)
    with pytest.raises(AssertionError, match=f"Attempted {name}"):
        call(scaler_of())


def test_an_update_without_a_check_is_refused() -> None:
    def call(scaler: Any) -> None:
        scaler.scale(torch.ones(()))
        scaler.update()

    peer_raises(AssertionError, call)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        call(scaler_of())


@pytest.mark.parametrize(
    "new_scale",
    [torch.ones(2), torch.ones((), requires_grad=True), torch.ones((), device="meta")],
    ids=["two elements", "requires grad", "device"],
)
def test_an_unusable_new_scale_is_refused(new_scale: torch.Tensor) -> None:
    def call(scaler: Any) -> None:
        scaler.scale(torch.ones(()))
        scaler.update(new_scale)

    peer_raises(AssertionError, call)
    with pytest.raises(AssertionError, match="new_scale should be"):
        call(scaler_of())


@pytest.mark.parametrize("outputs", [1.0, None, [torch.ones(()), 2.0], (["loss"],), "loss", {"loss": torch.ones(())}])
def test_outputs_that_are_no_tensors_are_refused(outputs: Any) -> None:
    if not isinstance(outputs, (str, dict, tuple)):
        peer_raises(ValueError, lambda scaler: scaler.scale(outputs))
    assert "must be a tensor or an iterable" in message(OptionError, ValueError, lambda: scaler_of().scale(outputs))


def test_outputs_on_the_meta_device_are_refused() -> None:
    outputs = torch.ones((), device="meta")
    for value in (outputs, [outputs]):
        peer_raises(AssertionError, lambda scaler, value=value: scaler.scale(value))  # type: ignore[misc]
        assert "device meta" in message(PhaseError, AssertionError, lambda value=value: scaler_of().scale(value))


@pytest.mark.parametrize("factors", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_factors_that_do_not_grow_or_back_off_are_refused(factors: dict[str, float]) -> None:
    for kind in (PeerScaler, ShardedGradScaler):
        with pytest.raises(AssertionError, match="factor must be"):
            kind("cpu", **factors)


@pytest.mark.parametrize("group", [(1, 2), "gloo", 3])
def test_a_process_group_that_is_none_is_refused(group: Any) -> None:
    text = message(OptionTypeError, TypeError, lambda: scaler_of(process_group=group))
    assert f"got {type(group).__name__}" in text


@on_ranks(2)
def test_a_rank_outside_the_scalers_group_is_told_so(rank: int) -> None:
    group = dist.new_group([0])
    scaler, optimizer = started(process_group=group), sgd([param_with(torch.ones(2))])
    if rank == 0:
        scaler.step(optimizer)
    else:
        text = message(UsageError, RuntimeError, lambda: scaler.step(optimizer))
        assert "rank 1 is not in the scaler's process_group" in text


def test_a_closure_is_refused_and_an_empty_state_dict_too() -> None:
    with pytest.raises(RuntimeError, match="Closure"):
        started().step(sgd([param_with(torch.ones(2))]), closure=lambda: 0.0)
    with pytest.raises(RuntimeError, match="empty"):
        started().load_state_dict({})
