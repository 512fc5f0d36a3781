"""Sets parameters of modules, by assignment where a module's class has a ``__setattr__`` that keeps them elsewhere too.

All others are set without the checks of ``nn.Module.__setattr__``, which take long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class _Assignments:
    """Sets the parameters of a module by assignment.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __contains__(self, name: str) -> bool:
        return name in self._module._parameters

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._module._parameters[name]

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        setattr(self._module, name, param)

    def get(self, name: str) -> nn.Parameter | None:
        """Return the parameter, or None if there is none."""
        return self._module._parameters.get(name)


# Recurrent modules look at their parameters in each forward as well.
_PLAIN_SETTERS = (nn.Module.__setattr__, nn.RNNBase.__setattr__)


def parameters_of(module: nn.Module) -> Any:
    """Return the parameters that a module holds itself, by name, as a mapping that sets them as the module needs it."""
    return module._parameters if type(module).__setattr__ in _PLAIN_SETTERS else _Assignments(module)


class Bindings(NamedTuple):
    """Lists the places of a handle's tensors in modules, as columns: a step goes through them several times a unit.

    Attributes:
        attributes: for each place, the mapping of a module that holds the tensor.
        names: the names there.
        unsharded: the tensors for compute.
        sharded: the tensors outside of compute.
    """

    attributes: Sequence[Any]
    names: Sequence[str]
    unsharded: Sequence[torch.Tensor]
    sharded: Sequence[torch.Tensor]
