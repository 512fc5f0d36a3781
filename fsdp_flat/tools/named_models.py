"""Makes the model that a command line names, on the meta device where it can: :func:`named_model`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError, UsageError, some_of


def named_model(name: str, *, allow_pickle: bool) -> nn.Module:
    """Return the model that a name means, without memory for its parameters.

    Args:
        name: ``module:function`` or ``module:Class``, called without arguments; the path of a hub model's
            ``config.json`` (needs transformers); or that of a model, saved whole by ``torch.save``.
        allow_pickle: unpickle a saved model, for which code that the file names runs.

    Raises:
        OptionError: there is no such thing, or it gives no model.
        UsageError: transformers is needed and not installed.
    """
    path = Path(name)
    if path.suffix == ".json":
        made = _of_config(path)
    elif path.exists():
        if not allow_pickle:
            raise OptionError(f"{path}: a saved model is made by code that the file names; allow it by --allow-pickle.")
        made = torch.load(path, map_location="meta", weights_only=False)
    else:
        made = _of_import(name)
    if not isinstance(made, nn.Module):
        raise OptionError(f"{name} gives a {type(made).__name__}; expected a torch.nn.Module.")
    return made


def _of_import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise OptionError(f"{name} is no file; name a model by module:function, as in train:build.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{name} cannot be imported: {error}.") from error
    with torch.device("meta"):
        return made if isinstance(made, nn.Module) else made()


def _of_config(path: Path) -> Any:
    try:
        config = json.loads(path.read_text())
        architectures = [*(config.get("architectures") or ()), "AutoModel"]
        if "model_type" not in config:
            raise KeyError("model_type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is no config.json of a hub model: {error!r}.") from error
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{path} needs transformers (pip install transformers): {error}.") from error
    cls = getattr(transformers, architectures[0], transformers.AutoModel)
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    with torch.device("meta"):
        return make(transformers.AutoConfig.for_model(**config))


def classes_named(model: nn.Module, names: list[str]) -> set[type[nn.Module]]:
    """Return the classes of a model's modules that have these names; raise an OptionError for an unknown one."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    if unknown := [name for name in names if name not in there]:
        raise OptionError(f"The model has no {unknown[0]}; it has {some_of(sorted(there), 12)}.")
    return {there[name] for name in names}
