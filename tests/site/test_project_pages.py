"""The changelog and the page of versions say what a release is."""

from __future__ import annotations

from pathlib import Path

from fsdp_flat.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_changelog_has_the_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_versions_says_what_a_release_may_change() -> None:
    assert "MAJOR.MINOR.PATCH" in (ROOT / "docs" / "versions.md").read_text()
