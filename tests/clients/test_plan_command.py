"""``fsdp-flat plan`` on the config.json of a hub model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_flat.tools.command import main
from fsdp_flat.tools.named_models import named_model
from tests.tools.test_planning_page import OUTPUTS, ROOT, assert_shown

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "vocab_size": 4096}
BERT = {"model_type": "bert", "num_hidden_layers": 2, "num_labels": 3, "vocab_size": 100}
VIT = {"model_type": "vit", "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}


def test_a_config_gives_the_model_of_its_architecture_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 100}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    model = named_model(str(tmp_path / "config.json"), allow_pickle=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(model.model.layers) == 2
    assert {param.device.type for param in model.parameters()} == {"meta"}


def planned(
    tmp_path: Path, config: dict[str, object], capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, Any]:
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **config}))
    assert main(["plan", str(path), "--ranks", "2", "--json", *flags]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_hub_model_is_planned_for_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No cache, fp32 states of a bf16 config, and the loss."""
    tokens = ["--batch", "2x64", "--tokens", "--wrap", "LlamaDecoderLayer", "--recompute"]
    low = {**LLAMA, "torch_dtype": "bfloat16"}
    found = planned(tmp_path, low, capsys, *tokens)
    assert found["assumed"]["precision"].startswith("bf16: float32 parameters, gradients and optimizer states")
    assert found["assumed"]["loss"] == "the model's own, from labels"
    numel = sum(unit["numel"] for unit in found["units"])
    assert found["phases"]["forward"]["optimizer"] == pytest.approx(2 * 4 * numel / 2, rel=0.01)
    without_cache = planned(tmp_path, {**low, "use_cache": False}, capsys, *tokens)
    assert found["phases"] == without_cache["phases"]
    pure = planned(tmp_path, low, capsys, *tokens, "--precision", "pure-bf16")
    assert pure["phases"]["forward"]["optimizer"] == pytest.approx(2 * 2 * numel / 2, rel=0.01)
    logits = 2 * 64 * 4096 * 4
    assert found["peak"]["activations"] > 2 * logits, "the loss is computed in fp32"


@pytest.mark.parametrize(
    ("config", "flags", "loss"),
    [
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, ["--batch", "2x16", "--tokens"], "from labels"),
        ({**BERT, "architectures": ["BertModel"]}, ["--batch", "2x16", "--tokens"], "sum of its output"),
        ({**VIT, "architectures": ["ViTForImageClassification"]}, ["--batch", "2x3x32x32"], "from labels"),
    ],
)
def test_models_of_other_tasks_get_the_labels_that_they_take(
    config: dict[str, object], flags: list[str], loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for precision in ("bf16", "pure-bf16"):
        found = planned(tmp_path, config, capsys, *flags, "--precision", precision)
        assert loss in found["assumed"]["loss"]


def test_the_page_shows_the_largest_batch_that_the_command_finds() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    command = OUTPUTS["batch.txt"].splitlines()[0]
    words = [sys.executable, "-m", "fsdp_flat", *command.removeprefix("$ fsdp-flat ").split()]
    found = subprocess.run(words, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "\nbatch: 4x8192, the largest that fits 80.0 GB\n" in found
    assert_shown("batch.txt", f"{command}\n{found}")


def test_a_hub_model_of_tokens_asks_for_the_flag_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **LLAMA}))
    assert main(["plan", str(tmp_path / "config.json"), "--ranks", "2", "--batch", "2x16"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "",
        "fsdp-flat plan: LlamaForCausalLM takes input_ids, and --batch is of floats: add --tokens.\n",
    )
