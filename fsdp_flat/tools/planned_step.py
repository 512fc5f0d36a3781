"""Runs a step of the engine without memory, ranks or an accelerator, and counts it: what ``fsdp_flat.plan`` describes.

A copy of the model on fake tensors (``FakeTensorMode``) is wrapped as the caller would wrap it, in process groups that
send nothing, and takes a step, which is counted. The step before, in which units learn their order and the optimizer
makes its states, is run only if that order or its gradients matter; else what it leaves behind is made without it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from fsdp_flat.api import CPUOffload, ShardingStrategy, is_a
from fsdp_flat.comm import PLANNED, collectives_by, strategy_from
from fsdp_flat.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp_flat.core import (
    FlatGradBuffer,
    Unit,
    attributes_of,
    local_of,
    made_on,
    outside_fake_mode,
    units_of,
)
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.extras.describe import describe
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.guards import guards_off
from fsdp_flat.guards.torch_functions import left_as_found
from fsdp_flat.runtime import listed, offload_activations, offload_optimizer, planned_accelerator, resolve_ignored
from fsdp_flat.tools.accelerator_functions import AcceleratorFunctions
from fsdp_flat.tools.live_bytes import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, LiveBytes
from fsdp_flat.tools.planned_job import Machine, PlannedGroups, PlannedStreams, PlannedTransport, planned_groups
from fsdp_flat.tools.step_memory import BytesByKind, Moment, StepPhase
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.tools.torch_tools import (
    FAKE_TENSOR_LOGGER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    run_backward,
    silent,
)
from fsdp_flat.wrap import _Policy, plan_units
from fsdp_flat.wrap.policies import is_policy_object, named_classes

APIS = ("FullyShardedDataParallel", "fully_shard")

Checkpointed = bool | Collection[type[nn.Module]] | None
Loss = Callable[[nn.Module, Any], torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Any]

# What optimizers raise that read values, want a closure, or refuse parameters of such a shape or on such a device.
_REFUSALS = (AssertionError, DataDependentOutputException, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class UnitArguments:
    """Holds the arguments of :func:`fsdp_flat.plan` that decide on units; see there."""

    num_ranks: int
    num_replicas: int
    sharding_strategy: Any
    auto_wrap_policy: Any
    mixed_precision: Any
    ignored_modules: Any
    ignored_states: Any
    use_orig_params: bool
    api: str
    offloads: bool
    offloads_optimizer: bool
    is_accelerator: bool
    prefetches_forward: bool

    @property
    def num_shards(self) -> int:
        """Ranks that share the parameters."""
        return self.num_ranks // self.num_replicas if strategy_from(self.sharding_strategy).shards else 1

    def check(self) -> None:
        """Raise if the numbers of ranks and of replicas do not fit each other or the strategy."""
        num_ranks, num_replicas = self.num_ranks, self.num_replicas
        strategy = strategy_from(self.sharding_strategy)
        if not all(isinstance(each, int) for each in (num_ranks, num_replicas)):
            raise OptionTypeError(
                f"num_ranks and num_replicas must be integers; got {num_ranks!r} and {num_replicas!r}."
            )
        if num_ranks < 1 or num_replicas < 1 or num_ranks % num_replicas:
            raise OptionError(
                f"num_ranks must be a positive multiple of num_replicas; got num_ranks={num_ranks} and "
                f"num_replicas={num_replicas}."
            )
        if num_replicas > 1 and not strategy.is_hybrid:
            raise OptionError(
                f"num_replicas is for hybrid strategies; got num_replicas={num_replicas} with {strategy.name}."
            )
        if self.api not in APIS:
            raise OptionError(f"api must be one of {', '.join(map(repr, APIS))}; got {self.api!r}.")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Holds the arguments of :func:`fsdp_flat.plan` that decide on a step and not on units; see there."""

    batch: Any
    loss: Loss
    optimizer: MakeOptimizer | None
    bandwidth: float | None
    flops: float | None
    accumulates: bool
    offloads_activations: bool


