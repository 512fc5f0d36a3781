"""Cases that the fuzzer has found, each in its smallest form."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import clean_tensor_name
from fsdp_flat.composable import fully_shard
from tests.composable.sides import one_backward
from tests.support import assert_close, on_ranks
from tests.support.kit import Stack


@on_ranks(2)
def test_the_wrapper_takes_a_module_that_holds_units_of_fully_shard() -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    fully_shard(model.blocks[1])
    model = FSDP(model, use_orig_params=True)
    for step in range(2):
        for side in (plain, model):
            optimizer = torch.optim.SGD(side.parameters(), lr=0.1, foreach=False)
            one_backward(side, step)
            for param in plain.parameters() if side is plain else ():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for name, value in model.state_dict().items():
        name = clean_tensor_name(name)
        assert isinstance(value, DTensor) == name.startswith("blocks.1.")
        assert_close(value.full_tensor() if isinstance(value, DTensor) else value, expected[name].detach(), what=name)
