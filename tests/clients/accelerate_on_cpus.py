"""accelerate, and so transformers, with the FSDP plugin on several CPU processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Let ``AcceleratorState`` do for several CPU processes what it does for those of accelerators.

    Released versions drop the plugin there without a word and wrap in DistributedDataParallel.
    """
    made = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        AcceleratorState.__init__ = made  # type: ignore[method-assign]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