def loss_of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that a model computes itself (``.loss`` of its output), or else the sum of its output.

    ``batch`` is what the model is called with: a tuple of arguments, a dict of keyword arguments, or one argument.
    """
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch)):
        raise OptionTypeError(
            f"batch must hold the tensors that the model is called with; got {batch!r}. For example "
            'batch=torch.empty(4, 1024, device="meta").'
        )
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    trained = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not trained:
        raise OptionError(
            f"The output of {type(model).__name__} has no tensor that requires a gradient. Pass a loss "
            "(plan(loss=...), --loss), which is called with the model and the batch."
        )
    return torch.stack([tensor.float().sum() for tensor in trained]).sum()


def planned_step(
    module: nn.Module, arguments: UnitArguments, step: StepSettings | None = None, checkpointed: Checkpointed = None
) -> StepPlan:
    """Return the plan of the units of ``module``, which stays as it is, and of a step if its settings are given.

    Args:
        module: a module that is not sharded.
        arguments: how it is sharded.
        step: what a step does.
        checkpointed: recompute in backward the forwards of the units below the outermost, or of modules of classes.

    Raises:
        OptionError: wrapping would raise it, or the model or the optimizer cannot run without values.
    """
    arguments.check()
    if units_of(module):
        raise OptionError(
            f"{type(module).__name__} holds a FullyShardedDataParallel already; describe(model) shows it."
        )
    num_shards = arguments.num_shards
    device = PLANNED if arguments.is_accelerator else torch.device("cpu")
    with (
        guards_off(),
        left_as_found(),
        planned_groups(num_shards, arguments.num_ranks // num_shards) as groups,
        planned_accelerator() if arguments.is_accelerator else nullcontext(),
    ):
        infinite = float("inf")
        machine = Machine(
            (None if step is None else step.bandwidth) or infinite, (None if step is None else step.flops) or infinite
        )
        run = _Run(machine, on_accelerator=arguments.is_accelerator)
        mesh = _mesh(arguments, groups)
        with FakeTensorMode(allow_non_fake_inputs=True), run.counter:
            model = _sharded(module, arguments, groups, mesh, device)
            found = describe(model)
            units = found.units
            if units and units[0].name.removeprefix("FSDP") == type(module).__name__:
                units = (replace(units[0], name=type(module).__name__), *units[1:])
            plan = StepPlan(units, found.num_shards, found.num_replicas, found.most_gathered_nbytes)
            if step is None:
                return plan
            _checkpoint(model, checkpointed)
            run.connect(units_of(model))
            run.counter.kind = ACTIVATIONS
            batch = tree_map(lambda leaf: _like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, step.batch)
            foreach = arguments.is_accelerator and not arguments.offloads
            run.prepare(model, step, foreach=foreach, offloads=arguments.offloads_optimizer)
            # All need the order of the forwards before.
            has_budget = any(unit.options.strategy.budget is not None for unit in units_of(model))
            needs_order = arguments.prefetches_forward or step.offloads_activations or has_budget
            if needs_order or step.accumulates:
                run.step(model, batch, step, name=type(module).__name__)
            run.begin()
            run.step(model, batch, step, name=type(module).__name__)
    has_speeds = step.bandwidth is not None or step.flops is not None
    offloads = arguments.offloads or arguments.offloads_optimizer or step.offloads_activations
    return replace(
        plan,
        phases=run.phases(),
        moments=tuple(run.moments),
        sent_nbytes=machine.sent_nbytes,
        flops=machine.flops,
        seconds=run.seconds if has_speeds else None,
        exposed_seconds=run.exposed_seconds if has_speeds else None,
        host_nbytes=run.host_nbytes if offloads else 0,
    )


class _Run:
    """Runs steps, and counts the last.

    Attributes:
        moments: the memory after each operator that changed it.
        host_nbytes: the most bytes of the host in it.
        seconds, exposed_seconds: the time of its forward and backward, and the part in which compute waited.
    """

    def __init__(self, machine: Machine, *, on_accelerator: bool) -> None:
        self._machine, self._on_accelerator = machine, on_accelerator
        self.counter = LiveBytes(machine, self._note, on_accelerator=on_accelerator)
        self.moments: list[Moment] = []
        self.host_nbytes = 0
        self.seconds = self.exposed_seconds = 0.0
        self._phase = StepPhase.FORWARD
        self._counts = False
        self._optimizer: Any = None
        self._params: list[nn.Parameter] = []
        self._hooked: set[nn.Parameter] = set()
        self._unit = ""
        self._last: list[int] = []

    def connect(self, units: Sequence[Unit]) -> None:
        """Have units that are built use the streams or the transport of the machine, and tell of their events."""
        transport = PlannedTransport(self._machine, self.counter.communicate)
        streams = PlannedStreams(self._machine)
        for unit in units:
            unit.step.trace = self
            if self._on_accelerator:
                unit.step.use_memory(streams, unit.step.pool)
            for group in unit.param_groups:
                if not group.output.tensors:
                    # The first all-gather makes the tensors of all that follow.
                    group.output.send(group.pool)
                    group.output.arrived()
                    group.slots.use_output(group.output)
                    group.output.free(group.pool)
                for tensor in group.output.tensors if group.output.owns_memory else ():
                    self.counter.use(tensor, GATHERED)
                comm = group.comm
                if comm.step_collectives is not None and not self._on_accelerator:
                    comm.step_collectives = collectives_by(comm.step_collectives.rank_group, transport)

    def append(self, event: tuple[str, str]) -> None:
        """Note the unit of an event of the tree."""
        _, self._unit = event

    def _note(self) -> None:
        if not self._counts:
            return
        self.host_nbytes = max(self.host_nbytes, self.counter.host_nbytes)
        if self.counter.nbytes != self._last:
            self._last = list(self.counter.nbytes)
            self.moments.append(Moment(self._phase, self._machine.seconds, self._unit, BytesByKind(*self._last)))

    def phases(self) -> tuple[Moment, ...]:
        """Return the largest moment of each phase."""
        by_phase = [[moment for moment in self.moments if moment.phase is phase] for phase in StepPhase]
        return tuple(max(moments, key=lambda moment: moment.nbytes.total) for moments in by_phase)

    @contextmanager
    def _in(self, phase: StepPhase) -> Iterator[None]:
        """Count what happens inside the block as a phase of the step."""
        self.counter.kind = OPTIMIZER if phase is StepPhase.OPTIMIZER else ACTIVATIONS
        self._phase, self._last = phase, []
        self.counter.measure()
        self._note()
        yield
        self.counter.measure()
        self._note()

    def prepare(self, model: nn.Module, step: StepSettings, *, foreach: bool, offloads: bool) -> None:
        """Make the optimizer and its states, and what else a step leaves.

        ``foreach`` is as torch would choose it. The optimizer ``offloads`` its states.
        """
        self._params = [param for param in model.parameters() if param.requires_grad]
        self.counter.kind = OPTIMIZER
        if step.optimizer is not None and self._params:
            # torch chooses no foreach for DTensors of some units beside flat parameters of others.
            is_mixed = len({isinstance(param, DTensor) for param in self._params}) > 1
            self._optimizer = _made_optimizer(step.optimizer, self._params, foreach=foreach and not is_mixed)
            if offloads:
                offload_optimizer(self._optimizer)
            for param in self._params:
                param.grad = torch.zeros_like(param) if param.numel() else None
            self._update()
            for param in self._params:
                param.grad = None
        for group in [group for unit in units_of(model) for group in unit.param_groups]:
            is_reused = group.comm.step_collectives is not None or group.grads.dtype != group.grads.reduce_dtype
            if group.slots.num_trainable and is_reused:
                group.grads.recycle(FlatGradBuffer(group.layout, group.grads.dtype, group.spec.device))

    def begin(self) -> None:
        """Count from now on."""
        self._machine.begin()
        self._counts = True

    def step(self, model: nn.Module, batch: Any, step: StepSettings, *, name: str) -> None:
        """Run a step; ``name`` is that of the model in errors."""
        with _values_refused(name), AcceleratorFunctions() if self._on_accelerator else nullcontext():
            with (
                self._in(StepPhase.FORWARD),
                offload_activations(model) if step.offloads_activations else nullcontext(),
            ):
                loss = step.loss(model, batch)
            self._hook_gradients(units_of(model))
            with self._in(StepPhase.BACKWARD):
                run_backward(loss)
                self._machine.wait_for_network()
        del loss
        self.seconds, self.exposed_seconds = self._machine.seconds, self._machine.exposed_seconds
        for param in self._params:
            if param.grad is not None:
                self.counter.use(local_of(param.grad), GRADIENTS)
        with self._in(StepPhase.OPTIMIZER):
            if self._optimizer is not None:
                self._update()
        for param in self._params if not step.accumulates else ():
            param.grad = None

    def _update(self) -> None:
        with _refusals_of(type(self._optimizer).__name__):
            self._optimizer.step()

    def _hook_gradients(self, units: Iterable[Unit]) -> None:
        """Count the gradients of unsharded parameters from the time on at which autograd has computed them."""
        for param in [param for unit in units for group in unit.param_groups for param in group.output.params]:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_hook(lambda grad: self.counter.use(grad, GRADIENTS))


def _mesh(arguments: UnitArguments, groups: PlannedGroups) -> DeviceMesh | None:
    """Return the mesh of ``fully_shard`` or of a hybrid strategy, made outside of ``FakeTensorMode``, or None."""
    is_hybrid = strategy_from(arguments.sharding_strategy).is_hybrid
    if arguments.api != "fully_shard" and (not is_hybrid or arguments.num_ranks == 1):
        return None
    if groups.replicate.size() == 1 and not is_hybrid:
        return DeviceMesh.from_group(groups.shard, "cpu")
    return DeviceMesh.from_group(
        [groups.replicate, groups.shard], "cpu", groups.mesh(), mesh_dim_names=("replicate", "shard")
    )


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return made_on(tensor, device)
    except Exception as error:
        raise OptionError(
            f"plan cannot make a {type(tensor).__name__} of shape {tuple(tensor.shape)} without values: {error!r}. Its "
            "class needs __tensor_flatten__ and __tensor_unflatten__."
        ) from error


def _without_memory(module: nn.Module, device: torch.device) -> tuple[nn.Module, dict[Any, Any]]:
    """Return a copy of ``module`` on ``device``, and the copy of each of its modules and parameters."""
    params = {param: nn.Parameter(_like(param, device), param.requires_grad) for param in module.parameters()}
    with outside_fake_mode():  # those that a class has set are not the caller's
        for param, twin in params.items():
            twin.__dict__.update(attributes_of(param))
    others = {
        value: _like(value, device)
        for child in module.modules()
        for value in tree_leaves(vars(child))
        if isinstance(value, torch.Tensor) and value not in params
    }
    copies: dict[int, Any] = {id(tensor): twin for tensor, twin in (*params.items(), *others.items())}
    for leaf in tree_leaves([vars(child) for child in module.modules()]):
        if isinstance(leaf, torch.Generator):
            copies[id(leaf)] = leaf  # nothing is drawn from it
    copied = copy.deepcopy(module, copies)
    for child in copied.modules():
        if isinstance(child, nn.SyncBatchNorm):
            child.forward = MethodType(_BatchNorm.forward, child)  # type: ignore[method-assign]  # its own refuses operators of the CPU
    return copied, {**params, **dict(zip(module.modules(), copied.modules(), strict=True))}


class _PolicyOfOriginals(_Policy):
    """Asks a policy object about the modules of which a tree has copies, by their copies."""

    def __init__(self, originals: dict[Any, Any], policy: Any) -> None:
        self._originals, self._policy = originals, policy

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        ignored = {self._originals[module] for module in ignored_modules}
        chosen = self._policy._run_policy(self._originals[root_module], ignored, root_kwargs)
        return {copied: chosen[each] for copied, each in self._originals.items() if each in chosen}


def _asked_about(originals: dict[Any, Any], policy: Any) -> Any:
    """Return a policy that is asked about the caller's modules, by their copies: it may know some by identity."""
    if policy is None or named_classes(policy) is not None:
        return policy
    if is_policy_object(policy):
        return _PolicyOfOriginals(originals, policy)
    if not callable(policy):
        return policy  # wrapping refuses it by name
    return lambda *, module, **question: policy(module=originals[module], **question)


