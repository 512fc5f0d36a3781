"""Trains with accelerate, written for FSDP1 and unchanged; fsdp_flat runs it, on CPUs too.

Run it with ``torchrun --nproc-per-node 2 -m fsdp_flat.run examples/accelerate_fsdp.py``.
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Sequential):
    """A block, wrapped as one unit by its name."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


accelerator = Accelerator(
    gradient_accumulation_steps=2,
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        use_orig_params=True,
        state_dict_type="FULL_STATE_DICT",
    ),
)
torch.manual_seed(0)  # every rank starts from the same weights and makes the same data
numbers = torch.randn(1024, 8)
examples = TensorDataset(numbers, numbers.sort().values)  # learn to sort eight numbers
model = nn.Sequential(*[Block(8) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)

# The sampler gives each rank its part; accelerate would split an ordinary DataLoader itself, in prepare().
sampler = DistributedSampler(examples, accelerator.num_processes, accelerator.process_index)
loader = DataLoader(examples, batch_size=32, sampler=sampler)
for epoch in range(8):
    sampler.set_epoch(epoch)  # another order in each epoch
    for batch in loader:
        given, expected = (each.to(accelerator.device) for each in batch)
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(given), expected)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}  loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")

accelerator.print(type(model))
weights = accelerator.get_state_dict(model)  # every rank must call this; rank 0 gets the full tensors
accelerator.save(weights, "accelerate_fsdp.pt")
accelerator.end_training()
