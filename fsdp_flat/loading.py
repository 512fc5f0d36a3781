"""Makes ``load_state_dict`` atomic: all of it is written, or nothing.

If the loaded module is a wrapper, everything is checked before anything is written. If it is a plain module with
wrappers inside, a wrapper has no access to errors of the other modules, so each wrapper is written in order, as plain
modules are, and restored if the load fails in the end. Two things are not restored: values that plain modules loaded
before the first wrapper, and any values after an exception that ends torch's call, since no hook runs for these.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp_flat.errors import FsdpFlatError, LoadError
from fsdp_flat.flat import FlatParamHandle, modules_of
from fsdp_flat.layout import clean_fqn, clean_text
from fsdp_flat.runtime import Unit, unit_of, units_of
from fsdp_flat.state import LoadReport, failed_anywhere

__all__ = ["all_or_nothing", "end_load", "report_of"]


@dataclass(eq=False, slots=True)
class _Load:
    """Tracks a call of ``load_state_dict`` in which wrappers take part.

    Attributes:
        root: the module that it was called on.
        strict: missing or unexpected names are an error.
        missing, errors: the lists that torch keeps for the call.
        owner: the outermost wrapper that is being loaded; None between wrappers.
        report: errors and pending writes of the owner.
        held: copies of shards below a plain root from before they were written.
        snapshot: snapshot of the other tensors that the load may overwrite there.
        exchanging_units: units below a plain root whose ranks exchanged chunks.
        at_end: callbacks to run once the call is over, however it ends.
    """

    root: nn.Module
    strict: bool
    missing: list[str]
    errors: list[str]
    owner: nn.Module | None = None
    report: LoadReport | None = None
    held: dict[FlatParamHandle, torch.Tensor] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    exchanging_units: list[Unit] = field(default_factory=list)
    at_end: list[Callable[[], object]] = field(default_factory=list)

    def refuses(self, keys: Any) -> bool:
        """Return whether torch will raise for names alone."""
        return self.strict and bool(keys.missing_keys or keys.unexpected_keys)


# Loads in progress, by the identity of the list of errors.
_loads_in_progress: dict[int, _Load] = {}
# Attributes of a wrapper during a load: writes deferred until torch has not raised, and its snapshot.
_DEFERRED, _SNAPSHOT = "_load_put_off", "_load_beside"


def report_of(wrapper: nn.Module, missing: list[str], errors: list[str]) -> LoadReport:
    """Return the report of the load in progress: errors found so far, and pending writes.

    Args:
        wrapper: the wrapper to be loaded now.
        missing, errors: the lists that torch keeps for the call.
    """
    load = _loads_in_progress.get(id(errors))
    if load is None:
        load = _begin_load(wrapper, missing, errors)
    if load.report is None:
        load.owner, load.report = wrapper, LoadReport(missing, errors)
    return load.report


def _begin_load(wrapper: nn.Module, missing: list[str], errors: list[str]) -> _Load:
    calls = list(_calls())
    call: Mapping[str, Any] = next((each for each in calls if each["error_msgs"] is errors), {})
    root = call.get("self", wrapper)
    if unit_of(root) is None and len(calls) > 1:
        # A plain module in a hook of another load: torch may be iterating over its hooks, which must not change then.
        call, root = {}, wrapper
    load = _Load(root, call.get("strict", False), missing, errors)
    _loads_in_progress[id(errors)] = load
    if "load" in call:
        # torch's inner function is freed when the call ends, also after an exception.
        weakref.finalize(call["load"], _end, load)
    if unit_of(root) is None:
        hooks: OrderedDict[int, Callable[..., Any]] = root._load_state_dict_post_hooks
        if end_load not in hooks.values():
            root.register_load_state_dict_post_hook(end_load)
        # Run after the user's hooks, which may remove missing names.
        hooks.move_to_end(next(key for key, hook in hooks.items() if hook is end_load))
        load.snapshot = Snapshot(root, assign=call.get("assign", False))
        load.at_end = _record_versions(root, call.get("metadata"))
    return load


def _end(load: _Load) -> None:
    if _loads_in_progress.get(id(load.errors)) is load:
        del _loads_in_progress[id(load.errors)]
        for finish in load.at_end:
            finish()


def _calls() -> Iterator[Mapping[str, Any]]:
    """Yield the local variables of every ``load_state_dict`` in progress; torch does not pass them to submodules."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "load_state_dict" and "error_msgs" in frame.f_locals:
            yield frame.f_locals
        frame = frame.f_back


