"""Names without the components that wrappers add."""

from __future__ import annotations

import pytest

from fsdp_flat.layout import (
    FLAT_PARAM,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    clean_fqn,
    flat_param_name,
    is_flat_param_name,
)


@pytest.mark.parametrize(
    "name, cleaned",
    [
        ("", ""),
        ("weight", "weight"),
        ("_fsdp_wrapped_module.weight", "weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module._fsdp_wrapped_module.weight", "a.b.weight"),
        ("_orig_mod.a._orig_mod.weight", "a.weight"),
        ("_fsdp_wrapped_module._flat_param", "_flat_param"),
        ("a._fsdp_wrapped_module", "a"),
        ("x_orig_mod.weight", "x_orig_mod.weight"),
        ("x_fsdp_wrapped_module.weight", "x_fsdp_wrapped_module.weight"),
        ("_orig_mod2._checkpoint_wrapped_module_.weight", "_orig_mod2._checkpoint_wrapped_module_.weight"),
    ],
)
def test_clean_fqn_removes_exactly_the_wrapper_components(name: str, cleaned: str) -> None:
    assert clean_fqn(name) == cleaned


def test_names_of_flat_parameters_are_recognized_and_no_others() -> None:
    assert [flat_param_name(position) for position in range(3)] == ["_flat_param", "_flat_param_1", "_flat_param_2"]
    assert all(is_flat_param_name(flat_param_name(position)) for position in (0, 1, 12))
    assert not any(map(is_flat_param_name, ("", "_flat_param_", "_flat_param_x", "a._flat_param", "_flat_param.a")))


def test_the_names_are_those_of_torch_fsdp() -> None:
    from torch.distributed.fsdp import _common_utils, _unshard_param_utils

    assert FSDP_WRAPPED_MODULE == _common_utils.FSDP_WRAPPED_MODULE
    assert FSDP_PREFIX == _common_utils.FSDP_PREFIX
    assert FLAT_PARAM == _unshard_param_utils.FLAT_PARAM
