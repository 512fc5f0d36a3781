"""Rewrites settings of clients from version 1 of FSDP to 2: files of ``accelerate config``, and Trainer arguments."""

from __future__ import annotations

import re

import libcst as cst

from fsdp_flat.tools.migrate_imports import Finding
from fsdp_flat.tools.migrate_source import Migrated
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

_ENTRY = re.compile(
    rb"(?P<indent>[ ]+)(?P<key>\w+):[ ]*(?P<value>[^#\r\n]*?)[ ]*(?P<comment>#[^\r\n]*)?(?P<end>\r?\n|$)"
)


def rewrite_yaml(data: bytes) -> Migrated:
    """Rewrite the ``fsdp_config`` of a file of ``accelerate config``; other files stay."""
    lines = data.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if re.match(rb"fsdp_config:\s*(#.*)?$", line)), None)
    if start is None:
        return Migrated(data, [])
    stop = next(
        (at for at in range(start + 1, len(lines)) if lines[at].strip() and not lines[at].startswith(b" ")), len(lines)
    )
    try:
        entries = _entries(lines[start + 1 : stop])
        if entries.get("version") == "2":
            return Migrated(data, [])
        texts = _new_entries(lines[start + 1 : stop], entries)
    except Left as left:
        return Migrated(data, [Finding(start + 1, "left", f"fsdp_config: {left}")])
    findings = [Finding(start + 1, "changed", "fsdp_config: from version 1 to 2"), Finding(start + 1, "differs", _RUN)]
    if entries.get("sync_module_states", "true").lower() == "true":
        findings.append(Finding(start + 1, "differs", _NO_BROADCAST))
    precision = re.search(rb"^mixed_precision:\s*['\"]?(\w+)", data, re.MULTILINE)
    if precision is not None and precision[1] != b"no":
        findings.append(Finding(start + 1, "differs", _PRECISION))
    return Migrated(b"".join([*lines[: start + 1], *texts, *lines[stop:]]), sorted(findings))


def _entries(lines: list[bytes]) -> dict[str, str]:
    """Return the keys, without their prefix, and values of the lines of a mapping."""
    entries = {}
    for line in lines:
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        found = _ENTRY.fullmatch(line)
        if found is None or found["value"][:1] in (b"", b"{", b"[", b"&", b"*", b"|", b">"):
            raise Left(f"`{line.decode(errors='replace').strip()}` is no plain entry")
        value = found["value"].decode(errors="replace").strip("'\"")
        entries[found["key"].decode().removeprefix("fsdp_")] = value
    return entries


def _new_entries(lines: list[bytes], entries: dict[str, str]) -> list[bytes]:
    for key, value in entries.items():
        _check(key, value)
    texts = []
    last = None
    for line in lines:
        found = _ENTRY.fullmatch(line)
        key = found["key"].decode().removeprefix("fsdp_") if found is not None else ""
        if found is None or line.lstrip().startswith(b"#"):
            texts.append(line)
            continue
        last = found
        if key in ("sharding_strategy", "reshard_after_forward"):
            value = str(_RESHARD.get(entries[key].upper(), entries[key].lower())).lower()
            texts.append(_entry(found, "fsdp_reshard_after_forward", value))
        elif key == "version":
            texts.append(_entry(found, "fsdp_version", "2"))
        elif key not in _GONE:
            texts.append(line)
    if last is None:
        raise Left("it has no entries")
    if "state_dict_type" not in entries:
        texts.append(_entry(last, "fsdp_state_dict_type", "FULL_STATE_DICT"))  # what version 1 takes for granted
    if "version" not in entries:
        texts.append(_entry(last, "fsdp_version", "2"))
    return texts


def _entry(like: re.Match[bytes], key: str, value: str) -> bytes:
    return like["indent"] + f"{key}: {value}".encode() + (like["end"] or b"\n")


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
