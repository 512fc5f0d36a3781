"""load_checkpoint into a model that has changed: strict, prefix and rename, as load_full has them."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, RankMismatchError
from tests.support import assert_equal, on_ranks
from tests.support.beside import FRONTS
from tests.support.models import Tied
from tests.support.wrapper_models import whole_state


def wrapped(model: nn.Module, front: str) -> Any:
    if front == "fully_shard":
        return fully_shard(model)
    return FSDP(model, use_orig_params=front == "originals")


def values(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        return whole_state(model)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(8, width) for width in widths))


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


@FRONTS
@on_ranks(2)
def test_what_fits_is_loaded_and_the_rest_is_named(front: str, tmp_path: Path) -> None:
    old = wrapped(net(8, 3), front)
    save_checkpoint(tmp_path, old, step=1)
    new = net(8, seed=1)
    new.append(nn.BatchNorm1d(8))
    new = wrapped(new, front)
    before, saved = values(new), values(old)
    with pytest.raises(LoadError, match=re.escape("load_checkpoint(..., strict=False)")):
        load_checkpoint(tmp_path, new)
    assert_equal(values(new), before)
    # The second module is another one in both.
    with pytest.raises(LoadError, match=r"'1\.weight' has shape"):
        load_checkpoint(tmp_path, new, strict=False)
    rename = {"1.weight": None, "1.bias": "head.bias"}
    found = load_checkpoint(tmp_path, new, strict=False, rename=lambda name: rename.get(name, name))
    assert found is not None
    assert sorted(found.missing) == sorted(name for name in before if name.startswith("1."))
    assert found.unexpected == ("1.bias",)
    expected = {name: saved[name] if name.startswith("0.") else value for name, value in before.items()}
    assert_equal(values(new), expected)


@FRONTS
@on_ranks(2)
def test_names_are_mapped_by_prefix_and_by_rename(front: str, tmp_path: Path) -> None:
    inner = net(8, 8)
    old = wrapped(named(body=inner, head=nn.Linear(8, 2)), front)
    save_checkpoint(tmp_path / "whole", old, step=1)
    part = wrapped(net(8, 8, seed=1), front)
    with pytest.raises(LoadError, match=re.escape("load_checkpoint(..., prefix='body.')")):
        load_checkpoint(tmp_path / "whole", part)
    found = load_checkpoint(tmp_path / "whole", part, prefix="body.")
    assert found is not None
    assert (found.missing, found.unexpected) == ((), ())
    saved = {name.removeprefix("body."): value for name, value in values(old).items() if name.startswith("body.")}
    assert_equal(values(part), saved)
    save_checkpoint(tmp_path / "part", part, step=2)
    torch.manual_seed(3)
    whole = wrapped(named(body=net(8, 8, seed=4)), front)
    with pytest.raises(LoadError, match=re.escape("rename=lambda name: 'body.' + name")):
        load_checkpoint(tmp_path / "part", whole)
    load_checkpoint(tmp_path / "part", whole, rename=lambda name: "body." + name)
    assert_equal(values(whole), {"body." + name: value for name, value in saved.items()})


@FRONTS
@on_ranks(2)
def test_a_tied_parameter_takes_the_value_of_any_of_its_names(front: str, tmp_path: Path) -> None:
    old = wrapped(Tied(), front)
    save_checkpoint(tmp_path, old, step=1)
    saved = values(old)
    tied = [name for name in saved if sum(torch.equal(saved[name], each) for each in saved.values()) > 1]
    assert len(tied) == 2
    for left_out in tied:
        torch.manual_seed(7)
        new = wrapped(Tied(), front)
        with torch.no_grad():
            for param in new.parameters():
                param.add_(1)
        names = {name: name for name in saved if name != left_out}
        found = load_checkpoint(tmp_path, new, rename=names.get)
        assert found is not None
        assert not found.missing
        assert_equal(values(new), saved)


@on_ranks(2)
def test_an_optimizer_comes_along_where_its_parameters_are_those_that_were_saved(tmp_path: Path) -> None:
    """A buffer that is new says nothing of an optimizer."""
    old = FSDP(net(8, 8), use_orig_params=True)
    optimizer = torch.optim.AdamW(old.parameters())
    for param in old.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save_checkpoint(tmp_path, old, optimizer, step=1)
    new: Any = net(8, 8, seed=1)
    new.register_buffer("seen", torch.zeros(3))
    new = wrapped(new, "originals")
    fresh = torch.optim.AdamW(new.parameters())
    found = load_checkpoint(tmp_path, new, fresh, strict=False)
    assert found is not None
    assert found.missing == ("seen",)
    for one, other in zip(old.parameters(), new.parameters(), strict=True):
        if one.numel():
            assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[other]["exp_avg"])
    with pytest.raises(OptionError, match=r"names of parameters.*optim=None"):
        load_checkpoint(tmp_path, new, fresh, strict=False, prefix="0.")


@on_ranks(2)
def test_bad_names_are_told_on_every_rank(tmp_path: Path, rank: int) -> None:
    model = FSDP(named(model=net(8)), use_orig_params=True)
    save_checkpoint(tmp_path, model, step=1)
    new = FSDP(net(8, seed=1), use_orig_params=True)
    before = whole_state(new)

    def first(name: str) -> str:
        return name.removeprefix("model.")

    def second(name: str) -> str | None:
        return first(name) if name.endswith("bias") else None

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (OptionError, "pass prefix='model.'", {"prefix": "model"}),
        (LoadError, "No name begins with prefix='modle.': there are 'model.0.weight'", {"prefix": "modle."}),
        (LoadError, "No name begins with prefix='modle.'", {"prefix": "modle.", "strict": False}),
        (OptionError, "rename gives the name 'same' to", {"rename": lambda name: "same"}),
        (OptionTypeError, "prefix must be a str", {"prefix": 3}),
        (RankMismatchError, "strict=", {"strict": rank == 0}),
        (RankMismatchError, "from 'model.0.", {"rename": [first, second][rank], "strict": False}),
    ]
    for kind, text, options in cases:
        with pytest.raises(kind, match=re.escape(text)):
            load_checkpoint(tmp_path, new, **options)
        dist.barrier()
    assert_equal(whole_state(new), before)
