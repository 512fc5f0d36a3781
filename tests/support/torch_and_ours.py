"""The same test body on torch's FSDP1 and on ours: its own asserts hold on both, and both return the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
import torch.distributed.fsdp.wrap as peer_wrap
from torch import nn
from torch.distributed import distributed_c10d

import fsdp_flat
import fsdp_flat.wrap as our_wrap
from tests.support import assert_close
from tests.support.beside import Beside, adamw
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build, options_for
from tests.support.kit import normal, train_on
from tests.support.models import NestedBlock
from tests.support.peer import mend_peer, peer_warnings_silenced
from tests.support.pool import TASK_TIMEOUT_S
from tests.support.transport import rank_device
from tests.support.zoo import CASES, Case

ORIG = (True,)
# Hybrid sharding over one rank is left out: torch's class does not average the replicas' gradients there.
STRATEGIES = [*PLAIN, Layout("HYBRID_SHARD", (1, 2))]
SHARDED = [Layout("FULL_SHARD"), Layout("SHARD_GRAD_OP")]
FULL = SHARDED[:1]
# A root and two units: enough for most questions, and quick.
BLOCKS = replace(CASES["nested units"], units=(NestedBlock,))
KINDS = {True: "orig", False: "flat"}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two implementations, by the names that both have.

    Attributes:
        name: ``"torch"`` or ``"ours"``.
        api: the package with the wrapper class, the enumerations and the configurations.
        wrapping: its module of policies.
    """

    name: str
    api: Any
    wrapping: Any

    @property
    def FSDP(self) -> Any:
        """The wrapper class."""
        return self.api.FullyShardedDataParallel

    @property
    def is_torch(self) -> bool:
        """Whether this is torch's implementation, which needs to be told where to compute."""
        return self.name == "torch"

    def wrap(
        self, module: nn.Module, layout: Layout | None = None, *, units: Sequence[type] = (), **options: Any
    ) -> Any:
        """``module``, and each instance of ``units`` in it, wrapped. Every rank must call this.

        Args:
            module: the module to wrap.
            layout: strategy and mesh; by default the class's own default.
            units: classes of which each instance becomes a unit.
            options: further arguments of the class.
        """
        if layout is not None:
            options = {**options_for(layout, self.api.ShardingStrategy), **options}
        if units:
            options.setdefault("auto_wrap_policy", self.wrapping.ModuleWrapPolicy(set(units)))
        if self.is_torch:
            options.setdefault("device_id", rank_device())
        return self.FSDP(module, **options)

    def wrap_case(self, case: Case, layout: Layout | None = None, **options: Any) -> Any:
        """The case's model with its units wrapped."""
        return self.wrap(build(case), layout, units=case.units, **options)

    def state_dict_as(self, model: nn.Module, kind: str, model_config: Any = None, optim_config: Any = None) -> Any:
        """The context of ``state_dict_type`` by the short name of a type: ``"FULL"``, ``"SHARDED"``, ``"LOCAL"``."""
        return self.FSDP.state_dict_type(
            model, self.api.StateDictType[f"{kind}_STATE_DICT"], model_config, optim_config
        )

    def units(self, model: nn.Module) -> list[Any]:
        """The wrappers of a tree, outermost first."""
        return list(self.FSDP.fsdp_modules(model))

    def sharded_units(self, model: nn.Module) -> list[bool]:
        """For each unit with parameters whether it has to be gathered before use; never with NO_SHARD."""
        return [unit._handle.needs_unshard() for unit in self.units(model) if unit._handle is not None]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Ignore warnings that both give about old interfaces and NO_SHARD, and no other warning."""
        with peer_warnings_silenced(), warnings.catch_warnings():
            about = (
                r"(?s).*NO_SHARD",
                r"Unit .* is not sharded, so its entries",
                r"(?s).*deprecated",
                r".* is an older form of",
                "enable_nested_tensor is True",  # nn.Transformer's own, for every model of its kind
                r".*offload_to_cpu=True.* rank0_only=False",  # advice that both give
                "Gradients of .* are each rank's own",  # as some cases mean them to be
            )
            for message in about:
                warnings.filterwarnings("ignore", message=message)
            if self.is_torch:
                for message in (".*has both parameters with requires_grad=True and False", "Multiple backends are"):
                    warnings.filterwarnings("ignore", message=message)
            yield


TORCH = Side("torch", peer_library, peer_wrap)
OURS = Side("ours", fsdp_flat, our_wrap)
SIDES = {side.name: side for side in (TORCH, OURS)}
# A launch runs all layouts of a test on both sides.
TIMEOUT_S = 3 * TASK_TIMEOUT_S
# How much later than the first rank others may end a body that failed.
APART = timedelta(seconds=15)


def on_both_sides(
    *,
    num_ranks: int = 2,
    layouts: Sequence[Layout] = PLAIN,
    kinds: Sequence[bool] = (True, False),
    torch_cannot: str = "",
    tolerance: dict[str, float] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated top-level test body on torch's class and on ours, on every rank of one launch.

    The body names those of these arguments that it needs: ``side``, ``layout`` and ``use_orig_params``; others are
    pytest's. ``use_orig_params`` makes a test each; layouts run one after the other inside it. Asserts in the body
    hold for both classes, and its results are compared.

    Args:
        num_ranks: number of ranks.
        layouts: values of ``layout``.
        kinds: values of ``use_orig_params``.
        torch_cannot: why torch's class fails on CPUs with gloo; the body then runs on ours alone.
        tolerance: of the comparison; by default that of this folder.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        names = list(inspect.signature(body).parameters)
        cells = [str(index) for index, _ in enumerate(layouts)] if "layout" in names else [""]
        by_kind = "use_orig_params" in names
        passed = [name for name in names if name not in ("side", "layout", "use_orig_params")]

        @functools.wraps(body)
        def test(ranks: Any, **arguments: Any) -> None:
            __tracebackhide__ = True
            run = ranks(num_ranks, timeout=TIMEOUT_S).run
            some = [layouts[int(cell)] if cell else None for cell in cells]
            sides = ["ours"] if torch_cannot else ["torch", "ours"]
            by_rank = run(run_cells, (body.__module__, body.__name__), some, arguments, sides, tolerance or TOLERANCE)
            failures = [f"--- rank {rank}, {text}" for rank, texts in enumerate(by_rank) for text in texts]
            if failures:
                raise AssertionError("\n".join([f"{len(failures)} failures", *failures]))

        asked = ["ranks", *(["use_orig_params"] if by_kind else []), *passed]
        # Names the arguments for pytest, which would else look at the body's own arguments.
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        )
        if by_kind:
            test = pytest.mark.parametrize("use_orig_params", kinds, ids=[KINDS[kind] for kind in kinds])(test)
        return test

    return decorate


def run_cells(
    name: tuple[str, str],
    layouts: list[Layout | None],
    arguments: dict[str, Any],
    sides: list[str],
    tolerance: dict[str, float],
) -> list[str]:
    """On a rank: the body below the decorator, for each layout on each side; the texts of the failures.

    All cells run, also after a failure, unless ranks fail apart: then the one that failed raises.
    """
    body = getattr(importlib.import_module(name[0]), name[1]).__wrapped__
    mend_peer()
    failures = []
    for index, layout in enumerate(layouts):
        cell = arguments if layout is None else {**arguments, "layout": layout}
        results = []
        for side_name in sides:
            try:
                results.append(result_of(body, SIDES[side_name], cell))
            except (Exception, pytest.fail.Exception):
                failures.append(f"{layout or 'body'} on {side_name}:\n{traceback.format_exc(limit=-6)}")
                leave_together(f"{index} {side_name}", failures[-1])
            else:
                default_store().set(f"{index} {side_name} {dist.get_rank()}", "done")
        if len(results) == 2:
            try:
                # Ours is "got", torch's is "expected".
                assert_close(results[1], results[0], **tolerance, what=f"{layout or 'body'}: result")
            except AssertionError as error:
                failures.append(str(error))
    return failures


def result_of(body: Callable[..., Any], side: Side, cell: dict[str, Any]) -> Any:
    """The body's result on one side."""
    torch.manual_seed(0)
    with side.quiet():
        return body(side, **cell)


