"""peft's LoRA on a wrapped model: train the adapters, save them with clean names, load them into a plain model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.kit import on_both, tokens
from tests.support import assert_close, on_ranks
from tests.support.transport import rank_device

CONFIG = {
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def adapted(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model_of(0), config)


def wrapped(model: nn.Module, by_policy_of_peft: bool) -> Any:
    """With units that peft's documentation makes: layers, and the trainable leaves alone."""
    layer = type(model.get_base_model().model.layers[0])
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    if by_policy_of_peft:
        unsharded_params = partial(
            lambda_auto_wrap_policy,
            lambda_fn=lambda module: (
                not list(module.named_children())
                and getattr(module, "weight", None) is not None
                and module.weight.requires_grad
            ),
        )
        policy = partial(_or_policy, policies=[unsharded_params, policy])
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=not by_policy_of_peft, device_id=rank_device())


def run(by_policy_of_peft: bool, folder: Path) -> dict[str, Any]:
    """Train, save the adapters on rank 0, and see that a plain model with them gives the same."""
    model = wrapped(adapted(), by_policy_of_peft)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    losses = []
    for step in range(3):
        ids = tokens()[4 * step + 2 * dist.get_rank() :][:2]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        told: dict[str, Any] = {
            "losses": losses,
            "last": model(input_ids=tokens()[:4], labels=tokens()[:4]).loss.item(),
        }
    # As peft's own message has it; every rank takes part, and all names are the plain model's inside.
    with FSDP.summon_full_params(model, writeback=False):
        adapters = get_peft_model_state_dict(model.module)
        model.module.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    told["adapters"] = {name: value.clone() for name, value in adapters.items()}
    plain = PeftModel.from_pretrained(model_of(0), folder)
    with torch.no_grad():
        told["plain"] = plain.eval()(input_ids=tokens()[:4], labels=tokens()[:4]).loss.item()
    return told


@pytest.mark.parametrize("by_policy_of_peft", [False, True], ids=["layers", "trainable_leaves"])
@on_ranks(2)
def test_lora_trains_and_its_adapters_are_saved_with_clean_names(by_policy_of_peft: bool, tmp_path: Path) -> None:
    theirs, ours = on_both(run, by_policy_of_peft=by_policy_of_peft, folder=tmp_path)
    mine, others = ours.result, theirs.result
    assert_close([mine["losses"], mine["last"]], [others["losses"], others["last"]], rtol=1e-5, atol=1e-6)
    # On the peer peft leaves out every adapter below a nested unit, as its names keep the wrapper's words there.
    assert len(mine["adapters"]) == 8
    assert not [name for name in mine["adapters"] if "_fsdp_wrapped_module" in name]
    assert abs(mine["plain"] - mine["last"]) < 1e-5
