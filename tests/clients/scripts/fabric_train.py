"""Trains with Fabric and FSDP: accumulation, clipping, validation, and checkpoints in the middle of an epoch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from tiny import Tiny, TinyLayer, full_state, show, show_units, show_weights, tokens
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 2
SAVE_AFTER = 4  # batches; in the middle of an epoch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--state-dict-type", default="full")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--mesh", action="store_true", help="groups as a tuple, of which Lightning makes a mesh")
    parser.add_argument("--strategy", choices=["fsdp"], help="by its name, with no options")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    groups: Any = {"device_mesh": (1, 2), "sharding_strategy": "HYBRID_SHARD"} if args.mesh else {}
    strategy = FSDPStrategy(auto_wrap_policy={TinyLayer}, state_dict_type=args.state_dict_type, **groups)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=args.strategy or strategy, precision=args.precision)
    fabric.launch()
    fabric.seed_everything(5 if args.resume else 0)
    model = fabric.setup_module(Tiny())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.03))
    sampler = DistributedSampler(tokens()[:48], shuffle=True)
    data = fabric.setup_dataloaders(DataLoader(tokens()[:48], batch_size=4, sampler=sampler))
    held_out = fabric.setup_dataloaders(DataLoader(tokens()[48:60], batch_size=3))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": 0}
    if args.resume:
        fabric.load(args.folder / "checkpoint", state)
    done = state["batches"]
    for epoch in range(done // len(data), EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for index, ids in enumerate(data):
            if epoch * len(data) + index < done:
                continue
            done += 1
            is_accumulating = done % 2 != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = model(ids)
                fabric.backward(loss / 2)
            if not is_accumulating:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                if fabric.is_global_zero:
                    show("train", done, loss.detach(), norm)
            if done == SAVE_AFTER and not args.resume:
                fabric.save(args.folder / "checkpoint", {**state, "batches": done})
        model.eval()
        with torch.no_grad():
            losses = fabric.all_gather(torch.stack([model(ids) for ids in held_out]))
        if fabric.is_global_zero:
            show("valid", epoch, losses.mean())
    weights = full_state(model._forward_module)
    if fabric.is_global_zero:
        show_units(model._forward_module)
        show_weights(weights)


if __name__ == "__main__":
    main()
