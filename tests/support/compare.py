"""Compares tensors and nested structures, and reports where and by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def assert_close(actual: Any, expected: Any, *, rtol: float, atol: float, what: str = "value") -> None:
    """Assert ``|actual - expected| <= atol + rtol * |expected|`` everywhere; NaN equals NaN.

    Types, keys, lengths, shapes, dtypes and devices must be equal. ``torch.nn.Parameter`` counts as a tensor.
    Numbers are compared with the same tolerance, anything else with ``==``.

    Args:
        actual: a tensor, a number, or dicts, lists and tuples of such.
        expected: the same structure.
        rtol: relative tolerance.
        atol: absolute tolerance.
        what: name of the value, with which the path in the message starts.
    """
    __tracebackhide__ = True
    _compare(actual, expected, what, rtol, atol)


def assert_equal(actual: Any, expected: Any, *, what: str = "value") -> None:
    """Assert that both are bitwise equal, so that ``-0.0`` differs from ``0.0`` and a NaN from another NaN."""
    __tracebackhide__ = True
    _compare(actual, expected, what, None, None)


def _compare(actual: Any, expected: Any, path: str, rtol: float | None, atol: float | None) -> None:
    __tracebackhide__ = True
    _check(path, "type", _kind(actual), _kind(expected))
    if isinstance(expected, torch.Tensor):
        _compare_tensors(actual, expected, path, rtol, atol)
    elif isinstance(expected, Mapping):
        missing = [key for key in expected if key not in actual]
        extra = [key for key in actual if key not in expected]
        if missing or extra:
            raise AssertionError(f"{path}: keys differ: missing {missing}, unexpected {extra}")
        for key, value in expected.items():
            _compare(actual[key], value, f"{path}[{key!r}]", rtol, atol)
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        _check(path, "length", len(actual), len(expected))
        for index, value in enumerate(expected):
            _compare(actual[index], value, f"{path}[{index}]", rtol, atol)
    elif isinstance(expected, float):
        _compare_floats(actual, expected, path, rtol, atol)
    elif actual != expected:
        raise AssertionError(f"{path}: got {actual!r}, expected {expected!r}")


def _compare_tensors(
    actual: torch.Tensor, expected: torch.Tensor, path: str, rtol: float | None, atol: float | None
) -> None:
    __tracebackhide__ = True
    for name in ("shape", "dtype", "device", "layout"):
        _check(path, name, getattr(actual, name), getattr(expected, name))
    got, want = actual.detach(), expected.detach()
    if rtol is None or atol is None:
        differs = _bytes_of(got).ne(_bytes_of(want)).any(dim=-1).reshape(got.shape)
    else:
        differs = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    num_differing = int(differs.sum())
    if num_differing == 0:
        return
    wide = torch.complex128 if got.is_complex() else torch.float64
    distance = (got.to(wide) - want.to(wide)).abs()
    # A NaN on one side only counts as an infinite difference; one of the bits only counts as 0.
    one_nan = got.isnan() ^ want.isnan()
    distance = distance.nan_to_num(nan=0.0).masked_fill(one_nan, math.inf).masked_fill(~differs, -1.0)
    at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape)) if distance.dim() else ()
    limit = "bitwise" if rtol is None else f"rtol={rtol:g}, atol={atol:g}"
    raise AssertionError(
        f"{path}: {num_differing} of {got.numel()} elements differ ({limit}); largest difference "
        f"{float(distance[at]):.6g} at {list(at)}: got {got[at].item()!r}, expected {want[at].item()!r}"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, one row per element."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())


def _compare_floats(actual: float, expected: float, path: str, rtol: float | None, atol: float | None) -> None:
    __tracebackhide__ = True
    if rtol is None or atol is None:
        same = actual.hex() == expected.hex()
    else:
        same = (
            actual == expected
            or (math.isnan(actual) and math.isnan(expected))
            or (math.isfinite(expected) and abs(actual - expected) <= atol + rtol * abs(expected))
        )
    if not same:
        raise AssertionError(f"{path}: got {actual!r}, expected {expected!r}, difference {abs(actual - expected):.6g}")


def _kind(value: Any) -> type:
    """Return the type to compare: a parameter or sharded gradient is a tensor, an ordered dict a dict."""
    if type(value) is torch.nn.Parameter:
        return torch.Tensor
    return dict if isinstance(value, dict) else type(value)


def _check(path: str, what: str, actual: Any, expected: Any) -> None:
    __tracebackhide__ = True
    if actual != expected:
        raise AssertionError(f"{path}: {what} differs: got {actual}, expected {expected}")
