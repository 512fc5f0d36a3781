"""The table of FSDP1's names: each is where the table says, and exists in torch."""

from __future__ import annotations

import importlib

import pytest

from fsdp_flat.compat.torch_names import HOMES, MIRRORED_MODULES, PEER, PRIVATE_MODULES, home_of


@pytest.mark.parametrize("name", HOMES)
def test_a_name_is_in_its_home_and_in_a_module_of_torch(name: str) -> None:
    assert hasattr(importlib.import_module(HOMES[name]), name)
    modules = [module for module in (*MIRRORED_MODULES, *PRIVATE_MODULES) if home_of(module, name) is not None]
    peers = [importlib.import_module(f"{PEER}.{module}" if module else PEER) for module in modules]
    assert any(hasattr(peer, name) for peer in peers)


def test_public_names_have_the_module_of_the_same_name_and_unknown_ones_none() -> None:
    assert home_of("", "MixedPrecision") == "fsdp_flat"
    assert home_of("api", "MixedPrecision") == "fsdp_flat.api"
    assert home_of("_common_utils", "TrainingState") == "fsdp_flat.fully_sharded_data_parallel"
    assert home_of("_exec_order_utils", "TrainingState") is None
    assert home_of("wrap", "no_such_policy") is None
