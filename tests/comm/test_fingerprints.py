"""Fingerprints of tensors: equal for equal bits, and different after a change of any element."""

from __future__ import annotations

import pytest
import torch

from fsdp_flat.comm import fingerprints


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    numels = (0, 1, 7, 513, 4096, 20000)
    return [torch.arange(numel).to(dtype) for numel in numels] + [torch.arange(12).to(dtype).view(3, 4).t()]


@pytest.mark.every_value_in_quick("dtypes that few tests have")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_a_change_of_any_element_changes_the_fingerprint_of_its_tensor_alone(dtype: torch.dtype) -> None:
    expected = fingerprints(tensors(dtype))
    assert fingerprints(tensors(dtype)) == expected
    for index, tensor in enumerate(tensors(dtype)):
        for position in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            changed = tensors(dtype)
            flat = changed[index].reshape(-1).clone()
            flat[position] = 0 if flat[position] else 1
            changed[index] = flat.view(changed[index].shape)
            found = fingerprints(changed)
            assert [a == b for a, b in zip(found, expected, strict=True)] == [i != index for i in range(len(expected))]


def test_parameters_and_strided_tensors_have_the_fingerprint_of_their_values() -> None:
    every_other = torch.arange(20.0)[::2]
    assert fingerprints([torch.nn.Parameter(every_other)]) == fingerprints([every_other.clone()])


@pytest.mark.parametrize("shape", [(64, 1024), (3, 512), (128, 512, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_in_another_order_change_the_fingerprint(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert fingerprints([tensor]) != fingerprints([tensor.flip(0)])
