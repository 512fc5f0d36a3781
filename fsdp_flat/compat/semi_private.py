"""Presents units, handles and wrappers under undocumented and older names of FSDP1 that callers read.

accelerate, verl, OLMo, composer, MMEngine, torch's checkpointing and its test helpers read these. Each reads the unit,
the handle and its layout, or calls a function of a package below. A docstring says so if an attribute may be assigned.
Two things are stored: the views of a wrapper's handles, which callers compare by ``is``, and FSDP1's attributes of a
flat parameter. :func:`add_undocumented_members` adds the members of :class:`UndocumentedMembers` to the wrapper class.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import core
from fsdp_flat.api import BackwardPrefetch, ShardingStrategy, StateDictType, member_of
from fsdp_flat.comm import STRATEGIES
from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES, no_attribute, not_assignable
from fsdp_flat.compat.views import assignable, derived
from fsdp_flat.core import (
    Layout,
    Phase,
    Unit,
    alignment_numel,
    have_grads,
    modules_of,
    outermost_of,
    predivide_factor,
    reset_step,
    sharded_grad_of,
    unit_of,
    units_of,
)
from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UsageError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn, flat_param_name
from fsdp_flat.runtime import ShardedModule, local_norm, set_comm_hook
from fsdp_flat.state import (
    CODECS,
    OptimInput,
    load_full_or_sharded,
    own_settings,
    save_full_or_sharded,
    settings_for,
    warn_of_older_form,
    warn_of_optim_input,
)
from fsdp_flat.user_warnings import warn_user

# The names that ``fsdp_flat.fully_sharded_data_parallel`` has too, as FSDP1's module of that name.
__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "FlatParamHandle",
    "HandleTrainingState",
    "HybridShardProcessGroupType",
    "ProcessGroupType",
    "TrainingState",
    "_get_fqn_to_param",
    "_get_grad_norm",
    "_get_param_to_fqn",
    "_optim_state_dict_type_to_config",
    "_state_dict_type_to_config",
]

# Types of the constructor's ``process_group``.
HybridShardProcessGroupType = tuple[dist.ProcessGroup, dist.ProcessGroup]
ProcessGroupType = dist.ProcessGroup | HybridShardProcessGroupType | None

HYBRID_SHARDING_STRATEGIES = [row.member for row in STRATEGIES.values() if row.is_hybrid]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = tuple(
    row.member for row in STRATEGIES.values() if row.shards and not row.reshard_after_forward
)
_state_dict_type_to_config = MappingProxyType({kind: codec.model_config for kind, codec in CODECS.items()})
_optim_state_dict_type_to_config = MappingProxyType({kind: codec.optim_config for kind, codec in CODECS.items()})


class TrainingState(Enum):
    """Enumerates the states of a wrapper under FSDP1's names."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class HandleTrainingState(Enum):
    """Enumerates the states of a handle under FSDP1's names; BACKWARD_POST has no counterpart here."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


TRAINING_STATES = {
    Phase.IDLE: (TrainingState.IDLE, HandleTrainingState.IDLE),
    Phase.FORWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD),
    Phase.BACKWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.BACKWARD_PRE),
    Phase.SUMMONED: (TrainingState.SUMMON_FULL_PARAMS, HandleTrainingState.SUMMON_FULL_PARAMS),
}


class _ReadOnly(property):
    """Refuses an assignment in the words of :func:`not_assignable`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        raise not_assignable(instance, self._name)


# A read-only property.
_derived = partial(derived, kind=_ReadOnly)


def replaced(path: str, convert: Callable[[Any], Any] | None = None) -> Any:
    """Return a property of a unit's record of settings; assigning it replaces the record of this unit alone."""
    holder, record, field = path.split(".")

    def assign(self: Any, value: Any) -> None:
        unit = getattr(self, holder)
        setattr(unit, record, replace(getattr(unit, record), **{field: value if convert is None else convert(value)}))

    return property(attrgetter(path), assign, doc=f"Reads and sets ``{path}``.")


def _state_setting(field: str) -> Any:
    """Return a property of a unit's settings for state dicts; assigning it replaces those of this unit alone."""

    def read(self: Any) -> Any:
        return getattr(own_settings(self._unit).state_dict, field)

    def assign(self: Any, value: Any) -> None:
        own = own_settings(self._unit)
        own.state_dict = replace(own.state_dict, **{field: value})

    return property(read, assign, doc=f"Reads and sets ``{field}``.")


