"""Makes the model that a command line names, on the meta device where it can: :func:`named_model`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import FsdpFlatError, OptionError, some_of
from fsdp_flat.tools.hub_models import hub_model, is_hub_config
from fsdp_flat.tools.text import words_of


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
    if is_hub_config(name):
        return hub_model(path)
    made = _saved_model(path, allow_pickle=allow_pickle) if path.exists() else _built_model(name)
    if not isinstance(made, nn.Module):
        raise OptionError(f"{name} gives a {type(made).__name__}; expected a torch.nn.Module.")
    return made


def _saved_model(path: Path, *, allow_pickle: bool) -> Any:
    if path.is_dir():
        raise OptionError(f"{path} is a folder; name a model's config.json, a saved model, or module:function.")
    if not allow_pickle:
        raise OptionError(f"{path}: a saved model is made by code that the file names; allow it by --allow-pickle.")
    try:
        return torch.load(path, map_location="meta", weights_only=False)
    except Exception as error:
        raise OptionError(f"{path} is no model of torch.save: {words_of(error)}.") from error


def _built_model(name: str) -> Any:
    made = imported(name)
    if isinstance(made, nn.Module) or not callable(made):
        return made
    try:
        with torch.device("meta"):
            return made()
    except (Exception, SystemExit) as error:
        raise OptionError(
            f"{name}() raises {words_of(error)}. Name a function without arguments that builds the model."
        ) from error


def imported(name: str) -> Any:
    """Return what ``module:name`` means, imported with the current folder on the path.

    Raises an OptionError if there is no such thing, or importing it raises.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise OptionError(f"{name} is no file; name a model by module:function, as in train:build.")
    if not all(part.isidentifier() for part in module.split(".")):
        raise OptionError(
            f"{name} is no name of a module: write it as an import does, as in package.model:build, from the folder "
            "that holds the package."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made: Any = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{name} cannot be imported: {error}.") from error
    except FsdpFlatError:
        raise
    except (Exception, SystemExit) as error:  # of the module's own code
        raise OptionError(
            f"{name} cannot be imported, which runs its file: {words_of(error)}. Put what trains below "
            'if __name__ == "__main__".'
        ) from error
    return made


def classes_named(model: nn.Module, names: list[str]) -> set[type[nn.Module]]:
    """Return the classes of a model's modules that have these names; raise an OptionError for an unknown one."""
    there = {type(module).__name__: type(module) for module in model.modules()}
    if unknown := [name for name in names if name not in there]:
        raise OptionError(f"The model has no {unknown[0]}; it has {some_of(sorted(there), 12)}.")
    return {there[name] for name in names}
