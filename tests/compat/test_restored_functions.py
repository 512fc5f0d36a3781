"""Each function of torch that the library replaces is torch's own again after ``restore_torch_functions()``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as PeerFSDP
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from fsdp_flat.compat import replace_torch_functions, restore_torch_functions
from tests.support import on_ranks
from tests.support.kit import wrapped
from tests.support.models import Stack


def functions() -> dict[str, Any]:
    """Return what is replaced, by name."""
    owners = [
        *((clip_grad, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_norm_"), (GradScaler, "_unscale_grads_")),
        *((torch.autograd, "grad"), (torch.autograd, "backward"), (torch.optim.Optimizer, "zero_grad")),
        *((DTensor, "full_tensor"), (dist, "barrier"), (DistributedDataParallel, "__init__")),
        *((PeerFSDP, "__init__"), (FSDPParamGroup, "__init__")),
        *((PeerFSDP, "state_dict_type"), (PeerFSDP, "summon_full_params"), (PeerFSDP, "optim_state_dict")),
        *([(torch.optim.Muon, "__init__")] if hasattr(torch.optim, "Muon") else []),  # since torch 2.9
    ]
    return {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in owners}


@on_ranks(2)
def test_each_function_is_torchs_own_while_they_are_restored() -> None:
    wrapped(Stack())
    replaced = functions()
    restore_torch_functions()
    try:
        own = functions()
        assert [name for name in own if not own[name].__module__.startswith("torch.")] == []
        assert [name for name in own if own[name] is replaced[name]] == []
        wrapped(Stack())  # a new model does not replace them again
        assert functions() == own
    finally:
        replace_torch_functions()
    assert [name for name, each in functions().items() if each is own[name]] == []
