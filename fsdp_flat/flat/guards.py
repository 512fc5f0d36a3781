"""Guards against one rank's part of a parameter or gradient being taken for the full one, and makes flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.params import FlattenedBy, ManagedParam
from fsdp_flat.flat.torch_flat import unguarded
from fsdp_flat.user_warnings import warn_user

# ``torch.nn.utils.get_total_norm`` computes the norm of each gradient with one of these.
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})
SHARDED_HINTS = (
    "Call the wrapped model (its forward all-gathers the parameters); for another method use "
    "fsdp_flat.register_forward_method(model, name); for a block of code use fsdp_flat.unshard_for(model), which works "
    "under autograd, or summon_full_params."
)


# -- parameters --------------------------------------------------------------------------------------------------------


def module_guard(describe: Callable[[nn.Module], str]) -> Callable[..., NoReturn]:
    """Create a forward pre-hook that raises, for modules with a sharded parameter that ``describe`` names."""

    def guard(module: nn.Module, _args: Any) -> NoReturn:
        raise UsageError(
            f"{type(module).__name__} was called while its parameter {describe(module)} is sharded: this rank holds "
            f"a local shard of it. {SHARDED_HINTS}"
        )

    return guard


class ShardedPlaceholder(torch.Tensor):
    """Replaces an original parameter in its module while it is sharded (``use_orig_params=False``).

    It has the parameter's shape and dtype but no data; every operation on it raises.
    """

    _describe: Callable[[], str]

    @classmethod
    def of(cls, unsharded_params: Sequence[torch.Tensor], describe: Callable[[int], str]) -> list[ShardedPlaceholder]:
        """Create the placeholders of ``unsharded_params``, which ``describe`` names by their indices."""
        placeholders = []
        blanks: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        for index, each in enumerate(unsharded_params):
            kind = each.shape, each.dtype
            if kind not in blanks:
                blanks[kind] = torch.empty(each.shape, dtype=each.dtype, device="meta")
            placeholders.append(blanks[kind].as_subclass(cls))
            placeholders[-1]._describe = partial(describe, index)
        return placeholders

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METADATA:
            with unguarded():
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    # The results of ``.T`` and ``.data`` have a shape but no data either.
                    result = result.as_subclass(cls)
                    result._describe = args[0]._describe
                return result
        found = first_of(ShardedPlaceholder, args, kwargs)
        if found is None:
            raise UsageError(f"A sharded parameter was used. {SHARDED_HINTS}")
        raise UsageError(
            f"Parameter {found._describe()} was used while it is sharded: this rank holds a local shard of the unit's "
            f"flat parameter. {SHARDED_HINTS}"
        )

    def __deepcopy__(self, _memo: Any) -> ShardedPlaceholder:
        return self


_METADATA = frozenset(
    {"__get__", "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex"}
    | {"stride", "__repr__", "__hash__", "__format__", "__len__", "as_subclass", "type", "is_contiguous"}
)


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """Identifies flat parameters: ``isinstance(t, FlatParameter)`` is true for every unit's flat parameter.

    As in FSDP1, callers cannot construct one.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> FlatParameter:
        raise TypeError("FlatParameter is a type to test against; units make their flat parameters themselves.")


class _FlatMark(int):
    """Equals True on a unit's flat parameter, and is false on a pickled one, which belongs to no unit."""

    def __reduce__(self) -> Any:
        return set, ()


_FLAT_MARK = _FlatMark(True)


def as_flat_parameter(param: nn.Parameter) -> nn.Parameter:
    """Mark a 1-D parameter as a flat one, and return it."""
    param.__dict__.update(_is_flat_param=_FLAT_MARK, _fsdp_flattened=_FLAT_MARK)
    return param


def refuse_replaced(what: str) -> NoReturn:
    """Raise for a parameter, or a flat parameter, that torch's fully_shard has replaced; ``what`` names it."""
    raise UsageError(
        f"{what} was replaced in its module: torch's fully_shard was called on a module that "
        "FullyShardedDataParallel manages, or on one around it. One of the two can shard a parameter. Take the "
        "wrapper away (fsdp_flat.unwrap) before fully_shard, or pass its parameters as ignored_params."
    )


