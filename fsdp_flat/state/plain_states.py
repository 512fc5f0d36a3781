"""Turns optimizer states that are quantized, and counts on an accelerator, into plain tensors, and back.

A quantized state of torchao's ``AdamW8bit`` is a wrapper of several tensors; one of bitsandbytes' is codes under a name
of its own, with the constants of its blocks and a map of codes beside it. A state dict cannot hold a part of either. It
is saved as the values that it stands for, which fit any sharding. A load quantizes them as the optimizer's present
state is, if it has states already, which may round values a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core import copy_of, dtensor_of, inner_tensors, is_plain, local_of
from fsdp_flat.errors import UnsupportedError, some_of
from fsdp_flat.layout import Box, Interval
from fsdp_flat.state.codecs import BoxedTensor
from fsdp_flat.state.shards import ParamIndex
from fsdp_flat.state.torch_state import dtensor

States = Mapping[nn.Parameter, Mapping[str, Any]]


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor made of other tensors, or a DTensor whose local tensor is one."""
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
        return False
    local = local_of(value)
    return not isinstance(local, (DTensor, BoxedTensor)) and hasattr(local, "__tensor_flatten__")


def has_quantized(row: Mapping[str, Any]) -> bool:
    """Return whether any state of a parameter is a tensor made of other tensors, or codes."""
    return bool(_code_names(row)) or any(map(is_wrapper, row.values()))


# The name under which bitsandbytes' ``state_dict`` hides tensors that are not shaped like the parameter from FSDP1.
_HIDDEN = "__bnb_optimizer_quant_state__"
# Elements of a block of bitsandbytes' states.
_BLOCK = 256


