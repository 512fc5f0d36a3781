"""Serializes states that are scalars or not tensors, to exchange them between ranks."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch

from fsdp_flat.comm import dtype_from_name

__all__ = ["value_from_text", "value_to_text"]


def value_to_text(value: Any) -> list[Any]:
    """Encode a non-tensor state as JSON, equal on every rank for equal values; pickled if JSON lacks the type."""
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return [str(value.dtype), value.item()]
    if type(value) in (int, float, str, bool, type(None)):
        return ["", value]
    return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]


def value_from_text(text: list[Any]) -> Any:
    """Decode a value that :func:`value_to_text` encoded on a rank of the same job."""
    kind, value = text
    if kind == "pickle":
        return pickle.loads(base64.b64decode(value))
    return torch.tensor(value, dtype=dtype_from_name(kind)) if kind else value