def warn_of_lost_hooks(params: Sequence[ManagedParam], unit_name: str) -> None:
    """Warn if a parameter that becomes a part of a flat one has a hook for its gradient, which will not run."""
    lost = [entry.fqn for entry in params if entry.param._post_accumulate_grad_hooks]
    if lost:
        warn_user(
            f"Parameter {lost[0]!r} of unit {unit_name!r} has a hook from register_post_accumulate_grad_hook, which "
            "will not run: with use_orig_params=False the parameter becomes a part of a flat one, and only that gets a "
            "reduced gradient. Register the hook on the flat parameter after wrapping, or pass use_orig_params=True."
        )


def replace_shard(flat_param: nn.Parameter, shard: torch.Tensor) -> None:
    """Set the data of a flat parameter, also if it was on the meta device, where ``.data =`` refuses other devices."""
    if flat_param.is_meta == shard.is_meta:
        flat_param.data = shard
    else:
        other = nn.Parameter(shard, flat_param.requires_grad)
        other.__dict__.update(flat_param.__dict__)
        torch.utils.swap_tensors(flat_param, other)


def renew_shard(flat_param: nn.Parameter) -> None:
    """Move the shard to new memory, before values that a caller has assigned are copied to it.

    The caller may hold the old memory as the data to restore (``saved = p.data; p.data = averaged``).
    """
    flat_param.data = _copied(flat_param.data)


def _copied(shard: torch.Tensor) -> torch.Tensor:
    """Return a copy of a shard, in pinned memory if the shard is, as an offloaded one."""
    return shard.clone().pin_memory() if shard.is_pinned() else shard.clone()


def copy_flat_parameter(flat_param: nn.Parameter, copied: nn.Parameter | None = None) -> nn.Parameter:
    """Return a flat parameter with a copy of the shard: ``copied`` if ``copy.deepcopy`` has already created one."""
    if copied is None:
        copied = nn.Parameter(_copied(flat_param.data), flat_param.requires_grad)
    return as_flat_parameter(copied)


# -- gradients ---------------------------------------------------------------------------------------------------------


