"""What save_full writes of a peft model is what peft reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from fsdp_flat import FullyShardedDataParallel, fully_shard, load_full, save_full
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.clients.kit import tokens
from tests.clients.test_peft import model_of
from tests.support import on_ranks
from tests.support.transport import rank_device

OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "module_saved_whole": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "no_task_type": {"task_type": None},
}


def adapted(options: dict[str, Any], seed: int, *names: str) -> Any:
    torch.manual_seed(seed)
    arguments = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **options}
    config = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **arguments)
    model = get_peft_model(model_of(0), config)
    for name in names:
        model.add_adapter(name, config)
        model.set_adapter(name)
    return model


def sharded(model: Any, form: str) -> Any:
    layers = model.get_base_model().model.layers
    if form == "wrapper":
        policy = ModuleWrapPolicy({type(layers[0])})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=rank_device())
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens()[:4]).logits


@pytest.mark.filterwarnings("ignore")  # peft warns of embeddings among the targets
@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("kind", OPTIONS)
@on_ranks(2)
def test_peft_reads_the_adapter_that_save_full_writes(kind: str, form: str, tmp_path: Path) -> None:
    plain = adapted(OPTIONS[kind], 3)
    names = {name for name, value in plain.named_parameters() if value.requires_grad}
    expected = get_peft_model_state_dict(plain, save_embedding_layers=False)
    model = sharded(adapted(OPTIONS[kind], 3), form)
    save_full(model, tmp_path, trainable_only=True)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert len(found) == len(names)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not (tmp_path / "model.safetensors").exists()
    read = PeftModel.from_pretrained(model_of(0), tmp_path)
    assert torch.equal(logits(read), logits(plain))
    plain.save_pretrained(tmp_path / f"peft{dist.get_rank()}", save_embedding_layers=False)
    theirs = (tmp_path / f"peft{dist.get_rank()}" / "adapter_config.json").read_text()
    assert (tmp_path / "adapter_config.json").read_text().split() == theirs.split()
    other = sharded(adapted(OPTIONS[kind], 4), form)
    missing, unexpected = load_full(other, tmp_path, strict=False)
    assert unexpected == []
    assert not names & set(missing)
    assert torch.allclose(logits(other), logits(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a deprecated name of transformers
@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_a_second_adapter_is_in_the_folder_of_its_name_and_a_full_model_beside_them_stays(
    form: str, tmp_path: Path
) -> None:
    plain = adapted({}, 3, "second")
    model = sharded(adapted({}, 3, "second"), form)
    save_full(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    save_full(model, tmp_path, trainable_only=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "adapter_model.safetensors").exists()  # the first adapter is frozen
    found = load_file(tmp_path / "second" / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(plain, adapter_name="second")
    assert found.keys() == expected.keys()
    read = PeftModel.from_pretrained(model_of(0), tmp_path / "second")
    assert torch.equal(logits(read), logits(plain))
    other = sharded(adapted({}, 5, "second"), form)
    _, unexpected = load_full(other, tmp_path / "second", strict=False)
    assert unexpected == []
    assert torch.allclose(logits(other), logits(model))
