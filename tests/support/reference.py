"""Trains a replicated model on the global batch, as the reference for sharded training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def replicated_gradients(
    model: nn.Module, batches: Sequence[Any], loss_of: LossFunction
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Compute the mean loss over all ranks' batches, and its gradients.

    No communication: every rank runs all batches, one after the other, on its own plain copy.
    Gradients are also accumulated into ``.grad``, as by backward.

    Args:
        model: a plain module with the weights that the sharded model started from.
        batches: each rank's batch, by rank.
        loss_of: ``loss_of(model, batch)`` returns a scalar, the mean over the batch's elements.

    Returns:
        The loss, detached, and ``{fqn: gradient}``, ``None`` for a parameter without a gradient.
    """
    if not batches:
        raise ValueError("the reference needs one batch for each rank, got none")
    total: torch.Tensor | None = None
    for batch in batches:
        loss = loss_of(model, batch) / len(batches)
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }
    return total, gradients


def replicated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss_of: LossFunction
) -> torch.Tensor:
    """Take one optimizer step of the replicated model on all ranks' batches; return the mean loss before it."""
    optimizer.zero_grad()
    loss, _ = replicated_gradients(model, batches, loss_of)
    optimizer.step()
    return loss