class ShardedGrad(torch.Tensor):
    """Holds this rank's shard of a gradient: the ``.grad`` of a sharded parameter.

    It is used as any tensor, until an optimizer's step makes it a plain one. Operations in place, and conversions with
    nothing to convert, return it, all others plain tensors. Only the norms that ``torch.nn.utils.clip_grad_norm_`` and
    ``get_total_norm`` compute are marked: see :class:`LocalNorm`.
    """

    _owner: FlattenedBy | list[str]

    # Optimizers read it of each gradient; found here, it costs no call of ``__torch_function__``.
    is_sparse = False

    @classmethod
    def of(cls, grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``grad``, a gradient of the sharded parameter ``param``."""
        if type(grad) not in (torch.Tensor, ShardedGrad):
            return grad  # other classes do their own wrapping: fake tensors
        alias = grad.as_subclass(cls)
        # Not the parameter itself: a cycle through its gradient, which autograd's C++ objects hold, is never collected.
        owner = param._fsdp_flattened  # type: ignore[attr-defined]
        alias._owner = owner if isinstance(owner, FlattenedBy) else param.__dict__.get("_fqns", [])
        return alias

    def mark(self, result: torch.Tensor) -> torch.Tensor:
        """Return ``result``, computed from this gradient, as a gradient of the same kind."""
        if type(result) is not torch.Tensor:
            return result
        marked = result.as_subclass(type(self))
        marked._owner = self._owner
        return marked

    def describe(self) -> str:
        """Return the name of its parameter, for error texts."""
        owner = self._owner
        return owner.describe() if isinstance(owner, FlattenedBy) else f"the flat parameter of {owner}"

    def part(self) -> str:
        """Return a sentence on the part that it is, for error texts."""
        return f"This rank holds {self.numel()} elements of the gradient of {self.describe()}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1:
            others = tuple(kind for kind in types if kind is not ShardedGrad)
            return others[0].__torch_function__(func, others, args, kwargs or {})
        with unguarded():
            result = func(*args, **(kwargs or {}))
            return LocalNorm.mark(func, args, result) if getattr(func, "__name__", "") in _NORMS else result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with unguarded():
            return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class UnreducedGrad(ShardedGrad):
    """Marks a ``.grad`` between two backwards inside ``no_sync``: local to this rank, not yet reduced.

    Reading it works as for any tensor. Writing it, or a tensor computed from it, into another tensor raises: an
    optimizer's (or gradient scaler's) step does this, and would use one rank's gradient.
    """

    def part(self) -> str:
        return f"The gradient of {self.describe()} is this rank's own, not reduced yet (no_sync)"

    def refuse(self, operation: str) -> NoReturn:
        """Raise for an operation that would use this rank's unreduced gradient."""
        raise UsageError(
            f"{operation} was called on the gradient of {self.describe()}, which is not reduced: the backwards since "
            "the last step, or the last ones, were inside no_sync, so it is this rank's own. Run the last backward of "
            "an accumulation outside of no_sync, then step."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        unreduced = first_of(cls, args, kwargs)
        if name.endswith("_") and not name.startswith("__"):
            target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if not isinstance(target, cls):
                unreduced.refuse(name)
        with unguarded():
            result = LocalNorm.mark(func, args, func(*args, **(kwargs or {})))
            results = result if name.startswith("_foreach") and result else [result]
            # Scalars, such as norms, stay as they are.
            marked = [
                unreduced.mark(each) if isinstance(each, torch.Tensor) and each.dim() else each for each in results
            ]
        return marked[0] if results is not result else marked


class LocalNorm(torch.Tensor):
    """Holds the norm of one rank's shard of a gradient, or several such norms stacked.

    It can be read like any tensor. The norm of stacked norms raises: it is the last step of
    ``torch.nn.utils.get_total_norm``, whose result would differ between ranks.
    """

    _part: str

    @staticmethod
    def mark(func: Any, args: Any, result: Any) -> Any:
        """Return ``result`` of ``func(*args)``, with norms of sharded gradients as :class:`LocalNorm`.

        Call it with torch functions disabled. ``args[0]`` is a gradient or a list of gradients.
        """
        if getattr(func, "__name__", "") not in _NORMS or not args:
            return result
        if not isinstance(result, (list, tuple)):
            return _marked(result, args[0])
        return [_marked(norm, grad) for norm, grad in zip(result, args[0], strict=True)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = tuple(kind for kind in types if kind not in (LocalNorm, ShardedGrad))
        if others:
            return others[0].__torch_function__(func, others, args, kwargs or {})
        name = getattr(func, "__name__", "")
        with unguarded():
            if name in _NORMS and isinstance(args[0], LocalNorm) and args[0].dim() == 1:
                args[0].refuse()
            result = func(*args, **(kwargs or {}))
        return _marked(result, first_of(LocalNorm, args, kwargs)) if name in ("to", "stack") else result

    def refuse(self) -> NoReturn:
        """Raise for a norm over sharded gradients."""
        raise UsageError(
            f"The norm over several gradients was taken on one rank, as torch.nn.utils.clip_grad_norm_ and "
            f"get_total_norm do. {self._part}, so the result would differ between ranks. Call "
            "model.clip_grad_norm_(max_norm) of the outermost FullyShardedDataParallel on every rank; it returns the "
            "norm over all ranks, and with max_norm=inf it changes nothing. For sums of your own, take norms of "
            "grad.detach() and all-reduce them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _marked(norm: torch.Tensor, source: object) -> torch.Tensor:
    """Mark a norm of a sharded gradient, or a tensor computed from such norms; return others unchanged."""
    if not isinstance(source, (ShardedGrad, LocalNorm)) or type(norm) is not torch.Tensor:
        return norm
    marked = norm.as_subclass(LocalNorm)
    marked._part = source._part if isinstance(source, LocalNorm) else source.part()
    return marked


def first_of(kind: type[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Return the first argument of a class among the arguments of an operation, and in lists; None if there is none."""
    if args and isinstance(args[0], kind):
        return args[0]
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((item for item in flat if isinstance(item, kind)), None)


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, which may have a different dtype than ``param`` (``keep_low_precision_grads``)."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch rejects a gradient of another dtype unless it is assigned through ``.data``.
    shown = torch.empty_like(param).as_subclass(type(grad))
    shown.__dict__.update(grad.__dict__)
    param.grad = shown
    with unguarded():
        shown.data = grad


def convert_grad(param: nn.Parameter, grad: torch.Tensor, converted: torch.Tensor) -> None:
    """Set ``param.grad`` to ``converted``, the result of a conversion of ``grad``."""
    set_grad(param, grad.mark(converted) if isinstance(grad, ShardedGrad) else converted)
