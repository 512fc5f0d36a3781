"""Trains a plain replica beside the same model sharded by each front that a test asks for, on the same batches."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils import _pytree as pytree

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat import wrap as our_policies
from fsdp_flat.composable import FSDPModule, fully_shard
from fsdp_flat.core import Phase, units_of
from fsdp_flat.layout import clean_fqn, join_fqn
from tests.support import kit
from tests.support.compare import assert_close
from tests.support.kit import ROWS, WIDTH, full_grads, full_params, mesh, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.peer import peer_fsdp, peer_fully_shard

# body(model, batch): the loss of a forward, of which the backward is run, or None if the body ran what it needs.
Body = Callable[[Any, Any], torch.Tensor | None]
# shard(module, apply, **options): shards a model, or parts of it, by the function of a front.
Shard = Callable[..., Any]

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
# For models in float32.
NEAR = {"rtol": 1e-5, "atol": 1e-6}

OUR_WRAPPERS = ("flat", "originals")
TORCHS_WRAPPERS = ("fsdp1", "fsdp1_flat")
WRAPPERS = (*OUR_WRAPPERS, *TORCHS_WRAPPERS)
OURS = (*OUR_WRAPPERS, "fully_shard")
TORCHS = (*TORCHS_WRAPPERS, "fsdp2")


def _torchs_wrapper(module: nn.Module, **options: Any) -> Any:
    """Wrap a module in torch's FSDP1, given a strategy of the library."""
    if "sharding_strategy" in options:
        options["sharding_strategy"] = torch_fsdp.ShardingStrategy[options["sharding_strategy"].name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        return peer_fsdp(module, **options)


APPLY: dict[str, Shard] = {
    "flat": functools.partial(wrapped, use_orig_params=False),
    "originals": functools.partial(wrapped, use_orig_params=True),
    "fully_shard": fully_shard,
    "fsdp1": functools.partial(_torchs_wrapper, use_orig_params=True),
    "fsdp1_flat": functools.partial(_torchs_wrapper, use_orig_params=False),
    "fsdp2": peer_fully_shard,
}
# A test of the wrapper with flat and with original parameters, and of ``fully_shard``.
FRONTS = pytest.mark.parametrize("front", OURS)
# The same, of the wrapper alone; and for a test that wraps by itself.
WRAPPER_FRONTS = pytest.mark.parametrize("front", OUR_WRAPPERS)
ORIG_PARAMS = pytest.mark.parametrize("use_orig_params", [False, True], ids=OUR_WRAPPERS)
# The library's fully_shard and torch's.
BOTH = ("fully_shard", "fsdp2")
FRONTS_AND_TORCH = pytest.mark.parametrize("fronts", ["flat", "originals", BOTH], ids=OURS)
MEMORY = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
# Names of strategies; hybrid ones with the shape of their mesh, replicas by shards.
TWO_RANKS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2")
FOUR_RANKS = ("FULL_SHARD", "HYBRID_SHARD 2x2", "HYBRID_SHARD 4x1")

batch = functools.partial(kit.batch, dtype=torch.float64)
# A replica's own collective is none of those that a test records.
_all_reduce = dist.all_reduce


def batch_of(step: int, width: int = WIDTH, num_rows: int = ROWS) -> torch.Tensor:
    """Return this rank's rows of a step."""
    return batch(dist.get_rank(), step, width, num_rows)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer whose steps show gradients by their size."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW whose steps depend on the size of the gradients.

    With a small ``eps`` the steps are the same for gradients of any scale, so a gradient that is wrong by a factor (a
    sum in place of a mean) would go unseen.
    """
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2, eps=0.1)


class Beside:
    """Holds a plain replica and the same model sharded by each of some fronts, and trains them on the same data.

    A rank runs the replica on its own batch alone, as it runs the sharded models; the replica's gradients are then
    averaged over ranks by one all-reduce. So anything may differ between ranks, buffers and what a rank runs too.

    Args:
        module: the model; the first front shards it, further ones shard copies.
        fronts: names of :data:`APPLY`.
        units: classes of which each instance becomes a unit.
        shard: shards a model by the function that it is given and returns it; by default by ``units``.
        optimizer: makes the optimizer of a model.
        batch: ``batch(rank, step)``; by default :func:`batch`, rows of random numbers, whose number is ``num_rows``.
        body: what a model runs in a step.
        dtype: of the model and its batches; None leaves them as they are.
        note_outputs: compares outputs, for which a model has a forward hook while a body runs.
        tolerance: of the comparisons.
        options: further arguments of the fronts' function.

    Attributes:
        plain: the replica.
        sharded: the sharded models by their fronts.
        optimizers: by their fronts, the replica's as ``"plain"``.
        tolerance: of the comparisons.
        num_steps: number of backwards so far, which is the step of the next one's batches.
        clean_name: makes the replica's name of a name in a sharded model.
    """

    def __init__(
        self,
        module: nn.Module,
        fronts: str | Sequence[str] = "flat",
        *,
        units: Sequence[type[nn.Module]] = (Block,),
        shard: Shard | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        batch: Callable[[int, int], Any] = batch,
        body: Body = square_loss,
        dtype: torch.dtype | None = torch.float64,
        note_outputs: bool = True,
        tolerance: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        module = module if dtype is None else module.to(dtype)
        self.plain: Any = copy.deepcopy(module)
        copies = [copy.deepcopy(module) for _ in fronts[1:]] if not isinstance(fronts, str) else []
        self.sharded: dict[str, Any] = {}
        for front, own in zip([fronts] if isinstance(fronts, str) else fronts, [module, *copies], strict=True):
            by_units = functools.partial(by_policy, units=units)
            self.sharded[front] = (shard or by_units)(own, APPLY[front], **options)
        self.optimizers = {"plain": optimizer(self.plain)}
        self.optimizers.update({front: optimizer(model) for front, model in self.sharded.items()})
        self.num_steps = 0
        self.clean_name: Callable[[str], str] = clean_fqn
        self._batch, self._body, self._dtype = batch, body, dtype
        self._notes_outputs, self.tolerance = note_outputs, tolerance or CLOSE
        self._is_low = not {"mp_policy", "mixed_precision"}.isdisjoint(options)

    @property
    def ours(self) -> Any:
        """The model that the library shards, the first if there are several."""
        return next(model for front, model in self.sharded.items() if front in OURS)

    @property
    def theirs(self) -> Any:
        """The model that torch shards."""
        return next(model for front, model in self.sharded.items() if front in TORCHS)

    @property
    def models(self) -> list[Any]:
        """The sharded models, then the replica."""
        return [*self.sharded.values(), self.plain]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of :attr:`ours`."""
        return next(each for front, each in self.optimizers.items() if front in OURS)

    def units(self) -> list[tuple[Any, ...]]:
        """Return the units in the order of modules, each of every sharded model."""
        classes = (FSDP, FSDPModule, torch_fsdp.FullyShardedDataParallel, torch_fsdp.FSDPModule)
        found = [[each for each in model.modules() if isinstance(each, classes)] for model in self.sharded.values()]
        return list(zip(*found, strict=True))

    # -- training --------------------------------------------------------------------------------------------------

    def batch(self, step: int | None = None) -> Any:
        """Return this rank's batch of a step; by default of the next one."""
        found = self._batch(dist.get_rank(), self.num_steps if step is None else step)
        return pytree.tree_map_only(torch.Tensor, self._as_dtype, found)

    def _as_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() and self._dtype else tensor

    def backward(self, body: Body | None = None, step: int | None = None) -> dict[str, Any]:
        """Run forward and backward of every model on this rank's batch; compare losses and outputs with the replica's.

        Args:
            body: what a model runs; by default that of the constructor.
            step: number of the batch; by default that of the next step.

        Returns:
            What the body returned for each sharded model, by fronts, without its graph.
        """
        step = self.num_steps if step is None else step
        results = {front: self._run(model, body, step) for front, model in self.sharded.items()}
        expected = self.follow(body, step)
        for front, result in results.items():
            result = pytree.tree_map_only(torch.Tensor, self._as_dtype, result) if self._is_low else result
            for found, wanted, what in zip(result, expected, ("loss", "outputs"), strict=True):
                assert_close(found, wanted, **self.tolerance, what=f"{front}: {what} of step {step}")
        self.num_steps = step + 1
        return {front: loss for front, (loss, _) in results.items()}

    def follow(self, body: Body | None = None, step: int = 0) -> tuple[Any, list[torch.Tensor]]:
        """Run forward and backward of the replica alone, average its gradients, and return its loss and outputs."""
        found = self._run(self.plain, body, step)
        average_gradients(self.plain)
        return found

    def _run(self, model: nn.Module, body: Body | None, step: int) -> tuple[Any, list[Any]]:
        """Return what a body returns, and the outputs of the model's forwards, without their graph."""
        outputs: list[Any] = []
        with ExitStack() as stack:
            if self._notes_outputs:
                note = model.register_forward_hook(lambda _model, _args, output: outputs.extend(_copies(output)))
                stack.callback(note.remove)
            loss = (body or self._body)(model, self.batch(step))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, loss), outputs

    def step(self) -> None:
        """Take a step of every optimizer, and clear the gradients."""
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradients of every model."""
        for model in self.models:
            model.zero_grad()

    def train(self, body: Body | None = None, num_steps: int = 1, **tolerance: float) -> None:
        """Take whole steps: compare losses and outputs, gradients, and parameters, and that nothing is left running."""
        for _ in range(num_steps):
            self.backward(body)
            self.check_gradients(f"gradients of step {self.num_steps - 1}", **tolerance)
            self.step()
            self.check_parameters(**tolerance)
            for front, model in self.sharded.items():
                if front in OURS:
                    assert_idle(model)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the sharded models accumulate gradients inside the block without reducing them.

        A wrapper has ``no_sync`` for it, and ``fully_shard`` ``set_requires_gradient_sync``.
        """
        with ExitStack() as stack:
            for front, model in self.sharded.items():
                if front in WRAPPERS:
                    stack.enter_context(model.no_sync())
                else:
                    model.set_requires_gradient_sync(False)
                    stack.callback(model.set_requires_gradient_sync, True)
            yield

    # -- comparisons -----------------------------------------------------------------------------------------------

    def check_gradients(self, what: str = "gradients", **tolerance: float) -> None:
        """Compare the gradients with the replica's. Every rank must call this.

        A gradient is None where the replica's is. But a flat parameter has one gradient for all parameters in it, and
        so has torch's ``fully_shard`` for all of a unit: the replica then gets zeros too, for its optimizer.
        """
        expected = {self.clean_name(name): param for name, param in self.plain.named_parameters()}
        for front, model in self.sharded.items():
            if front == "flat":
                self._fill_up(model, expected)
            if front in TORCHS_WRAPPERS:
                # Torch shows no gradients of flat parameters, and of others not where a rank has none: those of its
                # wrapper show in the parameters after a step.
                continue
            wanted = {name: param.grad for name, param in expected.items()}
            actual = self._values(front, grads=True)
            if front == "fsdp2":
                wanted = {
                    name: torch.zeros_like(expected[name]) if grad is None and actual[name] is not None else grad
                    for name, grad in wanted.items()
                }
            self._compare(front, actual, wanted, what, tolerance)

    def check_parameters(self, **tolerance: float) -> None:
        """Compare the parameters with the replica's. Every rank must call this."""
        expected = {self.clean_name(name): param.detach() for name, param in self.plain.named_parameters()}
        for front in self.sharded:
            self._compare(front, self._values(front, grads=False), expected, "parameters", tolerance)

    def check_state_dict(self, **tolerance: float) -> None:
        """Compare state dicts with the replica's, with its buffers of this rank. Every rank must call this."""
        expected = {name: value.detach() for name, value in self.plain.state_dict().items()}
        for front, model in self.sharded.items():
            actual = {name: value.detach() for name, value in model.state_dict().items()}
            self._compare(front, actual, expected, "state dict", tolerance)

    def _values(self, front: str, *, grads: bool) -> dict[str, Any]:
        """Return parameters or gradients by name: of a wrapper's full ones, else this rank's part as a DTensor."""
        model = self.sharded[front]
        if front in OUR_WRAPPERS:
            values = full_grads(model) if grads else full_params(model)
            return {self.clean_name(name): value for name, value in values.items()}
        if front in TORCHS_WRAPPERS:
            with torch_fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
                return {clean_fqn(name): param.detach().clone() for name, param in model.named_parameters()}
        params = {self.clean_name(name): param for name, param in model.named_parameters()}
        return {name: param.grad if grads else param.detach() for name, param in params.items()}

    def _fill_up(self, model: nn.Module, plain: dict[str, nn.Parameter]) -> None:
        """Give zeros to parameters of the replica that share a flat parameter with one that has a gradient."""
        for name, module in model.named_modules():
            for handle in module._unit.param_groups if isinstance(module, FSDP) else ():
                params = [plain[self.clean_name(join_fqn(name, fqn))] for fqn in handle.layout.fqns]
                if any(param.grad is not None for param in params):
                    for param in params:
                        param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def _compare(
        self, front: str, actual: dict[str, Any], expected: dict[str, Any], what: str, tolerance: dict[str, float]
    ) -> None:
        __tracebackhide__ = True
        tolerance = {**self.tolerance, **tolerance}
        if front in WRAPPERS:
            assert_close(actual, expected, **tolerance, what=what)
        else:
            assert_parts(actual, expected, **tolerance, what=what)


