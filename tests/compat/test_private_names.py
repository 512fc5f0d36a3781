"""The table of torch's private functions: complete, true, and each function does with our objects what it says."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_flat
from fsdp_flat.compat.private_names import JOINED, PASSES, RAISES, WORKS
from fsdp_flat.compat.torch_names import FSDP2_NAMES
from fsdp_flat.errors import UsageError
from fsdp_flat.fully_sharded_data_parallel import HandleTrainingState, TrainingState
from tests.support import on_ranks
from tests.support.models import BufferedBlock
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer

needs_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the table is of torch 2.13, and this is {torch.__version__}"
)
ROOT = Path(inspect.getfile(dist)).parent
FILES = [*ROOT.glob("fsdp/**/*.py"), *ROOT.glob("_composable/**/*.py"), ROOT / "_composable_state.py"]
# What a module, a state, a handle or a parameter group is called, and its classes.
ARGUMENTS = {
    *("module", "modules", "model", "root", "root_module", "root_modules", "module_to_wrap", "fully_sharded_module"),
    *("fsdp_module", "state", "fsdp_state", "root_state", "handle", "handles", "fsdp_param_info", "fsdp_params"),
}
CLASSES = ("FSDPState", "FlatParamHandle", "nn.Module", "FSDPParam", "FSDPModule")
PUBLIC = {"always_wrap_policy", "enable_wrap", *FSDP2_NAMES}


def functions() -> dict[tuple[str, str], ast.FunctionDef]:
    """Module and name of each function of torch's FSDPs, with its definition."""
    found = {}
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[module, node.name] = node
    return found


def takes_ours(node: ast.FunctionDef) -> bool:
    """Whether an argument may be a module, a state, a handle or a parameter group."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    classes = [ast.unparse(each.annotation) for each in arguments if each.annotation is not None]
    classes = [text.replace("type[nn.Module]", "") for text in classes]
    return any(each.arg in ARGUMENTS for each in arguments) or any(kind in text for kind in CLASSES for text in classes)


def does(module: str, name: str) -> list[str]:
    """Which of the three things the table has for a function: one, if the table is right."""
    found = [kind for kind, names in (("works", WORKS), ("passes", PASSES)) if name in names.get(module, "").split()]
    return found + ["raises" for each in RAISES.values() if name in each.get(module, "").split()]


@needs_torch_2_13
def test_every_function_that_takes_an_object_of_fsdp_is_in_the_table_once() -> None:
    """A walk over torch's modules finds no function that is forgotten."""
    wrong = {
        key: does(*key)
        for key, node in functions().items()
        if takes_ours(node) and node.name not in PUBLIC and len(does(*key)) != 1
    }
    assert wrong == {}
    assert len([key for key, node in functions().items() if takes_ours(node)]) > 150


@needs_torch_2_13
def test_every_function_of_the_table_is_torchs_and_takes_such_an_object() -> None:
    known = functions()
    for table in (WORKS, PASSES, *RAISES.values()):
        for module, names in table.items():
            for name in names.split():
                assert (module, name) in known, (module, name)
    for module, name in JOINED:
        assert inspect.isclass(getattr(importlib.import_module(f"torch.distributed.{module}"), name))


def arguments_for(module: str, node: ast.FunctionDef, model: Any, fully: Any) -> list[Any]:
    """Our objects for the arguments that take some, None for the others."""
    is_second = module.startswith("fsdp._fully_shard")
    state = fully._get_fsdp_state() if is_second else model
    handle = state._fsdp_param_groups[0] if is_second else model._handle
    values = {"handle": handle, "handles": [handle], "state": state, "fsdp_state": state, "root_state": state}
    if is_second:
        values |= {"fsdp_params": handle.fsdp_params, "modules": [fully]}
    else:
        info = importlib.import_module("torch.distributed.fsdp._optim_utils").FSDPParamInfo
        values |= {
            "fsdp_param_info": info(model, handle, {}, []),
            "fqn_to_fsdp_param_info": {"a": info(model, handle, {}, [])},
        }
    given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return [values.get(name, model if name in ARGUMENTS else None) for name in given]


@needs_torch_2_13
@on_ranks(2)
def test_each_function_that_cannot_work_raises_an_error_with_its_name_and_what_to_call() -> None:
    """No error names the user's class."""
    known, model = functions(), shard(seeded(), use_orig_params=True)
    fully = fsdp_flat.fully_shard(BufferedBlock())
    with fsdp_flat.installed():
        for advice, by_module in RAISES.items():
            for module, names in by_module.items():
                for name in names.split():
                    call = getattr(importlib.import_module(f"torch.distributed.{module}"), name)
                    with pytest.raises(UsageError) as caught:
                        call(*arguments_for(module, known[module, name], model, fully))
                    text = str(caught.value)
                    assert text.startswith(f"{name} is a private function of torch's FSDP"), text
                    assert text.endswith(f"{advice}."), text
                    assert "Model" not in text


