"""Says what ``fully_shard`` needs for each argument of the wrapper: a table of rules, each of which is sure or refuses.

A rule takes the value's expression and adds to a :class:`Sharding`, or raises :class:`Left` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from fsdp_flat.tools.wrapped_models import Source, argument_of, nodes_below

POSITIONS = (
    *("module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch"),
    *("mixed_precision", "ignored_modules", "param_init_fn", "device_id", "sync_module_states", "forward_prefetch"),
    *("limit_all_gathers", "use_orig_params", "ignored_states", "device_mesh"),
)
"""The wrapper's parameters in the order of its signature."""

OUTERMOST = "is outermost"
"""Stands in the text of an argument for the test whether a module is the outermost unit."""


class Left(Exception):
    """Tells why code of the wrapper stays."""


@dataclass(slots=True)
class Sharding:
    """Holds what replaces one wrapper call.

    Attributes:
        arguments: keyword arguments of ``fully_shard``, as text.
        chosen: condition for a ``{module}`` to be a unit, if a policy chooses any; ``by_size`` is the other way.
        by_size: arguments of ``size_based_auto_wrap_policy``.
        first: statements about the ``{model}`` before it is sharded.
        imports: names that the text needs, dotted.
        broadcasts: whether ``first`` broadcasts the model, which takes it to be on the process group's device.
        differs: what will behave differently.
    """

    arguments: dict[str, str] = field(default_factory=dict)
    chosen: str | None = None
    by_size: str | None = None
    first: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=lambda: {"fsdp_flat.fully_shard"})
    differs: list[str] = field(default_factory=list)
    broadcasts: bool = False


def sharding_of(source: Source, call: cst.Call, *, is_outermost: bool) -> Sharding:
    """Return what replaces a wrapper call.

    Args:
        source: the module of the call.
        call: the call.
        is_outermost: whether it is sure that no other unit holds the module.
    """
    given = _arguments(call)
    sharding = Sharding()
    for name, value in given.items():
        if name == "module":
            continue
        if name not in _RULES:
            raise Left(f"the argument {name} is not known")
        if source.code(value) != "None":
            _RULES[name](source, value, sharding)
    if sharding.broadcasts:
        _move_first(source, given.get("device_id"), sharding)
    if "HYBRID" in source.code(source.value_of(given.get("sharding_strategy", cst.Name("None")))) and (
        "mesh" not in sharding.arguments
    ):
        raise Left("hybrid sharding without device_mesh: pass a mesh of two dims")
    if OUTERMOST in sharding.arguments.get("mp_policy", "") and not (sharding.chosen or sharding.by_size is not None):
        if not is_outermost:
            raise Left("mixed precision, and which wrapper is the outermost is not sure: it alone casts its inputs")
        sharding.arguments["mp_policy"] = sharding.arguments["mp_policy"].replace(
            f", cast_forward_inputs={OUTERMOST}", ""
        )
    if "mp_policy" in sharding.arguments and (sharding.chosen or sharding.by_size is not None):
        sharding.differs.append("BatchNorm runs in param_dtype; with a policy, the wrapper keeps it in full precision")
    if source.code(given.get("use_orig_params", cst.Name("False"))) != "True":
        sharding.differs.append("parameters() are the model's own ones, not flat ones; unused ones keep .grad None")
    return sharding


def _arguments(call: cst.Call) -> dict[str, cst.BaseExpression]:
    if any(arg.star for arg in call.args):
        raise Left("arguments are passed by * or **; write them out")
    given: dict[str, cst.BaseExpression] = {}
    for at, arg in enumerate(call.args):
        given[POSITIONS[at] if arg.keyword is None else arg.keyword.value] = arg.value
    if "module" not in given:
        raise Left("no module is passed")
    return given


# -- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Source, cst.BaseExpression, Sharding], None]


