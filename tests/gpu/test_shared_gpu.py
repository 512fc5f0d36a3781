"""Worker ranks over NCCL share one GPU; what places their tensors there is tested without one too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support import Ranks
from tests.support.kit import BLOCKS, batch, square_loss
from tests.support.models import Stack
from tests.support.pool import WarmPools
from tests.support.transport import GLOO, NCCL, CreatesOn, mesh_type, rank_device

NEEDS_CUDA = "NCCL needs a CUDA device"


def test_each_rank_that_shares_a_gpu_is_a_host_of_its_own_to_nccl() -> None:
    first, second = NCCL.environ(0), NCCL.environ(1)
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert {environ["NCCL_SOCKET_IFNAME"] for environ in (first, second)} == {"lo"}
    assert {environ["LOCAL_RANK"] for environ in (first, second)} == {"0"}
    assert GLOO.environ(0) == {}
    assert (rank_device(), mesh_type()) == (torch.device("cpu"), "cpu")


def test_tensors_and_modules_of_a_test_are_made_on_the_device_of_its_rank() -> None:
    with CreatesOn(torch.device("meta")):
        made = [torch.ones(2), torch.tensor([1.0]), torch.randn(2, 3), torch.empty(2), torch.arange(3)]
        made += [*nn.Linear(2, 3).parameters(), torch.as_tensor([1.0]), torch.zeros(2, requires_grad=True)]
        assert {tensor.device.type for tensor in made} == {"meta"}
        assert made[-1].is_leaf
        assert made[-1].requires_grad
        assert torch.ones(2, device="cpu").device.type == "cpu", "a device that is named"
        assert torch.ones_like(made[0]).device.type == "meta"
        on_cpu = torch.ones(2, device="cpu")
        assert torch.as_tensor(on_cpu).device.type == "cpu", "it has a device already"
    assert torch.ones(2).device.type == "cpu"


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pools_on_gpu() -> Iterator[WarmPools]:
    """Pools of ranks that share the GPU."""
    pools = WarmPools(NCCL)
    yield pools
    pools.close()


def train_over_nccl(memory_of_nccl: bool) -> tuple[str, str, list[float]]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    assert total.item() == num_ranks * (num_ranks + 1) / 2
    assert init_device_mesh(mesh_type(), (num_ranks,)).get_local_rank() == rank
    torch.manual_seed(0)
    model = FSDP(Stack(), auto_wrap_policy=BLOCKS)
    for wrapper in FSDP.fsdp_modules(model):
        wrapper.set_allocate_memory_from_process_group_for_comm(memory_of_nccl)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(3):
        loss = square_loss(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    return dist.get_backend(), str(next(model.parameters()).device), losses


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_train_over_nccl_on_one_gpu(num_ranks: int, pools_on_gpu: WarmPools) -> None:
    ranks = Ranks(pools_on_gpu, num_ranks, 120.0)
    found = []
    for memory_of_nccl in (False, True):
        results = ranks.run(train_over_nccl, memory_of_nccl)
        assert {(backend, device) for backend, device, _ in results} == {("nccl", "cuda:0")}
        (losses,) = {tuple(losses) for *_, losses in results}
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def averages_and_sums_over_nccl() -> list[torch.Tensor]:
    shards = []
    for sums in (False, True):
        torch.manual_seed(0)
        model = FSDP(Stack(), auto_wrap_policy=BLOCKS, use_orig_params=True)
        for unit in FSDP.fsdp_modules(model):
            unit.set_force_sum_reduction_for_comms(sums)
        square_loss(model, batch(dist.get_rank())).backward()
        shards.append(torch.cat([param.grad.view(-1) for param in model.parameters() if param.grad is not None]).cpu())
    return shards


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_averages_of_nccl_are_divided_sums_to_the_bit(num_ranks: int, pools_on_gpu: WarmPools) -> None:
    for averages, sums in Ranks(pools_on_gpu, num_ranks, 120.0).run(averages_and_sums_over_nccl):
        assert averages.any()
        assert torch.equal(averages, sums)
