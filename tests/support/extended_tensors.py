"""Classes of tensors that are all-gathered by functions of their own, as torch's fully_shard calls them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.support import assert_close, assert_equal


class Holder(torch.Tensor):
    """Holds tensors of one shape and dtype, named ``_NAMES``, and runs each operation on each of them."""

    _NAMES: tuple[str, ...] = ("first",)

    @staticmethod
    def __new__(cls: Any, *inner: torch.Tensor) -> Any:
        first = inner[0]
        return torch.Tensor._make_wrapper_subclass(
            cls,
            first.shape,
            strides=first.stride(),
            storage_offset=first.storage_offset(),
            dtype=first.dtype,
            device=first.device,
        )

    def __init__(self, *inner: torch.Tensor) -> None:
        for name, tensor in zip(self._NAMES, inner, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self._NAMES), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:
        return cls(*[inner[name] for name in cls._NAMES])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(map(str, self.inner()))})"

    def inner(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self._NAMES]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = []
        for name in cls._NAMES:
            own_args, own_kwargs = pytree.tree_map_only(
                cls, lambda each, name=name: getattr(each, name), (args, kwargs)
            )
            found.append(pytree.tree_flatten(func(*own_args, **own_kwargs)))
        spec, leaves = found[0][1], zip(*[each for each, _ in found], strict=True)
        out = [cls(*each) if isinstance(each[0], torch.Tensor) else each[0] for each in leaves]
        return return_and_correct_aliasing(func, args, kwargs, pytree.tree_unflatten(out, spec))


class Pair(Holder):
    """Two tensors, both of which are sent; its function before an all-gather takes the mesh alone."""

    _NAMES = ("first", "second")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return tuple(self.inner()), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        assert metadata is None
        first, second = outputs
        if out is None:
            return Pair(first, second).to(param_dtype), (first, second)
        assert isinstance(out, Pair)
        for own, sent in zip(out.inner(), outputs, strict=True):
            if sent.dtype == param_dtype:
                assert own.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()
            else:
                assert own.dtype == param_dtype
                own.copy_(sent)
        return None


class NewPair(Pair):
    """A pair whose function before an all-gather takes all that torch passes."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Module)
        assert hasattr(mp_policy, "param_dtype")
        assert outer_stride == (outer_size[1], 1)
        return tuple(self.inner()), None

    fsdp_post_all_gather = Pair.fsdp_post_all_gather


class SentInBfloat16(Holder):
    """A tensor that is sent in bf16, with padding, and computed with in the dtype of the unit."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1
        padded = torch.zeros(math.ceil(outer_size[0] / mesh.size()), *outer_size[1:], dtype=torch.bfloat16)
        padded[: self.first.size(0)].copy_(self.first)
        return (padded,), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (tensor,) = outputs
        assert tensor.dtype == torch.bfloat16
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: out.size(0)])
            return None
        whole = tensor.to(param_dtype)
        return whole, (tensor, whole)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


class SentUnpadded(SentInBfloat16):
    """One that forgets the padding."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.first.bfloat16(),), None


class SentInInt8(Holder):
    """A tensor that is sent as integers of 8 bits with a scale a row; how many it sends is in the metadata."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        scale = self.first.abs().amax(1).clamp(min=1e-12) / 127
        return ((self.first / scale[:, None]).round().to(torch.int8), scale), {"rows": outer_size[0]}

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        integers, scale = outputs
        assert integers.dtype == torch.int8
        assert metadata == {"rows": integers.size(0)}
        whole = (integers * scale[:, None]).to(param_dtype)
        if out is None:
            return whole, (integers, scale, whole)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Scaled(Holder):
    """Numbers with a scale beside them: its values are their products."""

    _NAMES = ("numbers", "scale")

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        is_first = scale.dtype == numbers.dtype
        super().__init__(numbers, torch.full_like(numbers, 2.0, dtype=torch.float64) if is_first else scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            return args[0].copy_((args[1].numbers * args[1].scale).to(args[0].dtype))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return ((self.numbers * self.scale).to(self.numbers.dtype),), None  # type: ignore[attr-defined]

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


class Sealed(NewPair):
    """A pair that is not made from other tensors: training needs none of this."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:
        raise NotImplementedError("a Sealed is not made from others")

    fsdp_pre_all_gather = NewPair.fsdp_pre_all_gather  # type: ignore[assignment]

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Pair(*outputs), outputs)


class Fickle(NewPair):
    """A pair that has values, unless there are negative ones or, perhaps, no rows."""

    has_empty_values = True

    def dequantize(self) -> torch.Tensor:
        if not (self.first.numel() or self.has_empty_values) or self.first.lt(0).any():  # type: ignore[attr-defined]
            raise NotImplementedError("no values")
        return self.first.clone()  # type: ignore[attr-defined, no-any-return]


class OneWay(Holder):
    """A tensor whose values ``dequantize`` returns, and which takes none back but those of its class."""

    def dequantize(self) -> torch.Tensor:
        return self.first.clone()  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not (isinstance(args[0], cls) and isinstance(args[1], cls)):
            raise NotImplementedError("a OneWay is copied to and from its class alone")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Rounded(Holder):
    """Integers of 8 bits with a scale a row; plain values that are copied in are rounded at random.

    As torchao's int8 weights it has no ``empty_like``, and is given its own shape whatever ``as_strided`` asks for.
    """

    _NAMES = ("integers", "scale")

    @staticmethod
    def __new__(cls: Any, integers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype, device=integers.device)

    @classmethod
    def of(cls, values: torch.Tensor) -> Rounded:
        """Round to the nearest."""
        scale = values.abs().amax(1).clamp(min=1e-12) / 127
        return cls((values / scale[:, None]).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        integers, scale = self.inner()
        return integers * scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        first = args[0]
        if func is aten.empty_like.default:
            raise NotImplementedError("a Rounded has no empty_like")
        if func in (aten.as_strided.default, aten.view.default):
            return return_and_correct_aliasing(func, args, kwargs, cls(*first.inner()))
        if func is aten.new_zeros.default:
            integers, scale = first.inner()
            return cls(integers.new_zeros(args[1]), scale.new_zeros(args[1][0]))
        if func is aten.copy_.default and not isinstance(first, cls):
            return first.copy_(args[1].dequantize())
        if func is aten.copy_.default and not isinstance(args[1], cls):
            scale = args[1].abs().amax(1).clamp(min=1e-12) / 127
            integers = (args[1] / scale[:, None] + torch.rand(args[1].shape)).floor().to(torch.int8)
            return first.copy_(cls(integers, scale))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return tuple(self.inner()), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Rounded(*outputs), outputs)


class Mute(Holder):
    """A tensor of a class of its own, without such functions."""


def assert_alike(ours: Any, theirs: Any, *, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Assert that results are equal: to the bit on two ranks, since the sum of more depends on their order."""
    if dist.get_world_size() == 2:
        assert_equal(ours, theirs)
    else:
        assert_close(ours, theirs, atol=atol, rtol=rtol)


def held_by(model: nn.Module, kind: type[Holder]) -> nn.Module:
    """Put the weights of all linears of a model in tensors of a class, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            inner = [weight.clone() for _ in kind._NAMES]
            module.weight = nn.Parameter(kind(*inner), requires_grad=module.weight.requires_grad)
    return model
