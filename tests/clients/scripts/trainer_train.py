"""Trains with transformers' Trainer: accumulation, clipping, evaluation, checkpoints, FSDP by TrainingArguments."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny import show, show_units, show_weights, tokens
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=13,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


class Rows(Dataset):
    """Token rows as the Trainer takes them."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fsdp-version", type=int)
    parser.add_argument("--state-dict-type", default="FULL_STATE_DICT")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    fsdp_config = {
        "version": args.fsdp_version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": args.state_dict_type,
        "activation_checkpointing": args.bf16,
    }
    arguments = TrainingArguments(
        output_dir=str(args.folder),
        bf16=args.bf16,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=6,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        learning_rate=0.02,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=fsdp_config,
    )
    torch.manual_seed(5 if args.resume else 0)
    model = LlamaForCausalLM(CONFIG)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(tokens()[:40]), eval_dataset=Rows(tokens()[40:52])
    )
    trainer.train(resume_from_checkpoint=str(args.folder / "checkpoint-3") if args.resume else None)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    trainer.save_model(str(args.folder / "model"))
    if trainer.is_world_process_zero():
        show_units(trainer.model_wrapped)
        for row in trainer.state.log_history:
            # A resumed Trainer keeps the rows of the steps before it.
            if row["step"] > (3 if args.resume else 0):
                if "loss" in row:
                    show("train", row["step"], row["loss"], row["grad_norm"])
                elif "eval_loss" in row:
                    show("valid", row["step"], row["eval_loss"])
        show_weights(state)
        if args.state_dict_type == "FULL_STATE_DICT":
            saved = LlamaForCausalLM.from_pretrained(args.folder / "model").state_dict()
            assert all(torch.equal(saved[name].float(), value.float()) for name, value in state.items())


if __name__ == "__main__":
    main()
