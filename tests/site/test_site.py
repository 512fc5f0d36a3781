"""What docs/_site adds to mkdocs: docstrings as Markdown, and no page that needs a network."""

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
