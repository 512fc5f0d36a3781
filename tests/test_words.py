"""The package uses the field's terms: private words that once stood for them do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fsdp_flat"

# The old word, as a regular expression, and the term of torch.distributed, FSDP2 or DTensor that it stood for.
TERMS = {
    r"guises?\b": "DTensor adapter",
    r"(shard|replicate) ax[ei]s\b": "shard group, replicate group",
    r"\bUnitGroups\b": "ShardingGroups",
    r"\b(Param)?Slot(Shard)?\b": "ParamInfo, LocalShard",
    r"\blanded\b|\b_?on_landed\b": "grad ready",
    r"\bGradientWindow\b": "flat gradient buffer",
    r"\bPartialGrad\b|\bwithdraw_partial\b": "unreduced local gradient",
    r"\bgate_inputs\b|\b_?InputGate\b": "post-backward hook on the inputs",
    r"\bkeep_memory\b": "keep_buffers",
    r"\bshow_full\b|\bshow_shard\b|\bhide_whole\b": "use_unsharded_views, use_sharded_views",
    r"\bSpread\b|\bwhole_moves\b|\bMoves\b(?! )": "partition, transfer plan",
    r"\b[Ll]anes?\b|\bMailRoom\b|\b[Mm]ailbox(es)?\b|\b[Ll]etters?\b": "p2p channel, shared-memory transport, message",
    r"\bTogether\b|\bfailing\(": "consensus, error propagation",
    r"\bstand-?ins?\b|\bStandIn\b": "sharded placeholder",
    r"\blook_away\b|\buntraced\b": "torch function disabled, dynamo-disabled",
    r"\bdissolve\b|\blifted\b": "unflatten, detached",
    r"\bcarry_out\b": "commit",
    r"\bblank_states\b": "templates",
    r"\bfloors?\b(?! div)": "layer",
    r"\b[Ss]omebody\b": "a caller, another rank",
}


@pytest.mark.parametrize("word", TERMS, ids=list(TERMS.values()))
def test_no_private_word_stands_for_a_term_of_the_field(word: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(word, line)
    ]
    assert not found, f"write {TERMS[word]!r} instead:\n" + "\n".join(found)


def test_the_search_finds_a_word() -> None:
    assert re.search(next(iter(TERMS)), "the guise of a parameter")
