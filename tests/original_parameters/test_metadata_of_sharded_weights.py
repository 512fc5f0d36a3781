"""What a program can read of a weight while it is sharded is true; what needs its values raises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecision as PeerMixedPrecision
from torch.distributed.fsdp import ShardingStrategy as PeerStrategy
from torch.utils import _pytree

from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import wrapped
from tests.support.peer import peer_fsdp


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def _described(value: Any) -> Any:
    """Return what a program can read of a result: no values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.layout, value.is_meta, value.is_cpu, value.is_cuda
    return value


X = torch.ones(3, 4)
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda w: (w.shape, w.size(), w.size(0), w.dim(), w.ndim, w.numel(), w.nelement(), len(w)),
    "strides": lambda w: (w.stride(), w.is_contiguous(), w.storage_offset()),
    "dtype": lambda w: (w.dtype, w.element_size(), w.itemsize, w.nbytes, w.type(), w.is_floating_point()),
    "torch's functions": lambda w: (
        torch.is_floating_point(w),
        torch.is_complex(w),
        torch.numel(w),
        torch.is_tensor(w),
    ),
    "device": lambda w: (w.device, w.get_device(), torch.get_device(w), w.is_meta, w.is_cpu, w.is_cuda, w.is_mps),
    "layout": lambda w: (w.layout, w.is_sparse, w.is_quantized, w.is_nested, w.is_mkldnn),
    "requires_grad": lambda w: w.requires_grad,
    "grad": lambda w: w.data.grad,
    "data": lambda w: w.data,
    "data of data": lambda w: w.data.data.detach(),
    "device of data": lambda w: (w.data.device, w.data.dtype, w.data.is_meta, w.detach().device),
    "transposed": lambda w: (w.T, w.mT, w.t(), w.T.stride(), w.T.is_contiguous()),
    "zeros_like": torch.zeros_like,
    "zeros_like of a keyword": lambda w: torch.zeros_like(input=w),
    "ones_like": torch.ones_like,
    "empty_like": torch.empty_like,
    "full_like": lambda w: torch.full_like(w, 2.0),
    "rand_like": lambda w: torch.rand_like(w, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "of data": lambda w: torch.zeros_like(w.data),
    "of transposed": lambda w: torch.zeros_like(w.T).stride(),
    "new_zeros": lambda w: w.new_zeros(2, 3),
    "new_ones": lambda w: w.new_ones(2, dtype=torch.int64),
    "new_full": lambda w: w.new_full((2,), 3.0),
    "new_empty": lambda w: w.new_empty(2),
    "new_empty_strided": lambda w: w.new_empty_strided((2, 2), (1, 2)),
    "new_tensor": lambda w: w.new_tensor([1.0, 2.0]),
    "new": lambda w: w.new(3),
    "to": lambda w: X.double().to(w),
    "to a device": lambda w: X.to(w.device, w.dtype),
    "type_as": lambda w: X.type_as(w),
    "expand_as": lambda w: torch.ones(()).expand_as(w),
    "view_as": lambda w: torch.arange(24).view_as(w),
    "reshape_as": lambda w: torch.arange(24).reshape_as(w),
    "eye": lambda w: torch.eye(w.shape[1], device=w.device, dtype=w.dtype),
    "class": lambda w: (isinstance(w, torch.Tensor), isinstance(w, nn.Parameter)),
    "hash": lambda w: len({w: 1, w.data: 2}),
    "pytree": lambda w: _pytree.tree_flatten({"a": w})[1].num_leaves,
}
NEED_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": lambda w: w.detach().clone(),
    "to": lambda w: w.to(torch.float64),
    "type": lambda w: w.type(torch.float64),
    "double": lambda w: w.double(),
    "cpu": lambda w: w.cpu() + 1,
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "linear of data": lambda w: F.linear(X, w.data),
    "item": lambda w: w.sum().item(),
    "equal": lambda w: torch.equal(w, w),
    "numpy": lambda w: w.numpy(),
    "view": lambda w: w.view(-1),
    "requires_grad_": lambda w: w.requires_grad_(False),
    "copy_": lambda w: w.copy_(torch.zeros(6, 4)),
    "copied": lambda w: torch.zeros(6, 4).copy_(w),
    "out": lambda w: torch.add(torch.zeros(6, 4), 1, out=w),
    "stack": lambda w: torch.stack([torch.zeros(6, 4), w]),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
    "foreach": lambda w: torch._foreach_add([w], 1.0),
}


