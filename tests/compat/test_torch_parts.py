"""Parts of torch that know FSDP1, and private functions that clients import, with our wrapper after install()."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp.wrap import CustomPolicy as PeerCustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerModuleWrapPolicy

import fsdp_flat
from fsdp_flat.errors import UsageError
from fsdp_flat.wrap import CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy
from tests.compat.clients import imported
from tests.support import assert_close, on_ranks
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock
from tests.support.wrapper_models import batch, seeded, shard, whole_state

POLICIES = {
    "ours_by_class": ModuleWrapPolicy({BufferedBlock}),
    "ours_by_function": CustomPolicy(lambda module: isinstance(module, BufferedBlock)),
    "torchs_by_class": PeerModuleWrapPolicy({BufferedBlock}),
    "torchs_by_function": PeerCustomPolicy(lambda module: isinstance(module, BufferedBlock)),
    "a_function": partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, BufferedBlock)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> float:
    model.zero_grad()  # torch's named optimizer has no zero_grad that works
    loss = square_loss(model, batch(dist.get_rank(), num))
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    ("policy", "installs"),
    # torch's function takes a policy object of its own class, or after install() of either.
    [
        (policy, installs)
        for policy in POLICIES
        for installs in (True, False)
        if installs or policy != "ours_by_function"
    ],
)
@on_ranks(2)
def test_activation_checkpointing_is_applied_with_policies_of_both_sides(policy: str, installs: bool) -> None:
    plain = shard(seeded())
    with fsdp_flat.installed() if installs else nullcontext():
        model = shard(seeded())
        apply_activation_checkpointing(model, auto_wrap_policy=POLICIES[policy])
        blocks = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
        assert len(blocks) == 2
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain)]
        for num in range(2):
            assert step(model, optimizers[0], num) == step(plain, optimizers[1], num)
    assert_close(whole_state(model), whole_state(plain), rtol=0, atol=0)


@on_ranks(2)
def test_a_compiled_model_trains_as_an_uncompiled_one() -> None:
    with fsdp_flat.installed(), imported("compiling_client") as client:
        plain, model = (vars(client)["make"](seeded(), use_orig_params=True) for _ in range(2))
        compiled = torch.compile(model, backend="aot_eager")
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain)]
        for num in range(2):
            assert abs(step(compiled, optimizers[0], num) - step(plain, optimizers[1], num)) < 1e-6
    torch._dynamo.reset()


@on_ranks(2)
def test_the_named_optimizer_saves_and_loads_through_our_wrapper() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated", DeprecationWarning)
        from torch.distributed.optim import _NamedOptimizer

    def named(model: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _NamedOptimizer(model.named_parameters(), torch.optim.Adam, module=model, lr=0.05)

    with fsdp_flat.installed():
        model = shard(seeded(), use_orig_params=True)
        optimizer = named(model)
        losses = [step(model, optimizer, num) for num in range(2)]
        reference = shard(seeded(), use_orig_params=True)
        plain = torch.optim.Adam(reference.parameters(), lr=0.05)
        assert losses == [step(reference, plain, num) for num in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # torch's named optimizer makes this call itself, with names as keys, and leaves the result out.
            held = {name for name, param in model.named_parameters() if param.numel() > 0}
            assert set(optimizer.state_dict()["state"]) == held
            saved = model.optim_state_dict(model, optimizer)
            again = model.optim_state_dict(model, optimizer, optimizer.state_dict())
            assert_close(again["state"], saved["state"], rtol=0, atol=0)
            assert_close(saved["state"], reference.optim_state_dict(reference, plain)["state"], rtol=0, atol=0)
            fresh = shard(seeded(seed=4), use_orig_params=True)
            other = named(fresh)
            other.init_state()
            other.load_state_dict(saved)
        fresh.load_state_dict(whole_state(model))
        assert [step(fresh, other, num) for num in (2, 3)] == [step(reference, plain, num) for num in (2, 3)]


@on_ranks(2)
def test_an_asynchronous_save_of_sharded_states_is_loaded_back(tmp_path: Path) -> None:
    with warnings.catch_warnings(), fsdp_flat.installed():
        warnings.simplefilter("ignore")
        model = shard(seeded(), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        step(model, optimizer, 0)
        model_state, optim_state = get_state_dict(model, optimizer, options=StateDictOptions())
        group = dist.new_group(backend="gloo")
        # In torch 2.8 the storage writer stages the states.
        stages = "async_stager" in inspect.signature(dcp.async_save).parameters
        saved = dcp.async_save(
            {"model": model_state, "optim": optim_state},
            storage_writer=dcp.FileSystemWriter(tmp_path),
            process_group=group,
            **({"async_stager": BlockingAsyncStager()} if stages else {}),
        )
        losses = [step(model, optimizer, num) for num in (1, 2)]  # training goes on while it is written
        saved.result()  # type: ignore[union-attr]

        fresh = shard(seeded(seed=4), use_orig_params=True)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.05)
        states = dict(zip(("model", "optim"), get_state_dict(fresh, fresh_optimizer)))
        dcp.load(states, storage_reader=dcp.FileSystemReader(tmp_path))
        set_state_dict(fresh, fresh_optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
        assert [step(fresh, fresh_optimizer, num) for num in (1, 2)] == losses
        dist.destroy_process_group(group)


@on_ranks(2)
def test_private_functions_work_on_our_wrapper() -> None:
    with fsdp_flat.installed(), imported("client_of_private_names") as client:
        names = vars(client)
        model = shard(seeded())
        first, inner, _ = fsdp_flat.FullyShardedDataParallel.fsdp_modules(model)
        assert first is model
        assert names["_get_module_fsdp_state"](model) is model
        assert names["_get_module_fsdp_state"](module=model) is model
        assert names["_get_fsdp_handles"](model) == [
            module._handle for module in fsdp_flat.FullyShardedDataParallel.fsdp_modules(model)
        ]
        assert model._is_root is None
        names["_lazy_init"](model, model)
        assert (model._is_root, inner._is_root) == (True, False)
        with names["_unshard_params_for_summon"](model, model, True, False, False, False):
            assert model.first.weight.shape == (5, 3)
            assert not isinstance(inner.up.weight, nn.Parameter)  # that unit is not shown whole
        assert names["is_wrapped"](model)
        assert names["clean_tensor_name"]("_fsdp_wrapped_module.first.weight") == "first.weight"


@pytest.mark.parametrize("when", ["in forward", "before backward", "after backward"])
@on_ranks(2)
def test_the_final_callback_cleans_up_after_a_step_that_did_not_end(when: str) -> None:
    with fsdp_flat.installed(), imported("client_that_cleans_up") as client:
        model, reference = (shard(seeded(), use_orig_params=True) for _ in range(2))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
        hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0) if when == "in forward" else None
        with pytest.raises(ZeroDivisionError) if hook else nullcontext():
            loss = square_loss(model, batch(dist.get_rank(), 5))
            _ = loss.backward() if when == "after backward" else None
        _ = hook and hook.remove()
        clean_up = vars(client)["_post_backward_final_callback"]
        clean_up(model, model)
        wrappers = fsdp_flat.FullyShardedDataParallel.fsdp_modules(model)
        assert all(wrapper._unit.is_sharded for wrapper in wrappers)
        assert all((param.grad is not None) == (when == "after backward") for param in model.parameters() if len(param))
        with pytest.raises(UsageError, match="outermost"):
            clean_up(wrappers[1], wrappers[1])
        assert step(model, optimizers[0], 0) == step(reference, optimizers[1], 0)
    assert_close(whole_state(model), whole_state(reference), rtol=0, atol=0)


@on_ranks(2)
def test_names_of_modules_are_the_plain_models_inside_summon_full_params() -> None:
    plain = [name for name, _ in seeded().named_modules()]
    holder = nn.ModuleDict({"model": shard(seeded())})
    model = holder["model"]
    with model.summon_full_params(holder):
        assert list(dict(model.named_modules())) == plain
        assert list(dict(model.module.named_modules())) == plain
        assert [name for name in dict(holder.named_modules()) if "_fsdp_wrapped_module" in name] == []
        assert dict(model.named_modules())["blocks.1"] is model.blocks[1]._fsdp_wrapped_module
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        assert names.count("blocks.1") == 2  # the unit and its module
        assert [name for name, _ in holder.named_parameters()] == [
            f"model.{name}" for name, _ in seeded().named_parameters()
        ]
    assert "_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module" in dict(model.named_modules())


class InAFile:
    """Stands for a tensor that is not read yet, as Lightning's lazy loading does: torch's functions read it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.shape, self.dtype, self.num_reads = tensor, tensor.shape, tensor.dtype, 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.read() if isinstance(arg, InAFile) else arg for arg in args), **(kwargs or {}))

    def read(self) -> torch.Tensor:
        self.num_reads += 1
        return self._tensor


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_what_stands_for_a_tensor_in_a_file_is_read_when_it_is_loaded(orig: bool) -> None:
    model = shard(seeded(), use_orig_params=orig)
    other = whole_state(shard(seeded(seed=3)))
    lazy = {name: InAFile(value) if "shift" not in name else value for name, value in other.items()}
    model.load_state_dict(lazy)
    assert_close(whole_state(model), other, rtol=0, atol=0)
    assert {value.num_reads for value in lazy.values() if isinstance(value, InAFile)} <= {0, 1}
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor"):
        model.load_state_dict({**other, "first.weight": "no tensor"})
