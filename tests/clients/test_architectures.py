"""12 architectures of transformers and 18 methods of peft train in both parameter modes as the unsharded model does.

"Done when" of "What programs read, write and forget".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from fsdp_flat.wrap import CustomPolicy
from tests.support import on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside

TEXT = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
NO_DROPOUT = {"attention_dropout": 0.0}
OF_GPT2 = {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Name of the configuration, of the model, and arguments of the configuration.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", WIDE),
    "mistral": ("MistralConfig", "MistralForCausalLM", WIDE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", WIDE),
    "gemma, with a tied head": ("GemmaConfig", "GemmaForCausalLM", {**WIDE, "head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**WIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "mixtral, with experts": ("MixtralConfig", "MixtralForCausalLM", {**WIDE, "num_local_experts": 4}),
    "gpt2, with a tied head": ("GPT2Config", "GPT2LMHeadModel", {**OF_GPT2, **QUIET}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {key: value for key, value in WIDE.items() if key != "num_key_value_heads"},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**WIDE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, **NO_DROPOUT},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5, an encoder and a decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**TEXT, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0},
    ),
}
TARGETS = ["q_proj", "v_proj"]
# Methods whose trained parameters have modules of their own. A flat parameter is trained or frozen as a whole, so with
# flat parameters each of these modules has a unit, as peft's documentation advises; the parameters of other methods,
# which lie beside frozen ones, are left out of sharding, and their gradients averaged.
WITH_MODULES = {"LoRA", "rsLoRA", "LoRA beside a trained head", "layer norms"} | {
    "prompt tuning",
    "prefix tuning",
    "P-tuning",
}
NEW_TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
# Name of the configuration in peft, and its arguments.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "LoRA of an embedding": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA beside a trained head": ("LoraConfig", {"r": 2, "modules_to_save": ["lm_head"]}),
    "LoHa": ("LoHaConfig", {"r": 2}),
    "LoKr": ("LoKrConfig", {"r": 2}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 10}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8}),
    "HRA": ("HRAConfig", {"r": 2}),
    "MiSS": ("MissConfig", {"r": 2}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "prompt tuning": ("PromptTuningConfig", NEW_TOKENS),
    "prefix tuning": ("PrefixTuningConfig", NEW_TOKENS),
    "P-tuning": ("PromptEncoderConfig", {**NEW_TOKENS, "encoder_hidden_size": 16}),
}


def built(name: str) -> Any:
    config, model, arguments = ARCHITECTURES[name]
    torch.manual_seed(0)
    arguments = {"use_cache": False, **arguments}
    return getattr(transformers, model)(getattr(transformers, config)(**arguments))


def adapted(name: str) -> Any:
    config, arguments = METHODS[name]
    if "task_type" not in arguments:
        arguments = {"target_modules": TARGETS, "task_type": "CAUSAL_LM", **arguments}
    base = built("llama")
    torch.manual_seed(1)
    model = peft.get_peft_model(base, getattr(peft, config)(**arguments))
    # Adapters that begin at zero would leave half of the gradients zero.
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.1)
    return model


def is_layer(module: nn.Module) -> bool:
    """Say whether a module is a layer of one of the architectures, by the names that transformers gives these."""
    name = type(module).__name__
    return name.endswith(("DecoderLayer", "GPT2Block", "GPTNeoXLayer", "BloomBlock", "BertLayer", "T5Block"))


def is_trainable_leaf(module: nn.Module) -> bool:
    """Say whether a module has parameters of its own that are trained, in a model in which others are frozen."""
    return any(param.requires_grad for param in module.parameters(recurse=False))


def tokens_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(3, TEXT["vocab_size"], (2, 7), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train(model: Any, policy: Callable[[nn.Module], bool], front: str, **kwargs: Any) -> None:
    """Train two steps beside the plain model; gradients and parameters have to agree after each."""
    beside = Beside(
        model,
        front,
        auto_wrap_policy=CustomPolicy(policy),
        optimizer=lambda each: torch.optim.SGD(each.parameters(), lr=0.05),
        batch=tokens_of,
        body=loss_of,
        dtype=None,
        tolerance={"atol": 2e-6, "rtol": 1e-4},
        **kwargs,
    )
    if "ignored_states" in kwargs:
        beside.ours.average_ignored_gradients()
    beside.train(num_steps=2)


@WRAPPER_FRONTS
@pytest.mark.parametrize("name", ARCHITECTURES)
@on_ranks(2)
def test_an_architecture_trains_as_the_unsharded_model(name: str, front: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers uses deprecated functions
        train(built(name), is_layer, front)


@WRAPPER_FRONTS
@pytest.mark.parametrize("name", METHODS)
@on_ranks(2)
def test_a_method_of_peft_trains_as_the_unsharded_model(name: str, front: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(name)
        if front == "originals":
            train(model, is_layer, front)
        elif name in WITH_MODULES:
            train(model, lambda module: is_layer(module) or is_trainable_leaf(module), front)
        else:
            trained = [param for param in model.parameters() if param.requires_grad]
            train(model, is_layer, front, ignored_states=trained)
