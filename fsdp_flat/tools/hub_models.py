"""Builds a hub model from its ``config.json`` for training, and the batch that it is trained on; needs transformers."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError, UsageError
from fsdp_flat.tools.text import words_of

# Ends of names of classes that take a label for each token, and for each example.
_LABEL_PER_TOKEN = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForPreTraining",
    "ForTokenClassification",
    "LMHeadModel",
)
_LABEL_PER_EXAMPLE = ("ForAudioClassification", "ForImageClassification", "ForSequenceClassification")


def is_hub_config(name: str) -> bool:
    """Say whether a name of a model is the path of a hub model's ``config.json``."""
    return Path(name).suffix == ".json"


def hub_model(path: Path) -> nn.Module:
    """Return the model of a ``config.json`` on the meta device, in its dtype, without a cache of keys and values.

    Raises:
        OptionError: the file is no config of a hub model that transformers knows.
        UsageError: transformers is not installed.
    """
    try:
        fields = json.loads(path.read_text())
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ValueError('it has no "model_type"')
        architectures = [str(name) for name in fields.get("architectures") or ["AutoModel"]]
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(f"{path} is no config.json of a hub model: {words_of(error)}.") from error
    try:
        import transformers
    except ImportError as error:
        missing = error.name or "transformers"
        raise UsageError(f"{path} needs {missing} (pip install {missing}): {error}.") from error
    cls: Any = getattr(transformers, architectures[0], transformers.AutoModel)
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        config = transformers.AutoConfig.for_model(**fields)
        # Training fills no cache, and a cache would count as activations.
        for part in (config, *vars(config).values()):
            if isinstance(part, transformers.PretrainedConfig):
                part.use_cache = False
        with torch.device("meta"):
            made = make(config)
    except Exception as error:
        raise OptionError(f"transformers makes no model of {path}: {words_of(error)}.") from error
    if not isinstance(made, nn.Module):
        raise OptionError(f"{path} gives a {type(made).__name__}; expected a torch.nn.Module.")
    return made.train()


def hub_batch(model: nn.Module, given: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return keyword arguments of a hub model's forward: ``given``, and labels if the model computes a loss from them.

    Raises an OptionError if the model takes tokens and ``given`` is of floating-point numbers, or the other way round.
    """
    name, cls = str(getattr(model, "main_input_name", "input_ids")), type(model).__name__
    is_tokens = not given.is_floating_point()
    if is_tokens != (name == "input_ids"):
        change = "leave out --tokens" if is_tokens else "add --tokens"
        raise OptionError(f"{cls} takes {name}, and --batch is of {'integers' if is_tokens else 'floats'}: {change}.")
    batch = {name: given}
    if "labels" in inspect.signature(model.forward).parameters:
        if cls.endswith(_LABEL_PER_EXAMPLE):
            batch["labels"] = torch.empty(len(given), dtype=torch.long, device="meta")
        elif is_tokens and cls.endswith(_LABEL_PER_TOKEN):
            batch["labels"] = torch.empty_like(given)
    return batch
