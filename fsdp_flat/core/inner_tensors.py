"""Takes apart tensors that are made of other tensors, as quantized ones are, and puts others together like them.

Their classes have torch's two methods for this, ``__tensor_flatten__`` and ``__tensor_unflatten__``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from fsdp_flat.core.torch_core import dtensor_of, has_inner_tensors, local_of


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that a tensor is made of, by name; none of a plain one and of a DTensor."""
    if isinstance(tensor, DTensor) or not has_inner_tensors(tensor):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def plain_tensors_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over the plain tensors in which a tensor of any class keeps its values; a plain one is its own."""
    if inner := inner_tensors(tensor):
        for each in inner.values():
            yield from plain_tensors_in(each)
    else:
        yield tensor


def made_like(tensor: torch.Tensor, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the class, shape and settings of another one, made of other ``inner`` tensors."""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        dict(inner), context, tensor.size(), tensor.stride()
    )
    return made


def made_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor like another one of any class, without values, in memory of its own on a device."""
    inner = {name: made_on(each, device) for name, each in inner_tensors(tensor).items()}
    if not inner:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    made = made_like(tensor, inner)
    # Settings may have the device. A class may have no empty_like.
    return made if made.device == device else made_like(torch.empty_like(tensor, device=device), inner)


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values, exactly those of tensors of one class: ``copy_`` of a quantized one may quantize once more."""
    own, others = inner_tensors(local_of(target)), inner_tensors(local_of(source))
    if own and others:
        for name, each in others.items():
            assign(own[name], each)
    else:
        target.copy_(source)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an exact copy of a tensor of any class: ``clone`` of a quantized one may quantize it once more."""
    if isinstance(tensor, DTensor):
        return dtensor_of(copy_of(local_of(tensor)), tensor._spec)
    inner = inner_tensors(tensor.detach())
    return made_like(tensor.detach(), {k: copy_of(v) for k, v in inner.items()}) if inner else tensor.detach().clone()


@contextmanager
def seeded_alike(device: torch.device) -> Iterator[None]:
    """Have all ranks, replicas among them, draw the same random numbers inside the block; later ones stay their own."""
    on_host = device.type == "cpu"
    with torch.random.fork_rng([] if on_host else [device], device_type="cuda" if on_host else device.type):
        torch.default_generator.manual_seed(0)
        if not on_host:
            torch.get_device_module(device).manual_seed(0)
        yield


def without_memory(whole: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of the class and settings of another one, made of tensors on the meta device.

    None if it is made of no other tensors, or if the class does not make one: training does not need it.
    """
    try:
        inner = {name: torch.empty_like(each, device="meta") for name, each in inner_tensors(whole).items()}
        return made_like(whole, inner) if inner else None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None
