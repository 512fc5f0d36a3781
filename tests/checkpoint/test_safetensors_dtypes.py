"""safetensors files of every dtype that the format and torch have are written and read; others are errors by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel, fully_shard, load_full, save_full
from fsdp_flat.errors import LoadError, PeerFailureError, UnsupportedError
from tests.support import on_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="reads and writes with the other implementation")

# By name of the format, the dtype. The format has F6_E2M3 and F6_E3M2 too, which torch lacks.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FRONTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": lambda model: FullyShardedDataParallel(model, use_orig_params=True),
    "flat parameters": lambda model: FullyShardedDataParallel(model),
    "fully_shard": fully_shard,
}


def values(dtype: torch.dtype, start: int) -> torch.Tensor:
    """Return five rows of three elements with bytes that are no two alike, as zeros and ones for a bool."""
    numbers = torch.arange(start, start + 15 * dtype.itemsize, dtype=torch.uint8)
    return (numbers % 2 if dtype is torch.bool else numbers).view(dtype).view(5, 3)


class Typed(nn.Module):
    """Has a frozen parameter and a buffer of one dtype."""

    def __init__(self, dtype: torch.dtype, start: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(values(dtype, start), requires_grad=False)
        self.register_buffer("buffer", values(dtype, start + 7))


def raw(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Return dtypes, shapes and bytes, which all dtypes have."""
    return {
        name: (value.dtype, value.shape, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, value in state.items()
    }


@pytest.mark.parametrize("code", DTYPES)
@on_ranks(2)
def test_a_model_of_each_dtype_is_saved_for_the_safetensors_package_and_loaded_from_it(
    code: str, tmp_path: Path, rank: int
) -> None:
    expected = raw(Typed(DTYPES[code], 1).state_dict())
    for front, wrap in FRONTS.items():
        path = save_full(wrap(Typed(DTYPES[code], 1)), tmp_path / front) / "model.safetensors"
        dist.barrier()
        # As an image of the file, which has the dtype under the format's name, and read by the package.
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert (header["frozen"]["dtype"], header["buffer"]["dtype"]) == (code, code)
        assert raw(safetensors.load_file(path)) == expected
        if rank == 0:
            safetensors.save_file(Typed(DTYPES[code], 1).state_dict(), tmp_path / f"{front} of the package.safetensors")
        dist.barrier()
        for source in (path, tmp_path / f"{front} of the package.safetensors"):
            other = wrap(Typed(DTYPES[code], 3))
            assert load_full(other, source) == ([], [])
            again = save_full(other, tmp_path / f"{front} again") / "model.safetensors"
            dist.barrier()
            assert raw(safetensors.load_file(again)) == expected
            dist.barrier()


@pytest.mark.parametrize("code", ["F6_E2M3", "Q7"])
@on_ranks(2)
def test_a_dtype_that_torch_lacks_is_an_error_that_names_it(code: str, tmp_path: Path, rank: int) -> None:
    entry = {"dtype": code, "shape": [4], "data_offsets": [0, 3]}
    header = json.dumps({"weight": entry}).encode()
    path = tmp_path / "made.safetensors"
    if rank == 0:
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    dist.barrier()
    text = f"made.safetensors is no safetensors file.*{code}"
    with pytest.raises((LoadError, PeerFailureError), match=text):
        load_full(FullyShardedDataParallel(nn.Linear(2, 2)), path)


@on_ranks(2)
def test_without_the_safetensors_package_files_are_written_and_the_error_of_a_load_says_what_to_install(
    tmp_path: Path,
) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "safetensors", None)
        save_full(model, tmp_path)
        with pytest.raises(UnsupportedError, match=r"model.safetensors is read by .*pip install safetensors"):
            load_full(model, tmp_path)
    assert load_full(model, tmp_path) == ([], [])
