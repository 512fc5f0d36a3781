"""Runs optimizers that need unsharded matrices (Muon, Shampoo, Adafactor) on sharded parameters.

Each parameter is owned by one rank of its shard group. In a step the owner receives the local shards of its weight and
of its gradient, an ordinary optimizer updates the unsharded weight, and its local shards are sent back. The optimizer's
states stay on the owner as full tensors, since states of another shape (Adafactor's factors, Shampoo's preconditioners)
cannot be sharded like the parameter, and Muon's momentum would be two more transfers. State dicts read
``state_owners``: they save the states of the owner and load them there only (``state/optim_save.py``).

An owner is one of the ranks that hold elements of the parameter. So a parameter that lies on one rank is not
transferred, and every rank of a transfer can check locally whether there is a gradient.
"""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_flat.comm import (
    ErrorTexts,
    P2PChannels,
    RankGroup,
    UntilRanksMeet,
    agree,
    exchange_ints,
    moves_cpu_tensors,
    true_on_any_rank,
)
from fsdp_flat.core import check_module
from fsdp_flat.errors import OptionError, UnsupportedError, UsageError, counted, some_of
from fsdp_flat.extras.matrix_owners import (
    GradStatus,
    OwnedParam,
    balanced_owners,
    check_param,
    check_status,
    rounds_of,
)
from fsdp_flat.extras.names import whole_shape
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import check_callable, stepped_ids
from fsdp_flat.state import ParamIndex
from fsdp_flat.user_warnings import warn_user

_ERROR_TEXTS = ErrorTexts(
    "giving parameters to a MatrixOptimizer",
    "Ranks gave different parameters to a MatrixOptimizer.",
    "Give it the same parameters in the same groups on every rank, also those that a rank has no elements of, and the "
    "same max_nbytes.",
)
_STEPPING = ErrorTexts("stepping a MatrixOptimizer")
_MAX_NBYTES = 1 << 30


