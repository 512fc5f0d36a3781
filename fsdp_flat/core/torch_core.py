"""Collects the private names of torch that this package needs, each with its reason.

Two decorators exclude functions from torch.compile: this library runs between compiled graphs and never inside one.
dynamo recognizes torch's own FSDP by file path; another package has to mark its functions.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import Variable
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _python_dispatch, _pytree

# Swaps the memory of two storages of which one is empty; there is no public equivalent. None before torch 2.12.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)

# Context in which subclasses of tensors are plain ones, for the library's own operations on sharded gradients.
unguarded = torch._C.DisableTorchFunctionSubclass

# Creates a tensor of a subclass that has a shape, dtype and device, but no memory; there is no public equivalent.
without_data: Callable[..., Any] = torch.Tensor._make_wrapper_subclass

# Sets the version counters of tensors, which autograd compares with those of the tensors that it has saved.
# ``torch.autograd._unsafe_preserve_version_counter`` does so, inside a block.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# Returns the version counter of a tensor, of which a step reads many: faster than a loop in Python.
VERSION_OF: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

# Returns the id of this thread's running autograd graph task; -1 outside of backward. Distinguishes an activation
# recomputation from an ordinary forward; there is no public equivalent.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Returns whether the running backward keeps its graph for another one (``retain_graph=True``); there is no public
# equivalent.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Returns whether two tensors share a storage; there is no public equivalent that takes fake tensors.
is_alias: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]

# Context in which new tensors have no memory, and operators compute shapes and dtypes alone; documented, not exported.
fake_mode: Callable[..., AbstractContextManager[Any]] = FakeTensorMode

# Context outside of ``FakeTensorMode``, in which a mesh reads its ranks: it keeps them in a tensor.
outside_fake_mode: Callable[[], AbstractContextManager[Any]] = unset_fake_temporarily

# Returns the address of a tensor's first element.
_ADDRESS_OF: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr

# Splits each tensor into as many chunks along a dim, padded with zeros, and concatenates the first chunks of all, the
# second chunks of all, and so on, as rows of a matrix: the order of a reduce-scatter of rows, by one operation.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat


# Returns the number that the next autograd node of this thread gets; there is no public equivalent.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def running_node_number() -> int:
    """Return the number of the autograd node that the running backward executes; the largest of all without one.

    Of the nodes that can run, autograd runs the one of the largest number, that is the one made last.
    """
    node = torch._C._current_autograd_node()
    return sys.maxsize if node is None else int(node._sequence_nr())


def is_in_function() -> bool:
    """Return whether the forward of an autograd function runs, in which a re-entrant checkpoint calls modules.

    torch disables gradients of forward mode there, as ``inference_mode`` does, and ``no_grad`` does not.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def node_will_run(node: Any) -> bool:
    """Return whether the running backward executes an autograd node.

    ``register_multi_grad_hook`` uses the same private function.
    """
    return bool(torch._C._will_engine_execute_node(node))


