"""Calls that the documentation shows, as a user's typed program; test_types.py has a type checker read it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_flat
from fsdp_flat import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MatrixOptimizer,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedEMA,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    check_replicas,
    clean_named_parameters,
    compare_with,
    describe,
    fully_shard,
    iter_full_state_dict,
    list_checkpoints,
    load_checkpoint,
    load_full,
    participate,
    plan,
    record,
    register_forward_method,
    save_checkpoint,
    save_full,
    unshard_for,
    unwrap,
    verify_checkpoint,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def wrapper() -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (1, 2))
    model = FSDP(
        nn.Sequential(*[Block(16) for _ in range(4)]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16,
            master_dtype=torch.float32,
            full_precision_modules=(nn.LayerNorm,),
            uncast_inputs=("positions",),
        ),
        cpu_offload=CPUOffload(offload_params=True),
        device_id=torch.device("cpu"),
        sync_module_states="auto",
        device_mesh=mesh,
        use_orig_params=True,
    )
    FSDP(model, sync_module_states="raise")
    FSDP(model, sync_module_states=True, device_id="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with model.no_sync(mode="sharded"):
        loss = model(torch.zeros(2, 16)).sum()
        loss.backward()
    model.set_gradient_divide_factor(2.0)
    model.set_requires_gradient_sync(False)
    norm: torch.Tensor = model.clip_grad_norm_(1.0)
    optimizer.step()
    model.average_ignored_gradients()
    model.average_buffers()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        full = model.state_dict()
    states = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
    with FSDP.summon_full_params(model, writeback=False):
        print({name: tuple(value.shape) for name, value in model.named_parameters()})
    saving = save_checkpoint("run", model, optimizer, {"step": 3}, background=True)
    saving.wait()
    found = load_checkpoint("run", model, optimizer)
    step: int = 0 if found is None else found.extra["step"]
    num_bytes: int = verify_checkpoint(list_checkpoints("run")[0].path).nbytes
    print(num_bytes, check_replicas(model, optimizer))
    save_full(model, "hub")
    load_full(model, "hub", prefix="model.", rename=lambda name: None if name == "head" else name)
    for name, tensor in iter_full_state_dict(model):
        print(name, tensor.shape, step, norm, full)
    ShardedStateDictConfig(boxes=True)
    ema = ShardedEMA(model, 0.999)
    ema.update()
    with ema.swap():
        pass
    plain: nn.Module = unwrap(model)
    print(plan(plain, 64, auto_wrap_policy=ModuleWrapPolicy({Block})), describe(model))
    peak_nbytes: int = plan(plain, 64, batch=torch.zeros(2, 16), fit="80GB", checkpointing=[Block]).peak_nbytes
    with record(model) as recording:
        model(torch.zeros(2, 16)).sum().backward()
    print(recording.summary(), peak_nbytes)
    recording.save("step.json")
    register_forward_method(model, "generate")
    with unshard_for(model):
        pass
    with fsdp_flat.debug():
        pass
    participate(model)
    dict(clean_named_parameters(model))
    MatrixOptimizer(model, torch.optim.SGD, lr=0.02)
    scaler = ShardedGradScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    compare_with(model, plain, lambda m: m(torch.zeros(2, 16)).sum())
    names: list[str] = check_replicas(model)
    print(names)
    block = model.module
    print(block, fsdp_flat.install(), fsdp_flat.install(fully_shard=True), fsdp_flat.__version__)
    fsdp_flat.uninstall()


def sharded() -> None:
    model = nn.Sequential(*[Block(16) for _ in range(4)])
    for block in model:
        fully_shard(block)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2,)),
        reshard_after_forward=2,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    fully_shard(model).set_requires_gradient_sync(False)
    fully_shard(model, offload_policy=CPUOffloadPolicy()).unshard()
    fully_shard([model[0], model[1]])[0].reshard()
    root = fully_shard(Block(16))
    root(torch.zeros(2, 16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(root.parameters(), 1.0)
    root.train()
    handle = root.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    root.set_modules_to_forward_prefetch([root])
