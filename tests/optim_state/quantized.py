"""An optimizer whose states are tensors made of others, as torchao's 8-bit ones are, which needs no package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

aten = torch.ops.aten


class Rounded(torch.Tensor):
    """Holds 8-bit ``codes`` and one ``scale``, a power of two, so that rounding a second time changes nothing."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], _context: Any, *_: Any) -> Rounded:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and isinstance(args[0], Rounded):
            source = args[1].values() if isinstance(args[1], Rounded) else args[1]
            most = source.abs().max().item()
            args[0].scale.fill_(2.0 ** math.ceil(math.log2(most / 127)) if most else 1.0)
            args[0].codes.copy_((source / args[0].scale).round())
            return args[0]
        if func is aten.copy_.default:
            return args[0].copy_(args[1].values())
        if func in (aten.detach.default, aten.alias.default, aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        if func is aten.view.default:  # by DTensor.from_local
            return cls(args[0].codes.view(args[1]), args[0].scale)
        raise NotImplementedError(f"{func} of a Rounded")

    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self.codes.float() * self.scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rounded({tuple(self.shape)})"


class Closed(Rounded):
    """A tensor whose values no other tensor can have."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default and not isinstance(args[0], Closed):
            raise NotImplementedError("copy_ out of a Closed")
        return super().__torch_dispatch__(func, types, args, kwargs)


class RoundingSGD(torch.optim.Optimizer):
    """Keeps the momentum of parameters with at least four elements on this rank in tensors of ``kind``."""

    def __init__(self, params: Any, lr: float = 0.1, kind: type[Rounded] = Rounded) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"])

    def _update(self, param: nn.Parameter, lr: float) -> None:
        local, grad = (each._local_tensor if isinstance(each, DTensor) else each for each in (param, param.grad))
        row = self.state[param]
        if not row:
            made = torch.zeros_like(local)
            if local.numel() >= 4:
                made = self.kind(torch.zeros(local.shape, dtype=torch.int8), torch.ones(()))
            if isinstance(param, DTensor):
                size = {"shape": param.shape, "stride": param.stride()}
                made = DTensor.from_local(made, param.device_mesh, param.placements, run_check=False, **size)
            row.update(step=torch.zeros(()), momentum=made)
        row["step"] += 1
        state = row["momentum"]._local_tensor if isinstance(row["momentum"], DTensor) else row["momentum"]
        momentum = (state.values() if isinstance(state, Rounded) else state) * 0.5 + grad
        state.copy_(momentum)
        local.sub_(momentum, alpha=lr)