def pytree_children(value: Any) -> Iterable[Any] | None:
    """Return the children of an object of a class registered with torch's pytree; None for any other object.

    The functions that flatten a whole tree call a leaf any class that they do not know, dataclasses for example.
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)[0]


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, not a DTensor, has values to read: tensors of ``FakeTensorMode`` have none.

    torch documents the mode, and exports neither it nor the class of its tensors.
    """
    return not isinstance(tensor, FakeTensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own class; those of ``FakeTensorMode`` stand for such tensors."""
    return type(tensor) is torch.Tensor or isinstance(tensor, FakeTensor)


# Returns whether a tensor is of a class that keeps its values in other tensors, as quantized ones do. torch's own
# packages use it; it is not documented.
has_inner_tensors: Callable[[torch.Tensor], bool] = _python_dispatch.is_traceable_wrapper_subclass


def place_function(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """Return the function that identifies the memory of tensors like ``tensor``: equal where they begin at one place.

    It is the address. Tensors of ``FakeTensorMode`` have none: it is the storage, and the offset in the storage.
    """
    return _ADDRESS_OF if has_values(tensor) else _fake_place


def place_of(tensor: torch.Tensor) -> Any:
    """Return what :func:`place_function` says of ``tensor``."""
    return place_function(tensor)(tensor)


def _fake_place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def is_in_a_graph(unsharded_param: torch.Tensor) -> bool:
    """Return whether ``unsharded_param`` is in an autograd graph, whose accumulator holds a second reference to it."""
    return bool(unsharded_param._use_count() > 1)  # type: ignore[attr-defined]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself.

    ``DTensor.to_local`` records an autograd node, and returns another tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """Return a DTensor of ``local`` with the mesh, placements, global shape and dtype that ``spec`` describes.

    ``DTensor.from_local`` computes these anew and records an autograd node, and ``DTensor.__init__`` does nothing but
    leave torch.compile: too slow for each gradient of each step.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


# Attributes by which a parameter that a unit has flattened, or a DTensor that is a Parameter, is known.
_MARKS = frozenset({"_fsdp_flat_index", "_fsdp_flat_hooked", "_fsdp_flat_owner", "_fsdp_flattened", "_is_param"})


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a caller has set on a parameter, without those that its class or a unit has set."""
    own = param.detach().__dict__
    return {key: value for key, value in param.__dict__.items() if key not in own and key not in _MARKS}


def dtensor_parameter(dtensor: DTensor, *, like: nn.Parameter) -> nn.Parameter:
    """Turn ``dtensor`` itself, which nothing else uses, into a Parameter with the attributes of another one.

    ``nn.Parameter`` does the same with an alias, whose creation takes most of the time.
    """
    dtensor.__dict__.update(like.__dict__ if type(like) in (nn.Parameter, DTensor) else attributes_of(like))
    dtensor._is_param = True
    return cast(nn.Parameter, dtensor.requires_grad_(like.requires_grad))


def strided_shard(dim: int, num_parts: int) -> Placement:
    """Return the placement of a dim that a later mesh dim has split into ``num_parts`` before."""
    return _StridedShard(dim, split_factor=num_parts)


def concatenated_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the dims of both, which are slices of one mesh.

    torch exports no function for this. Before torch 2.10 the slice is made by the names of the dims.
    """
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return cast(DeviceMesh, concatenate([first, second]))
    from torch.distributed.device_mesh import _mesh_resources

    root = _mesh_resources.get_root_mesh(first)
    names = (*(first.mesh_dim_names or ()), *(second.mesh_dim_names or ()))
    return root[names]


def flattened_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of all ranks of a slice of a mesh; torch's public functions cannot flatten one."""
    return mesh if mesh.ndim == 1 else mesh._flatten("_".join(mesh.mesh_dim_names or ()))


_Function = TypeVar("_Function", bound=Callable[..., Any])


_eval_frame: Any = torch._C._dynamo.eval_frame
# Skip the frames of a function, and treat those of its callees as any.
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
_REASON = (
    "fsdp_flat all-gathers and frees parameters here, outside of any graph. The wrapped module is compiled; "
    "for fullgraph=True compile the modules inside the units instead of what holds them."
)


def dynamo_disabled(function: _Function) -> _Function:
    """Run ``function`` and everything that it calls eagerly; each call is a graph break."""

    # torch's wrapper costs time at every call even if nothing is compiled, and there is one call per gradient. Its
    # creation imports torch._dynamo, which takes long: only where something is compiled.
    @dynamo_disabled_here
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if active_compiler() is None:
            return function(*args, **kwargs)
        return _disabled(function)(*args, **kwargs)

    return cast(_Function, run)


def dynamo_disabled_here(function: _Function) -> _Function:
    """Run ``function`` eagerly but allow its callees to be compiled; returns the same function, marked.

    With the public ``torch.compiler.disable(recursive=False)``, dynamo examines the function's own frame in every
    call, which is slow and counts as a recompilation (torch 2.13). ``torch._dynamo.decorators.skip`` does this too,
    and importing it takes long.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


@functools.cache
@dynamo_disabled_here
def _disabled(function: _Function) -> _Function:
    return cast(_Function, torch.compiler.disable(function, reason=_REASON))


# Returns a function while torch.compile would compile functions called from here, else None or False. As a C function
# it has no frame that dynamo could compile; the public is_compiling() is true only inside a trace.
active_compiler: Callable[[], Any] = _eval_frame.get_eval_frame_callback

# The class of all batch norms, which FSDP1 keeps in full precision by default, and that of modes that see each
# operation inside their block. torch exports neither.
BatchNorm = _BatchNorm
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# The dtype in which each of torch's low-precision hooks communicates gradients. The hooks cast, call the backend and
# cast back; gloo has no kernels for some of their calls. A reduction in this dtype gives the same result everywhere.
LOW_PRECISION_HOOKS: Mapping[Callable[..., Any], torch.dtype] = MappingProxyType(
    {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
)

# Runs a function at the end of the running backward, as DistributedDataParallel and FSDP do.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# Context in which operations leave the version counter of a tensor as it is, so that values that autograd has saved of
# it stay valid.
preserve_version: Callable[[torch.Tensor], AbstractContextManager[Any]]
preserve_version = torch.autograd._unsafe_preserve_version_counter

# Returns whether autocast is on for any device; the public function takes a device, and raises for one that it does not
# know.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
# Has a function called before an error for lack of memory on CUDA; None in a torch without CUDA. An optimizer's error
# passes through no other call of this library.
cuda_memory_observer: Callable[[Callable[..., None]], None] | None
cuda_memory_observer = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` was called on ``module``, and so reduces the gradients below it.

    torch's composable functions note on each module which of them were called on it; no public function reads that.
    """
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())
