"""Names adapters of the peft package as its files do; the package is not imported."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_flat.core import unit_of

ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
_OWN_PREFIX = "base_model."  # of names in a PeftModel
_FILE_PREFIX = "base_model.model."  # of names in files


@dataclass(frozen=True, slots=True)
class Adapters:
    """Holds the adapters of a model, by their names, with their configurations.

    Attributes:
        module: the model that has them, inside of its unit.
        configs: objects with peft's ``save_pretrained``.
    """

    module: nn.Module
    configs: Mapping[str, Any]

    def owner(self, name: str) -> str:
        """Return the adapter that a name of the model belongs to: the first one, for what is of none."""
        words = name.split(".")
        return next((adapter for adapter in self.configs if adapter in words), self.first)

    @property
    def first(self) -> str:
        """The adapter whose files are in the folder itself, if it is called as peft calls the first."""
        return "default" if "default" in self.configs else next(iter(self.configs))

    def folder(self, adapter: str) -> str:
        """Return the folder of an adapter, in that of all, where peft has it."""
        return "" if adapter == "default" or len(self.configs) == 1 else adapter

    def stored_name(self, name: str, adapter: str) -> str:
        """Return the name that files of an adapter have for a name of the model: that without the adapter's."""
        words = name.split(".")
        if adapter in words:
            at = len(words) - 1 - words[::-1].index(adapter)
            # The copy of a module that is trained as a whole is stored under the module's own name.
            del words[at - 1 if words[at - 1] == "modules_to_save" else at : at + 1]
        stored = ".".join(words)
        # A model of transformers that has adapters itself (add_adapter) is no PeftModel.
        return stored if stored.startswith(_OWN_PREFIX) else _FILE_PREFIX + stored

    def config_of(self, adapter: str) -> dict[str, Any]:
        """Return the configuration of an adapter as peft's own method writes it, for inference."""
        config = copy.copy(self.configs[adapter])
        config.inference_mode = True
        base: Any = self.module
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
        mapping = None
        if config.task_type is None:
            # fully_shard puts FSDP before the name of the class that it extends.
            names = (type(base).__name__, type(base).__name__.removeprefix("FSDP"))
            kind = [each for each in type(base).__mro__ if each.__name__ in names][-1]
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder, auto_mapping_dict=mapping)
            found: dict[str, Any] = json.loads(Path(folder, ADAPTER_CONFIG_NAME).read_text())
        return found


def adapters_of(model: nn.Module) -> Adapters | None:
    """Return the adapters of a model that has peft's ``peft_config``, or None.

    Soft prompts are left out: their files do not hold parameters, but what is computed from them.
    """
    unit = unit_of(model)
    module = model if unit is None else unit.module
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    if any(not hasattr(each, "save_pretrained") or not hasattr(each, "task_type") for each in configs.values()):
        return None
    if any(getattr(each, "is_prompt_learning", False) for each in configs.values()):
        return None
    return Adapters(module, configs)