# -- how fronts shard ------------------------------------------------------------------------------------------------


def by_policy(model: Any, apply: Shard, *, units: Sequence[type[nn.Module]] = (Block,), **options: Any) -> Any:
    """Shard every instance of classes, and the module: a wrapper by an auto-wrap policy."""
    if apply in [APPLY[front] for front in WRAPPERS]:
        policies = torch_fsdp.wrap if apply in [APPLY[front] for front in TORCHS_WRAPPERS] else our_policies
        if units:
            options.setdefault("auto_wrap_policy", policies.ModuleWrapPolicy(set(units)))
        return apply(model, **options)
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, tuple(units)):
            apply(module, **options)
    return apply(model, **options)


def by_hand(module: nn.Module, apply: Shard, **options: Any) -> Any:
    """Shard every block, one by one, then the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Block):
                setattr(parent, name, apply(child, **options))
    return apply(module, **options)


def blocks_and_root(model: Any, apply: Shard = fully_shard, **options: Any) -> Any:
    """Shard every block of a ``Stack``, then the model."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = apply(block, **options)
    return apply(model, **options)


def children_and_root(model: nn.Module, apply: Shard = fully_shard, **options: Any) -> Any:
    """Shard every child of a module that has parameters, then the module."""
    for name, child in list(model.named_children()):
        if any(True for _ in child.parameters()):
            setattr(model, name, apply(child, **options))
    return apply(model, **options)