def _drop(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    """Leave out what ``fully_shard`` always does, or has methods for, and what changes no number."""


def _refuse(reason: str) -> Rule:
    def refuse(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
        raise Left(reason)

    return refuse


def _plain(source: Source, value: cst.BaseExpression) -> str:
    """Return the text of an expression that may be evaluated again, elsewhere in the file."""
    text = source.code(value)
    _check_names(source, value)
    if not all(
        isinstance(part, (cst.Name, cst.Attribute, cst.Dot, cst.SimpleWhitespace))
        for part in (value, *nodes_below(value))
    ):
        raise Left(f"`{text}` is computed in the call; give it a name first")
    return text


def _check_names(source: Source, value: cst.BaseExpression) -> None:
    """Leave an expression whose names may mean something else where the model is wrapped."""
    for part in (value, *nodes_below(value)):
        if isinstance(part, cst.Name) and part.value != "self" and not source.is_bound_once(part.value):
            raise Left(
                f"`{part.value}` is bound in several places, and may mean something else where the model is wrapped"
            )


def _truth(source: Source, value: cst.BaseExpression | None, default: bool, what: str) -> bool:
    text = str(default) if value is None else source.code(value)
    if text not in ("True", "False"):
        raise Left(f"{what} is `{text}`, neither True nor False")
    return text == "True"


def _choice(source: Source, value: cst.BaseExpression, of: Callable[[cst.BaseExpression], str]) -> str:
    """Return the text for a value, or for both values of ``a if condition else b``."""
    value = source.value_of(value)
    if not isinstance(value, cst.IfExp):
        return of(value)
    return f"{of(source.value_of(value.body))} if {_plain(source, value.test)} else {of(source.value_of(value.orelse))}"


_RESHARD = {
    "ShardingStrategy.FULL_SHARD": "None",
    "ShardingStrategy.HYBRID_SHARD": "None",
    "ShardingStrategy.SHARD_GRAD_OP": "False",
    "ShardingStrategy._HYBRID_SHARD_ZERO2": "False",
}


def _strategy(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    def of(each: cst.BaseExpression) -> str:
        name = source.name_of(each)
        if name == "ShardingStrategy.NO_SHARD":
            raise Left("NO_SHARD: use DistributedDataParallel")
        if name not in _RESHARD:
            raise Left(f"the strategy `{source.code(each)}` is not known here")
        return _RESHARD[name]

    text = _choice(source, value, of)
    if text != "None":
        sharding.arguments["reshard_after_forward"] = text


def _offload(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    def of(each: cst.BaseExpression) -> str:
        if isinstance(each, cst.Call) and source.name_of(each.func) == "CPUOffload":
            return (
                "CPUOffloadPolicy()"
                if _truth(source, argument_of(each, "offload_params", 0), False, "offload_params")
                else "None"
            )
        if source.code(each) == "None":
            return "None"
        raise Left(f"the value of cpu_offload, `{source.code(each)}`, is not known here")

    text = _choice(source, value, of)
    if text != "None":
        sharding.arguments["offload_policy"] = text
        sharding.imports.add("fsdp_flat.CPUOffloadPolicy")


_PRECISION = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
)


def _precision(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    whole = source.value_of(value)

    def of(each: cst.BaseExpression) -> str:
        if source.code(each) == "None":
            return "MixedPrecisionPolicy()"
        if not isinstance(each, cst.Call) or source.name_of(each.func) != "MixedPrecision":
            raise Left(f"the value of mixed_precision, `{source.code(each)}`, is not known here")
        given = {name: argument_of(each, name, at) for at, name in enumerate(_PRECISION)}
        if sum(value is not None for value in given.values()) < len(each.args):
            raise Left("MixedPrecision has arguments that fully_shard has nothing for")
        if _truth(source, given["keep_low_precision_grads"], False, "keep_low_precision_grads"):
            raise Left("keep_low_precision_grads: gradients have the parameters' dtype with fully_shard")
        casts = _truth(source, given["cast_forward_inputs"], False, "cast_forward_inputs")
        root_casts = _truth(source, given["cast_root_forward_inputs"], True, "cast_root_forward_inputs")
        texts = [
            f"{name}={_plain(source, dtype)}"
            for name in ("param_dtype", "reduce_dtype")
            if (dtype := given[name]) is not None and source.code(dtype) != "None"
        ]
        if not casts:
            texts.append(f"cast_forward_inputs={OUTERMOST if root_casts else 'False'}")
        buffers = given["buffer_dtype"]
        if buffers is not None and source.code(buffers) != "None":
            to, tests = _plain(source, buffers), ["buffer.is_floating_point()"]
            if isinstance(whole, cst.IfExp):
                test = source.code(whole.test)
                tests.insert(0, test if each is source.value_of(whole.body) else f"not {test}")
            sharding.first.append(
                f"for buffer in {{model}}.buffers():\n    if {' and '.join(tests)}:\n"
                f"        buffer.data = buffer.to({to})"
            )
            sharding.differs.append(f"floating-point buffers are {to} in state dicts too")
        return f"MixedPrecisionPolicy({', '.join(texts)})"

    sharding.arguments["mp_policy"] = _choice(source, whole, of)
    sharding.imports.add("fsdp_flat.MixedPrecisionPolicy")


def _policy(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    policy = source.value_of(value)
    if source.name_of(policy) == "wrap.size_based_auto_wrap_policy" and not isinstance(policy, cst.Call):
        sharding.by_size = ""
        return
    if not isinstance(policy, cst.Call):
        raise Left(f"the policy `{source.code(value)}` is not known here")
    called = source.name_of(policy.func)
    if called == "wrap.ModuleWrapPolicy":
        _chosen_by_class(source, argument_of(policy, "module_classes", 0), sharding)
        return
    bound = source.name_of(policy.args[0].value) if called == "functools.partial" and policy.args else ""
    if bound in ("wrap.transformer_auto_wrap_policy", "wrap._module_wrap_policy"):
        name = "module_classes" if "module" in bound else "transformer_layer_cls"
        _chosen_by_class(source, argument_of(policy, name, None), sharding)
    elif bound == "wrap.lambda_auto_wrap_policy":
        function = argument_of(policy, "lambda_fn", None)
        if function is None:
            raise Left("lambda_auto_wrap_policy without lambda_fn")
        sharding.chosen = f"{_plain(source, function)}({{module}})"
    elif bound == "wrap.size_based_auto_wrap_policy":
        numbers = argument_of(policy, "min_num_params", None)
        if numbers is None or len(policy.args) != 2:
            raise Left("size_based_auto_wrap_policy with other arguments than min_num_params")
        _check_names(source, numbers)
        sharding.by_size = source.code(numbers)
    else:
        raise Left(f"the policy `{source.code(value)}` is not known here")


def _chosen_by_class(source: Source, classes: cst.BaseExpression | None, sharding: Sharding) -> None:
    if classes is None:
        raise Left("the classes of the policy are not known here")
    name = source.code(classes)
    if any(isinstance(node, cst.Attribute) and source.code(node.value) == name for node in source.nodes):
        raise Left(f"the classes of the policy, `{name}`, may be changed later")
    classes = source.value_of(classes)
    if not isinstance(classes, (cst.Set, cst.List, cst.Tuple)):
        raise Left(f"the classes of the policy, `{source.code(classes)}`, are not written out here")
    names = [_plain(source, element.value) for element in classes.elements]
    sharding.chosen = f"isinstance({{module}}, {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'})"


def _device(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    text = source.code(value)
    sets_it = any(
        isinstance(node, cst.Call) and source.code(node.func).endswith(("set_device", "set_device_index"))
        for node in source.nodes
    )
    if sets_it or "current_device" in text or "current_accelerator" in text:
        return
    sharding.differs.append(
        f"fully_shard moves the model to the current accelerator, if there is one, instead of to `{text}`: call "
        "torch.accelerator.set_device_index before"
    )


def _sync(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    if _truth(source, value, False, "sync_module_states"):
        sharding.first.insert(
            0,
            "for tensor in [*{model}.parameters(), *{model}.buffers()]:\n"
            "    torch.distributed.broadcast(tensor.data, src=0)",
        )
        sharding.imports.add("torch.distributed")
        sharding.broadcasts = True


def _move_first(source: Source, device: cst.BaseExpression | None, sharding: Sharding) -> None:
    """Move the model to its device before it is broadcast, as the wrapper does: NCCL broadcasts no tensors of a CPU."""
    if device is None or source.code(device) == "None":
        sharding.differs.append("the model is broadcast where it is: move it to the device of the process group before")
        return
    # It is evaluated where the wrapper's argument was.
    text = source.code(device).replace("{", "{{").replace("}", "}}")
    sharding.first.insert(0, f"{{model}}.to({text})")


def _mesh(source: Source, value: cst.BaseExpression, sharding: Sharding) -> None:
    sharding.arguments["mesh"] = _plain(source, value)


_RULES: dict[str, Rule] = {
    "auto_wrap_policy": _policy,
    "sharding_strategy": _strategy,
    "mixed_precision": _precision,
    "cpu_offload": _offload,
    "device_mesh": _mesh,
    "device_id": _device,
    "sync_module_states": _sync,
    **dict.fromkeys(("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params"), _drop),
    "process_group": _refuse("process_group: pass a device_mesh instead"),
    "param_init_fn": _refuse("param_init_fn: call to_empty and initialize after fully_shard"),
    "ignored_modules": _refuse("ignored_modules: pass their parameters as ignored_params of each fully_shard"),
    "ignored_states": _refuse("ignored_states: pass parameters as ignored_params of each fully_shard"),
}
