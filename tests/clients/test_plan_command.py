"""``fsdp-flat plan`` on the config.json of a hub model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_flat.tools.named_models import named_model


def test_a_config_gives_the_model_of_its_architecture_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    model = named_model(str(tmp_path / "config.json"), allow_pickle=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(model.model.layers) == 2
    assert {param.device.type for param in model.parameters()} == {"meta"}