def placed(layout: str, front: str = "flat", *, shared_memory: bool = True) -> dict[str, Any]:
    """Return the options of a front for a strategy, with new groups. Every rank must call this.

    Args:
        layout: a name of ``ShardingStrategy``; for a hybrid one and " 2x1", the shape of the mesh.
        front: the front.
        shared_memory: False has ranks exchange tensors by gloo.
    """
    name, _, shape = layout.partition(" ")
    if not shared_memory:
        # Read at the first collective of a group, so the groups have to be new.
        os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    if front not in WRAPPERS:
        sizes = (dist.get_world_size(), 1) if name == "NO_SHARD" else tuple(map(int, shape.split("x"))) if shape else ()
        reshards = name in ("FULL_SHARD", "HYBRID_SHARD")
        return {"reshard_after_forward": reshards, **({"mesh": mesh(*sizes)} if sizes else {})}
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[name]}
    if not shape:
        return {**options, "process_group": dist.new_group()}
    num_replicas, num_shards = map(int, shape.split("x"))
    if shared_memory:
        return {**options, "device_mesh": mesh(num_replicas, num_shards)}
    grid = torch.arange(num_replicas * num_shards).view(num_replicas, num_shards)
    return {**options, "process_group": (_own_group(grid.tolist()), _own_group(grid.t().tolist()))}


