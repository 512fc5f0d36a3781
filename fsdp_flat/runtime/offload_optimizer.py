"""Keeps the states of an optimizer in host memory between its steps: ``fsdp_flat.offload_optimizer``."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from fsdp_flat.comm import HostSwap
from fsdp_flat.core.torch_core import dtensor_of, is_plain, local_of
from fsdp_flat.core.unit import Unit, units_holding
from fsdp_flat.errors import OptionTypeError, UsageError


class _State(NamedTuple):
    """Holds one state: its parameter, its place in ``optimizer.state``, its value, and the value on this rank."""

    param: Any
    of_param: dict[Any, Any]
    key: Any
    value: torch.Tensor
    local: torch.Tensor

    def replace(self, local: torch.Tensor) -> None:
        """Put another tensor of this rank in the place, unless it has got another value since."""
        if self.of_param.get(self.key) is self.value:
            value: Any = self.value
            self.of_param[self.key] = local if self.local is value else dtensor_of(local, value._spec)


class OffloadedStates:
    """Moves the states of one optimizer: to the accelerator for its step, and then to the host.

    Copies to the host begin after the step, in as many parts as there are units. At the begin of each unit's forward
    compute waits for one part, the memory on the accelerator is given back, and ``optimizer.state`` shows the host's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, unit: Unit, swap: HostSwap) -> None:
        self._unit, self._device_type, self._swap = weakref.ref(unit), unit.options.device.type, swap
        # Pinned memory is allocated once: by parameter and key, the place of a state on the host.
        self._places: dict[tuple[Any, Any], torch.Tensor] = {}
        # Parts that are still on the accelerator: the event after the copies, and each state with its place.
        self._leaving: list[tuple[Any, list[tuple[_State, torch.Tensor]]]] = []
        self._sent: Any = None
        optimizer.register_step_pre_hook(self._return)
        optimizer.register_step_post_hook(self._send)
        optimizer.register_load_state_dict_post_hook(self._send)
        optimizer.register_state_dict_pre_hook(self._settle)

    def _states(self, optimizer: torch.optim.Optimizer, *, on_host: bool) -> list[_State]:
        """Return the states that are moved: plain tensors, and DTensors of such, with more than one element."""
        found = []
        for param, of_param in optimizer.state.items():
            for key, value in of_param.items():
                local = local_of(value) if isinstance(value, torch.Tensor) else None
                if local is not None and is_plain(local) and local.numel() > 1 and local.is_contiguous():
                    is_there = local is self._places.get((param, key))
                    if is_there is on_host and (is_there or local.device.type == self._device_type):
                        found.append(_State(param, of_param, key, value, local))
        return found

    def _return(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Have the states on the accelerator."""
        if self._leaving:  # no forward since the last step
            self._swap.wait(self._sent)
        self._leaving = []
        states = self._states(optimizer, on_host=True)
        if states:
            made, arrived = self._swap.begin_to_device([state.local for state in states])
            self._swap.wait(arrived)
            for state, local in zip(states, made, strict=True):
                state.replace(local)

    def _send(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Begin to copy the states to the host."""
        unit, states = self._unit(), self._states(optimizer, on_host=False)
        if unit is None or not states:
            return
        self._leaving = []
        num_states = -(-len(states) // len(unit.step.units))
        for first in range(0, len(states), num_states):
            part = [(state, self._place_of(state)) for state in states[first : first + num_states]]
            self._sent = self._swap.begin_to_host([state.local for state, _ in part], [place for _, place in part])
            self._leaving.append((self._sent, part))
        unit.step.at_next_forward.append(self._begin_leaving)

    def _place_of(self, state: _State) -> torch.Tensor:
        key, local = (state.param, state.key), state.local
        place = self._places.get(key)
        if place is None or (place.shape, place.dtype) != (local.shape, local.dtype):
            place = self._places[key] = self._swap.place_for(local)
        return place

    def _begin_leaving(self) -> None:
        unit = self._unit()
        if unit is not None:
            unit.step.at_units += [self._leave] * len(self._leaving)

    def _leave(self) -> None:
        """Show the states of one part on the host, and give back their memory on the accelerator."""
        if self._leaving:
            sent, part = self._leaving.pop(0)
            self._swap.wait(sent)
            for state, place in part:
                state.replace(place)

    def _settle(self, *_: Any) -> None:
        """Block the host until the copies are complete, before it reads the states."""
        if self._sent is not None:
            self._swap.block(self._sent)


_offloaded: weakref.WeakKeyDictionary[torch.optim.Optimizer, OffloadedStates] = weakref.WeakKeyDictionary()


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Keep the states of an optimizer in pinned host memory between its steps, with the same results to the bit.

    The accelerator runs the steps, for which the states come back; gradients and shards stay there. So it pays where
    activations take more memory than states: both are not there at one time. Each step copies all states in both
    directions: the optimizer waits until they have come, and copies to the host run until the next forward and beside
    it. States in other forms than plain tensors and DTensors stay where they are. In a step with a closure that runs
    forward and backward the states are on the accelerator meanwhile. On a CPU nothing changes. A second call does
    nothing.

    ``CPUOffload(offload_optimizer=True)`` of the wrapper does this at the first step of each optimizer.

    Args:
        optimizer: an optimizer of parameters that units shard.

    Raises:
        OptionTypeError: (a TypeError) no optimizer.
        UsageError: (a RuntimeError) no unit has any of its parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionTypeError(f"optimizer must be a torch.optim.Optimizer; got a {type(optimizer).__name__}.")
    if optimizer in _offloaded:
        return
    units = units_holding(param for group in optimizer.param_groups for param in group["params"])
    if not units:
        raise UsageError(
            f"offload_optimizer was called with a {type(optimizer).__name__} that holds no parameters of a unit. Build "
            "the optimizer after wrapping, from model.parameters()."
        )
    unit = units[0]
    if unit.step.streams.is_accelerator and not unit.options.offload_params:
        _offloaded[optimizer] = OffloadedStates(optimizer, unit, unit.step.streams.swap)
