"""Copies of parameters with gradients, torch's native paths in eval, exceptions, hooks, and other devices."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_flat import fully_shard
from fsdp_flat.collectives import use_collectives
from fsdp_flat.comm import torch_comm
from fsdp_flat.core import PerParamTarget
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.beside import children_and_root
from tests.support.kit import seeded, square_loss
from tests.support.models import Stack


def sharded_stack() -> Stack:
    model = seeded()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(2)
def test_parameters_their_gradients_and_an_optimizer_can_be_copied_and_saved() -> None:
    model = sharded_stack()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        square_loss(model, torch.randn(3, 8)).backward()
        optimizer.step()
    for param in model.parameters():
        twin = copy.deepcopy(param)
        assert isinstance(twin.grad, DTensor)
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(twin.grad.to_local(), param.grad.to_local(), rtol=0, atol=0)
        written = io.BytesIO()
        torch.save(param.grad, written)
        # Of the gradient alone, not of its unit's.
        assert written.tell() < 4 * param.grad.to_local().numel() + 6000
    copied = copy.deepcopy(optimizer)
    assert len(copied.state) == len(optimizer.state)


@on_ranks(2)
def test_attention_that_is_a_unit_of_its_own_runs_in_an_encoder_layer_without_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    layer = copy.deepcopy(plain)
    fully_shard(layer.self_attn)
    fully_shard(layer)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


@on_ranks(2)
def test_zero_grad_after_a_backward_that_raised_clears_all_gradients() -> None:
    model = sharded_stack()
    fresh = sharded_stack()

    def fail(_grad: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    square_loss(model, torch.ones(3, 8)).backward()
    hook = model.blocks[1].register_forward_hook(lambda _module, _args, output: output.register_hook(fail) and None)
    loss = square_loss(model, torch.ones(3, 8))
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    hook.remove()
    model.zero_grad()
    x = torch.full((3, 8), 0.5)
    square_loss(model, x).backward()
    square_loss(fresh, x).backward()
    for param, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        assert isinstance(param.grad, DTensor)
        assert isinstance(expected.grad, DTensor)
        torch.testing.assert_close(param.grad.to_local(), expected.grad.to_local())


class _Work:
    def __init__(self, work: object, fails: bool) -> None:
        self._work, self._fails = work, fails

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self._work.wait()  # type: ignore[attr-defined]
        if self._fails:
            raise RuntimeError("on purpose")


@on_ranks(2)
@pytest.mark.parametrize("fails_in", ["begin", "wait"])
def test_an_all_gather_that_failed_keeps_no_memory_and_none_of_it_is_used_again(fails_in: str) -> None:
    model, fails = sharded_stack(), ""

    def gather(output: torch.Tensor, own: torch.Tensor, group: object, async_op: bool = False) -> _Work:
        if fails == "begin":
            raise RuntimeError("on purpose")
        work = torch_comm.all_gather_single(output, own.clone(), group=group, async_op=True)
        return _Work(work, fails == "wait")

    staged: list[torch.Tensor] = []
    stage = PerParamTarget.stage

    def note(rows: PerParamTarget, own: torch.Tensor, rank: int, num_ranks: int) -> object:
        found = stage(rows, own, rank, num_ranks)
        staged.append(found[0])
        return found

    use_collectives(model, all_gather=gather)
    x = torch.ones(3, 8)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PerParamTarget, "stage", note)
        expected = model(x).detach()
        fails = fails_in
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x)
        # A collective that was abandoned may still write there.
        abandoned = staged[-1].fill_(7.0)
        fails = ""
        output = model(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        assert bool((abandoned == 7.0).all())
        output.sum().backward()
    for unit_module in (*model.blocks, model):
        for handle in unit_module._unit.param_groups:
            staging = handle.output.target._staging
            assert staging is None or staging.storage.nbytes() == 0


@on_ranks(1)
def test_a_hook_on_an_unsharded_parameter_that_was_just_unfrozen_is_kept() -> None:
    calls = []
    module = nn.Linear(4, 4)
    module.weight.requires_grad_(False)
    fully_shard(module)
    module.unshard()  # type: ignore[operator]
    module.weight.requires_grad_(True)
    module.weight.register_post_accumulate_grad_hook(calls.append)
    module(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 1
    module.reshard()  # type: ignore[operator]
    assert module.weight.grad is not None


@on_ranks(2)
def test_full_tensors_that_are_assigned_go_to_the_device_of_the_mesh() -> None:
    # The meta device stands for an accelerator.
    mesh = DeviceMesh("meta", torch.arange(dist.get_world_size()))
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    fully_shard(module, mesh=mesh)
    full = {name: torch.ones(tensor.shape) for name, tensor in module.state_dict().items()}
    module.load_state_dict(full, assign=True)
    assert module.weight.device.type == module.weight._local_tensor.device.type == "meta"  # type: ignore[operator,union-attr]


@on_ranks(2)
def test_a_parameter_that_is_taken_out_is_an_error_and_one_that_is_put_back_is_unchanged() -> None:
    model = children_and_root(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    x = torch.ones(2, 4)
    before, layer = model(x).detach(), model[0]
    saved = dict(layer.named_parameters())
    for name, param in saved.items():
        setattr(layer, name, nn.Parameter(torch.zeros_like(param)))
    with pytest.raises(UsageError, match=r"'weight' of unit '0' was assigned on rank .*distribute_tensor"):
        model(x)
    for name, param in saved.items():
        setattr(layer, name, param)
    assert torch.equal(model(x), before)