def _sharded(
    module: nn.Module,
    arguments: UnitArguments,
    groups: PlannedGroups,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> nn.Module:
    """Shard a copy of ``module`` on ``device``, as the caller would shard that, and return it."""
    model, twins = _without_memory(module, device)

    def twins_of(given: Any) -> Any:
        return [twins.get(each, each) for each in given] if isinstance(given, Iterable) else given

    strategy = strategy_from(arguments.sharding_strategy)
    wrap_policy = _asked_about({twin: each for each, twin in twins.items()}, arguments.auto_wrap_policy)
    ignored = {
        "ignored_modules": twins_of(arguments.ignored_modules),
        "ignored_states": twins_of(arguments.ignored_states),
    }
    if arguments.api != "fully_shard":
        is_single = arguments.num_ranks == 1
        group = groups.shard if strategy.shards and not is_single else groups.replicate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of NO_SHARD, which is planned to compare it
            return FullyShardedDataParallel(
                model,
                group if mesh is None else None,
                ShardingStrategy.NO_SHARD if is_single else arguments.sharding_strategy,
                CPUOffload(arguments.offloads, arguments.offloads_optimizer),
                wrap_policy,
                mixed_precision=arguments.mixed_precision,
                forward_prefetch=arguments.prefetches_forward,
                use_orig_params=arguments.use_orig_params,
                device_mesh=mesh,
                **ignored,
            )
    left_out = resolve_ignored(model, **ignored, nested=())
    kwargs = {"sharding_strategy": arguments.sharding_strategy, "use_orig_params": True}
    chosen = [(model, kwargs)]
    if wrap_policy is not None:
        planned = plan_units(
            model,
            wrap_policy,
            ignored_modules=set(left_out.modules),
            ignored_params=set(left_out.params),
            root_kwargs=kwargs,
        )
        chosen = [*[(unit.module, unit.kwargs) for unit in planned.units], *chosen]
    policy = arguments.mixed_precision
    if is_a(policy, "MixedPrecision"):
        policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
    for unit, options in chosen:
        own = strategy_from(options["sharding_strategy"])
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=False if own.shards and not own.reshard_after_forward else own.budget,
            mp_policy=MixedPrecisionPolicy() if policy is None else policy,
            offload_policy=CPUOffloadPolicy() if arguments.offloads else OffloadPolicy(),
            ignored_params=set(left_out.params),
        )
    return model


