"""Lists the places in modules that hold a handle's tensors."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class _Assignments(UserDict[str, Any]):
    """The parameters of a module whose class has a ``__setattr__`` that keeps them elsewhere too."""

    def __init__(self, module: nn.Module) -> None:
        self.data = module._parameters
        self._module = module

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        setattr(self._module, name, param)


def parameters_of(module: nn.Module) -> Any:
    """Return the parameters that a module holds itself, as a mapping that sets them as the module needs it."""
    # The checks of ``nn.Module.__setattr__`` take long. Recurrent modules look at their parameters in each forward too.
    is_plain = type(module).__setattr__ in (nn.Module.__setattr__, nn.RNNBase.__setattr__)
    return module._parameters if is_plain else _Assignments(module)


class Bindings(NamedTuple):
    """Lists the places of a handle's tensors in modules, as columns: a step goes through them several times a unit.

    Attributes:
        attributes: for each place, the mapping of a module that holds the tensor, by ``names``.
        unsharded, sharded: the tensors for compute, and outside of it.
    """

    attributes: Sequence[Any]
    names: Sequence[str]
    unsharded: Sequence[torch.Tensor]
    sharded: Sequence[torch.Tensor]
