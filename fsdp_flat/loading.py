"""One ``load_state_dict``, from its first wrapper to its end: all of it is written, or nothing."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from fsdp_flat.layout import FSDP_PREFIX, clean_fqn
from fsdp_flat.runtime import unit_of, units_of
from fsdp_flat.state_dict import LoadReport

__all__ = ["Snapshot", "end_load", "forget", "report_of"]

_REPORT = "_load_report"


def report_of(wrapper: nn.Module, missing: list[str], errors: list[str]) -> LoadReport:
    """What the load that is going on has found so far.

    Args:
        wrapper: a wrapper that is being loaded.
        missing, errors: the lists that torch keeps for the load.
    """
    report: LoadReport | None = wrapper.__dict__.get(_REPORT)
    # The list of errors tells this load from one that an exception ended.
    if report is None or report.errors is not errors:
        root, strict, versions = _load_going_on(errors) or (wrapper, False, None)
        report = LoadReport(strict, missing, errors, owner=root)
        for module in root.modules():
            if module is root or unit_of(module) is not None:
                module.__dict__[_REPORT] = report
        if unit_of(root) is None:
            if end_load not in root._load_state_dict_post_hooks.values():
                root.register_load_state_dict_post_hook(end_load)
            _tell_versions(root, versions)
    return report


def _load_going_on(errors: list[str]) -> tuple[nn.Module, bool, dict[str, Any] | None] | None:
    """The module whose ``load_state_dict`` this is, whether it is strict, and the versions that were saved.

    torch tells them to no module further in, but what a plain parent will find wrong after its wrapped children are
    loaded has to be known before anything is written. So they are read off the call itself.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        found = frame.f_locals if frame.f_code.co_name == "load_state_dict" else {}
        if found.get("error_msgs") is errors:
            return found["self"], found["strict"], found.get("metadata")
        frame = frame.f_back
    return None


def _tell_versions(root: nn.Module, versions: dict[str, Any] | None) -> None:
    """Note the versions that a plain model was saved with under the names of wrapped modules too."""
    if versions is not None:
        for name, _ in root.named_modules():
            saved = versions.get(clean_fqn(name))
            if saved is not None:
                versions.setdefault(name, saved)


def end_load(module: nn.Module, keys: Any) -> None:
    """A load hook: errors without wrapper words, and at the root of the load the writing, if there are none."""
    report: LoadReport | None = module.__dict__.pop(_REPORT, None)
    if report is None:
        return
    keys.missing_keys[:] = map(clean_fqn, keys.missing_keys)
    keys.unexpected_keys[:] = map(clean_fqn, keys.unexpected_keys)
    # By now the wrapped modules have added theirs to the list.
    report.errors[:] = [text.replace(FSDP_PREFIX, "") for text in report.errors]
    if report.owner is module:
        report.carry_out(refused=report.strict and bool(keys.missing_keys or keys.unexpected_keys))


def forget(root: nn.Module) -> None:
    """Let go of what a load has read that an exception ended."""
    for module in root.modules():
        module.__dict__.pop(_REPORT, None)


class Snapshot:
    """What a load may overwrite besides shards: buffers, and parameters that no unit manages."""

    def __init__(self, root: nn.Module, *, assign: bool) -> None:
        managed = {
            param for unit in units_of(root) for handle in unit.handles for param in handle.views.visible_params()
        }
        self._held: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | None]] = []
        for module in root.modules():
            for tensors in (module._buffers, module._parameters):
                for name, tensor in tensors.items():
                    if tensor is None or tensor in managed or name in module._non_persistent_buffers_set:
                        continue
                    copied = None if assign else tensor.detach().clone()
                    self._held.append((tensors, name, tensor, copied))

    def restore(self) -> None:
        """Put it back."""
        with torch.no_grad():
            for tensors, name, tensor, copied in self._held:
                tensors[name] = tensor
                if copied is not None:
                    tensor.copy_(copied)