def _checkpoint(model: nn.Module, checkpointed: Checkpointed) -> None:
    """Have the units below the outermost, or modules of classes, recompute their forwards in backward."""
    if checkpointed is None or isinstance(checkpointed, bool):
        found = [unit.module for unit in units_of(model)[1:]] if checkpointed else []
    else:
        classes = listed(
            "checkpointing", checkpointed, lambda kind: isinstance(kind, type), "True, False or module classes"
        )
        found = [module for module in model.modules() if isinstance(module, tuple(classes))]
        if not found:
            names = ", ".join(cls.__name__ for cls in classes)
            raise OptionError(f"checkpointing names classes that the model has no module of: {names}.")
    for module in found:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def _made_optimizer(make: MakeOptimizer, params: list[nn.Parameter], *, foreach: bool) -> Any:
    """Make an optimizer, which updates many parameters at once where torch would on accelerators (``foreach``)."""
    with _refusals_of(getattr(make, "__name__", type(make).__name__)):
        optimizer = make(params)
    for group in getattr(optimizer, "param_groups", ()):
        if foreach and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("capturable"):
            group["capturable"] = False  # it needs a real accelerator, and has the same states
    return optimizer


@contextmanager
def _refusals_of(optimizer: str) -> Iterator[None]:
    try:
        with silent(FAKE_TENSOR_LOGGER):
            yield
    except _REFUSALS as error:
        raise OptionError(
            f"{optimizer} cannot run on parameters without values, so plan cannot count its states: "
            f"{type(error).__name__}: {error} Pass optimizer=None, and add the states of your optimizer by hand."
        ) from error


@contextmanager
def _values_refused(model: str) -> Iterator[None]:
    """Turn what a model raises inside the block, if it reads values of tensors, into an error about that."""
    try:
        with silent(FAKE_TENSOR_LOGGER), warnings.catch_warnings():
            # An all-gather extension may look where its tensors are, which here is nowhere.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise OptionError(
            f"{model} or its loss reads values of tensors ({error}), and plan runs it without "
            "values. Leave that part out of the loss that plan gets, or plan without a batch."
        ) from error
