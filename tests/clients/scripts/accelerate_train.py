"""Trains with accelerate: FSDP by a plugin or by accelerate launch; accumulation, clipping, validation, checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from tiny import Tiny, show, show_units, show_weights, tokens
from torch.utils.data import DataLoader

EPOCHS = 2
SAVE_AFTER = 6  # batches; in the middle of an epoch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fsdp-version", type=int, help="without it, accelerate launch says what to do")
    parser.add_argument("--state-dict-type", default="FULL_STATE_DICT")
    parser.add_argument("--mixed-precision")
    parser.add_argument("--flat-params", action="store_true")
    parser.add_argument("--step-before-load", action="store_true", help="what fsdp_flat says if it is needed")
    args = parser.parse_args()

    plugin = None
    if args.fsdp_version == 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            reshard_after_forward="FULL_SHARD",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TinyLayer"],
            state_dict_type=args.state_dict_type,
            use_orig_params=not args.flat_params,
        )
    elif args.fsdp_version == 2:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TinyLayer"],
            state_dict_type=args.state_dict_type,
            activation_checkpointing=args.mixed_precision == "bf16",
        )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=args.mixed_precision)
    set_seed(5 if args.resume else 0)
    model = Tiny()
    if args.flat_params:
        model = accelerator.prepare(model)  # the optimizer must get the flat parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    data = DataLoader(tokens(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    held_out = DataLoader(tokens(rows=22)[10:], batch_size=3)
    if args.flat_params:
        optimizer, data, held_out, schedule = accelerator.prepare(optimizer, data, held_out, schedule)
    else:
        model, optimizer, data, held_out, schedule = accelerator.prepare(model, optimizer, data, held_out, schedule)
    if accelerator.is_main_process:
        show_units(model)

    done = 0
    if args.step_before_load:
        model(tokens()[:4].to(accelerator.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if args.resume:
        accelerator.load_state(str(args.folder / "checkpoint"))
        done = SAVE_AFTER
    for epoch in range(done // len(data), EPOCHS):
        data.set_epoch(epoch)
        skipped = done - epoch * len(data)
        model.train()
        for ids in accelerator.skip_first_batches(data, skipped) if skipped else data:
            with accelerator.accumulate(model):
                loss = model(ids)
                accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            if norm is not None:
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                if accelerator.is_main_process:
                    show("train", done, loss.detach(), norm)
            if done == SAVE_AFTER and not args.resume:
                accelerator.save_state(str(args.folder / "checkpoint"))
        model.eval()
        with torch.no_grad():
            losses = accelerator.gather_for_metrics(torch.stack([model(ids).detach() for ids in held_out]))
        if accelerator.is_main_process:
            show("valid", epoch, losses.mean())
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        show_weights(state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
