"""A wrapped model and its plain replica, side by side on each rank, and their comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import clean_tensor_name
from fsdp_flat.errors import OptionError, TiedParameterError
from tests.support import assert_close

from .case import Case, Options, Wrapping, nodes_of
from .models import Root, as_rank, build
from .wrapping import arguments_from, wrap

TOLERANCE = {"rtol": 1e-8, "atol": 1e-10}
# fp32 parameters beside fp64 ones: their gradients are averaged in fp32.
NARROW = {"rtol": 1e-4, "atol": 1e-5}

EXPECTED_WARNINGS = (
    "NO_SHARD keeps full",
    ".*over a single rank",
    "Unit .* is not sharded, so its entries of the LOCAL_STATE_DICT are full tensors",
    "None of the inputs have requires_grad=True",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "auto_wrap_policy matches",
    "auto_wrap_policy chooses no module",
    "auto_wrap_policy names no class",
    "clip_grad_norm_ was called on a rank without gradients",
    ".*is sharded in torch.float32",
    "Unit .* is not sharded, so its entries of the SHARDED_STATE_DICT are full tensors",
    "Buffers differ between ranks",
    "The optimizer state dict has .* no names for them",
)


class Mismatch(AssertionError):
    """The sharded model differs from the replica. ``what`` is the kind of value."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(f"{what}: {text}")
        self.what = what


class NotLegal(Exception):
    """The replica cannot do it either: the action is left out on every rank."""


@contextmanager
def expected_warnings_ignored() -> Iterator[None]:
    """Let warnings be errors, but for those that cases ask for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=r"torch\.")
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


@dataclass
class State:
    """What decides which actions are legal; the generator keeps one without a model.

    Attributes:
        num_pending: forwards whose graphs wait for a backward.
        unsynced: gradients that no rank has reduced yet wait, from ``no_sync()``.
        has_snapshot: a saved state is there to be restored.
    """

    num_pending: int = 0
    unsynced: bool = False
    has_snapshot: bool = False

    @property
    def is_between_steps(self) -> bool:
        """Whether no graph and no unreduced gradient waits."""
        return self.num_pending == 0 and not self.unsynced


@dataclass(eq=False)
class Pending:
    """A forward that a backward may follow: every rank's input and outputs on the replica, this rank's outputs."""

    inputs: list[torch.Tensor]
    expected: list[list[torch.Tensor]]
    input: torch.Tensor
    outputs: list[torch.Tensor]


def clean_path(path: str) -> str:
    """Make a prefix of the plain model's names of a module's path."""
    words = [word for word in path.split(".") if word and word != "_fsdp_wrapped_module"]
    return "".join(f"{word}." for word in words)


def shard_sizes(case: Case) -> set[int]:
    """Return the numbers of ranks that units of a case are sharded over."""
    options = case.options
    whole = options.mesh[-1] if options.mesh else case.num_ranks
    strategies = {options.strategy, *(strategy for _, strategy in case.wrapping.strategies)}
    return {1 if strategy == "NO_SHARD" else whole for strategy in strategies}


def flattened(outputs: Any) -> list[torch.Tensor]:
    """List the tensors of a root's output."""
    return [outputs["out"], *outputs["sides"]]


def used(outputs: list[torch.Tensor], uses: list[int]) -> list[int]:
    """Return the indices of the outputs that a loss depends on."""
    return [index for index in uses if index < len(outputs)] or [0]


def loss_of(outputs: list[torch.Tensor], uses: list[int]) -> torch.Tensor:
    """Compute a bounded loss of some of the outputs."""
    chosen = used(outputs, uses)
    return sum((index + 1) * torch.tanh(0.3 * outputs[index]).square().mean() for index in chosen)  # type: ignore


