"""The Python blocks of docs/qlora.md run in their order, with either tab, after the first block of Getting started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bitsandbytes.nn import Params4bit
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.kit import tokens
from tests.clients.test_qlora import CONFIG
from tests.site.pages import blocks_of
from tests.support import assert_close, on_ranks


@pytest.mark.filterwarnings("ignore")  # of the packages: merges that round, uses of torch
@pytest.mark.parametrize("tab", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_the_page_quantizes_trains_resumes_merges_and_exports(tab: str, tmp_path: Path, rank: int) -> None:
    torch.manual_seed(0)
    if rank == 0:
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "base")
    dist.barrier()
    names: dict[str, Any] = {"base": str(tmp_path / "base"), "batches": tokens()[4 * rank :].split(2)[:3]}
    first, *_ = blocks_of("getting_started.md")
    tabs = {"wrapper": "return FSDP(", "fully_shard": "return fully_shard("}
    other = next(text for name, text in tabs.items() if name != tab)
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for block in (first, *(each for each in blocks_of("qlora.md") if other not in each.code)):
            block.run(names)
            if "served = " in block.code:
                merged, served = names["merged"], names["served"]
    finally:
        os.chdir(here)
    assert any(isinstance(each, Params4bit) for each in merged.parameters())
    ids = tokens()[:2]
    with torch.no_grad():  # in training mode: in evaluation 4-bit layers compute in bf16 on some CPUs
        logits = [each.train()(input_ids=ids).logits.float() for each in (merged, served, names["whole"])]
    assert_close(logits[0], logits[1], rtol=1e-2, atol=1e-2)
    assert (logits[0] - logits[2]).abs().mean() < 0.5 * logits[2].abs().mean()
