"""Rewrites settings of clients from version 1 of FSDP to 2: files of ``accelerate config``, and Trainer arguments."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from fsdp_flat.tools.rewriting import Finding, Migrated
from fsdp_flat.tools.wrapped_models import Source
from fsdp_flat.tools.wrapper_arguments import Left
from fsdp_flat.tools.wrapper_uses import Edits, text_of

# Keys without the prefix `fsdp_`, which files have and the Trainer takes.
_GONE = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params")
_SAME = (
    *("activation_checkpointing", "auto_wrap_policy", "cpu_offload", "cpu_ram_efficient_loading", "min_num_params"),
    *("offload_params", "state_dict_type", "transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"),
)
_RESHARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
_PRECISION = "under mixed precision version 2 casts parameters and inputs by its own rules; losses are close, not equal"
_NO_BROADCAST = "version 2 does not broadcast the first weights (sync_module_states): seed all ranks alike"
_RUN = "version 2 runs here with fsdp_flat.run --fully-shard, or install(fully_shard=True)"


def rewrite_yaml(data: bytes) -> Migrated:
    """Rewrite the ``fsdp_config`` of a file of ``accelerate config``; all other bytes, and other files, stay."""
    if not re.search(rb"^fsdp_config\s*:", data, re.MULTILINE):
        return Migrated(data, [])
    line = 1
    try:
        text, settings = _parsed(data)
        key, config = settings["fsdp_config"]
        line = key.start_mark.line + 1
        entries = _entries(config)
        values = {name: value.value for name, (_, value) in entries.items() if isinstance(value.value, str)}
        if values.get("version") == "2":
            return Migrated(data, [])
        after = _edited(text, entries, values)
        _parsed(after.encode())  # an anchor that other settings refer to may be gone
    except Left as left:
        return Migrated(data, [Finding(line, "left", f"fsdp_config: {left}")])
    findings = [Finding(line, "changed", "fsdp_config: from version 1 to 2"), Finding(line, "differs", _RUN)]
    if values.get("sync_module_states", "true").lower() == "true":
        findings.append(Finding(line, "differs", _NO_BROADCAST))
    if "mixed_precision" in settings and settings["mixed_precision"][1].value != "no":
        findings.append(Finding(line, "differs", _PRECISION))
    return Migrated(after.encode(), sorted(findings))


def _parsed(data: bytes) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """Return the text of a file, and the nodes of key and value of each of its settings, which have their places."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ModuleNotFoundError:
        raise Left("reading YAML needs ruamel.yaml, which is not installed: pip install ruamel.yaml") from None
    try:
        text = data.decode()
        root = YAML().compose(text)
    except (YAMLError, UnicodeDecodeError) as error:
        raise Left(f"the file is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(getattr(root, "value", None), list):
        raise Left("the file is no mapping")
    return text, {key.value: (key, value) for key, value in root.value}


def _entries(config: Any) -> dict[str, tuple[Any, Any]]:
    """Return the nodes of key and value of each entry, by its key without the prefix."""
    if config.id != "mapping" or not config.value:
        raise Left("it has no entries")
    if config.flow_style:
        raise Left("it is written in braces; write an entry a line")
    for key, value in config.value:
        # The node of an alias is that of its anchor, which is above.
        if not isinstance(key.value, str) or value.start_mark.index < key.end_mark.index:
            raise Left(f"the value of {key.value} is an alias; write it out")
    return {key.value.removeprefix("fsdp_"): (key, value) for key, value in config.value}


def _edited(text: str, entries: dict[str, tuple[Any, Any]], values: dict[str, str]) -> str:
    """Return the text with the entries of version 2; comments and the order stay."""
    for name in entries:
        _check(name, values.get(name, ""))
    edits: list[tuple[int, int, str]] = []
    for name, (key, value) in entries.items():
        span = key.start_mark.index, value.end_mark.index
        if name in ("sharding_strategy", "reshard_after_forward"):
            reshard = str(_RESHARD.get(values[name].upper(), values[name].lower())).lower()
            edits.append((*span, f"fsdp_reshard_after_forward: {reshard}"))
        elif name == "version":
            edits.append((*span, "fsdp_version: 2"))
        elif name in _GONE:
            edits.append((text.rfind("\n", 0, span[0]) + 1, _end_of_line(text, span[1]), ""))
    missing = {"state_dict_type": "FULL_STATE_DICT", "version": "2"}  # the first is what version 1 takes for granted
    key, value = [*entries.values()][-1]
    # The node of a list or mapping ends where the next one begins.
    at = _end_of_line(text, len(text[: value.end_mark.index].rstrip()))
    newline = "\r\n" if "\r\n" in text else "\n"
    added = [f"{' ' * key.start_mark.column}fsdp_{n}: {v}{newline}" for n, v in missing.items() if n not in entries]
    if added and not text[:at].endswith("\n"):
        added.insert(0, newline)
    edits.append((at, at, "".join(added)))
    for start, stop, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def _end_of_line(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


def _check(key: str, value: str) -> None:
    """Refuse a setting that version 2 has nothing for."""
    if key in ("sharding_strategy", "reshard_after_forward"):
        if value.upper() not in (*_RESHARD, "TRUE", "FALSE"):
            raise Left(f"the strategy {value} has no counterpart in version 2")
    elif key == "state_dict_type" and "LOCAL" in value:
        raise Left("state dicts of type LOCAL_STATE_DICT; version 2 has whole and sharded ones")
    elif key != "version" and key not in (*_GONE, *_SAME):
        raise Left(f"the setting {key} is not known")


# -- the Trainer ------------------------------------------------------------------------------------------------------


def is_trainer_arguments(source: Source, call: cst.Call) -> bool:
    """Return whether a call makes arguments of transformers' Trainer with FSDP."""
    name = source.name_of(call.func)
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    return (
        name.startswith("transformers.")
        and name.endswith("TrainingArguments")
        and bool(keywords & {"fsdp", "fsdp_config"})
    )


def trainer_arguments(source: Source, call: cst.Call, edits: Edits) -> None:
    """Rewrite the ``fsdp_config`` of Trainer arguments."""
    given = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    options, config = given.get("fsdp"), given.get("fsdp_config", cst.Dict([]))
    if not isinstance(config, cst.Dict):
        raise Left(f"fsdp_config is `{source.code(config)}`, not written out here")
    entries: dict[str, cst.BaseDictElement] = {}
    for element in config.elements:
        key = element.key if isinstance(element, cst.DictElement) else None
        if not isinstance(key, cst.SimpleString):
            raise Left("fsdp_config has keys that are not written out")
        entries[str(key.evaluated_value).removeprefix("fsdp_")] = element
    version = entries.get("version")
    if version is not None and source.code(version.value) == "2":
        return
    for name, element in entries.items():
        _check(name, source.code(element.value).strip("'\""))
    reshard = _reshard_option(source, options)
    kept = [
        text_of(e.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        for k, e in entries.items()
        if k not in (*_GONE, "version")
    ]
    if reshard is not None and "reshard_after_forward" not in entries:
        kept.append(f'"reshard_after_forward": {reshard}')
    text = f"{{{', '.join([*kept, chr(34) + 'version' + chr(34) + ': 2'])}}}"
    edits.differs.append(_RUN)
    if any(name in given and source.code(given[name]) != "False" for name in ("bf16", "fp16")):
        edits.differs.append(_PRECISION)

    def replaced(updated: cst.Call) -> cst.Call:
        new = cst.parse_expression(text)
        args = [
            arg.with_changes(value=new) if arg.keyword is not None and arg.keyword.value == "fsdp_config" else arg
            for arg in updated.args
        ]
        if "fsdp_config" not in given:
            args = [
                arg.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
                if arg is args[-1] and not isinstance(arg.comma, cst.Comma)
                else arg
                for arg in args
            ]
            plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            args.append(cst.Arg(new, keyword=cst.Name("fsdp_config"), equal=plain))
        return updated.with_changes(args=args)

    edits.by_node[call] = replaced


def _reshard_option(source: Source, options: cst.BaseExpression | None) -> bool | None:
    """Return what the words in the argument ``fsdp`` say of resharding after forward."""
    if options is None or source.code(options) in ("True", '""', "''"):
        return None
    if not isinstance(options, cst.SimpleString):
        raise Left(f"fsdp is `{source.code(options)}`, not written out here")
    words = str(options.evaluated_value).split()
    unknown = set(words) - {"full_shard", "shard_grad_op", "auto_wrap", "offload"}
    if unknown:
        raise Left(f"the option {', '.join(sorted(unknown))} has no counterpart in version 2")
    return "shard_grad_op" not in words