# ------------------------------------------------------------------------------- torch's functions, which pass

COMMON, RUNTIME = "fsdp._common_utils", "fsdp._runtime_utils"
Call = Callable[..., Any]


def shown(value: Any) -> Any:
    """What two libraries' objects have in common: parameters by shape, classes by name."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return [(shown(key), shown(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [shown(each) for each in value]
    if isinstance(value, set):
        return sorted(map(str, map(shown, value)))
    name = type(value).__name__
    if name == "FSDPParamInfo":
        return [shown(value.handle), value.param_indices, value.param_requires_grad]
    if name in ("TrainingState", "HandleTrainingState", "HandleShardingStrategy", "ShardingStrategy"):
        return value.name
    if name == "FlatParamHandle":
        return [name, value.flat_param._fqns]
    return list(map(shown, value)) if inspect.isgenerator(value) else value


def optimizer(model: Any) -> torch.optim.Optimizer:
    """An optimizer with a state for each parameter."""
    found = torch.optim.Adam(model.parameters())
    model(batch(dist.get_rank())).sum().backward()
    found.step()
    return found


def keys_of_states(of: Call, model: Any) -> Any:
    """FSDP1's keys of optimizer states, on all ranks."""
    optim = optimizer(model)
    names = importlib.import_module("torch.distributed.fsdp._optim_utils")
    params, fqns = names._get_param_key_to_param(optim), names._get_param_to_fqns(model)
    infos = names._get_fqn_to_fsdp_param_info(model)
    found, _ = of(optim.state_dict(), None, params, fqns, infos, merge_keys=True)
    return [(key.unflat_param_names, key.is_fsdp_managed) for key in found]


# A call of each function that reads something of an object of FSDP1.
READING: dict[tuple[str, str], Call] = {
    (COMMON, "_apply_to_modules"): lambda of, model: of(
        model, lambda module, prefix, level, found: found.append((prefix, level)), lambda found: found, None, []
    ),
    (COMMON, "_assert_in_training_states"): lambda of, model: of(model, [model.training_state]),
    (COMMON, "_get_module_fsdp_state"): lambda of, model: [of(each) is each for each in model.modules()],
    (COMMON, "_get_module_fsdp_state_if_fully_sharded_module"): lambda of, model: list(map(of, model.modules())),
    (COMMON, "_get_param_to_fqns"): lambda of, model: of(model),
    (COMMON, "_get_root_modules"): lambda of, model: of(set(model.modules())),
    (COMMON, "_get_sharding_strategy"): lambda of, model: of(model._handle),
    (COMMON, "_has_fsdp_params"): lambda of, model: of(model, model),
    (COMMON, "_is_composable"): lambda of, model: of(model),
    (COMMON, "_is_fsdp_flattened"): lambda of, model: [of(each) is True for each in model.parameters()],
    (COMMON, "_module_handle"): lambda of, model: of(model, model) is model._handle,
    (COMMON, "_named_parameters_with_duplicates"): lambda of, model: of(model),
    ("_composable_state", "_get_module_state"): lambda of, model: list(map(of, model.modules())),
    ("fsdp._init_utils", "_check_orig_params_flattened"): lambda of, model: of(model, set()),
    ("fsdp._init_utils", "_get_buffer_names"): lambda of, model: of(model),
    ("fsdp._init_utils", "_get_ignored_modules"): lambda of, model: of(model.module, None),
    ("fsdp._init_utils", "_get_orig_params"): lambda of, model: list(of(model, set())),
    ("fsdp._init_utils", "_need_to_materialize_module"): lambda of, model: of(model, set(), set()),
    ("fsdp._optim_utils", "_broadcast_processed_state"): lambda of, model: of(model, {"step": 1}, None),
    ("fsdp._optim_utils", "_broadcast_state"): lambda of, model: of(model, torch.ones(()), None),
    ("fsdp._optim_utils", "_get_flat_param_to_fqn"): lambda of, model: of(model),
    ("fsdp._optim_utils", "_get_fqn_to_fsdp_param_info"): lambda of, model: of(model),
    ("fsdp._optim_utils", "_get_param_id_to_param_from_optim_input"): lambda of, model: of(model),
    ("fsdp._optim_utils", "_get_param_key_to_param"): lambda of, model: of(optimizer(model)),
    ("fsdp._optim_utils", "_get_param_to_param_id_from_optim_input"): lambda of, model: of(model),
    ("fsdp._optim_utils", "_get_param_to_param_key"): lambda of, model: of(optimizer(model)),
    ("fsdp._optim_utils", "_map_param_key_to_optim_keys"): keys_of_states,
    (RUNTIME, "_check_flat_params_on_expected_device"): lambda of, model: of(model, model),
    (RUNTIME, "_get_training_state"): lambda of, model: of(model._handle),
    (RUNTIME, "_low_precision_hook_enabled"): lambda of, model: of(model),
    (RUNTIME, "_reset_flat_param_grad_info_if_needed"): lambda of, model: of([model._handle]),
    (RUNTIME, "_root_cast_forward_input"): lambda of, model: of(model, model, (batch(0),), {}),
    ("fsdp._state_dict_utils", "_param_name_infos"): lambda of, model: list(of(model, model)),
    ("fsdp._state_dict_utils", "_shared_param_name_infos"): lambda of, model: list(of(model, model)),
    ("fsdp._state_dict_utils", "_should_unshard_params"): lambda of, model: of(model),
    ("fsdp._traversal_utils", "_composable"): lambda of, model: of(model),
    ("fsdp._traversal_utils", "_get_fsdp_states"): lambda of, model: of(model),
    ("fsdp._traversal_utils", "_get_fsdp_states_with_modules"): lambda of, model: of(model),
    ("fsdp._unshard_param_utils", "_validate_unshard_params_args"): lambda of, model: of(
        model, True, False, False, False
    ),
    ("fsdp._debug_utils", "_get_sharded_module_tree_with_module_name_to_fqns"): lambda of, model: of(model),
    ("fsdp._wrap_utils", "_get_post_order_named_modules"): lambda of, model: of(model),
    # And of ours.
    (RUNTIME, "_get_fsdp_root_states"): lambda of, model: of(model),
    (RUNTIME, "_get_fsdp_root_states_with_modules"): lambda of, model: of(nn.Sequential(model)),
    (RUNTIME, "_is_fsdp_root"): lambda of, model: [of(model, model), of(model.blocks[0], model.blocks[0])],
    (RUNTIME, "_lazy_init"): lambda of, model: of(model, model) is model,
    ("fsdp._traversal_utils", "_get_fsdp_handles"): lambda of, model: of(model),
}


