"""All-gathers parameters by functions of their local tensors: FSDP2's all-gather extensions.

A local tensor with an extension has two methods. ``fsdp_pre_all_gather`` returns what its rank sends, tensors of any
dtypes and shapes that are equal on all ranks, and metadata that stay on the rank. ``fsdp_post_all_gather`` makes the
unsharded parameter of what all ranks have sent. So weights may be sent, and computed with, in fewer bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_flat.comm import Allocate, ErrorTexts, agree, is_accelerator, unrecorded
from fsdp_flat.core.all_gather_output import AllGatherOutput
from fsdp_flat.core.buffers import FlatBuffer, MemoryPool
from fsdp_flat.core.gather_targets import GatherTarget, PerParamTarget
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.inner_tensors import made_on, plain_tensors_in
from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.torch_core import (
    VERSION_OF,
    attributes_of,
    fake_mode,
    has_inner_tensors,
    has_values,
    is_plain,
    local_of,
    set_versions,
)
from fsdp_flat.errors import ShardingError, UnsupportedError

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SIGNATURE = (
    "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], "
    "module: nn.Module, mp_policy: MixedPrecisionPolicy)"
)
_SENT = ErrorTexts(
    "preparing its first all-gather of parameters with fsdp_pre_all_gather",
    "Ranks would send different inputs of an all-gather.",
    "fsdp_pre_all_gather must return tensors of the same dtypes and shapes on every rank, with padding where the "
    "parameter is sharded unevenly.",
)


def has_extension(local: torch.Tensor) -> bool:
    """Return whether a local tensor is all-gathered by functions of its own."""
    return hasattr(local, _PRE) or hasattr(local, _POST)


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory of a tensor's storage as bytes (1-D)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class _ExtendedParam:
    """All-gathers one parameter by its extension, or as it is if its local tensor has none.

    Attributes:
        param: the unsharded parameter; None before the first all-gather.
        outputs: what all ranks have sent, in rank order: a 1-D tensor for each input.
        freed: tensors to be freed with the outputs, that the extension made of them.
    """

    def __init__(
        self, entry: ManagedParam, shape: Sequence[int], padded: Sequence[int], spec: ParamGroupSpec, dtype: torch.dtype
    ) -> None:
        assert spec.per_param is not None
        # Not the entry itself, whose parameter is the full one before sharding.
        self._fqn, self._adapter, self._module, self._spec = entry.fqn, entry.adapter, entry.sites[0].module, spec
        self._dtype, self._mesh, self._policy = dtype, spec.per_param.shard_mesh, spec.per_param.policy
        self._size, self._padded_size = torch.Size(shape), torch.Size(padded)
        self._stride = torch.empty(self._size, device="meta").stride()
        # Attributes that a forward reads from parameters (weight decay flags, parallel dims) stay readable.
        self._attributes = attributes_of(entry.param)
        self.param: nn.Parameter | None = None
        self.outputs: list[FlatBuffer] = []
        self.freed: list[FlatBuffer] = []
        self._input_sizes: list[torch.Size] = []
        self._metadata: Any = None
        self._checked: torch.Tensor | None = None
        self._takes_mesh_only = self._has_checked_out = False

    def describe(self) -> str:
        return f"{self._fqn!r} {tuple(self._size)} of unit {self._spec.unit_name!r}"

    def inputs(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank sends of ``local``, its part of the parameter, as 1-D tensors of bytes."""
        if local is not self._checked:
            self._check(local)
        given, device = local, self._spec.device
        if local.device != device:
            local = local.to(device, non_blocking=True)
        if not has_extension(given):
            inputs: Sequence[torch.Tensor] = (self._padded(local).to(self._dtype),)
        else:
            pre_all_gather = cast(Any, local).fsdp_pre_all_gather
            args = () if self._takes_mesh_only else (self._size, self._stride, self._module, self._policy)
            inputs, self._metadata = self._checked_inputs(pre_all_gather(self._mesh, *args))
            self._check_padding(local, inputs)
        sizes = [each.size() for each in inputs]
        if self.outputs and sizes != self._input_sizes:
            raise ShardingError(
                f"fsdp_pre_all_gather of parameter {self.describe()} returned tensors of shapes "
                f"{[tuple(size) for size in sizes]}, and of {[tuple(size) for size in self._input_sizes]} in the first "
                "all-gather. The shapes must stay the same."
            )
        if not self.outputs:
            self._input_sizes, self._input_dtypes = sizes, [each.dtype for each in inputs]
        return [each.reshape(-1).view(torch.uint8) for each in inputs]

    def _padded(self, local: torch.Tensor) -> torch.Tensor:
        if local.size() == self._padded_size:
            return local
        padded = local.new_zeros(self._padded_size)
        if local.numel():
            # Only dim 0 may be uneven.
            padded[: local.size(0)].copy_(local)
        return padded

    def _check(self, local: torch.Tensor) -> None:
        has_pre, has_post = hasattr(local, _PRE), hasattr(local, _POST)
        if has_pre is not has_post:
            has, lacks = (_PRE, _POST) if has_pre else (_POST, _PRE)
            raise ShardingError(
                f"The local tensor of parameter {self.describe()}, a {type(local).__name__}, has {has} and no {lacks}; "
                "an all-gather extension needs both."
            )
        if has_pre:
            num_params = len(inspect.signature(cast(Any, local).fsdp_pre_all_gather).parameters)
            if num_params not in (1, 5):
                raise ShardingError(
                    f"fsdp_pre_all_gather of parameter {self.describe()} takes {num_params} arguments; expected "
                    f"{_SIGNATURE}, or the mesh alone."
                )
            self._takes_mesh_only = num_params == 1
        elif has_inner_tensors(local):
            raise UnsupportedError(
                f"Parameter {self.describe()} is a {type(local).__name__}, which has no fsdp_pre_all_gather and "
                "fsdp_post_all_gather, so its parts cannot be all-gathered. Define them in the class, set them on the "
                "local tensors before the first forward, or leave the parameter out with ignored_params."
            )
        self._checked = local

    def _check_padding(self, local: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        if self._takes_mesh_only or local.size() == self._padded_size:
            return
        if any(each.size() != self._padded_size for each in inputs):
            raise ShardingError(
                f"fsdp_pre_all_gather of parameter {self.describe()} returned tensors of shapes "
                f"{[tuple(each.size()) for each in inputs]} on rank {self._spec.rank} of the shard group, whose "
                f"part has shape {tuple(local.size())}. The parameter is sharded unevenly over "
                f"{self._spec.world_size} ranks, so each must have the padded shape {tuple(self._padded_size)}."
            )

    def _checked_inputs(self, result: Any) -> tuple[Sequence[torch.Tensor], Any]:
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        inputs = result[0] if is_pair else None
        # FSDP2 takes a tensor for the sequence of its rows.
        if not isinstance(inputs, (tuple, list, torch.Tensor)) or not all(isinstance(t, torch.Tensor) for t in inputs):
            got = f"a {type(result).__name__}" + (f" of {len(result)}" if isinstance(result, (tuple, list)) else "")
            raise ShardingError(
                f"fsdp_pre_all_gather of parameter {self.describe()} returned {got}; expected two values: a tuple of "
                "the tensors to send, and what fsdp_post_all_gather gets as metadata (None, if it needs none)."
            )
        return cast(Sequence[torch.Tensor], inputs), result[1]

    def _error_of_result(self, got: str) -> ShardingError:
        return ShardingError(
            f"fsdp_post_all_gather of parameter {self.describe()} returned {got}; expected the whole parameter, which "
            f"has {self._size.numel()} elements (more are padding), and a tuple of the tensors that are freed with it."
        )

    def _checked_result(self, result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], torch.Tensor)
        if not is_pair:
            raise self._error_of_result(f"a {type(result).__name__}")
        made, freed = result
        if made.numel() < self._size.numel():
            raise self._error_of_result(f"a {type(made).__name__} of shape {tuple(made.size())}")
        return made, freed

    def _check_out(self, local: torch.Tensor, fill: Callable[[], object]) -> None:
        """Fill the unsharded parameter for the first time by ``out``; raise if its memory is left as it was.

        That is memory which is freed between all-gathers, or which a trained plain parameter has for itself. Two
        patterns are written to it before, since its values may be equal to one.
        """
        held, param = self._memory(), self.param
        if not all(map(has_values, held.values())):
            fill()
            return
        own = {_place_of(buffer.tensor) for buffer in self.freed}
        before: dict[int, torch.Tensor] = {}
        if param is not None and param.requires_grad and is_plain(local_of(param).data):
            others = [*plain_tensors_in(local), *tree_leaves(self._metadata), *(each.tensor for each in self.outputs)]
            theirs = {_place_of(each) for each in others if isinstance(each, torch.Tensor)}
            before = {place: _bytes_of(each).clone() for place, each in held.items() if place not in own | theirs}
        left = {place: _bytes_of(each) for place, each in held.items() if place in own or place in before}
        for mark in (0x7F, 0x2A):
            for each in left.values():
                each.fill_(mark)
            fill()
            now = self._memory()
            left = {place: each for place, each in left.items() if place in now and (each == mark).all()}
            if not left:
                return
        for place in before.keys() & left.keys():
            left[place].copy_(before[place])
        raise ShardingError(
            f"fsdp_post_all_gather of parameter {self.describe()} was called with out=..., the unsharded parameter, "
            "and has not written to its memory, which has old weights or none. Copy what was gathered to out "
            "(out.copy_(...)), unless out is made of the all-gather outputs themselves."
        )

    def _memory(self) -> dict[int, torch.Tensor]:
        """Return by storage the plain tensors that the unsharded parameter is made of, those with elements."""
        assert self.param is not None
        return {_place_of(each): each for each in plain_tensors_in(local_of(self.param).detach()) if each.numel()}

    def lines(self) -> list[str]:
        """Describe what this rank sends."""
        sent = zip(self._input_dtypes, self._input_sizes, strict=True)
        return [f"{number} {self.describe()} {dtype} {tuple(size)}" for number, (dtype, size) in enumerate(sent)]

    def make_outputs(self) -> None:
        """Allocate the outputs."""
        world_size, device = self._spec.world_size, self._spec.device
        self.outputs = [
            FlatBuffer(torch.empty(world_size * size.numel(), dtype=dtype, device=device))
            for size, dtype in zip(self._input_sizes, self._input_dtypes, strict=True)
        ]

    def nbytes_to_gather(self, local: torch.Tensor) -> int:
        """Return the bytes of the outputs, and of what is freed with them, before the first all-gather.

        The extension is called with fake tensors. One that cannot be is taken to send what ``local`` is made of.
        """
        parts = list(plain_tensors_in(local))
        is_fake = not all(map(has_values, parts))
        try:
            with torch.no_grad(), nullcontext() if is_fake else fake_mode(allow_non_fake_inputs=True):
                fake = made_on(local, local.device)
                if len(parts) == 1 and parts[0] is local:
                    fake.__dict__.update(local.__dict__)  # functions that a caller has set
                trial = copy.copy(self)
                trial.outputs, trial.freed, trial.param = [], [], None
                trial.inputs(fake)
                trial.make_outputs()
                trial.fill(fake)
        except Exception:
            return self._spec.world_size * sum(part.nbytes for part in parts)
        return sum(buffer.full_nbytes for buffer in (*trial.outputs, *trial.freed))

    def fill(self, local: torch.Tensor) -> bool:
        """Make the unsharded parameter of the outputs; return whether it is another object than before."""
        world_size, is_new = self._spec.world_size, self.param is None
        freed: Sequence[torch.Tensor]
        if not has_extension(local):
            if not is_new:
                return False
            made, freed = self.outputs[0].tensor.data, ()
        else:
            outputs = tuple(
                buffer.tensor.view(world_size * size[0], *size[1:]) if size else buffer.tensor
                for buffer, size in zip(self.outputs, self._input_sizes, strict=True)
            )
            post_all_gather = partial(cast(Any, local).fsdp_post_all_gather, outputs, self._metadata, self._dtype)
            if not is_new:
                if self._has_checked_out:
                    post_all_gather(out=self.param)
                else:
                    self._has_checked_out = True
                    self._check_out(local, partial(post_all_gather, out=self.param))
                return False
            made, freed = self._checked_result(post_all_gather())
        made = torch.as_strided(made, self._size, self._stride, 0)
        if made.size() != self._size:
            raise self._error_of_result(f"a {type(made).__name__} of shape {tuple(made.size())}")
        self.param = nn.Parameter(self._adapter.from_local(made), requires_grad=False)
        self.param.__dict__.update(self._attributes)
        held = {_place_of(buffer.tensor) for buffer in self.outputs}
        for tensor in freed:
            if _place_of(tensor) not in held:
                held.add(_place_of(tensor))
                self.freed.append(FlatBuffer(tensor))
        return True