def _own_group(rows: Sequence[Sequence[int]]) -> Any:
    groups = [dist.new_group(list(row)) for row in rows]
    return next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row)


# -- what is compared ------------------------------------------------------------------------------------------------


def _copies(output: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]


def average_gradients(plain: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average gradients over ranks, of a group or all; one that only some ranks have is averaged with zeros."""
    params = list(plain.parameters())
    # One collective for all, in float64, which no order of the ranks rounds differently in float32: a flag for each
    # parameter, then all gradients.
    flags = torch.tensor([float(param.grad is not None) for param in params], device=params[0].device)
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    flat = torch.cat([flags.double(), *[grad.reshape(-1).double() for grad in grads]])
    _all_reduce(flat, group=group)
    means = (flat[len(params) :] / dist.get_world_size(group)).split([param.numel() for param in params])
    for param, has_grad, mean in zip(params, flat[: len(params)], means, strict=True):
        if has_grad:
            param.grad = mean.to(param.dtype).view(param.shape)


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the full tensor of a DTensor, detached. Every rank must call this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the full gradient of each parameter. Every rank must call this."""
    if isinstance(model, FSDP):
        return full_grads(model)
    return {clean_fqn(name): whole(param.grad) for name, param in model.named_parameters()}


def assert_parts(actual: dict[str, Any], expected: dict[str, Any], *, what: str = "value", **tolerance: float) -> None:
    """Assert that this rank's parts of tensors, most of them DTensors, are those of full ones; nothing is sent."""
    __tracebackhide__ = True
    parts = {name: _part_of(full, actual.get(name)) for name, full in expected.items()}
    locals_ = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in actual.items()}
    assert_close(locals_, parts, **tolerance, what=what)


