"""Lightning's ModelParallelStrategy, whose user calls fully_shard: Fabric and the Trainer; save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from tests.clients.kit import Tiny, on_both, tokens
from tests.support import assert_close, on_ranks

DISTRIBUTED = pytest.mark.parametrize("distributed", [True, False])


def parallelize(model: Tiny, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Tiny:
    """What a user gives to the strategy."""
    options: Any = {"mesh": mesh["data_parallel"], "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def new(fabric: Fabric, seed: int, *, on_meta: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    with fabric.init_module(empty_init=on_meta):
        plain = Tiny()
    model = fabric.setup_module(plain)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.03))


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> list[list[float]]:
    told = []
    ids = tokens()[dist.get_rank() :: 2]
    for step in steps:
        with fabric.no_backward_sync(model):
            fabric.backward(model(ids[4 * step : 4 * step + 2]))
        loss = model(ids[4 * step + 2 : 4 * step + 4])
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        told.append([loss.item(), norm.item()])
    return told


def run_fabric(distributed: bool, dtype: torch.dtype | None, on_meta: bool, folder: Path) -> dict[str, Any]:
    """Train, save, go on; load into new objects and go on from there."""
    strategy = FabricStrategy(
        lambda model, mesh: parallelize(model, mesh, dtype),
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=distributed,
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = new(fabric, 0)
    told = {"before": train(fabric, model, optimizer, range(3))}
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer, "step": 3})
    told["after"] = train(fabric, model, optimizer, range(3, 5))
    fresh, fresh_optimizer = new(fabric, 5, on_meta=on_meta)
    state = {"model": fresh, "optimizer": fresh_optimizer, "step": 0}
    fabric.load(folder / "checkpoint", state)
    told["step"] = state["step"]
    told["loaded"] = train(fabric, fresh, fresh_optimizer, range(3, 5))
    return told


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["full", "bf16"])
@DISTRIBUTED
@on_ranks(2)
def test_fabric_trains_saves_and_loads_as_on_fsdp2(
    distributed: bool, dtype: torch.dtype | None, on_meta: bool, tmp_path: Path
) -> None:
    theirs, ours = on_both(
        run_fabric, fully_shard=True, distributed=distributed, dtype=dtype, on_meta=on_meta, folder=tmp_path
    )
    assert ours.result["loaded"] == ours.result["after"]
    tolerance = 1e-5 if dtype is None else 2e-2
    assert_close(ours.result, theirs.result, rtol=tolerance, atol=tolerance)


class Sharded(LightningModule):
    """What a user writes for the Trainer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Tiny()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)}

    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh)


def run_trainer(distributed: bool, folder: Path) -> dict[str, Any]:
    """Fit two epochs and save; go on for one, once straight and once from the checkpoint."""
    data = DataLoader(tokens(rows=16), batch_size=2)

    def fit(module: Sharded, epochs: int, start: Path | None = None) -> Trainer:
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=distributed
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=epochs,
            gradient_clip_val=0.5,
            gradient_clip_algorithm="value",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, data, ckpt_path=start, weights_only=False)
        return trainer

    first = Sharded(0)
    fit(first, 2).save_checkpoint(folder / "checkpoint")
    straight, resumed = Sharded(0), Sharded(5)
    fit(straight, 3)
    fit(resumed, 3, folder / "checkpoint")
    assert straight.losses[: len(first.losses)] == first.losses
    return {"before": first.losses, "after": straight.losses[len(first.losses) :], "loaded": resumed.losses}


@DISTRIBUTED
@on_ranks(2)
def test_the_trainer_fits_saves_and_resumes_as_on_fsdp2(distributed: bool, tmp_path: Path) -> None:
    theirs, ours = on_both(run_trainer, fully_shard=True, distributed=distributed, folder=tmp_path)
    assert ours.result["loaded"] == ours.result["after"]
    assert_close(ours.result, theirs.result, rtol=1e-5, atol=1e-6)
