"""Hooks of mkdocs: the site contains the files that its pages link to, fetches nothing, and breaks long names."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# A link of a page to a file beside docs/, as [examples/minimal.py](../examples/minimal.py).
_OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+)([\w./-]+)(?=\))")
# Files that the site shows as they are, and the folder that they are in there.
_FOLDER = "files"
# What a browser would fetch from another host when it shows a page.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)
# The name of a test, as `folder/test_file.py::test_name`.
_TEST = re.compile(r"<code>([\w/]+\.py::\w+)</code>")
_log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Add each file that a page links to."""
    linked = set()
    for page in list(files.documentation_pages()):
        for ups, path in _OUTSIDE.findall(page.content_string):
            if (
                posixpath.normpath(posixpath.join("docs", page.src_uri, "..", ups))
                == "."
            ):
                linked.add(path)
    for path in sorted(linked):
        target = f"{_FOLDER}/{path}.txt"  # which every browser shows, and does not run or save
        files.append(File.generated(config, target, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Turn links to these files into links to what the site has of them."""

    def inside(match: re.Match[str]) -> str:
        target = f"{_FOLDER}/{match[2]}.txt"
        is_there = files.get_file_from_path(target) is not None
        return (
            posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
            if is_there
            else match[0]
        )

    return _OUTSIDE.sub(inside, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let names of tests, which are longer than a column of a table is wide, break."""
    return _TEST.sub(
        lambda match: "<code>" + re.sub(r"(::|/|_)", r"\1<wbr>", match[1]) + "</code>",
        html,
    )


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warn, which is an error in a strict build, of what a page would fetch from another host."""
    for tag in _FETCHED.findall(output):
        _log.warning("%s is not readable without a network: %s", page.file.src_uri, tag)
    return output