def leave_together(key: str, failure: str) -> None:
    """After a failure, wait until every rank has ended the same body; raise if one has not."""
    store = default_store()
    store.set(f"{key} {dist.get_rank()}", "failed")
    try:
        store.wait([f"{key} {rank}" for rank in range(dist.get_world_size())], APART)
    except dist.DistStoreError:
        raise RuntimeError(f"other ranks are still inside the body that failed here: {failure}") from None


def default_store() -> dist.Store:
    """The store of the default group."""
    return distributed_c10d._get_default_store()


# -- shared by bodies ---------------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Plain steps, so that parameters show gradients by their size."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step_input(rank: int, step: int) -> torch.Tensor:
    """A rank's rows of five numbers."""
    return normal(100 * step + rank, 4, 5)


def train(
    model: nn.Module, case: Case, optimizer: torch.optim.Optimizer, steps: Sequence[int] = range(3)
) -> list[torch.Tensor]:
    """Optimizer steps on this rank's batches of these numbers; the losses."""
    inputs = [batch_of(case, dist.get_rank(), index) for index in steps]
    return train_on(model, optimizer, inputs, case.loss_of)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the values of ``state_dict``."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(side: Side, name: str, layout: Layout | None = None, **options: Any) -> dict[str, Any]:
    """Losses and end of a short training of a model of the zoo."""
    case = CASES[name]
    model = side.wrap_case(case, layout, **options)
    losses = train(model, case, adamw(model))
    return {"losses": losses, "state": state_of(model)}


def beside_replica(
    model: nn.Module,
    replica: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    batch: Callable[[int, int], Any],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    num_steps: int = 3,
    before_step: Callable[[nn.Module], Any] = lambda _model: None,
) -> dict[str, torch.Tensor]:
    """Train a wrapped model beside a plain one on all ranks' batches; asserts equal losses and equal ends.

    Args:
        model: the wrapped model.
        replica: the plain model, with the same weights.
        loss_of: ``loss_of(model, batch)``, the mean over a rank's batch.
        batch: ``batch(rank, step)``.
        optimizer: makes the optimizer of each.
        num_steps: optimizer steps.
        before_step: called on each after its backward.

    Returns:
        The state dict at the end.
    """
    front = "fsdp1" if isinstance(model, peer_library.FullyShardedDataParallel) else "flat"
    beside = Beside(
        replica,
        front,
        shard=lambda *_: model,
        optimizer=optimizer,
        batch=batch,
        body=loss_of,
        dtype=None,
        tolerance=TOLERANCE,
    )
    for _ in range(num_steps):
        beside.backward()
        for each in beside.models:
            before_step(each)
        beside.step()
    beside.check_state_dict()
    return state_of(model)