def without_hidden(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the states of a parameter, those that bitsandbytes hides among them."""
    if _HIDDEN not in row:
        return row
    return {**{name: value for name, value in row.items() if name != _HIDDEN}, **row.get(_HIDDEN, {})}


def _code_names(row: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the names of states that are codes of bitsandbytes, each with those of its constants and its map."""
    found: dict[str, tuple[str, str]] = {}
    for number in (1, 2):
        if f"qmap{number}" in row and f"absmax{number}" in row:
            found[f"state{number}"] = f"absmax{number}", f"qmap{number}"
    return found


def _without_codes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of a parameter with values in the place of codes."""
    found = dict(row)
    for name, (absmax, qmap) in _code_names(row).items():
        constants, codes = (found.pop(absmax), found.pop(qmap)), row[name]
        found[name] = torch.ops.bitsandbytes.dequantize_blockwise(codes, *constants, _BLOCK, torch.float32)
    return found


def quantized_like(row: dict[str, Any], present: Mapping[str, Any]) -> None:
    """Quantize the loaded states of a parameter as the optimizer has them at present."""
    for name, value in present.items():
        if name in row and is_wrapper(value):
            row[name] = like_present(row[name], value)
    for name, (absmax, qmap) in _code_names(present).items():
        if name in row and row[name].numel() and present[name].dtype == torch.uint8:
            value, codes = row[name].float().contiguous(), present[qmap].to(row[name].device)
            row[name], row[absmax] = torch.ops.bitsandbytes.quantize_blockwise(value, codes, _BLOCK)
            row[qmap] = present[qmap]


def values_of(value: Any) -> Any:
    """Return a tensor made of others as the plain one of them that has its values, in its shape and dtype.

    torchao's float8 weights have one. Any other value, and a tensor that has no such one or several, is returned.
    """
    if not is_wrapper(value):
        return value
    local = local_of(value)
    inner = list(inner_tensors(local).values())
    same = [each for each in inner if (each.shape, each.dtype) == (local.shape, local.dtype) and not is_wrapper(each)]
    if len(same) != 1:
        return value
    if len(inner) > 1 and not same[0].is_meta:
        # The others, a scale perhaps, may be parts of the values.
        with torch.no_grad():
            if not torch.equal(torch.empty_like(same[0]).copy_(local), same[0]):
                return value
    return _placed_like(same[0], value)


def full_precision(value: torch.Tensor) -> torch.Tensor | None:
    """Return the values that a tensor made of others stands for, as a plain tensor of its shape and dtype.

    Its class makes them: ``to(dtype)`` of torchao's NF4, ``dequantize()`` of its other classes. Of a DTensor those of
    its local tensor, as a DTensor. None if the class makes no plain tensor, unless it is of no elements.
    """
    local = local_of(value).detach()
    for make in (lambda: local.to(local.dtype), local.dequantize):
        try:
            made = make()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            continue
        if is_plain(made) and made.shape == local.shape:
            # Parts of one dtype on all ranks, whatever their class makes.
            return _placed_like(made.to(local.dtype), value)
    if local.numel():
        return None
    return _placed_like(torch.empty(local.shape, dtype=local.dtype, device=local.device), value)


def _placed_like(local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as the local tensor of a DTensor if ``value`` is one."""
    return dtensor_of(local, value._spec) if isinstance(value, DTensor) else local


def plain_states(state: States, index: ParamIndex, *, in_boxes: bool) -> States:
    """Return an optimizer's states without tensors made of others, and with counts on the CPU.

    With ``in_boxes`` values of such tensors are CPU tensors, and of DTensors boxes, as checkpoints have them.
    """
    found: dict[nn.Parameter, dict[str, Any]] = {}
    counts: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    wrapped: set[str] = set()
    for param, row in state.items():
        found[param] = copied = _without_codes(row)
        for name, value in copied.items():
            if type(value) is not torch.Tensor:
                if is_wrapper(value):
                    wrapped.add(name)
            elif not value.dim() and value.device.type != "cpu":
                counts.append((copied, name, value))
    if counts:
        for (copied, name, _), value in zip(counts, _on_cpu([each for *_, each in counts]), strict=True):
            copied[name] = value
    for param, row in found.items() if wrapped else ():
        for name in [name for name in row if name in wrapped]:
            if is_wrapper(row[name]):
                row[name] = _plain(row[name], name, param, index, in_boxes=in_boxes)
            elif isinstance(row[name], torch.Tensor) and row[name].dtype in (torch.bfloat16, torch.float16):
                # The states of parameters that are too small for the optimizer to quantize; ranks save one dtype.
                row[name] = row[name].float()
    return found


def _on_cpu(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of 0-dim tensors on the CPU; the host waits once for each dtype, and not for each tensor."""
    found: dict[int, torch.Tensor] = {}
    for dtype, device in dict.fromkeys((each.dtype, each.device) for each in values):
        places = [at for at, each in enumerate(values) if (each.dtype, each.device) == (dtype, device)]
        copies = torch.stack([values[at] for at in places]).cpu()
        found.update((at, copy.clone()) for at, copy in zip(places, copies, strict=True))
    return [found[at] for at in range(len(values))]


def _plain(value: torch.Tensor, name: str, param: nn.Parameter, index: ParamIndex, *, in_boxes: bool) -> torch.Tensor:
    """Return the values of a tensor made of others, in full precision."""
    local = local_of(value)
    fqn = repr(index.fqns_of(param)[0]) if index.has(param) else f"a parameter of shape {tuple(param.shape)}"
    # What ``copy_`` makes of the several tensors of a parameter's class may be one of them.
    if type(local) is type(local_of(param.data)) and is_wrapper(values_of(value)):
        raise UnsupportedError(
            f"State {name!r} of {fqn} is a {type(local).__name__}, as the parameter is, of the tensors "
            f"{some_of(list(inner_tensors(local)), 6)}, none of which has its values. Nothing was saved. Save the "
            "model alone, or use an optimizer that keeps plain tensors."
        )
    dtype = torch.float32 if local.dtype in (torch.bfloat16, torch.float16) else local.dtype
    try:
        plain = torch.empty(local.shape, dtype=dtype, device="cpu" if in_boxes else local.device)
        with torch.no_grad():
            plain.copy_(local)
    except Exception as error:
        raise UnsupportedError(
            f"State {name!r} of {fqn} is a {type(local).__name__}, a tensor made of other tensors, whose values cannot "
            f"be copied into a plain tensor: {error!r}. Nothing was saved. Use an optimizer that keeps plain tensors, "
            "or whose tensors implement copy_; or save the model alone."
        ) from error
    if not isinstance(value, DTensor):
        return plain
    if not in_boxes:
        return dtensor(plain, tuple(value.shape), value.device_mesh, value.placements)
    return _boxed(value, plain)


def boxed(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a tensor of boxes, which is saved in the same way; any other tensor itself."""
    return _boxed(value, local_of(value)) if isinstance(value, DTensor) else value


def _boxed(value: DTensor, local: torch.Tensor) -> BoxedTensor:
    # A DTensor says so itself what torch.distributed.checkpoint writes of it.
    chunks = value.__create_chunk_list__()
    places = [Box(tuple(chunk.offsets), tuple(chunk.sizes), Interval(0, local.numel())) for chunk in chunks]
    return BoxedTensor(value.shape, places, [local], local)


def like_present(value: torch.Tensor, present: Any) -> torch.Tensor:
    """Return a loaded state as the optimizer has it at present: the same values, in a tensor of the same class.

    The value itself is returned if the present state is no tensor made of others, or has another shape.
    """
    if not is_wrapper(present) or value.shape != present.shape or is_wrapper(value):
        return value
    local = local_of(present)
    made = copy_of(local)
    with torch.no_grad():
        made.copy_(local_of(value))
    return _placed_like(made, present)


def create_states(optim: torch.optim.Optimizer) -> None:
    """Have an optimizer create its states, by a step with zero gradients and a learning rate of zero.

    ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`` does the same before it loads.
    """
    params = [param for group in optim.param_groups for param in group["params"] if param.requires_grad]
    grads, rates = [param.grad for param in params], [group["lr"] for group in optim.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optim.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        # Not optim.step, in which a learning-rate scheduler counts.
        type(optim).step(optim)
    finally:
        for group, rate in zip(optim.param_groups, rates, strict=True):
            group["lr"] = rate
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
