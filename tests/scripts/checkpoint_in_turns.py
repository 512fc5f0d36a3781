"""Checkpoints as language-model trainers write them that read FSDP1's flat parameters. For torchrun.

Full: rank 0 saves whole tensors; each rank copies its slices into the flat parameters, and loads the optimizer's
state when it is its turn. Local: each rank saves its flat parameters with their description, loads them as they
are, or puts the files of all ranks together without a process group.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
import torch.distributed.fsdp._runtime_utils as runtime_utils
import functools

DESCRIPTION = ("_fqns", "_shapes", "_numels", "_numels_with_padding", "_shard_param_infos", "_shard_numel_padded")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 13, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(device, seed=0):
    torch.manual_seed(seed)
    model = FSDP(
        Model(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        use_orig_params=True,
        limit_all_gathers=True,
        device_id=device,
    )
    decay = [param for name, param in model.named_parameters() if "norm" not in name]
    rest = [param for name, param in model.named_parameters() if "norm" in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.02)


def steps(model, optimizer, start, stop):
    losses = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 13, (3, 6), generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"loss {losses[-1]:.7f}", flush=True)
    return losses


def units(model):
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDP)]


# Whole tensors


def save_full(folder, model, optimizer):
    with FSDP.state_dict_type(
        model,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    ):
        weights = model.state_dict()
        if dist.get_rank() == 0:
            torch.save(weights, folder / "model.pt")
        else:
            assert not weights
        dist.barrier()
        states = FSDP.optim_state_dict(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(states, folder / "optim.pt")
    dist.barrier()


@torch.no_grad()
def load_full_weights(folder, model):
    """Each rank reads the file and copies its own slices."""
    for _, unit in units(model):
        for param in unit.params:
            param.fill_(torch.nan)
    weights = torch.load(folder / "model.pt", mmap=True)
    for name, unit in units(model):
        for param in unit.params:
            assert param._is_flat_param
            for fqn, info in zip(param._fqns, param._shard_param_infos):
                if not info.in_shard:
                    continue
                key = f"{name}.{fqn}".replace("_fsdp_wrapped_module.", "").lstrip(".")
                key = key.replace("_fsdp_wrapped_module", "").lstrip(".")
                piece = weights[key].flatten()[info.intra_param_start_idx : info.intra_param_end_idx + 1]
                param[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard].copy_(piece)
    for name, unit in units(model):
        for param in unit.params:
            for info in param._shard_param_infos:
                # Between parameters there may be padding, which no checkpoint has.
                start = info.offset_in_shard or 0
                if torch.isnan(param[start : start + (info.numel_in_shard or 0)]).any():
                    raise ValueError(f"not all of unit {name!r} was in the checkpoint")


def load_full_states(folder, model, optimizer):
    """One rank after the other, so that only one has the whole state in memory."""
    with FSDP.state_dict_type(
        model,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(rank0_only=False, offload_to_cpu=True),
        optim_state_dict_config=FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=True),
    ):
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                states = torch.load(folder / "optim.pt", map_location="cpu")
                local = FSDP.optim_state_dict_to_load(model, optimizer, states)
                del states
                gc.collect()
                optimizer.load_state_dict(local)
                del local
                gc.collect()
            dist.barrier()


# Flat parameters as they are


@torch.no_grad()
def save_local(folder, model, optimizer):
    runtime_utils._lazy_init(model, model)
    contents = []
    for name, unit in units(model):
        handle = unit._handle
        if handle is None:
            continue
        flat_param = handle.flat_param
        data = {"name": name, "flat_param": flat_param.detach().clone(), "strategy": handle._sharding_strategy.name}
        for key in DESCRIPTION:
            value = getattr(flat_param, key)
            data[key] = [tuple(one) for one in value] if key in ("_shapes", "_shard_param_infos") else value
        contents.append(data)
    torch.save({"units": contents, "optim": optimizer.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()


@torch.no_grad()
def load_local(folder, model, optimizer):
    runtime_utils._lazy_init(model, model)
    saved = torch.load(folder / f"rank{dist.get_rank()}.pt")
    handles = [(name, unit._handle) for name, unit in units(model) if unit._handle is not None]
    assert len(handles) == len(saved["units"])
    for (name, handle), data in zip(handles, saved["units"]):
        flat_param = handle.flat_param
        assert name == data["name"]
        assert list(flat_param._fqns) == list(data["_fqns"])
        assert [tuple(shape) for shape in flat_param._shapes] == data["_shapes"]
        assert [tuple(info) for info in flat_param._shard_param_infos] == data["_shard_param_infos"]
        assert unit_of(model, handle)._flat_param is flat_param
        flat_param.copy_(data["flat_param"])
    optimizer.load_state_dict(saved["optim"])


def unit_of(model, handle):
    return next(unit for _, unit in units(model) if unit._handle is handle or unit._flat_param is handle.flat_param)


def put_together(folder, num_ranks):
    """The whole weights, from the files of all ranks."""
    ranks = [torch.load(folder / f"rank{rank}.pt")["units"] for rank in range(num_ranks)]
    whole = {}
    for parts in zip(*ranks):
        for index, (fqn, shape) in enumerate(zip(parts[0]["_fqns"], parts[0]["_shapes"])):
            tensor = torch.full((torch.Size(shape).numel(),), torch.nan)
            for part in parts:
                in_shard, offset, numel, start, end = part["_shard_param_infos"][index]
                if in_shard:
                    tensor[start : end + 1] = part["flat_param"][offset : offset + numel]
            assert not torch.isnan(tensor).any()
            key = f"{parts[0]['name']}.{fqn}".replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
            whole[key.lstrip(".")] = tensor.reshape(shape)
    return whole


def full_weights(model):
    with FSDP.summon_full_params(model, writeback=False):
        named = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in named.items()}


def first_half(folder, device):
    folder = Path(folder)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    model, optimizer = build(device)
    if dist.get_rank() == 0:
        print(f"model of {type(model).__module__.partition('.')[0]}", flush=True)
    losses = steps(model, optimizer, 0, 2)
    save_full(folder, model, optimizer)
    save_local(folder, model, optimizer)
    return losses, full_weights(model)


def from_weights(folder, device):
    """The weights alone, by slices."""
    model, _ = build(device, seed=1)
    load_full_weights(Path(folder), model)
    return full_weights(model)


def from_full(folder, device):
    folder = Path(folder)
    model, optimizer = build(device, seed=1)
    load_full_weights(folder, model)
    load_full_states(folder, model, optimizer)
    return steps(model, optimizer, 2, 4), full_weights(model)


def from_local(folder, device):
    folder = Path(folder)
    model, optimizer = build(device, seed=1)
    load_local(folder, model, optimizer)
    weights = full_weights(model)
    joined = put_together(folder, dist.get_world_size())
    assert sorted(joined) == sorted(weights)
    for name, value in weights.items():
        torch.testing.assert_close(joined[name], value.cpu(), rtol=0, atol=0)
    return steps(model, optimizer, 2, 4), full_weights(model)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    own = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    first_half(sys.argv[1], own)
    from_full(sys.argv[1], own)
    from_local(sys.argv[1], own)
    dist.destroy_process_group()
