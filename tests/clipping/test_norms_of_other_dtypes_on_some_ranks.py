"""The dtype in which ranks exchange a norm does not depend on parameters that only some ranks have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support import assert_close, on_ranks
from tests.support.kit import normal, square_loss


class WithOwn(nn.Module):
    """Has a layer that all ranks share, and one of this rank's own."""

    def __init__(self, own_dtype: torch.dtype) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(4, 4), nn.Linear(4, 4).to(own_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x).to(self.own.weight.dtype))


@pytest.mark.filterwarnings("ignore:.*differ")
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2, 4)
def test_ranks_with_a_module_in_fp64_agree_with_those_without(by_torch: bool, rank: int) -> None:
    torch.manual_seed(0)
    model = WithOwn(torch.float64 if rank == 1 else torch.float32)
    wrapped = FSDP(model, ignored_modules=[model.own], use_orig_params=True)
    square_loss(wrapped, normal(0, 3, 4)).backward()
    found = nn.utils.clip_grad_norm_(wrapped.parameters(), 1e9) if by_torch else wrapped.clip_grad_norm_(1e9)
    assert found.dtype == (torch.float64 if rank == 1 else torch.float32)
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(totals, found.double())
    assert_close(totals, totals[:1] * len(totals), rtol=1e-5, atol=0.0)