class TensorOutput(AllGatherOutput):
    """Is made by all-gather extensions, for a group some of whose local tensors have one.

    Each input of each parameter has an output of its own. The unsharded parameters are made at the end of the first
    all-gather, and the outputs that they are made of are freed, and filled again, in place, as one buffer is. Before,
    ``params`` are tensors on the meta device.

    Args:
        managed: the parameters, in the order of ``layout``; the group's list, which has the sharded ones later.
    """

    def __init__(
        self, managed: Sequence[ManagedParam], layout: PerParamLayout, spec: ParamGroupSpec, dtype: torch.dtype
    ) -> None:
        self._managed, self._spec = managed, spec
        places = zip(managed, layout.param_infos, layout.chunk_shapes, strict=True)
        self._extended = [_ExtendedParam(entry, info.shape, padded, spec, dtype) for entry, info, padded in places]
        wholes = [torch.empty(info.shape, dtype=dtype, device="meta") for info in layout.param_infos]
        params = [
            nn.Parameter(entry.adapter.from_local(whole), requires_grad=False)
            for entry, whole in zip(managed, wholes, strict=True)
        ]
        super().__init__(params, [])

    def _locals(self) -> Iterator[tuple[_ExtendedParam, torch.Tensor]]:
        return zip(self._extended, [local_of(entry.param) for entry in self._managed], strict=True)

    def gathered_nbytes(self) -> int:
        return self.full_nbytes or sum(each.nbytes_to_gather(local) for each, local in self._locals())

    def send(self, pool: MemoryPool, memory: Allocate | None = None) -> tuple[torch.Tensor, GatherTarget | None]:
        """Return this rank's inputs as one row of bytes, and the target of all ranks' rows.

        Before the first all-gather ranks compare what they send.
        """
        world_size, device = self._spec.world_size, self._spec.device
        if self.target is None:
            inputs, error = list[torch.Tensor](), None
            try:
                inputs = self._inputs()
            except Exception as raised:  # the extension's own, perhaps on one rank
                error = raised
            lines = [] if error is not None else [line for each in self._extended for line in each.lines()]
            agree(lines, error, self._spec.rank_groups, _SENT)
            for each in self._extended:
                each.make_outputs()
            self._hold([buffer for each in self._extended for buffer in each.outputs])
            # ``.data`` has a version counter of its own, so writes leave that of tensors made of the outputs as it is.
            places = [each.data.view(torch.uint8).view(world_size, each.nbytes // world_size) for each in self.tensors]
            self.target = PerParamTarget(places, [0] * len(places))
            for buffer in self._memory:
                pool.empty(buffer.tensor.untyped_storage())  # to be allocated where the later ones are
        else:
            inputs = self._inputs()
        if world_size == 1 or not is_accelerator(device):
            self.alloc(pool)
        row = torch.empty(self.target.row_numel, dtype=torch.uint8, device=device)
        torch._foreach_copy_(list(row.split([each.numel() for each in inputs])), inputs)
        if world_size == 1:
            self.target.place(0, row.view(1, -1))
        return row, self.target

    def _inputs(self) -> list[torch.Tensor]:
        return [tensor for each, local in self._locals() for tensor in each.inputs(local)]

    def arrived(self) -> bool:
        versions = self._versions_before_free or tuple(map(VERSION_OF, self.params))
        with unrecorded():
            are_new = [each.fill(local) for each, local in self._locals()]
        self._versions_before_free = None  # after the extensions, which may raise
        if not any(are_new):
            set_versions(self.params, versions)  # autograd may have saved them: they have the same values again
            return False
        self.params = tuple(cast(nn.Parameter, each.param) for each in self._extended)
        self._hold([*self._memory, *(buffer for each in self._extended for buffer in each.freed)])
        return True
