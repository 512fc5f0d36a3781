"""The changelog is one screen, and contributors find set-up, checks, tests and places on half a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_flat.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "limit"), [("README.md", 170), ("CHANGELOG.md", 100), ("CONTRIBUTING.md", 45), ("SECURITY.md", 20)]
)
def test_a_page_fits_on_a_screen(name: str, limit: int) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= limit
    assert max(map(len, lines)) <= 120


def test_the_changelog_has_the_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_versions_says_what_a_release_may_change() -> None:
    assert "MAJOR.MINOR.PATCH" in (ROOT / "docs" / "versions.md").read_text()
