"""Makes flat parameters, and replaces their shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_flat.core.params import ManagedParam
from fsdp_flat.errors import UsageError
from fsdp_flat.user_warnings import warn_user


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
    param.__dict__.update(_is_flat_param=_FLAT_MARK, _fsdp_flat_owner=_FLAT_MARK, _fsdp_flattened=True)
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


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, which may have another shape, dtype or device than ``param``.

    Gradients have another dtype with ``keep_low_precision_grads``, and another shape inside ``no_sync``.
    """
    if grad is None or (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
        param.grad = grad
        return
    # torch rejects such a gradient unless it is assigned through ``.data``.
    param.grad = torch.empty_like(param)
    param.grad.data = grad
