"""Records the events of a model's steps, for tests of order and numbers of collectives."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from fsdp_flat.core import modules_of, own_unit, step_of, unit_of
from fsdp_flat.errors import OptionError


@contextmanager
def trace(model: nn.Module) -> Generator[list[tuple[str, str]], None, None]:
    """Record the events of the units of ``model`` inside the block, in their order on this rank.

    Each is ``(event, module)``, with the module's path in the tree (the outermost one's class, and the paths of several
    modules of one unit separated by commas). An ``all_gather`` of parameters on another mesh names that too:
    ``"blocks.0 (efsdp)"`` for a mesh of one dim ``efsdp``::

        with trace(model) as events:
            model(x).sum().backward()
        assert events.count(("reduce_scatter", "blocks.0")) == 1

    Events of a unit are ``pre_forward``, ``post_forward``, ``pre_backward``, ``post_backward``; ``unshard`` where its
    all-gather begins, ``wait_for_unshard`` where one waits, ``reshard`` where its memory is freed, or its content
    given up (``set_keep_unsharded_storage``); ``forward_prefetch`` and ``backward_prefetch`` before an ``unshard`` that
    begins early; and ``root_post_backward`` at the end of a backward. The last unit of a forward keeps its memory for
    the backward, and has no ``reshard`` in between. Collectives are ``all_gather`` and ``reduce_scatter``, one for each
    dtype and each ``requires_grad`` in the unit.

    Args:
        model: a module with units, of ``fully_shard`` or ``FullyShardedDataParallel``.

    Raises:
        OptionError: (a ValueError) there are none.
    """
    roots: list[nn.Module] = []
    below: set[nn.Module] = set()
    for module in modules_of(model):
        if unit_of(module) is not None and module not in below:
            roots.append(module)
            below.update(modules_of(module))
    if not roots:
        raise OptionError(f"{type(model).__name__} has no unit, of fully_shard or FullyShardedDataParallel, to trace.")
    events: list[tuple[str, str]] = []
    steps = [step_of(root, own_unit(root)) for root in roots]
    before = [step.trace for step in steps]
    for step in steps:
        step.trace = events
    try:
        yield events
    finally:
        for step, trace_before in zip(steps, before):
            step.trace = trace_before