def _part_of(full: torch.Tensor | None, like: Any) -> torch.Tensor | None:
    """Return this rank's part of a full tensor that is the same on every rank, sharded as a DTensor is."""
    if not isinstance(like, DTensor) or full is None:
        return full
    assert like.shape == full.shape
    mesh, (placement, *others) = like.device_mesh, like.placements
    if not others and isinstance(placement, ShardPlacement):
        # As below, without an operation on DTensors.
        chunks = full.chunk(mesh.size(), placement.dim)
        rank = mesh.get_local_rank()
        return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def assert_idle(model: nn.Module) -> None:
    """Assert that no collective or gradient is pending, and that no unit is unsharded but those told to stay so."""
    reshards = all(unit.control.reshard_after_backward is not False for unit in units_of(model))
    for unit in units_of(model):
        assert unit.is_sharded or not reshards, f"{unit.name} is not sharded"
        assert unit.phase is Phase.IDLE or not reshards, f"{unit.name} is {unit.phase.value}"
        assert not unit._pending_all_gathers, f"{unit.name} has gathers on their way"
        for handle in unit.param_groups:
            assert not any(handle.grads.ready()), f"{unit.name} has a gradient waiting"
            assert all(leaf.grad is None for leaf in handle.output.params)
            assert handle.kept_shards is None
            if handle.output.owns_memory and reshards:
                assert handle.output.nbytes == 0, f"{unit.name} holds {handle.output.nbytes} gathered bytes"
        assert not unit.step.reductions.has_any(unit.param_groups)
        assert not unit.step.order.prefetched
        assert unit.step.backward is None
        assert unit.step.order.iteration is None


# -- steps of fully_shard beside torch's -------------------------------------------------------------------------------


def one_backward(model: Any, step: int) -> None:
    """Run one forward and backward on this rank's rows of a step."""
    square_loss(model, batch_of(step)).backward()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer without state, to which a gradient of zeros is none: torch's are where ours are None."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def by_steps(
    module: nn.Module, fronts: str | Sequence[str] = BOTH, shard: Shard = blocks_and_root, **options: Any
) -> Beside:
    """Make a :class:`Beside` of ``fully_shard`` with bodies that are given the number of the step."""
    return Beside(module, fronts, shard=shard, batch=lambda _rank, step: step, body=one_backward, **options)


def of_stack(front: str, strategy: str = "FULL_SHARD", model: Stack | None = None, **options: Any) -> Beside:
    """Hold a stack beside a replica, in a front; hybrid strategies shard over two ranks. Every rank must call this."""
    layout = f"{strategy} {dist.get_world_size() // 2}x2" if "HYBRID" in strategy else strategy
    return Beside(model or Stack(2), front, **placed(layout), **options)
