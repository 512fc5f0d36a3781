"""Lists FSDP2's switches that the library has no use for: each is accepted without effect, or refused."""

from __future__ import annotations

from typing import Literal, NoReturn

from torch import nn

from fsdp_flat.core.unit import own_unit
from fsdp_flat.errors import UnsupportedError


class UnusedSwitches(nn.Module):
    """Accepts or refuses FSDP2's switches that the library has no use for; docstrings give the reasons.

    They are methods, not rows that make methods, because type checkers and the API reference read signatures.
    """

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept the request that backends get sums of gradients only, which is always so here.

        Gradients are divided after the sum, fp16 also before it, by the library itself.
        """

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept FSDP2's switch: all-gathers are always asynchronous here."""

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> NoReturn:
        """Refuse symmetric memory, which the library does not allocate.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"Unit {own_unit(self).name!r} cannot take its memory for communication from {backend}'s symmetric memory. "
            "Call set_allocate_memory_from_process_group_for_comm(True) for memory that the backend has registered, or "
            "pass an object whose allocate returns symmetric memory to set_custom_all_gather."
        )
