"""Trains with Lightning's Trainer, written for FSDP1 and unchanged; fsdp_flat runs it, on CPUs too.

Run it with ``torchrun --nproc-per-node 2 -m fsdp_flat.run examples/lightning_fsdp.py``.
"""

import os

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Sequential):
    """A block, wrapped as one unit."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Sorter(L.LightningModule):
    """Learns to sort eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(8) for _ in range(4)])

    def train_dataloader(self) -> DataLoader:
        numbers = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0))  # the same on every rank
        examples = TensorDataset(numbers, numbers.sort().values)
        # The Trainer calls its set_epoch; without a sampler it would add one.
        sampler = DistributedSampler(examples, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(examples, batch_size=32, sampler=sampler)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        given, expected = batch
        loss = nn.functional.mse_loss(self.blocks(given), expected)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss'].item():.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


L.seed_everything(0)  # every rank starts from the same weights
local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = L.Trainer(
    accelerator="auto" if torch.accelerator.device_count() >= local_ranks else "cpu",
    devices=local_ranks,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local_ranks,
    strategy=FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full"),
    max_epochs=8,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    gradient_clip_algorithm="value",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Sorter())
trainer.print(type(trainer.strategy.model))
trainer.save_checkpoint("lightning_fsdp.ckpt")