def matrix_params(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose unsharded shape has two dims or more, for an optimizer of matrices.

    Args:
        model: a wrapped model, or a module that holds wrapped ones, with ``use_orig_params=True``.

    Returns:
        The parameters in the order of ``model.parameters()``, each once; this rank's local shards of sharded ones.

    Raises:
        OptionError: (a ValueError) the model has flat parameters (``use_orig_params=False``).
    """
    check_module(model)
    return [param for param in model.parameters() if len(whole_shape(param)) >= 2]


class MatrixOptimizer(Optimizer):
    """Steps an optimizer of unsharded parameters over the parameters of a wrapped model.

    ::

        matrices = fsdp_flat.matrix_params(model)
        others = [param for param in model.parameters() if param not in set(matrices)]
        muon = fsdp_flat.MatrixOptimizer(model, torch.optim.Muon, params=matrices, lr=0.02)
        adamw = torch.optim.AdamW(others, lr=3e-4)

    The updated weights equal those of the inner optimizer on the unwrapped model, provided that it updates each
    parameter independently. It is used like any optimizer: parameter groups with different options, schedulers on
    ``param_groups``, ``zero_grad``, closures, ``clip_grad_norm_`` and gradient scalers before it.
    ``FSDP.optim_state_dict`` and ``save_checkpoint`` save its states under parameter names in their unsharded shapes,
    for any number of ranks, any wrapping, and the unwrapped model.

    A step transfers the weight and gradient of each parameter to its owner, and the weight back. An owner holds about
    its share of all elements unsharded during the step, and their states permanently. Every rank must construct it,
    step it, and add groups to it, at the same point.

    Args:
        model: a wrapped model, or a module that holds wrapped ones, with ``use_orig_params=True``.
        optimizer_class: a ``torch.optim.Optimizer`` subclass, or a function of parameter groups and ``options`` that
            returns one.
        params: parameters, named parameters or groups, the same on every rank; by default ``matrix_params(model)``.
            Parameters of other shapes and parameters that no unit manages are accepted too.
        max_nbytes: largest number of bytes of weights and gradients that an owner receives at once; one parameter may
            exceed it. With more, the inner optimizer is stepped several times, each time over the parameters received.
        options: further arguments of ``optimizer_class``.

    Attributes:
        state_owners: for each sharded parameter, the rank of its shard group that holds its states. ``state`` holds
            none, or an empty dict, for parameters that other ranks own.

    Raises:
        OptionError: (a ValueError) a flat parameter, a parameter of another model, ``max_nbytes`` below 1, LBFGS, or
            an inner optimizer that clips by a norm of all gradients (``max_grad_norm``).
        OptionTypeError: (a TypeError) ``model`` is no module, or ``optimizer_class`` cannot be called.
        UnsupportedError: (a NotImplementedError) a parameter is sharded by tensor parallelism.
        RankMismatchError: (a ValueError) ranks gave different parameters or ``max_nbytes``.
        PeerFailureError: (a RuntimeError) another rank failed with one of these.
        Exception: any that ``optimizer_class`` raises; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., Optimizer],
        *,
        params: Iterable[Any] | None = None,
        max_nbytes: int = _MAX_NBYTES,
        **options: Any,
    ) -> None:
        index = ParamIndex(model)
        self._model = model
        self._max_nbytes, self._num_steps = max_nbytes, 0
        self._inner: Optimizer | None = None
        self._owned: list[OwnedParam] = []
        self._rounds: list[list[OwnedParam]] = []
        self._param_ids: list[list[int]] = []
        self._compared: list[RankGroup] = []
        self._linked: list[RankGroup] = []
        self.state_owners: dict[nn.Parameter, int] = {}
        with self._agreed(index):
            check_callable("optimizer_class", optimizer_class)
            if not isinstance(max_nbytes, numbers.Real) or not max_nbytes >= 1:
                raise OptionError(f"max_nbytes must be a number of bytes of at least 1; got {max_nbytes!r}.")
            _refuse_lbfgs(optimizer_class)
            super().__init__(matrix_params(model) if params is None else params, options)
            groups = [self._inner_group(index, group) for group in self.param_groups]
            self._inner = optimizer_class(groups, **options)
            self.defaults = dict(self._inner.defaults)
            _refuse_clipping(self._inner)
            self._finish_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its options. Every rank must call this with the same parameters.

        Args:
            param_group: ``{"params": [...], **options}``.

        Raises:
            OptionError, UnsupportedError, RankMismatchError, PeerFailureError: as the constructor.
        """
        if self._inner is None:
            super().add_param_group(param_group)
            return
        index = ParamIndex(self._model)
        num_groups, num_owned = len(self.param_groups), len(self._owned)
        try:
            with self._agreed(index):
                super().add_param_group(param_group)
                self._inner.add_param_group(self._inner_group(index, self.param_groups[-1]))
                _refuse_clipping(self._inner)
                self._finish_groups()
        except Exception:
            del self.param_groups[num_groups:], self._inner.param_groups[num_groups:]
            for entry in self._owned[num_owned:]:
                del self.state_owners[entry.param]
            del self._owned[num_owned:]
            self._plan_steps()
            raise

    @contextmanager
    def _agreed(self, index: ParamIndex) -> Iterator[None]:
        """Raise on every rank if the block fails on one, or if ranks hold different parameters after it."""
        until_met, lines = UntilRanksMeet(), list[str]()
        with until_met:
            yield
        if until_met.error is None:
            lines.append(f"max_nbytes={self._max_nbytes}")
            for number, group in enumerate(self.param_groups):
                fqns = [fqn for param in group["params"] for fqn in index.fqns_of(param)]
                lines += [f"group {number}: {fqn}" for fqn in fqns]
        rank_groups = index.rank_groups
        agree(lines, until_met.error, rank_groups, _ERROR_TEXTS)
        self._compared = [each for each in rank_groups if each.group is not None and moves_cpu_tensors(each.group)]
        # A step reports errors over groups of which some rank is in further ones.
        is_linked = len(self._compared) > 1
        self._linked = [each for each in self._compared if any(true_on_any_rank([is_linked], [each]))]

    def _inner_group(self, index: ParamIndex, group: dict[str, Any]) -> dict[str, Any]:
        """Assign owners to the parameters of a group; return the inner optimizer's group, with unsharded parameters."""
        found = []
        for param in group["params"]:
            check_param(index, param)
            if param in index.managed:
                found.append((param, index.managed[param][0]))
        owners = balanced_owners(found, self._owned)
        wholes = {}
        for param, managed in found:
            entry = OwnedParam(param, managed, owners[param])
            self._owned.append(entry)
            self.state_owners[param] = entry.owner
            wholes[param] = entry.whole
        return {**_options_of(group), "params": [wholes.get(param, param) for param in group["params"]]}

    def _finish_groups(self) -> None:
        """Copy options that the inner optimizer filled in, and drop its states of parameters that other ranks own."""
        assert self._inner is not None
        self._copy_options(self._inner)
        for entry in self._owned:
            if not entry.is_owner and self._inner.state.pop(entry.whole, None) is not None:
                self.state[entry.param] = {}
        self._plan_steps()
        self._show_states()

    def _copy_options(self, inner: Optimizer) -> None:
        for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_options_of(inner_group))

    def _plan_steps(self) -> None:
        self._rounds = rounds_of(self._owned, self._max_nbytes)
        self._param_ids = [[id(param) for param in group["params"]] for group in self.param_groups]

    def _show_states(self, *, after_step: bool = False) -> None:
        """Set ``state`` to the inner optimizer's states of this rank's parameters.

        After a step parameters without states have empty ones, so that ``state`` is true on all ranks or on none: where
        it is false, torch's state dict functions step the optimizer to make states.
        """
        assert self._inner is not None
        if after_step:
            self.state.update({entry.param: {} for entry in self._owned if entry.param not in self.state})
        shown = {entry.param: entry.whole for entry in self._owned if entry.is_owner}
        for group in self.param_groups:
            for param in group["params"]:
                inner = shown.get(param, param)
                if inner in self._inner.state:
                    self.state[param] = self._inner.state[inner]

    # -- the step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Every rank of the model must call this.

        Args:
            closure: computes the loss anew and returns it; called once, on every rank.

        Returns:
            The value that ``closure`` returned; None without one.

        Raises:
            UsageError: (a RuntimeError) some ranks have a gradient of a parameter and others lack it, a parameter is
                not sharded, as inside ``summon_full_params``, or parameters were removed from ``param_groups``.
            PeerFailureError: (a RuntimeError) another rank failed with one of these.
            Exception: any that the inner optimizer raises; on the owner.
        """
        assert self._inner is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = self._check_step()
        options = [_options_of(group) for group in self.param_groups]
        until_sent, channels = UntilRanksMeet(), P2PChannels()
        # The inner optimizer holds parameters that no unit manages itself; they are updated in the first round alone.
        every = [param for group in self.param_groups for param in group["params"]]
        unmanaged = [param for param in every if param not in self.state_owners]
        grads = [param.grad for param in unmanaged]
        for entries in self._rounds or [[]]:
            for entry in entries:
                entry.gather(channels, has_grad=entry in with_grad)
            channels.wait()
            if until_sent.error is None:
                # Every round starts from the same options: an optimizer that counts steps in its groups counts one.
                _set_options(self._inner, options)
                # Other ranks wait for the weights, so send them before raising.
                with until_sent:
                    self._inner.step()
            for entry in entries:
                entry.scatter(channels, has_grad=entry in with_grad)
            channels.wait()
            for entry in entries:
                entry.release(has_grad=entry in with_grad)
            for param in unmanaged:
                param.grad = None
        for param, grad in zip(unmanaged, grads, strict=True):
            param.grad = grad
        if until_sent.error is not None:
            raise until_sent.error
        self._copy_options(self._inner)
        self._show_states(after_step=True)
        self._num_steps += 1
        if self._num_steps == 2:  # by now every optimizer of the program has stepped once
            self._warn_of_left_out()
        return loss

    def _warn_of_left_out(self) -> None:
        """Warn if only matrices of the model are trained, though others get gradients too."""
        stepped, params = stepped_ids(), dict(self._model.named_parameters())
        trained = {name: param for name, param in params.items() if param.requires_grad and param.grad is not None}
        left = [name for name, param in trained.items() if id(param) not in stepped]
        if left and not any(len(whole_shape(params[name])) >= 2 for name in left):
            warn_user(
                f"{len(left)} of {counted(len(trained), 'parameters')} with gradients are in no optimizer that has "
                f"stepped: {some_of(list(map(clean_fqn, left)), 4)}. matrix_params leaves out what is no matrix: give "
                "the others to another optimizer (AdamW), or set requires_grad=False."
            )

    def _check_step(self) -> set[OwnedParam]:
        """Return the parameters of which this rank has gradients; raise on every rank if one cannot step.

        Ranks of a group that communicates only on an accelerator are not compared: the host would wait for the device.
        """
        by_rank_group: dict[RankGroup, list[OwnedParam]] = {}
        for entry in self._owned:
            by_rank_group.setdefault(entry.rank_group, []).append(entry)
        until_met, failed, with_grad = UntilRanksMeet(), list[RankGroup](), set[OwnedParam]()
        with until_met:
            self._check_groups()
        for rank_group, entries in by_rank_group.items():
            own = [entry.status() for entry in entries]
            with_grad.update(entry for entry, status in zip(entries, own, strict=True) if status == GradStatus.HAS_GRAD)
            rows = [[int(until_met.error is None), *own]]
            if rank_group in self._compared:
                rows = exchange_ints(rows[0], rank_group)
            if not all(is_well for is_well, *_ in rows):
                failed += [rank_group] if rank_group in self._compared else []
                continue
            with until_met:
                for entry, statuses in zip(entries, list(zip(*rows, strict=True))[1:], strict=True):
                    check_status(entry, statuses)
        # Ranks that are in other groups only would step, or wait for these.
        agree([], until_met.error, self._linked or failed, _STEPPING)
        return with_grad

    def _check_groups(self) -> None:
        """Raise if parameters were removed from groups, or added otherwise than by ``add_param_group``."""
        ids = [[id(param) for param in group["params"]] for group in self.param_groups]
        if ids != self._param_ids:
            given, has = (
                f"{counted(len(groups), 'groups')} of {counted(sum(map(len, groups)), 'parameters')} in all"
                for groups in (self._param_ids, ids)
            )
            raise UsageError(
                f"The param_groups of a MatrixOptimizer were changed: it was given {given}, and they are now {has}, so "
                "it cannot step. Construct a new MatrixOptimizer from the parameters that are left, on every rank; add "
                "parameters by add_param_group."
            )

    # -- state dicts -------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that ``FSDP.optim_state_dict_to_load`` returned for this optimizer.

        The state dict of the unwrapped model's optimizer is accepted unchanged, if it numbers the same parameters.

        Args:
            state_dict: ``{"state": {position: {...}}, "param_groups": [...]}`` with states in unsharded shapes; those
                of parameters that other ranks own are ignored.

        Raises:
            ValueError: the groups do not match those of this optimizer.
        """
        assert self._inner is not None
        super().load_state_dict(state_dict)
        wholes: dict[Any, OwnedParam] = {entry.param: entry for entry in self._owned}
        state: defaultdict[Any, Any] = defaultdict(dict)
        for param, values in self.state.items():
            entry = wholes.get(param)
            # Empty states stand for those of other owners; torch's optimizers fail on them.
            if values and (entry is None or entry.is_owner):
                state[param if entry is None else entry.whole] = values
        groups = [
            {**inner_group, **_options_of(group)}
            for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True)
        ]
        # ``__setstate__`` also converts states of older torch versions.
        self._inner.__setstate__({"state": state, "param_groups": groups})
        self.state = defaultdict(dict)
        self._show_states(after_step=True)

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "A MatrixOptimizer cannot be copied or pickled: it belongs to its model on this rank. Make a new one for a "
            "copy of the model, and save states by FSDP.optim_state_dict or save_checkpoint."
        )


def _refuse_lbfgs(optimizer_class: object) -> None:
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
        raise OptionError(
            f"{optimizer_class.__name__} computes dot products over all parameters, and MatrixOptimizer updates each "
            "on one rank. Use it with NO_SHARD or fully_shard."
        )


def _refuse_clipping(inner: Optimizer) -> None:
    """Raise if an inner optimizer, as LAMBs do, clips by a norm of all gradients, of which each rank has its own."""
    for group in inner.param_groups:
        bound = group.get("max_grad_norm")
        if bound is not None and bound != 0 and bound != float("inf"):
            raise OptionError(
                f"{type(inner).__name__} clips by the norm of all gradients (max_grad_norm={bound}), and "
                "MatrixOptimizer gives each rank the gradients of some parameters. Pass max_grad_norm=float('inf'), "
                "and call model.clip_grad_norm_ or torch.nn.utils.clip_grad_norm_ before the step."
            )


def _set_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for key in _options_of(group).keys() - values.keys():
            del group[key]
        group.update(values)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
