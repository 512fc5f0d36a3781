"""Issue 44, decided by the owner: the engine runs under ``FakeTensorMode`` with a fake process group, by both APIs.

Rank 0 of eight is in this process, and nothing is sent. Tensors have no memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_flat
from benchmarks.counting import Counter
from fsdp_flat import (
    CPUOffload,
    CPUOffloadPolicy,
    MatrixOptimizer,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import PhaseError, UsageError
from tests.support.kit import BLOCKS, no_shard_allowed, wrapped
from tests.support.models import Block, Stack

NUM_RANKS = 8
TOLERANCE = 0.03
WIDTH = 64
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
HALF_ROWS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True, scope="module")
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


def sharded(module: nn.Module, *, original: bool | None, **options: Any) -> nn.Module:
    """Shard each block and the rest, by the wrapper with or without original parameters, or by fully_shard (None)."""
    # A mesh is made inside FakeTensorMode too.
    if isinstance(options.get("mesh") or options.get("device_mesh"), tuple):
        key = "mesh" if "mesh" in options else "device_mesh"
        options[key] = _mesh(*options[key])
    if original is not None:
        return wrapped(module, auto_wrap_policy=BLOCKS, use_orig_params=original, **options)
    for child in [child for child in module.modules() if isinstance(child, Block)]:
        fully_shard(child, **options)
    return fully_shard(module, **options)


def _mesh(*sizes: int) -> Any:
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


ADAM = partial(torch.optim.Adam, lr=0.1)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": ADAM,
    "foreach": partial(ADAM, foreach=True),
    "fused": partial(ADAM, fused=True),
    "for loop": partial(ADAM, foreach=False),
}
WRAPPER = {
    "defaults": {},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "HYBRID_SHARD": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": (2, 4)},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed precision": {"mixed_precision": HALF},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
}
IN_PLACE = {
    "defaults": {},
    "kept": {"reshard_after_forward": False},
    "smaller groups": {"reshard_after_forward": 2},
    "replicated": {"mesh": (2, 4)},
    "mixed precision": {"mp_policy": HALF_ROWS},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}
CASES = [
    *[pytest.param(original, WRAPPER[name], id=f"{original}-{name}") for original in (False, True) for name in WRAPPER],
    *[pytest.param(None, IN_PLACE[name], id=f"fully_shard-{name}") for name in IN_PLACE],
]
APIS = [pytest.param(False, id="flat"), pytest.param(True, id="original"), pytest.param(None, id="fully_shard")]


def batch() -> torch.Tensor:
    # Tools of torch that follow modules warn of inputs that need no gradient.
    return torch.randn(4, WIDTH, requires_grad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local(value) for state in optimizer.state.values() for value in state.values() if value.dim()]


@pytest.mark.parametrize(("original", "options"), CASES)
def test_whole_steps_run_on_tensors_without_memory(original: bool | None, options: dict[str, Any]) -> None:
    with FakeTensorMode():
        model = Stack(3, WIDTH)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        model = sharded(model, original=original, **options)
        optimizer = ADAM(model.parameters())
        for _ in range(3):
            model(batch()).pow(2).mean().backward()
            # This rank has no elements of some original parameters.
            params = [param for param in model.parameters() if local(param).numel()]
            assert all(isinstance(local(param.grad), FakeTensor) for param in params)
            assert [param.grad.shape for param in params] == [param.shape for param in params]
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(local(param), FakeTensor) for param in model.parameters())
    assert states_of(optimizer)
    assert all(isinstance(state, FakeTensor) for state in states_of(optimizer))


@pytest.mark.parametrize("original", APIS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_accumulated_and_clipped_gradients(original: bool | None, name: str) -> None:
    with FakeTensorMode():
        model = sharded(Stack(3, WIDTH), original=original)
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(3):
            with accumulating(model):
                model(batch()).pow(2).mean().backward()
            model(batch()).pow(2).mean().backward()
            norms = [nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            norms += [model.clip_grad_norm_(1.0)] if isinstance(model, FSDP) else []
            assert all(isinstance(local(norm), FakeTensor) and norm.shape == () for norm in norms)
            optimizer.step()
            optimizer.zero_grad()
        assert all(isinstance(state, FakeTensor) for state in states_of(optimizer))


class accumulating:
    """Leaves gradients unreduced in the block, by the means of either API."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        if isinstance(self.model, FSDP):
            self.block = self.model.no_sync()
            self.block.__enter__()
        else:
            self.model.set_requires_gradient_sync(False)

    def __exit__(self, *error: Any) -> None:
        if isinstance(self.model, FSDP):
            self.block.__exit__(*error)
        else:
            self.model.set_requires_gradient_sync(True)


