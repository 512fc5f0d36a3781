"""Files of transformers models: from_pretrained reads those of save_full, and load_full those of save_pretrained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from fsdp_flat import FullyShardedDataParallel, fully_shard, load_full, save_full
from fsdp_flat.checkpoint.safetensors_files import divided
from fsdp_flat.errors import LoadError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.transport import rank_device

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "gpt2 with a tied head": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama in bf16": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, dtype=torch.bfloat16)).to(torch.bfloat16),
}
TOKENS = torch.arange(12).reshape(2, 6)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in ("LlamaDecoderLayer", "GPT2Block")]


def plain(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[kind]().eval()


def sharded(kind: str, front: str) -> Any:
    """The model, created on the meta device, without values."""
    with torch.device("meta"):
        model = MODELS[kind]().eval()

    def write(module: nn.Module) -> None:
        module.to_empty(device=rank_device(), recurse=False)
        # As from_pretrained does: buffers that no file has, of rotary embeddings for instance.
        model._init_weights(module)

    if front == "wrapper":
        policy = ModuleWrapPolicy({type(block) for block in blocks_of(model)})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=write)
    for block in blocks_of(model):
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=rank_device())
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    return model


def saved_by_rank_0(model: Any, folder: Path, **how: Any) -> None:
    if dist.get_rank() == 0:
        model.save_pretrained(folder, **how)
    dist.barrier()


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("kind", MODELS)
@on_ranks(2)
def test_each_reads_the_files_of_the_other(kind: str, front: str, tmp_path: Path, rank: int) -> None:
    theirs = plain(kind)
    expected = theirs(TOKENS).logits
    saved_by_rank_0(theirs, tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = sharded(kind, front)
    assert load_full(model, tmp_path / "theirs") == ([], [])
    assert torch.equal(model(TOKENS).logits, expected)
    for name, largest in (("one file", 10**9), ("several files", 20_000)):
        folder = tmp_path / name
        save_full(model, folder, max_file_bytes=largest)
        assert (folder / "model.safetensors.index.json").exists() == (name == "several files")
        dist.barrier()
        back, report = type(theirs).from_pretrained(folder, output_loading_info=True)
        assert {name: list(found) for name, found in report.items() if found} == {}
        assert_equal(dict(back.state_dict()), dict(theirs.state_dict()))
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits, expected)
    dist.barrier()


def test_tensors_are_divided_among_files_as_huggingface_hub_does_it() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        sizes = draw.choices([1, 2, 3, 5, 8, 20], k=draw.randrange(1, 12))
        state = {f"{at}.weight": torch.empty(size, dtype=torch.uint8) for at, size in enumerate(sizes)}
        theirs = split_torch_state_dict_into_shards(state, max_shard_size=10).filename_to_tensors
        assert divided({name: tensor.nbytes for name, tensor in state.items()}, 10) == theirs


@on_ranks(2)
def test_the_configuration_beside_the_files_is_that_of_save_pretrained(tmp_path: Path, rank: int) -> None:
    for front in ("wrapper", "fully_shard"):
        theirs = plain("llama")
        saved_by_rank_0(theirs, tmp_path / "theirs")
        model = FullyShardedDataParallel(theirs) if front == "wrapper" else fully_shard(theirs)
        save_full(model, tmp_path / front)
        save_full(model, tmp_path / f"{front} in bf16", dtype=torch.bfloat16)
        dist.barrier()
        expected = json.loads((tmp_path / "theirs" / "config.json").read_text())
        assert json.loads((tmp_path / front / "config.json").read_text()) == expected
        found = json.loads((tmp_path / f"{front} in bf16" / "config.json").read_text())
        assert found == {**expected, "dtype": "bfloat16"}
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"{front} in bf16").dtype is torch.bfloat16
        dist.barrier()


@on_ranks(2)
def test_a_model_with_a_head_reads_files_of_one_without_and_the_other_way_round(tmp_path: Path, rank: int) -> None:
    torch.manual_seed(0)
    base, whole = LlamaModel(LlamaConfig(**LLAMA)), plain("llama", seed=1)
    saved_by_rank_0(base, tmp_path / "base")
    saved_by_rank_0(whole, tmp_path / "whole")
    headed = FullyShardedDataParallel(plain("llama", seed=2), use_orig_params=True)
    before = headed.state_dict()
    with pytest.raises(LoadError, match=r"rename=lambda name: 'model\.' \+ name\) would find .* 'lm_head\.weight'\."):
        load_full(headed, tmp_path / "base")
    missing, unexpected = load_full(headed, tmp_path / "base", rename=lambda name: "model." + name, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    values = {f"model.{name}": value for name, value in base.state_dict().items()}
    assert_equal(dict(headed.state_dict()), {**values, "lm_head.weight": before["lm_head.weight"]})
    headless = FullyShardedDataParallel(LlamaModel(LlamaConfig(**LLAMA)), use_orig_params=True)
    with pytest.raises(LoadError, match=r"prefix='model\.'\) would find .* not in the model: 'lm_head\.weight'\."):
        load_full(headless, tmp_path / "whole")
    assert load_full(headless, tmp_path / "whole", prefix="model.") == ([], [])
    assert_equal(dict(headless.state_dict()), dict(whole.model.state_dict()))
