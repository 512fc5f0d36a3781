"""Removes the components that wrappers add from names of parameters and modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp_flat.core import FlatParameter, check_module, unsharded_shape
from fsdp_flat.errors import OptionError
from fsdp_flat.layout import clean_fqn


def clean_tensor_name(tensor_name: str) -> str:
    """Return a dotted name without the components of FSDP, activation-checkpoint wrappers and ``torch.compile``.

    Args:
        tensor_name: a name from ``named_parameters``.

    Returns:
        The name in the plain model.
    """
    return clean_fqn(tensor_name)


def clean_named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True, remove_empty: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield ``model.named_parameters()`` under the plain model's names.

    ``torch.optim.AdamW(clean_named_parameters(model))`` makes an optimizer whose groups hold clean names.

    Args:
        model: a wrapper, or any module that holds wrappers.
        remove_duplicate: yield a tied parameter once, under its first name.
        remove_empty: leave out slices without elements, for optimizers whose kernels cannot take them. Ranks then yield
            different names; state dicts of the optimizer have all of them.

    Returns:
        Names and parameters, which are this rank's slices with ``use_orig_params=True``. Without it a unit has one
        parameter, under its module's name and ``_flat_param``; its ``_fqns`` lists the names of the parameters in it.
    """
    check_module(model)
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        if not remove_empty or param.numel() > 0:
            yield clean_fqn(name), param


def clean_named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the plain model's modules under the plain model's names.

    For code that looks modules up by the names of a state dict, and strips wrapper components at the start of a name
    only::

        adapters = [name for name, module in clean_named_modules(model) if hasattr(module, "lora_A")]

    Args:
        model: a wrapper, or any module that holds wrappers.

    Returns:
        Names and modules in the order of ``model.named_modules()``, without wrappers (of FSDP, of activation
        checkpointing, of ``torch.compile``): each name stands for the innermost module, which has the wrapped one's
        class. A module at several places is yielded once, under its first name.
    """
    check_module(model)
    yield from {clean_fqn(name): module for name, module in model.named_modules()}.items()


def whole_shape(param: torch.Tensor) -> torch.Size:
    """Return the unsharded shape of a parameter of which ``param`` is this rank's shard; else the tensor's own shape.

    ``[p for p in model.parameters() if len(whole_shape(p)) >= 2]`` finds the weights to decay, where ``p.dim()`` is 1.

    Raises:
        OptionError: a flat parameter, which holds several (``use_orig_params=False``).
    """
    if isinstance(param, FlatParameter):
        raise OptionError(
            "A flat parameter holds several parameters and has no shape of theirs. Pass use_orig_params=True to have "
            "groups of original parameters."
        )
    shape = unsharded_shape(param)
    return param.shape if shape is None else shape