@pytest.mark.parametrize("original", APIS)
def test_evaluation_and_full_parameters_work_without_memory(original: bool | None) -> None:
    with FakeTensorMode():
        model = sharded(Stack(3, WIDTH), original=original)
        optimizer = ADAM(model.parameters())
        step(model, optimizer)
        with torch.no_grad():
            model.eval()
            assert isinstance(model(batch()), FakeTensor)
        with FSDP.summon_full_params(model) if original is not None else nullcontext():
            if original is not None:
                assert model.first.weight.shape == (WIDTH, WIDTH)
                model.first.weight.data.mul_(2)
        model.train()
        step(model, optimizer)


@pytest.mark.parametrize("original", APIS)
def test_parameters_that_do_not_train_and_that_are_tied_are_found_without_memory(original: bool | None) -> None:
    with FakeTensorMode():
        module = Stack(3, WIDTH, WIDTH)
        module.head.weight = module.first.weight
        for block in module.blocks:
            block.requires_grad_(False)
        model = sharded(module, original=original)
        step(model, ADAM([param for param in model.parameters() if param.requires_grad]))
        assert not any(param.grad is not None for param in model.parameters())
        with FSDP.summon_full_params(model) if original is not None else nullcontext():
            assert model.head.weight is model.first.weight


@pytest.mark.parametrize("original", [True, None])
def test_values_that_a_caller_assigns_between_steps_are_adopted_or_refused_as_on_real_tensors(
    original: bool | None,
) -> None:
    told: list[list[str]] = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            model = sharded(Stack(3, WIDTH), original=original)
            step(model, ADAM(model.parameters()))
            weight = model.first.weight
            given = torch.zeros_like(local(weight))
            if original:
                weight.data = given
            else:
                weight._local_tensor = given
            # FSDP2 has no assignments between steps, so fully_shard refuses them.
            with pytest.raises(UsageError, match="distribute_tensor") if original is None else nullcontext():
                model(batch())
            here = local(model.first.weight)
            told.append([str(torch._C._is_alias_of(here, given)), str(tuple(here.shape))])
    assert told[0] == told[1]
    if original:
        assert told[0][0] == "False"  # the values were copied to the shard


@pytest.mark.parametrize("original", APIS)
def test_parameters_with_tensor_parallelism_step_without_memory(original: bool | None) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with FakeTensorMode():
        module = Stack(2, WIDTH, block=EvenBlock)
        for block in module.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        option = "mesh" if original is None else "device_mesh"
        model = sharded(module, original=original, **{option: mesh["dp"]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            step(model, optimizer)


class EvenBlock(Block):
    """A block whose inner width two ranks divide."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)


class Rounds(Block):
    """A block that computes with other weights, and restores its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.up.weight.data.clone()
        with torch.no_grad():
            self.up.weight.copy_(before.round())
        out = super().forward(x)
        with torch.no_grad():
            self.up.weight.data.copy_(before)
        return out


@pytest.mark.parametrize("original", APIS)
def test_weights_that_a_forward_restores_are_not_compared_without_memory(original: bool | None) -> None:
    with FakeTensorMode(), torch.no_grad():
        model = sharded(Stack(2, WIDTH, block=Rounds), original=original)
        assert isinstance(model(batch()), FakeTensor)


@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, None])
def test_state_dicts_are_saved_and_loaded_without_memory(kind: StateDictType | None) -> None:
    with FakeTensorMode():
        model = sharded(Stack(2, WIDTH), original=None if kind is None else True)
        optimizer = ADAM(model.parameters())
        step(model, optimizer)
        with nullcontext() if kind is None else FSDP.state_dict_type(model, kind):
            saved = model.state_dict()
            assert list(saved) == list(Stack(2, WIDTH).state_dict())
            assert model.load_state_dict(saved).missing_keys == []
            if kind is not None:
                states = FSDP.optim_state_dict(model, optimizer)
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        step(model, optimizer)