def _as_backward_prefetch(value: Any) -> BackwardPrefetch | None:
    return None if value is None else member_of(BackwardPrefetch, value, "backward_prefetch", others=" or None")


def wrappers_in(module: nn.Module) -> list[Any]:
    """Return every wrapper at or below ``module``, in the order of ``module.modules()``."""
    units = [(child, unit_of(child)) for child in modules_of(module)]
    return [child for child, unit in units if unit is not None and unit.options.api.has_wrapper]


class GroupMember:
    """Provides the group that a unit is sharded over (with NO_SHARD: replicated over), and this rank in it."""

    _device_handle = _ReadOnly(lambda self: torch.get_device_module(self._unit.options.device))
    _debug_level = _ReadOnly(lambda self: dist.get_debug_level())

    process_group = _derived("_unit.options.groups.process_group")
    _use_orig_params = _derived("_unit.options.use_orig_params")
    rank = _derived("_unit.options.groups.primary.rank")
    world_size = _derived("_unit.options.groups.primary.size")


class _ParamInfo(NamedTuple):
    """Locates the first registration of a parameter; ``module_name`` is relative to the unit's module."""

    param_name: str
    module: nn.Module
    module_name: str


class _SharedParamInfo(NamedTuple):
    """Locates a further registration of a parameter, and the first one."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class FlatParamShardMetadata(NamedTuple):
    """Describes the parameters of which this rank's shard holds a part; ends of ``param_offsets`` are inclusive."""

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class _OfModules(list[Any]):
    """Lists things that refer to modules, and is pickled empty: a pickled flat parameter belongs to no model."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


class _ShardParamInfo(NamedTuple):
    """Locates one parameter in this rank's shard; indices within the parameter are inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


def _flat(unit: Unit) -> list[core.ParamGroup]:
    return [handle for handle in unit.param_groups if handle.storage.flat_param is not None]


def describe_flat_params(unit: Unit) -> None:
    """Set FSDP1's constant attributes on a unit's flat parameters: names, sizes, and the shard's content."""
    for handle in _flat(unit):
        layout, infos, rank = handle.layout, handle.layout.param_infos, handle.spec.rank
        numels = _numels_and_paddings(layout)
        own_shards = [_ShardParamInfo(False, None, None, None, None)] * len(infos)
        for each in layout.local_shards(rank):
            start, stop = each.in_param.start, each.in_param.stop
            own_shards[each.index] = _ShardParamInfo(True, each.in_shard.start, stop - start, start, stop - 1)
        handle.flat_param.__dict__.update(
            _num_params=len(infos),
            _fqns=[param_info.fqn for param_info in infos],
            _shapes=[torch.Size(param_info.shape) for param_info in infos],
            _strides=[torch.empty(param_info.shape, device="meta").stride() for param_info in infos],
            _contiguities=[True] * len(infos),
            _param_extensions=[None] * len(infos),
            _param_infos=_OfModules(_located(entry.sites[0]) for entry in handle.params),
            _shared_param_infos=_OfModules(_further_sites(handle)),
            _modules=_OfModules({site.module: None for entry in handle.params for site in entry.sites}),
            _numels=tuple([param_info.numel for param_info in infos]),
            _numels_with_padding=tuple([numel for numel, _ in numels]),
            _is_padding_mask=[is_padding for _, is_padding in numels],
            _shard_param_infos=tuple(own_shards),
            _shard_numel_padded=min(
                layout.shard_numel, max(0, (rank + 1) * layout.shard_numel - layout.unpadded_numel)
            ),
            _sharded_size=torch.Size([layout.shard_numel]),
            _unpadded_unsharded_size=torch.Size([layout.unpadded_numel]),
            _padded_unsharded_size=torch.Size([layout.numel]),
        )


def _further_sites(handle: core.ParamGroup) -> list[_SharedParamInfo]:
    return [
        _SharedParamInfo(*_located(site), *_located(entry.sites[0]))
        for entry in handle.params
        for site in entry.sites[1:]
    ]


def _located(site: core.Site) -> _ParamInfo:
    return _ParamInfo(site.name, site.module, site.fqn.rpartition(".")[0])


