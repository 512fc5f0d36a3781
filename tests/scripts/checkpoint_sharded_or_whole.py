"""Checkpoints as fine-tuning recipes write them: sharded through DCP, or whole by the older functions. For torchrun."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
import functools

WHOLE_ON_RANK_ZERO = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        return x + self.mlp(torch.tanh(self.attention(x)))


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale


def build(device, use_orig_params, seed=0, low_precision=False):
    torch.manual_seed(seed)
    low = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    model = FSDP(
        Model(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
        mixed_precision=low if low_precision else None,
        device_id=device,
        limit_all_gathers=True,
        use_orig_params=use_orig_params,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def steps(model, optimizer, start, stop):
    losses = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(5, 4, generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"loss {losses[-1]:.7f}", flush=True)
    return losses


# Sharded, through torch.distributed.checkpoint


def save_sharded(folder, model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder), planner=DefaultSavePlanner())
    dist.barrier()


def load_sharded(folder, model, optimizer):
    reader = dist_cp.FileSystemReader(folder)
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        state = {"model": model.state_dict()}
        dist_cp.load(state, storage_reader=reader, planner=DefaultLoadPlanner())
        model.load_state_dict(state["model"])
        states = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"], optimizer_key="optim", storage_reader=reader
        )
        local = FSDP.optim_state_dict_to_load(optim_state_dict=states["optim"], model=model, optim=optimizer)
        optimizer.load_state_dict(local)


def load_into_plain(folder):
    """A conversion tool: sharded files into a plain model, on one process."""
    model = Model()
    state = {"model": model.state_dict()}
    dist_cp.load(state, storage_reader=dist_cp.FileSystemReader(folder), no_dist=True)
    model.load_state_dict(state["model"])
    return {name: value.clone() for name, value in model.state_dict().items()}


# Whole, by the older functions


def save_whole(folder, model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, WHOLE_ON_RANK_ZERO):
        weights = model.state_dict()
    states = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
        torch.save(states, folder / "states.pt")
    dist.barrier()


def load_whole(folder, model, optimizer, how):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        model.load_state_dict(torch.load(folder / "weights.pt"))
    if how == "scatter":
        # Rank 0 alone reads the file.
        states = torch.load(folder / "states.pt") if dist.get_rank() == 0 else None
        local = FSDP.scatter_full_optim_state_dict(states, model, optim=optimizer)
    elif how == "shard":
        local = FSDP.shard_full_optim_state_dict(torch.load(folder / "states.pt"), model, optim=optimizer)
    else:
        # States by ids, as from a plain model's optimizer.
        states = torch.load(folder / "states.pt")
        by_id = FSDP.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_ID, Model())
        by_name = FSDP.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, Model())
        local = FSDP.shard_full_optim_state_dict(by_name, model, optim=optimizer)
    optimizer.load_state_dict(local)


def full_weights(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def first_half(folder, device, use_orig_params):
    folder = Path(folder)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    model, optimizer = build(device, use_orig_params)
    if dist.get_rank() == 0:
        print(f"model of {type(model).__module__.partition('.')[0]}", flush=True)
    losses = steps(model, optimizer, 0, 2)
    save_sharded(folder / "sharded", model, optimizer)
    save_whole(folder, model, optimizer)
    return losses, full_weights(model)


def second_half(folder, device, use_orig_params, how):
    folder = Path(folder)
    model, optimizer = build(device, use_orig_params, seed=1, low_precision=True)
    if how == "sharded":
        load_sharded(folder / "sharded", model, optimizer)
    else:
        load_whole(folder, model, optimizer, how)
    return steps(model, optimizer, 2, 4), full_weights(model)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    own = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    for kind in (True, False):
        place = f"{sys.argv[1]}/{kind}"
        first_half(place, own, kind)
        for way in ("sharded", "scatter", "shard", "rekey"):
            second_half(place, own, kind, way)
    dist.destroy_process_group()