def _read(weight: torch.Tensor) -> dict[str, Any]:
    """Return every read of ``weight``; an error where it raises: FSDP1's weight has no storage in places."""
    found: dict[str, Any] = {}
    for name, read in READS.items():
        try:
            found[name] = _pytree.tree_map(_described, read(weight))
        except RuntimeError as error:
            found[name] = error
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("train", [True, False], ids=["trains", "frozen"])
@on_ranks(2, 4)
def test_metadata_of_a_sharded_weight_are_those_of_a_plain_weight_and_of_fsdp1(
    train: bool, strategy: str, dtype: torch.dtype, rank: int
) -> None:
    """The dtype is that of compute, which FSDP1 shows too after a forward."""
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    own, peer = (
        make(
            _net().requires_grad_(train),
            sharding_strategy=strategies[strategy],
            mixed_precision=precision(param_dtype=dtype),
            **options,
        )
        for make, strategies, precision in (
            (wrapped, ShardingStrategy, MixedPrecision),
            (peer_fsdp, PeerStrategy, PeerMixedPrecision),
        )
    )
    plain = nn.Parameter(torch.ones(6, 4, dtype=dtype), requires_grad=train)
    expected = {**_read(plain), "class": (True, False)}
    assert _read(own.module[0].weight) == expected
    for step in range(2):
        for model in (own, peer):
            with torch.no_grad():
                model(X)
            out = model(X)
            if train:
                out.sum().backward()
        assert _read(own.module[0].weight) == expected, f"step {step}"
        of_peer = {
            name: value for name, value in _read(peer.module[0].weight).items() if type(value) is not RuntimeError
        }
        assert len(of_peer) > len(READS) - 8
        assert of_peer == {name: expected[name] for name in of_peer}, f"step {step}"


@on_ranks(2)
def test_no_attribute_of_a_sharded_weight_says_meta(rank: int) -> None:
    weight = wrapped(_net()).module[0].weight
    for text in (repr(weight), f"{weight}", repr(weight.T), weight.type(), str(weight.data.device)):
        assert "meta" not in text
    for name in dir(torch.Tensor):
        if not name.startswith("_") and name != "volatile":  # which warns that it is no more
            try:
                value = getattr(weight, name)
            except (RuntimeError, AttributeError):
                continue
            assert callable(value) or "meta" not in repr(value), name


@on_ranks(2)
def test_a_sharded_weight_used_for_its_values_raises_with_its_name(rank: int) -> None:
    model = wrapped(_net())
    for step in range(2):
        for name, operation in NEED_VALUES.items():
            with pytest.raises(RuntimeError) as caught:
                operation(model.module[0].weight)
            text = str(caught.value)
            assert "'0.weight' (6, 4)" in text, (step, name)
            assert "unshard_for" in text, (step, name)
        model(X).sum().backward()


@on_ranks(2)
def test_metadata_follow_a_conversion_and_a_change_of_requires_grad(rank: int) -> None:
    """After ``.to``, and frozen between steps."""
    model = wrapped(_net()).double()
    weight = model.module[0].weight
    assert (weight.dtype, weight.new_zeros(1).dtype, weight.data.dtype) == (torch.float64,) * 3
    model._flat_param.requires_grad_(False)
    assert weight.requires_grad is False
    model._flat_param.requires_grad_(True)
    assert weight.requires_grad is True
    model.float()
    model(X).sum().backward()
    assert torch.zeros_like(model.module[0].weight).dtype is torch.float32


@on_ranks(2)
def test_a_batch_is_moved_to_the_weight_in_a_training_loop_and_in_a_parents_forward(rank: int) -> None:

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.low = nn.Embedding(7, 6), nn.Linear(6, 2, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            weight = self.low.weight  # of another unit: sharded here
            eye = torch.eye(weight.shape[1], device=weight.device, dtype=weight.dtype)
            return self.low(self.words(tokens.to(self.words.weight.device))) + self.low(eye).sum()

    torch.manual_seed(0)
    plain = Root()
    model = wrapped(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Embedding}))
    tokens = torch.tensor([0, 3, 6])
    for _ in range(2):
        moved = tokens.to(model.module.words.weight.device)
        out = model(moved)
        assert torch.allclose(out, plain(tokens))
        out.sum().backward()


@pytest.mark.of_guards
@on_ranks(2)
def test_a_compiled_function_may_read_the_metadata_of_a_sharded_weight(rank: int) -> None:
    model = wrapped(_net())

    @torch.compile(backend="eager")
    def placed(x: torch.Tensor) -> torch.Tensor:
        weight = model.module[0].weight
        return x.to(weight.device, weight.dtype) * weight.shape[0]

    assert torch.equal(placed(X.double()), X * 6)
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        told = pytest.warns(UserWarning, match="use_orig_params=True only") if step == 0 else nullcontext()
        with told:
            out = compiled(placed(X))
        out.sum().backward()
        assert model.module[0].weight.device == torch.device("cpu")
