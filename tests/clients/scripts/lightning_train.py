"""Trains with Lightning's Trainer and strategy="fsdp": accumulation, clipping, validation, checkpoints, resuming."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from tiny import Tiny, TinyLayer, full_state, show, show_units, show_weights, tokens
from torch.utils.data import DataLoader


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Tiny()
        self.norm = torch.zeros(())

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(ids)
        self.log("loss", loss)
        return loss

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        # The Trainer does not clip by the norm with FSDP; this is what its documentation has.
        self.norm = self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], batch: torch.Tensor, batch_idx: int) -> None:
        if self.trainer.is_global_zero and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            show("train", self.trainer.global_step, outputs["loss"], self.norm)

    def validation_step(self, ids: torch.Tensor) -> None:
        self.log("valid_loss", self.model(ids), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            show("valid", self.current_epoch, self.trainer.callback_metrics["valid_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)}

    def on_train_end(self) -> None:
        root = self.trainer.strategy.model
        state = full_state(root)
        if self.trainer.is_global_zero:
            show_units(root)
            show_weights(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--state-dict-type", default="full")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--mesh", action="store_true", help="groups as a tuple, of which Lightning makes a mesh")
    parser.add_argument("--strategy", choices=["fsdp"], help="by its name, with no options")
    args = parser.parse_args()

    L.seed_everything(0)  # the Trainer shuffles by this seed
    if args.resume:
        torch.manual_seed(5)
    groups: Any = {"device_mesh": (1, 2), "sharding_strategy": "HYBRID_SHARD"} if args.mesh else {}
    strategy = FSDPStrategy(
        auto_wrap_policy={TinyLayer},
        activation_checkpointing_policy={TinyLayer},
        state_dict_type=args.state_dict_type,
        **groups,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=args.strategy or strategy,
        precision=args.precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(args.folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        LanguageModel(),
        DataLoader(tokens()[:48], batch_size=4, shuffle=True),
        DataLoader(tokens()[48:60], batch_size=3),
        ckpt_path=args.folder / "epoch=0.ckpt" if args.resume else None,
    )


if __name__ == "__main__":
    main()