def end_load(module: nn.Module, keys: Any) -> None:
    """Clean the names in errors, as a load hook; at the outermost wrapper write the values if there are no errors."""
    load = next((each for each in list(_loads_in_progress.values()) if each.missing is keys.missing_keys), None)
    if load is None:
        return
    keys.missing_keys[:] = map(clean_fqn, keys.missing_keys)
    keys.unexpected_keys[:] = map(clean_fqn, keys.unexpected_keys)
    # The wrapped modules have added their errors by now.
    load.errors[:] = map(clean_text, load.errors)
    report = load.report
    if report is not None and load.owner is module:
        load.owner = load.report = None
        if module is load.root:
            _end(load)
            refused = load.refuses(keys)
            if refused:
                module.__dict__[_DEFERRED] = report
            if not refused or report.exchanging_units:
                _write(module, report, refused=refused)
        else:
            for unit in units_of(module):
                for handle in unit.handles:
                    # A unit that is registered twice is written twice.
                    if handle not in load.held:
                        load.held[handle] = handle.flat_param.data.to("cpu", copy=True)
            load.exchanging_units += report.exchanging_units
            report.commit(refused=False)
    elif module is load.root:
        _end(load)
        _end_below_plain_root(load, keys)


def _end_below_plain_root(load: _Load, keys: Any) -> None:
    error: FsdpFlatError | None = None
    if load.errors or load.refuses(keys):
        error = LoadError("; ".join(load.errors[:3]) or "keys are missing or unexpected")
    elsewhere = failed_anywhere(load.exchanging_units, error)
    load.errors += elsewhere
    if error is not None or elsewhere:
        with torch.no_grad():
            for handle, held in load.held.items():
                handle.flat_param.data.copy_(held)
                handle.views.bump_version()
        if load.snapshot is not None:
            load.snapshot.restore()


def _write(root: nn.Module, report: LoadReport, *, refused: bool) -> None:
    report.commit(refused=refused)
    if not refused and not report.errors:
        # Also if an error follows, new buffers belong to the new shards.
        snapshot = root.__dict__.get(_SNAPSHOT)
        if snapshot is not None:
            snapshot.discard()


def _record_versions(root: nn.Module, versions: dict[str, Any] | None) -> list[Callable[[], object]]:
    """Add the versions saved by a plain model under the names of wrapped modules; return callbacks that remove them."""
    if versions is None:
        return []
    names = {name: clean_fqn(name) for name, _ in root.named_modules()}
    added = {name: versions[clean] for name, clean in names.items() if clean in versions and name not in versions}
    versions.update(added)
    return [partial(versions.pop, name, None) for name in added]


def commit_late(root: nn.Module) -> None:
    """Write the values that were deferred because of missing or unexpected names, since torch has not raised.

    Raises:
        LoadError: ranks exchange chunks, and had to agree earlier that nothing is written.
    """
    report: LoadReport | None = root.__dict__.pop(_DEFERRED, None)
    if report is None:
        return
    if not report.exchanging_units:
        _write(root, report, refused=False)
    if report.exchanging_units or report.errors:
        raise LoadError(
            "; ".join(report.errors)
            or "Names were missing or unexpected, so nothing was loaded, but a load hook has taken them off the list. "
            "Load sharded state dicts with strict=False instead."
        )


@contextmanager
def all_or_nothing(root: nn.Module, *, assign: bool) -> Iterator[None]:
    """Load a wrapper inside the block; restore tensors that are not sharded if no shard was written."""
    # If a hook of another load calls this, write the deferred values of that load first, as in torch.
    commit_late(root)
    outer = root.__dict__.get(_SNAPSHOT)
    snapshot = root.__dict__[_SNAPSHOT] = Snapshot(root, assign=assign)
    try:
        yield
        commit_late(root)
    except BaseException:
        snapshot.restore()
        raise
    finally:
        root.__dict__.pop(_DEFERRED, None)
        root.__dict__.pop(_SNAPSHOT, None)
        if outer is not None:
            root.__dict__[_SNAPSHOT] = outer


class Snapshot:
    """Holds tensors that a load may overwrite besides shards: buffers, and parameters that no unit manages."""

    def __init__(self, root: nn.Module, *, assign: bool) -> None:
        managed = {
            param for unit in units_of(root) for handle in unit.handles for param in handle.views.visible_params()
        }
        self._held: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | None]] = []
        for module in modules_of(root):
            for tensors in (module._buffers, module._parameters):
                for name, tensor in tensors.items():
                    if tensor is None or tensor in managed or name in module._non_persistent_buffers_set:
                        continue
                    if is_lazy(tensor):
                        continue
                    copied = None if assign else tensor.detach().clone()
                    self._held.append((tensors, name, tensor, copied))

    def restore(self) -> None:
        """Restore the tensors that have changed."""
        with torch.no_grad():
            for tensors, name, tensor, copied in self._held:
                tensors[name] = tensor
                if copied is not None and not torch.equal(tensor, copied):
                    tensor.copy_(copied)

    def discard(self) -> None:
        """Drop the snapshot and keep the current values."""
        self._held.clear()
