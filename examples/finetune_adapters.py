"""Fine-tunes a small GPT with low-rank adapters (LoRA); the model's own weights are frozen, in bf16.

    torchrun --nproc-per-node 2 examples/finetune_adapters.py

The frozen weights stay in bf16. The adapters are bf16 too, but their shards are fp32 master weights, so that small
updates are not lost. Gradients are accumulated over micro-batches and clipped. The output file, `adapters.pt`, holds
the adapters only.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt_model import GPT, Block, GPTConfig, next_token_loss
from launch import compute_device, process_group
from stdlib_text import load_text, training_batch
from torch import nn

from fsdp_flat import FullStateDictConfig, MixedPrecision, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy

CONFIG = GPTConfig(layers=2, width=128, heads=4, seq_len=64)
ADAPTER_RANK = 8
STEPS, MICRO_BATCHES, BATCH_SIZE = 24, 2, 16


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable product of two low-rank matrices (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        options = {"dtype": frozen.weight.dtype, "device": frozen.weight.device}
        self.adapter_down = nn.Parameter(torch.randn(rank, frozen.in_features, **options) / frozen.in_features**0.5)
        self.adapter_up = nn.Parameter(torch.zeros(frozen.out_features, rank, **options))  # zero at first: no change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the frozen layer's output plus the adapter's."""
        return self.frozen(x) + F.linear(F.linear(x, self.adapter_down), self.adapter_up)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes the model and adds an adapter to every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child, rank))


def print_bytes(model: nn.Module, device: torch.device) -> None:
    """Prints, on rank 0, the bytes of frozen and of trainable parameters that each rank holds."""
    own = [sum(p.nbytes for p in model.parameters() if p.requires_grad is trainable) for trainable in (False, True)]
    every = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor(own, device=device))
    if dist.get_rank() == 0:
        for rank, (frozen, trainable) in enumerate(torch.stack(every).tolist()):
            print(f"rank {rank}: {frozen:,} bytes frozen in bf16, {trainable:,} bytes trainable in fp32", flush=True)


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapters by name on rank 0, nothing on the others. Every rank must call this."""
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):
        full = model.state_dict()
    return {name: value for name, value in full.items() if "adapter_" in name}


def main() -> None:
    """Runs the fine-tuning on every rank."""
    device = compute_device()
    with process_group(device):
        fine_tune(device)


def fine_tune(device: torch.device) -> None:
    """Trains the adapters, and saves them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank starts from the same weights; normally they come from a checkpoint
    model = GPT(CONFIG).to(torch.bfloat16)
    add_adapters(model, ADAPTER_RANK)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params=True,  # lets a block mix frozen and trainable parameters
        mixed_precision=MixedPrecision(master_dtype=torch.float32, reduce_dtype=torch.float32),
    )
    print_bytes(model, device)
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    text = load_text().train

    def micro_loss(index: int) -> torch.Tensor:
        inputs, targets = training_batch(
            text, seed=0, step=index, batch_size=BATCH_SIZE, seq_len=CONFIG.seq_len, rank=rank, num_ranks=num_ranks
        )
        return next_token_loss(model(inputs.to(device)).float(), targets.to(device)).mean() / MICRO_BATCHES

    for step in range(STEPS):
        first = step * MICRO_BATCHES
        with model.no_sync():  # all micro-batches but the last keep their gradients on this rank
            losses = [micro_loss(index) for index in range(first, first + MICRO_BATCHES - 1)]
            for loss in losses:
                loss.backward()
        losses.append(micro_loss(first + MICRO_BATCHES - 1))
        losses[-1].backward()  # reduces the sum over all micro-batches
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).detach().sum() / num_ranks
        dist.all_reduce(mean)
        if rank == 0 and (step % 6 == 0 or step == STEPS - 1):
            print(f"step {step:2d}  loss {mean:.3f}  gradient norm {norm:.2f}", flush=True)

    adapters_only = adapters_of(model)
    if rank == 0:
        path = os.environ.get("ADAPTERS", "adapters.pt")
        torch.save(adapters_only, path)
        print(f"wrote {path}: {len(adapters_only)} tensors, {sum(v.nbytes for v in adapters_only.values()):,} bytes")


if __name__ == "__main__":
    main()
