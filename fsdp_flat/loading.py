"""Makes the load of a wrapper, with all that is nested in it, atomic: everything is checked, then written, or nothing.

If ``load_state_dict`` is called on the wrapper, nothing is written for missing or unexpected names either. If it is
called on a plain module around wrappers, each outermost wrapper checks its own values, and torch goes on to the next
module; it raises in the end for names and for other modules, and what fitted until then stays written, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_flat.errors import LoadError
from fsdp_flat.flat import modules_of
from fsdp_flat.layout import clean_fqn, clean_text
from fsdp_flat.runtime import check_idle, unit_of, units_of
from fsdp_flat.state import LoadReport

__all__ = ["ModelLoad", "all_or_nothing", "end_load", "report_of"]


class ModelLoad:
    """Loads a wrapper and those nested in it, each of which refers to this object meanwhile.

    Args:
        wrapper: the outermost wrapper of the load.
        strict: missing or unexpected names are an error of this load.
        assign: the argument of ``load_state_dict``.

    Attributes:
        report: errors found so far and pending writes; None before torch has begun.
    """

    def __init__(self, wrapper: nn.Module, *, strict: bool, assign: bool) -> None:
        self.wrapper = wrapper
        self.report: LoadReport | None = None
        self._strict = strict
        self._snapshot = _Snapshot(wrapper, assign=assign)
        self._is_put_off = False
        units = ((child, unit_of(child)) for child in modules_of(wrapper))
        # Modules of fully_shard load as torch's do.
        self._wrappers = [child for child, unit in units if unit is not None and not unit.shows_dtensors]
        for child in self._wrappers:
            child._load = self  # type: ignore[assignment]

    def release(self) -> None:
        """End the load of the wrappers."""
        for child in self._wrappers:
            if child._load is self:
                del child._load

    def end(self, keys: Any) -> None:
        """Write all values unless one does not fit; with missing or unexpected names put this off until torch raises.

        Hooks that run later may take such names off the list. Where ranks exchange chunks, they agree now.
        """
        assert self.report is not None
        self._is_put_off = self._strict and bool(keys.missing_keys or keys.unexpected_keys)
        if not self._is_put_off:
            self.release()
        if not self._is_put_off or self.report.exchanging_units:
            self._commit(self.report, refused=self._is_put_off)

    def _commit(self, report: LoadReport, *, refused: bool) -> None:
        report.commit(refused=refused)
        if refused or report.errors:
            self._snapshot.restore()
        # If an exception follows a commit, new buffers belong to the new shards.
        self._snapshot.discard()

    def write_late(self) -> None:
        """Write the values that were put off, since torch has not raised.

        Raises:
            LoadError: ranks exchange chunks, and had to agree earlier that nothing is written.
        """
        if not self._is_put_off or self.report is None:
            return
        self._is_put_off = False
        if self.report.exchanging_units:
            raise LoadError(
                "; ".join(self.report.errors)
                or "Names were missing or unexpected, so nothing was loaded, but a load hook has taken them off the "
                "list. Load sharded state dicts with strict=False instead."
            )
        self._commit(self.report, refused=False)

    def undo(self) -> None:
        """Restore the tensors that are not sharded, unless the values were written."""
        self._snapshot.restore()


@contextmanager
def all_or_nothing(wrapper: nn.Module, *, strict: bool, assign: bool) -> Iterator[None]:
    """Load ``wrapper`` by torch's ``load_state_dict`` inside the block; after an exception nothing has changed.

    Args:
        wrapper: the wrapper on which ``load_state_dict`` was called.
        strict, assign: its arguments.
    """
    outer: ModelLoad | None = wrapper._load  # type: ignore[assignment]
    if outer is not None:
        # A hook of that load calls this: its values come first, as in torch.
        outer.write_late()
    load = ModelLoad(wrapper, strict=strict, assign=assign)
    try:
        yield
        load.write_late()
    except BaseException:
        load.undo()
        raise
    finally:
        load.release()


def report_of(wrapper: nn.Module, local_metadata: dict[str, Any], missing: list[str], errors: list[str]) -> LoadReport:
    """Return the report to which the load of a wrapper adds its errors and writes.

    Args:
        wrapper: the wrapper to be loaded now.
        local_metadata: torch's, which holds ``assign``.
        missing, errors: the lists that torch keeps for the call.
    """
    load: ModelLoad | None = wrapper._load  # type: ignore[assignment]
    if load is not None and load.report is None and load.wrapper is wrapper:
        load.report = LoadReport(missing, errors)
    if load is None or load.report is None or load.report.errors is not errors:
        # Called on a plain module, whose ``strict`` torch does not pass on.
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        load = ModelLoad(wrapper, strict=False, assign=assign)
        load.report = LoadReport(missing, errors)
    return load.report


def end_load(module: nn.Module, keys: Any) -> None:
    """Clean the names in errors, as a load hook; at the outermost wrapper end the load.

    Raises:
        LoadError: the wrapper was loaded again by a hook below it, so that the values of the outer load are lost.
    """
    keys.missing_keys[:] = map(clean_fqn, keys.missing_keys)
    keys.unexpected_keys[:] = map(clean_fqn, keys.unexpected_keys)
    load: ModelLoad | None = module._load  # type: ignore[assignment]
    if load is None or load.report is None or load.report.missing is not keys.missing_keys:
        raise LoadError(
            f"A load hook inside of {type(module).__name__} called load_state_dict on it, or on a module around it, "
            "before its own load was over. Load it after the outer load."
        )
    if load.wrapper is module:
        # The wrapped modules have added their errors by now.
        load.report.errors[:] = map(clean_text, load.report.errors)
        load.end(keys)


class _Snapshot:
    """Holds tensors that a load may overwrite besides flat shards: buffers, and parameters that no wrapper manages."""

    def __init__(self, root: nn.Module, *, assign: bool) -> None:
        managed: set[nn.Parameter] = set()
        for unit in units_of(root):
            if not unit.shows_dtensors:
                managed.update(param for handle in unit.handles for param in handle.views.visible_params())
            else:
                check_idle(unit, "load_state_dict")
                unit.reshard()
        self._held: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | None]] = []
        for module in modules_of(root):
            for tensors in (module._buffers, module._parameters):
                for name, tensor in tensors.items():
                    if tensor is None or tensor in managed or name in module._non_persistent_buffers_set:
                        continue
                    if is_lazy(tensor):
                        continue
                    # A DTensor of fully_shard that takes the place of another one takes its memory too.
                    copied = None if assign and not isinstance(tensor, DTensor) else tensor.detach().clone()
                    self._held.append((tensors, name, tensor, copied))

    def restore(self) -> None:
        """Restore the tensors that have changed."""
        with torch.no_grad():
            for tensors, name, tensor, copied in self._held:
                tensors[name] = tensor
                if copied is not None and not _is_equal(tensor, copied):
                    tensor.copy_(copied)

    def discard(self) -> None:
        """Drop the snapshot and keep the current values."""
        self._held.clear()


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the values that this rank has of two tensors."""
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other)