@dataclass
class Sides:
    """What is compared, by name."""

    actual: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]

    def add(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.actual[name], self.expected[name] = actual, expected


class Session(State):
    """Both models of a case while its program runs. Every rank must make one and do the same with it."""

    def __init__(self, case: Case, directory: str) -> None:
        super().__init__()
        self.case = case
        self.directory = directory
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.plain = build(case)
        self.is_narrow = any(p.dtype == torch.float32 for p in self.plain.parameters())
        self.model, self.case = self.make_model()
        self.optim = self.make_optimizer(self.model)
        self.plain_optim = self.make_optimizer(self.plain)
        self.groups = self.unit_groups()
        self.buffers = [
            {name: buffer.clone() for name, buffer in self.plain.named_buffers()} for _ in range(self.num_ranks)
        ]
        self.pending: list[Pending] = []
        # Outputs, with their graphs, of forwards that this rank's replica has run alone.
        self.alone: list[torch.Tensor] = []
        self.snapshot: Any = None
        self.ema: Any = None
        self.num_saves = 0
        self.has_edits = any(node.kind == "edited" for node in nodes_of(case.model))
        # What a backward of each rank has left unreduced on the replica, if edits of it look at that.
        self.own_grads: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(self.num_ranks)]

    # -- making ------------------------------------------------------------------------------------------------------

    def make_model(self) -> tuple[Any, Case]:
        """Build the sharded model; return the case with what the library had to refuse changed."""
        # As a user's script has it: only rank 0's weights count.
        is_other = self.case.options.sync_module_states and self.rank > 0
        seed = self.case.seed + 1 if is_other else None
        return self.wrapped(lambda: build(self.case, seed), self.case.wrapping, self.case.options)

    def wrapped(
        self,
        make: Callable[[], nn.Module],
        wrapping: Wrapping,
        options: Options,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[FSDP, Case]:
        """Wrap a new model; where the library has to refuse, wrap it in the nearest way that it takes."""
        kinds = {node.kind for node in nodes_of(self.case.model)}
        for _ in range(3):
            module = make()
            arguments = arguments_from(options, group)
            try:
                model = wrap(module, wrapping, arguments)
            except TiedParameterError:
                if wrapping.policy != "hand" or "tied" not in kinds:
                    raise
                wrapping = replace(wrapping, policy="custom")
            except OptionError as error:
                params = list(self.plain.parameters())
                is_mixed = len({p.requires_grad for p in params}) > 1 or len({p.dtype for p in params}) > 1
                if options.use_orig_params or not is_mixed or "use_orig_params=True" not in str(error):
                    raise
                options = replace(options, use_orig_params=True)
            else:
                return model, replace(self.case, wrapping=wrapping, options=options)
        raise AssertionError("A wrapping was refused three times.")

    def fresh(self, seed: int) -> Root:
        """Build another model of the same structure, and the same needs of gradients."""
        case = self.case
        made = build(case, seed)
        dtypes = {name: p.dtype for name, p in self.plain.named_parameters()}
        for (name, param), other in zip(made.named_parameters(), self.plain.parameters()):
            param.data = param.data.to(dtypes[name])
            param.requires_grad_(other.requires_grad)
        return made

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make an optimizer of either model. AdamW's steps depend on the size of gradients, by a large ``eps``."""
        spec = self.case.optimizer
        groups: list[dict[str, Any]] = [{"params": [], "lr": 0.05}, {"params": [], "lr": 0.02}]
        for name, param in model.named_parameters():
            second = spec.num_groups == 2 and len(clean_tensor_name(name)) % 2
            groups[second]["params"].append(param)
        groups = [group for group in groups if group["params"]]
        if spec.kind == "adamw":
            return torch.optim.AdamW(groups, weight_decay=0.1, eps=0.1, foreach=spec.foreach)
        return torch.optim.SGD(groups, momentum=0.9, foreach=spec.foreach)

    def unit_groups(self) -> list[list[nn.Parameter]]:
        """List the replica's parameters of each flat parameter, with ``use_orig_params=False``."""
        if self.case.options.use_orig_params:
            return []
        units = set(FSDP.fsdp_modules(self.model))
        found = []
        for name, module in self.model.named_modules():
            if module in units and module._flat_param is not None:
                found.append([self.plain.get_parameter(clean_path(name) + fqn) for fqn in module._flat_param._fqns])
        return found

    # -- running the replica -----------------------------------------------------------------------------------------

    @contextmanager
    def replica(self, rank: int) -> Iterator[nn.Module]:
        """Give the replica the buffers of a rank, and keep what becomes of them."""
        places = [(name.rpartition("."), name) for name, _ in self.plain.named_buffers()]
        for (path, _, last), name in places:
            self.plain.get_submodule(path)._buffers[last] = self.buffers[rank][name]
        with as_rank(rank):
            yield self.plain
        for (path, _, last), name in places:
            buffer = self.plain.get_submodule(path)._buffers[last]
            assert buffer is not None
            self.buffers[rank][name] = buffer

    def copied_buffers(self) -> list[dict[str, torch.Tensor]]:
        return [{name: buffer.clone() for name, buffer in buffers.items()} for buffers in self.buffers]

    def batch(self, seed: int, rank: int) -> torch.Tensor:
        """Make the rows of a rank; how many depends on the rank too."""
        generator = torch.Generator().manual_seed(1000 * (seed + self.case.seed) + rank)
        rows = 1 + (seed + 2 * rank) % 4
        return torch.randn(rows, self.case.width, generator=generator, dtype=torch.float64) + 0.3 * rank

    def batches(self, seed: int) -> list[torch.Tensor]:
        return [self.batch(seed, rank) for rank in range(self.num_ranks)]

    def fill_zeros(self) -> None:
        """Give parameters zero gradients whose flat parameter has one."""
        for group in self.groups:
            if any(param.grad is not None for param in group):
                for param in group:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)

    # -- differences between fronts ----------------------------------------------------------------------------------

    def unreduced(self, mode: str) -> AbstractContextManager[None]:
        """Leave gradients unreduced inside the block."""
        return self.model.no_sync(mode=mode)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the sharded model's gradients; returns the norm. Every rank must call this."""
        return self.model.clip_grad_norm_(max_norm, norm_type)

    def writable(self, *, with_grads: bool) -> AbstractContextManager[None]:
        """Let parameters be written inside the block."""
        return FSDP.summon_full_params(self.model, with_grads=with_grads)

    def show_sharded(self) -> None:
        """Make the modules hold what an optimizer holds."""

    def converted(self) -> None:
        """Look at the parameters again after a conversion."""

    def callable_units(self) -> list[tuple[nn.Module, nn.Module]]:
        """List the units below the root, each with its module of the model, that may be called by themselves."""
        units = [unit for unit in FSDP.fsdp_modules(self.model) if unit is not self.model]
        return [(unit, unit.module) for unit in units]

    # -- both --------------------------------------------------------------------------------------------------------

    def forward(self, seed: int, *, input_grad: bool = False) -> Pending:
        """Run both forward, and compare the outputs."""
        inputs = self.batches(seed)
        mine = inputs[self.rank].clone()
        expected = []
        if input_grad:
            for x in (*inputs, mine):
                x.requires_grad_()
        for rank, x in enumerate(inputs):
            with self.replica(rank) as plain:
                expected.append(flattened(plain(x)))
        with as_rank(self.rank):
            outputs = flattened(self.model(mine))
        self.compare("outputs", outputs, expected[self.rank])
        return Pending(inputs, expected, mine, outputs)

    def losses(
        self, chosen: list[Pending], uses: list[list[int]]
    ) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
        """Compute every rank's loss on the replica; return a function for this rank's own on the wrapped model.

        Raises:
            NotLegal: a rank's loss would need no gradient, or reach no forward that other ranks' losses reach.
        """
        expected = [
            sum((loss_of(one.expected[rank], uses[rank]) for one in chosen), start=torch.zeros(()))
            for rank in range(self.num_ranks)
        ]
        if not all(loss.requires_grad for loss in expected):
            raise NotLegal("a loss without a gradient")
        # docs/differences.md: every rank runs backward through the same forwards, and an input handed back is in none.
        reached = [
            [any(not one.expected[rank][i].is_leaf for i in used(one.expected[rank], uses[rank])) for one in chosen]
            for rank in range(self.num_ranks)
        ]
        if any(flags != reached[0] for flags in reached):
            raise NotLegal("a loss of an input alone on some ranks")
        return expected, lambda: sum((loss_of(one.outputs, uses[self.rank]) for one in chosen), start=torch.zeros(()))

    def backward(self, chosen: list[Pending], uses: list[list[int]], *, retain: bool, synced: bool) -> None:
        """Run both backward, and compare losses and the inputs' gradients."""
        expected, loss_function = self.losses(chosen, uses)
        self.backward_replica(expected, retain=retain)
        if synced:
            self.fill_zeros()
        with as_rank(self.rank):
            loss = loss_function()
            loss.backward(retain_graph=retain)
        self.compare("losses", loss.detach(), expected[self.rank].detach())
        for one in chosen:
            theirs = one.inputs[self.rank].grad
            if one.input.requires_grad:
                self.compare("inputs' gradients", one.input.grad, None if theirs is None else theirs * self.num_ranks)

    def backward_replica(self, losses: list[torch.Tensor], *, retain: bool = False) -> None:
        """Run backward of the replica's loss for every rank, which adds to the sum of all ranks' gradients.

        Edits of gradients see those of their rank that are not reduced yet, and no others.
        """
        params = list(self.plain.parameters()) if self.has_edits else []
        if not self.unsynced:
            self.gradients_reduced()
        reduced: dict[nn.Parameter, torch.Tensor] = {}
        for param in params:
            if param.grad is None or not param.grad.any():  # cleared, perhaps
                for own in self.own_grads:
                    if param.grad is None:
                        own.pop(param, None)
                    elif param in own:
                        own[param] = torch.zeros_like(param)
            if param.grad is not None:
                reduced[param] = param.grad - sum(own.get(param, 0) for own in self.own_grads)
        for rank, loss in enumerate(losses):
            for param in params:
                param.grad = self.own_grads[rank].get(param)
            with self.replica(rank):
                (loss / self.num_ranks).backward(retain_graph=retain)
            if params:
                self.own_grads[rank] = {param: param.grad for param in params if param.grad is not None}
        for param in params:
            found = [grads[param] for grads in (reduced, *self.own_grads) if param in grads]
            param.grad = sum(found[1:], start=found[0].clone()) if found else None

    def gradients_reduced(self) -> None:
        """Note that no rank has gradients of its own any more."""
        self.own_grads = [{} for _ in range(self.num_ranks)]

    # -- comparing ---------------------------------------------------------------------------------------------------

    def compare(self, what: str, actual: Any, expected: Any, *, loose: bool = False) -> None:
        """Compare nested values; raises :class:`Mismatch`."""
        try:
            assert_close(actual, expected, **(NARROW if loose or self.is_narrow else TOLERANCE), what=what)
        except AssertionError as error:
            raise Mismatch(what, str(error)) from None

    def compare_all(self) -> None:
        """Compare parameters, gradients where they are reduced, and buffers; a collective."""
        with_grads = not self.unsynced
        with FSDP.summon_full_params(self.model, writeback=False, with_grads=with_grads):
            found = {clean_tensor_name(name): p for name, p in self.model.named_parameters()}
            params = {name: p.detach().clone() for name, p in found.items()}
            grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in found.items()}
        mine = dict(self.plain.named_parameters())
        self.compare("parameters", params, {name: p.detach() for name, p in mine.items()})
        if with_grads:
            present = {name for name, grad in grads.items() if grad is not None}
            expected = {name for name, p in mine.items() if p.grad is not None}
            if present != expected:
                raise Mismatch(
                    "presence of gradients",
                    f"missing {sorted(expected - present)}, unexpected {sorted(present - expected)}",
                )
            self.compare(
                "gradients",
                {name: grads[name] for name in mine if name in present},
                {name: p.grad for name, p in mine.items() if name in present},
            )
        self.compare_buffers()

    def compare_after_action(self) -> None:
        """Compare what can be compared without a change of what comes next."""
        if self.num_pending:
            self.compare_buffers()
        elif self.case.compares_by == "summon":
            self.compare_all()
        else:
            self.compare_slices()

    def compare_slices(self) -> None:
        """Compare this rank's own slices of parameters and gradients, and buffers; no communication."""
        units = set(FSDP.fsdp_modules(self.model))
        params, grads = Sides({}, {}), Sides({}, {})
        for path, module in self.model.named_modules():
            if module in units:
                for flat_param in module.params:
                    self._add_slices(clean_path(path), flat_param, params, grads)
        self.compare("parameters", params.actual, params.expected)
        self.compare("gradients", grads.actual, grads.expected)
        self.compare_buffers()

    def _add_slices(self, prefix: str, flat_param: Any, params: Sides, grads: Sides) -> None:
        for index, (fqn, info) in enumerate(zip(flat_param._fqns, flat_param._shard_param_infos)):
            if not info.in_shard:
                continue
            name = prefix + fqn
            param = self.plain.get_parameter(name)
            here = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
            there = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
            params.add(name, flat_param.data[there], param.detach().flatten()[here])
            if self.unsynced:
                continue
            if self.case.options.use_orig_params:
                grad = flat_param._params[index].grad
                grad = None if grad is None else grad.detach().flatten()
            else:
                grad = None if flat_param.grad is None else flat_param.grad.detach()[there]
            if grad is not None and param.grad is not None:
                grads.add(name, grad, param.grad.flatten()[here])
            elif grad is not param.grad:
                raise Mismatch("presence of gradients", f"{name}: got {grad}, expected {param.grad}")

    def compare_buffers(self) -> None:
        buffers = {clean_tensor_name(name): buffer for name, buffer in self.model.named_buffers()}
        self.compare("buffers", buffers, self.buffers[self.rank])

    def compare_optimizers(self) -> None:
        """Compare optimizer states by name; a collective."""
        state = FSDP.optim_state_dict(self.model, self.optim)["state"]
        self.compare("optimizer state", self.by_first_name(state), self.plain_optimizer_state())

    def by_first_name(self, state: dict[str, Any]) -> dict[str, Any]:
        """Rename to the first name of each parameter, where modules or parameters have several."""
        first = {param: name for name, param in self.plain.named_parameters()}
        return {first[self.plain.get_parameter(name)]: dict(values) for name, values in state.items()}

    def plain_optimizer_state(self) -> dict[str, Any]:
        names = {param: name for name, param in self.plain.named_parameters()}
        return {names[param]: dict(values) for param, values in self.plain_optim.state.items() if values}

    # -- changing models ---------------------------------------------------------------------------------------------

    def drop_pending(self) -> None:
        self.pending.clear()
        self.num_pending = 0

    def adopt(self, model: FSDP, optim: torch.optim.Optimizer, case: Case) -> None:
        """Go on with another wrapped model."""
        self.model, self.optim, self.case = model, optim, case
        self.groups = self.unit_groups()
        self.ema = None
        self.plain_optim.zero_grad()

    def grads_to_plain(self) -> None:
        """Overwrite the replica's gradients, after they were compared with less precision."""
        with FSDP.summon_full_params(self.model, writeback=False, with_grads=True):
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    self.plain.get_parameter(clean_tensor_name(name)).grad = param.grad.detach().clone()
