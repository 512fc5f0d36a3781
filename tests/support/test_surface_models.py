"""The comparison that the tests of this folder use can fail."""

from __future__ import annotations

import pytest
import torch

from tests.support.surface_models import assert_near


@pytest.mark.parametrize(
    "actual, message",
    [
        ({"a": torch.tensor([1.0, 100.0])}, "keys"),
        ({"b": torch.tensor([1.0, 100.0], dtype=torch.bfloat16)}, "bfloat16"),
        ({"b": torch.ones(3)}, "shape|expected"),
        ({"b": torch.tensor([1.0, 102.0])}, "differs by 2"),
        ({"b": torch.tensor([1.0, float("nan")])}, "differs by nan"),
    ],
)
def test_a_difference_in_key_dtype_shape_or_value_fails(actual: dict[str, torch.Tensor], message: str) -> None:
    expected = {"b": torch.tensor([1.0, 100.0])}
    assert_near({"b": torch.tensor([1.5, 99.5])}, expected, 1e-2, "value")
    with pytest.raises(AssertionError, match=message):
        assert_near(actual, expected, 1e-2, "value")


def test_integers_have_to_be_equal() -> None:
    with pytest.raises(AssertionError, match="differs by 1"):
        assert_near(torch.tensor(1001), torch.tensor(1000), 1e-2, "count")
