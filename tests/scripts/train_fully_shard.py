"""Trains a transformer with fully_shard in the manner of torchtitan: meta device, blocks, DCP. For torchrun."""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, LENGTH = 17, 12, 2, 9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

    def init_weights(self):
        for norm in (self.attention_norm, self.norm):
            norm.reset_parameters()
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.trunc_normal_(linear.weight, std=0.2)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.zeros(LENGTH, WIDTH), persistent=False)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(num_layers)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def init_weights(self):
        self.positions.copy_(torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
        nn.init.normal_(self.tok_embeddings.weight)
        for block in self.layers.values():
            block.init_weights()
        self.norm.reset_parameters()
        nn.init.trunc_normal_(self.output.weight, std=0.2)

    def forward(self, ids):
        x = self.tok_embeddings(ids) + self.positions
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def apply_fsdp(model, mesh, param_dtype=None, offload=False, reshard_after_forward=True):
    config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)}
    if offload:
        config["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=reshard_after_forward)
    for block in model.layers.values():
        fully_shard(block, **config, reshard_after_forward=reshard_after_forward)
    # The last ones are needed again at once in backward.
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)
    assert isinstance(model, FSDPModule)


class ModelState:
    """What torchtitan gives to DCP for the model."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))


class OptimizerState:
    """The same for the optimizer."""

    def __init__(self, model, optimizer):
        self.parts = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self):
        return get_optimizer_state_dict(*self.parts, options=self.options)

    def load_state_dict(self, state):
        set_optimizer_state_dict(*self.parts, optim_state_dict=state, options=self.options)


def clip(parameters, max_norm):
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def build(seed, mesh, compile_blocks=False, checkpoint=True, **options):
    with torch.device("meta"):
        model = Transformer()
    for name, block in list(model.layers.items()):
        if checkpoint:
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        if compile_blocks:
            block.compile()
        model.layers[name] = block
    apply_fsdp(model, mesh, **options)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, foreach=True)
    return model, optimizer


def train(folder, replicate=1, steps=3, accumulate=2, **options):
    """Train, save in the middle, and go on from there with a model of other weights; return losses and norms."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))
    mesh = mesh["shard"] if replicate == 1 else mesh
    ids = torch.randint(
        VOCABULARY, (2 * steps, accumulate, world_size, 2, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )

    def run(model, optimizer, which):
        told = []
        for step in which:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in range(accumulate):
                model.set_requires_gradient_sync(part == accumulate - 1)
                batch = ids[step, part, rank]
                logits = model(batch[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten()) / accumulate
                loss.backward()
                total += loss.detach()
            norm = clip(list(model.parameters()), 1.0)
            optimizer.step()
            dist.all_reduce(total)
            told.append((total.item() / world_size, norm.item()))
        return told

    model, optimizer = build(0, mesh, **options)
    if rank == 0:
        print(f"model of {type(model).__mro__[1].__module__.partition('.')[0]}", flush=True)
    told = run(model, optimizer, range(steps))
    dcp.save({"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
    told += run(model, optimizer, range(steps, 2 * steps))
    model, optimizer = build(5, mesh, **options)
    dcp.load({"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}, checkpoint_id=folder)
    again = run(model, optimizer, range(steps, 2 * steps))
    assert again == told[steps:], (again, told)
    if rank == 0:
        for loss, norm in told:
            print(f"loss {loss:.7f} norm {norm:.7f}", flush=True)
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    dist.init_process_group("gloo")
    train(os.path.join(parser.parse_args().folder, "checkpoint"))
    # Tensors of finished collectives are freed before the interpreter ends (pytorch issue 190489).
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