def _numels_and_paddings(layout: Layout) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    end = 0
    for param_info in layout.param_infos:
        if param_info.offset > end:
            found.append((param_info.offset - end, True))
        found.append((param_info.numel, False))
        end = param_info.offset + param_info.numel
    return [*found, (layout.unpadded_numel - end, True)] if layout.unpadded_numel > end else found


def forget_tensors(unit: Unit) -> None:
    """Drop the tensors that reading ``_flat_param`` stored on it, which may keep a replaced shard alive."""
    for handle in _flat(unit):
        for name in ("_local_shard", "_full_param_padded", "_params", "_shared_params"):
            handle.flat_param.__dict__.pop(name, None)


class FlatParamHandle(GroupMember):
    """Presents a handle under FSDP1's names."""

    def __init__(self, unit: Unit, handle: core.ParamGroup) -> None:
        self._unit = unit
        self._real = handle

    _fully_sharded_module = _derived("_unit.module")
    _sharding_strategy = _derived("_unit.options.strategy.member")
    _offload_params = _derived("_unit.options.offload_params")
    _fwd_bwd_param_dtype = _derived("_real.compute_dtype")
    _reduce_dtype = _derived("_real.grads.reduce_dtype")
    _keep_low_precision_grads = _derived("_unit.options.precision.keep_low_precision_grads")
    device = _derived("_real.spec.device")
    _use_full_prec_in_eval = _derived("_unit.options.precision.full_in_eval")
    _aligned_numel = _ReadOnly(
        lambda self: alignment_numel(self._fwd_bwd_param_dtype.itemsize, use_orig_params=True) * self._use_orig_params
    )
    _training_state = _ReadOnly(lambda self: TRAINING_STATES[self._unit.phase][1])
    _uses_param_mixed_precision = _ReadOnly(lambda self: self._fwd_bwd_param_dtype != self._orig_param_dtype)
    _uses_reduce_mixed_precision = _ReadOnly(lambda self: self._reduce_dtype != self._orig_param_dtype)
    _force_full_precision = _ReadOnly(lambda self: self._unit.wants_full_precision)
    uses_sharded_strategy = _ReadOnly(lambda self: self._sharding_strategy is not ShardingStrategy.NO_SHARD)

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, with FSDP1's tensor attributes updated."""
        flat_param, originals, shared = self._real.flat_param, None, None
        if self._use_orig_params:
            originals = list(self._real.slots.visible_params)
            # One for each further registration.
            places = zip(originals, self._real.params, strict=True)
            shared = [param for param, entry in places for _ in entry.sites[1:]]
        flat_param.__dict__.update(
            _local_shard=flat_param.data,
            _full_param_padded=self._real.output.tensors[0],
            _params=originals,
            _shared_params=shared,
        )
        return flat_param

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype of the shard. Assigning one converts the shard to it."""
        return self._real.orig_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype):
            raise OptionTypeError(f"_orig_param_dtype must be a torch.dtype; got {dtype!r}.")
        self._convert(lambda tensor: tensor.to(dtype))

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """The gradient of the shard, 1-D and padded like it; assembled at each read with original parameters."""
        if not any(have_grads(self._real)):
            return None
        return sharded_grad_of(self._real) if self._use_orig_params else self._real.flat_param.grad

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ABSENT_ATTRIBUTES:
            raise not_assignable(self, name)
        super().__setattr__(name, value)

    def shard_metadata(self) -> FlatParamShardMetadata:
        """Return names, shapes and places of the parameters of which this rank's shard holds a part."""
        param = self._real.flat_param.__dict__
        columns = (param[name] for name in ("_fqns", "_shapes", "_strides", "_contiguities", "_numels"))
        found = [
            (*row, (own.intra_param_start_idx, own.intra_param_end_idx))
            for *row, own in zip(*columns, param["_shard_param_infos"], strict=True)
            if own.in_shard
        ]
        return FlatParamShardMetadata(*(zip(*found) if found else [()] * len(FlatParamShardMetadata._fields)))

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yield name and module name of every registration, first ones before further ones."""
        for entry in self._real.params:
            name, _, module_name = _located(entry.sites[0])
            yield name, module_name
        yield from self.shared_param_module_names()

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yield name and module name of every registration after a parameter's first one."""
        for info in _further_sites(self._real):
            yield info.param_name, info.module_name

    @property
    def _fqns_in_shard(self) -> list[str]:
        return list(self.shard_metadata().param_names)

    def _get_modules(self) -> set[nn.Module]:
        return {site.module for entry in self._real.params for site in entry.sites}

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        """Do nothing: gradients are those of the parameters, and no flat one has to be kept in line with them."""

    def pre_unshard(self) -> bool:
        """Return whether :meth:`unshard` will do anything."""
        return self.needs_unshard()

    def unshard(self) -> None:
        """Unshard the parameters of the unit. Every rank of the shard group must call this."""
        self._unit.unshard()

    def post_unshard(self) -> None:
        """Do nothing: :meth:`unshard` has done all of it."""

    def post_reshard(self) -> None:
        """Do nothing: :meth:`reshard` has done all of it."""

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Return the unsharded flat tensor; its storage is empty while the unit is sharded."""
        return self._real.output.tensors[0]

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return self.uses_sharded_strategy and tensor.shape == (self._real.layout.shard_numel,)

    def needs_unshard(self) -> bool:
        return self.uses_sharded_strategy and not self._unit.is_unsharded

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unsharded parameters of the unit if ``free_unsharded_flat_param``; between steps."""
        self._unit.check_idle("reshard")
        if free_unsharded_flat_param:
            self._unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the shard, as ``Tensor.to`` with the same arguments; between steps."""
        self._convert(lambda tensor: tensor.to(*args, **kwargs))
        self.flat_param.__dict__["_local_shard"] = self._real.flat_param.data

    def _convert(self, fn: Any) -> None:
        self._unit.check_idle("converting a flat parameter")
        self._unit.reshard()
        self._real.adopt_changes()
        self._real.convert(fn)
        forget_tensors(self._unit)


class _UnknownWrapper(dict[str, str]):
    """Replaces a wrapper's mapping of renamed children, to detect callers that do not support wrappers."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return ``default``; raise a UsageError for the wrapped module."""
        if name == FSDP_WRAPPED_MODULE:
            raise UsageError(
                "torch.distributed.checkpoint.state_dict does not know fsdp_flat's wrapper here, so it would take this "
                "rank's local shards for full tensors. Call fsdp_flat.install() first (or use fsdp_flat.installed()), "
                "or call the wrapper's own methods: model.state_dict(), FSDP.optim_state_dict(model, optim) and their "
                "counterparts for loading, or fsdp_flat.save_checkpoint."
            )
        return default


