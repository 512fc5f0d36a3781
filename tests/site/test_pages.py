"""The Python blocks of each page of docs/ run on two ranks, in their order, after the first block of Getting started.

The first block of ``docs/getting_started.md`` has the imports and the model that all pages use. A page may have
comments in its source: ``<!-- run`` and code, which prepares what the page speaks of, and ``<!-- not run: ... -->``
above a block that cannot run here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.site.pages import PAGES, blocks_of
from tests.support import on_ranks

# Pages whose results a test of their own looks at; it runs all their blocks.
OTHER_TESTS = {
    "checkpoints.md": "tests/site/test_first_page.py",
    "migrating.md": "tests/tools/test_migrating_guide.py",
    "planning.md": "tests/tools/test_planning_page.py",
    "qlora.md": "tests/clients/test_qlora_page.py",
}
PAGES_WITH_CODE = [page for page in PAGES if page not in OTHER_TESTS and blocks_of(page)]


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
@on_ranks(2)
def test_the_blocks_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page}
    first, *rest = blocks_of("getting_started.md")
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for block in (first, *(rest if page == "getting_started.md" else blocks_of(page))):
            if not block.reason:
                block.run(names)
    finally:
        os.chdir(here)
