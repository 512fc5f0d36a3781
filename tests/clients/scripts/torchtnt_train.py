"""Trains with torchtnt's AutoUnit and FSDPStrategy: accumulation and clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tiny import Tiny, TinyLayer, full_state, show, show_units, show_weights, tokens
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler
from torchtnt.framework.auto_unit import AutoUnit, TrainStepResults
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.utils.env import init_from_env
from torchtnt.utils.prepare_module import FSDPStrategy


class Unit(AutoUnit[torch.Tensor]):
    def compute_loss(self, state: State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.module(data), None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[Any, Any]:
        return torch.optim.AdamW(module.parameters(), lr=0.03), None

    def on_train_step_end(self, state: State, data: torch.Tensor, step: int, results: TrainStepResults) -> None:
        if results.total_grad_norm is not None and dist.get_rank() == 0:
            show("train", step, results.loss.detach(), results.total_grad_norm)


def main() -> None:
    device = init_from_env()
    torch.manual_seed(0)
    unit = Unit(
        module=Tiny(),
        device=device,
        strategy=FSDPStrategy(auto_wrap_policy=ModuleWrapPolicy({TinyLayer})),
        gradient_accumulation_steps=2,
        clip_grad_norm=0.5,
    )
    sampler = DistributedSampler(tokens(), shuffle=True)
    train(unit, DataLoader(tokens(), batch_size=4, sampler=sampler), max_epochs=2)
    state = full_state(unit.module)
    if dist.get_rank() == 0:
        show_units(unit.module)
        show_weights(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