@pytest.mark.parametrize("key", READING, ids=lambda key: ".".join(key))
@on_ranks(2)
def test_a_look_up_gives_for_our_wrapper_what_torchs_gives_for_its_own(key: tuple[str, str]) -> None:
    """A look-up never finds that there is no FSDP in a sharded model."""
    module = importlib.import_module(f"torch.distributed.{key[0]}")
    for orig in (False, True):
        with peer_warnings_silenced():
            theirs = shown(READING[key](getattr(module, key[1]), shard_by_peer(seeded(), use_orig_params=orig)))
        with fsdp_flat.installed():
            mine = shown(READING[key](getattr(module, key[1]), shard(seeded(), use_orig_params=orig)))
        assert mine == theirs


@on_ranks(2)
def test_an_optimizer_state_by_torchs_private_function_is_that_of_the_method() -> None:
    """``_optim_state_dict``, which some scripts call for accelerate's models."""
    from torch.distributed.fsdp import _optim_utils

    model = shard(seeded(), use_orig_params=True)
    optim = optimizer(model)
    with fsdp_flat.installed():
        saved = _optim_utils._optim_state_dict(model, optim, optim.state_dict(), None, False, False, None, False, True)
    wanted = model.optim_state_dict(model, optim)
    assert saved["state"].keys() == wanted["state"].keys()
    for name, state in saved["state"].items():
        assert all(torch.equal(value, wanted["state"][name][key]) for key, value in state.items())


@on_ranks(2)
def test_torchs_functions_run_on_objects_that_are_not_ours() -> None:
    runtime = importlib.import_module("torch.distributed.fsdp._runtime_utils")
    before = runtime._unshard_grads
    peer = shard_by_peer(seeded())
    with fsdp_flat.installed():
        assert importlib.import_module(f"torch.distributed.{COMMON}")._get_module_fsdp_state(peer) is peer
        assert runtime._unshard_grads(None) is None
        assert runtime._unshard_grads is not before
    assert runtime._unshard_grads is before


def test_states_of_the_enums_have_torchs_names() -> None:
    common = importlib.import_module("torch.distributed.fsdp._common_utils")
    assert [each.name for each in TrainingState] == [each.name for each in common.TrainingState]
    assert [each.name for each in HandleTrainingState] == [each.name for each in common.HandleTrainingState]