def test_an_optimizer_of_whole_matrices_steps_without_memory() -> None:
    with FakeTensorMode():
        model = sharded(Stack(2, WIDTH), original=True)
        optimizer = MatrixOptimizer(model, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            step(model, optimizer)


# -- memory ------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process holds")
@pytest.mark.parametrize(
    ("original", "options"), [(False, {}), (True, {}), (None, {}), (True, {"mixed_precision": HALF})]
)
def test_ten_billion_parameters_take_no_memory(original: bool | None, options: dict[str, Any]) -> None:
    width = 24576
    with FakeTensorMode():
        before = resident()
        model = sharded(Stack(4, width), original=original, **options)
        optimizer = ADAM(model.parameters())
        for _ in range(2):
            model(torch.randn(2, width)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sum(local(param).numel() for param in model.parameters()) * NUM_RANKS > 10**10
        # The local shards alone would take 5 GB, and the states of Adam 10 GB.
        assert resident() - before < 100 * 2**20


def measured(mode: AbstractContextManager[Any], original: bool | None, options: dict[str, Any]) -> dict[str, float]:
    """Return bytes alive at most and at the end, and sent, in wrapping and in the second step."""
    gc.collect()
    found: dict[str, float] = {}
    with mode, no_shard_allowed():
        x = batch()
        with Counter(counts_earlier=False) as counter:
            model = sharded(Stack(4, WIDTH), original=original, **options)
            found["peak of wrapping"], found["wrapped"] = counter.peak, counter.alive()
            optimizer = ADAM(model.parameters())
            for _ in range(2):
                counter.peak, sent, number = 0, counter.sent, counter.collectives
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found["peak of a step"], found["after a step"] = counter.peak, counter.alive()
            found["sent"], found["collectives"] = counter.sent - sent, counter.collectives - number
    return found


@pytest.mark.parametrize(("original", "options"), CASES)
def test_a_dispatch_mode_counts_the_bytes_of_a_step_on_real_tensors(
    original: bool | None, options: dict[str, Any]
) -> None:
    real = measured(nullcontext(), original, options)
    fake = measured(FakeTensorMode(), original, options)
    assert fake == pytest.approx(real, rel=TOLERANCE)
    assert (fake["sent"], fake["collectives"]) == (real["sent"], real["collectives"])
    full = 4 * sum(param.numel() for param in Stack(4, WIDTH).parameters())
    # What is counted has the unsharded parameters in it, and they are freed in the end.
    assert real["peak of a step"] > real["after a step"] + full / 6
    if options.get("sharding_strategy") is not ShardingStrategy.NO_SHARD:
        assert real["wrapped"] < full / 2


# The tracker says so of an input without a gradient.
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass:UserWarning")
@pytest.mark.parametrize("original", APIS)
def test_torchs_memory_tracker_sees_buffers_come_and_go(original: bool | None) -> None:
    fake = measured(FakeTensorMode(), original, {})
    gc.collect()
    with FakeTensorMode():
        x = batch()
        with MemTracker() as tracker:
            model = sharded(Stack(4, WIDTH), original=original)
            optimizer = ADAM(model.parameters())
            for _ in range(2):
                tracker.reset_mod_stats()
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        cpu = torch.device("cpu")
        peak, left = (tracker.get_tracker_snapshot(kind)[cpu] for kind in ("peak", "current"))
    assert peak["Total"] == pytest.approx(fake["peak of a step"], rel=TOLERANCE)
    assert left["Total"] == pytest.approx(fake["after a step"], rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass:UserWarning")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["resharded", "kept"])
def test_torchs_memory_tracker_of_fsdp2_finds_the_bytes_of_torchs_fully_shard(options: dict[str, Any]) -> None:
    """Of a steady step; ours holds one more unsharded unit, which is all-gathered beside the compute of another."""
    found = []
    for shard in (fully_shard, torch_fsdp.fully_shard):
        with fsdp_flat.installed(fully_shard=True) if shard is fully_shard else nullcontext(), FakeTensorMode():
            model: Any = Stack(4, WIDTH)
            for module in (*[child for child in model.modules() if isinstance(child, Block)], model):
                shard(module, mesh=_mesh(1, NUM_RANKS)["shard"], **options)
            optimizer, x = ADAM(model.parameters()), batch()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((x,))
            for _ in range(2):
                tracker.reset_mod_stats()
                with tracker:
                    model(x).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append([tracker.get_tracker_snapshot(kind)[torch.device("cpu")] for kind in ("peak", "current")])
    (peak, left), (torchs_peak, torchs_left) = found
    assert {kind.value: nbytes for kind, nbytes in list(left.items())[:-1]} == {
        kind.value: nbytes for kind, nbytes in list(torchs_left.items())[:-1]
    }
    assert left["Total"] == torchs_left["Total"]
    unit = 4 * sum(param.numel() for param in Block(WIDTH).parameters())
    assert torchs_peak["Total"] - unit <= peak["Total"] <= torchs_peak["Total"] + 1.2 * unit


# -- collectives -------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Notes the name of each collective and the bytes of the largest tensor that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.calls.append((func.__name__.split(".")[0].strip("_"), max(sizes)))
        return func(*args, **(kwargs or {}))


def nbytes_of(model: nn.Module, original: bool | None) -> dict[str, int]:
    """Return the bytes of the unsharded parameters, with padding, of each unit by its name."""
    found: dict[str, int] = {}
    if original is None:
        for name, param in Stack(3, WIDTH).named_parameters():
            unit = name.rpartition(".")[0].rpartition(".")[0]
            rows = NUM_RANKS * math.ceil(len(param) / NUM_RANKS)
            found[unit] = found.get(unit, 0) + 4 * rows * (param.numel() // len(param))
        return found
    for module in FSDP.fsdp_modules(model):
        name = next(name for name, child in model.named_modules() if child is module).replace(
            "_fsdp_wrapped_module.", ""
        )
        found[name] = 4 * NUM_RANKS * module._handle.flat_param.numel()
    return found


@pytest.mark.parametrize("original", APIS)
def test_each_unit_is_gathered_and_reduced_in_its_size_and_in_the_order_of_a_step(original: bool | None) -> None:
    with FakeTensorMode():
        model = sharded(Stack(3, WIDTH), original=original)
        optimizer = ADAM(model.parameters())
        step(model, optimizer)
        with CommDebugMode() as counted, Sent() as sent:
            step(model, optimizer)
        # Flat parameters show their padding.
        size = nbytes_of(sharded(Stack(3, WIDTH), original=None if original is None else False), original)
    blocks = [size[f"blocks.{index}"] for index in range(3)]
    # The last block and the root stay unsharded between forward and backward.
    gathers = [("allgather_base", each) for each in (size[""], *blocks, blocks[1], blocks[0])]
    reductions = [("reduce_scatter_base", each) for each in (*reversed(blocks), size[""])]
    assert [call for call in sent.calls if call[0] == "allgather_base"] == gathers
    assert [call for call in sent.calls if call[0] == "reduce_scatter_base"] == reductions
    assert len(sent.calls) == counted.get_total_counts() == len(gathers) + len(reductions)


# -- what stays an error -----------------------------------------------------------------------------------------------


@pytest.mark.of_guards
def test_a_weight_that_is_assigned_after_a_forward_is_refused_without_memory() -> None:
    with FakeTensorMode():
        model = sharded(Stack(3, WIDTH), original=True)
        out = model(batch())
        model.head.weight = nn.Parameter(torch.zeros(5, WIDTH))
        with pytest.raises(PhaseError, match=r"head\.weight"):
            out.sum().backward()
