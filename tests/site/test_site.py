"""What docs/_site adds to mkdocs: docstrings as Markdown, origins of blocks, and no page that needs a network."""

from __future__ import annotations

import importlib.util
import logging
from types import ModuleType, SimpleNamespace

import pytest

from tests.site.pages import DOCS

REASON = "make docs installs what the site is built with"


def loaded(name: str) -> ModuleType:
    """Load a file of docs/_site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_docstring_becomes_markdown() -> None:
    pytest.importorskip("griffe", reason=REASON)
    text = "Plan it; see :class:`StepPlan` and :func:`plan`::\n\n    plan(model)\n\n"
    text += "Args:\n    a, b,\n        c: as there.\n"
    assert loaded("docstrings").to_markdown(text, frozenset({"plan"})) == (
        "Plan it; see `StepPlan` and [`plan`][fsdp_flat.plan]:\n\n```python\nplan(model)\n```\n\n"
        "Args:\n    a: as there.\n    b: as there.\n    c: as there."
    )


@pytest.mark.parametrize(
    ("tag", "is_fetched"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ("<link rel=stylesheet href=//fonts.example/a.css>", True),
        ('<script src="assets/x.js"></script>', False),
        ('<a href="https://ui.perfetto.dev">', False),
    ],
)
def test_what_a_page_would_fetch_is_a_warning(tag: str, is_fetched: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mkdocs", reason=REASON)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        assert loaded("hooks").on_post_page(tag, page=page) == tag
    assert ("a.md is not readable without a network" in caplog.text) is is_fetched


def test_a_block_says_which_blocks_it_continues() -> None:
    pytest.importorskip("markdown", reason=REASON)
    first = "# First\n\n## The model\n\n```python\nclass Block:\n    pass\n```\n"
    page = "# A\n\n## Make `it`\n\n```python\nx = Block()\n```\n\n```python\nx\n```\n\n"
    page += "## Use it\n\n    ```python\n    def f(x):\n        return x, len([y for y in x])\n    f(x)\n    ```\n"
    found = loaded("code_blocks").with_origins(page, "reference/a.md", first)
    lines = [line for line in found.splitlines() if "Continues" in line]
    assert lines == [
        "Continues from [Getting started](../getting_started.md#the-model).",
        "    Continues from [Make `it`](#make-it).",
    ]
    assert [line for line in found.splitlines() if "ontinues" not in line and line] == [
        line for line in page.splitlines() if line
    ]


def test_a_name_that_a_block_defines_before_it_uses_it_comes_from_nowhere() -> None:
    pytest.importorskip("markdown", reason=REASON)
    names_of = loaded("code_blocks").names_of
    assert names_of("x = 1\nprint(x + y)\ny = 2\n") == ({"x", "y"}, {"y"})
    assert names_of("def f():\n    return g() + h\ndef g(): ...\n") == ({"f", "g"}, {"h"})


def test_pictures_link_to_themselves_and_names_of_tests_open() -> None:
    pytest.importorskip("mkdocs", reason=REASON)
    html = loaded("hooks").on_page_content('<img alt="" src="a.png"><td><code>a/test_b.py::test_c</code></td>')
    assert '<a href="a.png" title="Open the picture"><img alt="" src="a.png"></a>' in html
    assert "<summary>1 test</summary>" in html
    assert "test_<wbr>c" in html


def test_sentences_of_an_output_are_wrapped_and_its_tables_are_not() -> None:
    pytest.importorskip("mkdocs", reason=REASON)
    sentence, table = "word " * 30, "column  " * 20
    page = f"```text\n{sentence}\n{table}\n```\n"
    lines = loaded("hooks").wrapped(page).splitlines()
    assert table in lines
    assert max(len(line) for line in lines if line != table) <= 100
    assert "".join(lines).replace(" ", "") == page.replace("\n", "").replace(" ", "")


def test_the_picture_of_sharding_is_what_its_script_draws() -> None:
    drawn = loaded("sharding")
    assert drawn.picture() == drawn.PICTURE.read_text()