class UndocumentedMembers(GroupMember):
    """Holds the members of FSDP1's wrapper that are not documented; no wrapper inherits from this class."""

    _unit: Unit

    sharding_strategy = _derived("_unit.options.strategy.member")
    compute_device = _derived("_unit.options.device")
    mixed_precision = _derived("_unit.options.mixed_precision")
    cpu_offload = _derived("_unit.options.cpu_offload")
    limit_all_gathers = replaced("_unit.options.limit_all_gathers", bool)
    backward_prefetch = replaced("_unit.options.backward_prefetch", _as_backward_prefetch)
    forward_prefetch = replaced("_unit.options.forward_prefetch", bool)
    training_state = _ReadOnly(lambda self: TRAINING_STATES[self._unit.phase][0])
    _use_full_prec_in_eval = _derived("_unit.options.precision.full_in_eval")
    _device_mesh = _derived("_unit.options.groups.mesh")
    _sync_gradients = assignable("_unit.control.sync_gradients")
    _comm_hook_state = assignable("_unit.policy.hook_state")
    _state_dict_config = _state_setting("state_dict_config")
    _optim_state_dict_config = _state_setting("optim_state_dict_config")
    _has_params = _ReadOnly(lambda self: bool(self._unit.param_groups))
    _ignored_modules = _ReadOnly(lambda self: set(self._unit.ignored.modules))
    _ignored_params = _ReadOnly(lambda self: set(self._unit.ignored.params))

    @property
    def _state_dict_type(self) -> StateDictType:
        """Type of this unit's state dicts. Assigning one gives configs of another type their defaults."""
        return own_settings(self._unit).state_dict.state_dict_type

    @_state_dict_type.setter
    def _state_dict_type(self, value: Any) -> None:
        before, now = own_settings(self._unit).state_dict, settings_for(value, None, None)
        for name in ("state_dict_config", "optim_state_dict_config"):
            if isinstance(getattr(before, name), type(getattr(now, name))):
                setattr(now, name, getattr(before, name))
        own_settings(self._unit).state_dict = now

    @property
    def _comm_hook(self) -> Any:
        """The communication hook of this unit alone. Assigning one, or None, sets it."""
        return self._unit.policy.hook

    @_comm_hook.setter
    def _comm_hook(self, hook: Any) -> None:
        set_comm_hook(self._unit.policy, hook)

    @property
    def _gradient_predivide_factor(self) -> float:
        """Divisor of the unit's gradients before the sum over ranks, applied as in FSDP1 if it is above 1."""
        factor = self._unit.policy.predivide_factor
        return predivide_factor(self._unit.options.groups.num_ranks) if factor is None else factor

    @_gradient_predivide_factor.setter
    def _gradient_predivide_factor(self, factor: float) -> None:
        self._divide_by(factor, self._gradient_postdivide_factor)

    @property
    def _gradient_postdivide_factor(self) -> float:
        """Divisor of the unit's gradients after the sum over ranks, applied as in FSDP1 if it is above 1."""
        total = self._unit.policy.divide_factor
        total = self._unit.options.groups.num_ranks if total is None else total
        return float(total) / self._gradient_predivide_factor

    @_gradient_postdivide_factor.setter
    def _gradient_postdivide_factor(self, factor: float) -> None:
        self._divide_by(self._gradient_predivide_factor, factor)

    def _divide_by(self, before: float, after: float) -> None:
        for factor in (before, after):
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
                raise OptionError(f"A factor that divides gradients must be a number above 0; got {factor!r}.")
            if factor < 1:
                warn_user(
                    f"{factor} divides no gradients: FSDP1 divides by factors above 1 only. Call "
                    "set_gradient_divide_factor with the product of both factors to multiply gradients."
                )
        policy = self._unit.policy
        policy.predivide_factor = max(1.0, float(before))
        policy.divide_factor = policy.predivide_factor * max(1.0, float(after))

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        if self.sharding_strategy not in HYBRID_SHARDING_STRATEGIES:
            raise AttributeError("_inter_node_pg is there with hybrid strategies only.")
        return self._unit.options.groups.replicate.group

    # -- handles -------------------------------------------------------------------------------------------------

    def _named_handles(self) -> list[FlatParamHandle]:
        known = self.__dict__.setdefault("_handle_names", {})
        return [known.setdefault(handle, FlatParamHandle(self._unit, handle)) for handle in self._unit.param_groups]

    @property
    def _handle(self) -> FlatParamHandle | None:
        return next(iter(self._named_handles()), None)

    @property
    def _flat_param(self) -> Any:
        return next(iter(self.params), None)

    @property
    def params(self) -> list[nn.Parameter]:
        return [handle.flat_param for handle in self._named_handles()]

    @property
    def _fully_sharded_module_to_handle(self) -> dict[nn.Module, FlatParamHandle]:
        return {} if self._handle is None else {self._unit.module: self._handle}

    # -- the tree ------------------------------------------------------------------------------------------------

    def _of_root(self: Any, name: str) -> list[Any]:
        if not self._is_root:
            raise AttributeError(f"{name} is there on the outermost wrapper only, after its first use.")
        return wrappers_in(self)

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        return [handle for wrapper in self._of_root("_all_handles") for handle in wrapper._named_handles()]

    @property
    def _all_fsdp_states(self) -> list[Any]:
        return self._of_root("_all_fsdp_states")

    @property
    def _is_root(self) -> bool | None:
        """True for a root; None before the first use. Assigning False or None drops a root's step."""
        root = outermost_of(self._unit)
        return None if root is None else root is self._unit

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        if not value and self._is_root:
            self._reset_lazy_init()

    def _reset_lazy_init(self) -> None:
        reset_step(self._unit.step.units)

    # -- methods -------------------------------------------------------------------------------------------------

    def _assert_state(self, state: Any) -> None:
        """Raise unless the training state is ``state``, or one of several; members of FSDP1's enum match by name."""
        expected = [member.name for member in (state if isinstance(state, Sequence) else [state])]
        if self.training_state.name not in expected:
            raise OptionError(
                f"Unit {self._unit.name!r} was expected to be in {' or '.join(expected)}; it is in "
                f"{self.training_state.name}."
            )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the children that ``torch.distributed.checkpoint.state_dict`` renames: none.

        Its functions look up the wrapped module here only if they treat the wrapper as an ordinary module.
        """
        return _UnknownWrapper()

    def _low_precision_hook_enabled(self) -> bool:
        return self._unit.policy.dtype is not None

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    _unshard = ShardedModule.unshard

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Order later all-gathers after the work issued so far, as after an optimizer's step."""
        self._unit.step.streams.shards_written()

    @contextmanager
    def _deregister_orig_params_ctx(self: Any) -> Generator[None, None, None]:
        """Register flat parameters inside the block, as with ``use_orig_params=False``, here and below."""
        units = units_of(self)
        for unit in units:
            unit.check_idle("_deregister_orig_params_ctx")
            if not unit.options.use_orig_params:
                raise PhaseError(f"Unit {unit.name!r} was made with use_orig_params=False: it shows flat parameters.")
        for unit in units:
            unit.reshard()
            unit.adopt_assigned()
            for position, handle in enumerate(unit.param_groups):
                handle.slots.remove()
                for entry in handle.params:
                    for site in entry.sites:
                        site.module._parameters[site.name] = None
                unit.module._parameters[flat_param_name(position)] = handle.flat_param
        try:
            yield
        finally:
            for unit in units:
                for position, handle in enumerate(unit.param_groups):
                    unit.module._parameters.pop(flat_param_name(position), None)
                    handle.slots.show_sharded()
                    # The caller may have set ``.data``, or changed it in place past its version counter.
                    handle.raise_weights_epoch()
                    handle.adopt_changes()

    # -- optimizer state ------------------------------------------------------------------------------------------

    _optim_state_dict_impl = staticmethod(save_full_or_sharded)
    _optim_state_dict_to_load_impl = staticmethod(load_full_or_sharded)

    @contextmanager
    def _use_training_state(
        self, training_state: TrainingState, handle_training_state: HandleTrainingState
    ) -> Generator[None, None, None]:
        """Set the state of the step inside the block, and restore it. BACKWARD_POST is BACKWARD_PRE here."""
        wanted = training_state, handle_training_state
        if wanted[1] is HandleTrainingState.BACKWARD_POST:
            wanted = training_state, HandleTrainingState.BACKWARD_PRE
        phase = next((phase for phase, states in TRAINING_STATES.items() if states == wanted), None)
        if phase is None:
            raise OptionError(f"{training_state} and {handle_training_state} do not occur together; got both.")
        before, self._unit.phase = self._unit.phase, phase
        try:
            yield
        finally:
            self._unit.phase = before

    @staticmethod
    def _warn_optim_input(optim_input: OptimInput, *, stacklevel: int = 1) -> None:
        warn_of_optim_input(optim_input)

    @staticmethod
    def _warn_legacy_optim_state_dict(curr: str, new: str, *, stacklevel: int = 1) -> None:
        warn_of_older_form(curr, new)

    @staticmethod
    def _is_using_optim_input(optim_input: OptimInput, optim: torch.optim.Optimizer | None) -> bool:
        return optim_input is not None or optim is None


def add_undocumented_members(wrapper: type[nn.Module]) -> None:
    """Add the members of :class:`UndocumentedMembers` to the wrapper class, except for those that it defines itself."""
    for name, member in {**vars(GroupMember), **vars(UndocumentedMembers)}.items():
        if not name.startswith("__") and name not in vars(wrapper):
            setattr(wrapper, name, member)


def _get_grad_norm(
    params: Iterable[nn.Parameter], norm_type: float, zero: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the fp32 norm of this rank's gradients of some parameters, as one vector; without any, ``zero``."""
    grads = [param.grad for param in params if param.grad is not None]
    return local_norm(grads, norm_type, device, torch.float32) if grads else zero


def _get_param_to_fqn(model: nn.Module) -> dict[nn.Parameter, str]:
    """Map each parameter of a model without flat parameters to its first name in the plain model."""
    found: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        if getattr(param, "_is_flat_param", False):
            raise OptionError(f"{name!r} is a flat parameter, which has the names of several; its _fqns lists them.")
        found.setdefault(param, clean_fqn(name))
    return found


def _get_fqn_to_param(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the inverse of :func:`_get_param_to_fqn`."""
    return {name: param for param, name in _get_param_to_fqn(model).items()}
