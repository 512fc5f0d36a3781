"""Hooks of mkdocs: the site contains the files that its pages link to, fetches nothing, and fits its columns."""

from __future__ import annotations

import importlib.util
import logging
import posixpath
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# A link of a page to a file beside docs/, as [examples/minimal.py](../examples/minimal.py).
_OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+)([\w./-]+)(?=\))")
# A link of README, which is the site's first page, relative to the root.
_FROM_ROOT = re.compile(r"(?<=\]\()(?!https?:|#)(?=[\w.])")
_README = re.compile(r"(?<=\]\()((?:\.\./)+)README\.md")
# Files that the site shows as they are, and the folder that they are in there.
_FOLDER = "files"
# What a browser would fetch from another host when it shows a page.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)
# A cell of a table with nothing but names of tests, as `folder/test_file.py::test_name`.
_TESTS = re.compile(r"<td>((?:\s*<code>[\w/]+\.py::\w+</code>)+)</td>")
_TEST = re.compile(r"<code>([\w/]+\.py::\w+)</code>")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CODE = re.compile(r"<code>([^<]*)</code>")
# Where code in a cell may break, beside spaces: within words of more than so many characters.
_BREAKS = re.compile(r"(?:(?<=[(=.\[])|(?<=\w_))(?=\w)")
_LONG = re.compile(r"\S{17,}")
_PICTURE = re.compile(r'<img\b[^>]*\bsrc="([^"]+)"[^>]*>')
# What a program prints, on a page that shows it.
_OUTPUT = re.compile(r"^```(?:text|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COLUMNS = 100
_log = logging.getLogger("mkdocs.hooks.site")


def _loaded(name: str) -> ModuleType:
    """Load a file beside this one, which is in no package."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_blocks = _loaded("code_blocks")


def on_files(files: Files, config: Any) -> Files:
    """Add README as the first page, and each file that a page links to."""
    readme = _FROM_ROOT.sub("../", (ROOT / "README.md").read_text())
    files.append(
        File.generated(config, "index.md", content=readme.replace("](../docs/", "]("))
    )
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

    markdown = _README.sub(lambda match: f"{match[1][3:]}index.md", markdown)
    linked = _OUTSIDE.sub(inside, markdown)
    first_page = (ROOT / "docs" / _blocks.FIRST_PAGE).read_text()
    return _blocks.with_origins(wrapped(linked), page.file.src_uri, first_page)


def wrapped(markdown: str) -> str:
    """Wrap the sentences of outputs; tables, which have columns two spaces apart, and patches stay as they are."""

    def narrow(match: re.Match[str]) -> str:
        lines = []
        for line in match[1].splitlines():
            is_sentence = "  " not in line.strip() and line[:1] not in "+-$"
            lines += (
                textwrap.wrap(
                    line,
                    _COLUMNS,
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                if is_sentence and len(line) > _COLUMNS
                else [line]
            )
        return match[0].replace(match[1], "\n".join(lines) + "\n")

    return _OUTPUT.sub(narrow, markdown)


def fitted(table: re.Match[str]) -> str:
    """Name the column in each cell, for narrow screens, which show rows one below another, and let long code break."""
    headings = [
        re.sub(r"<[^>]*>", "", each).strip() for each in _HEADING.findall(table[0])
    ]

    def named(row: re.Match[str]) -> str:
        columns = iter(headings)
        return re.sub("<td", lambda _: f'<td data-column="{next(columns, "")}"', row[0])

    def broken(code: re.Match[str]) -> str:
        text = _LONG.sub(lambda word: _BREAKS.sub("<wbr>", word[0]), code[1])
        return f"<code>{text}</code>"

    return _CODE.sub(broken, _ROW.sub(named, table[0]))


def on_page_content(html: str, **_: Any) -> str:
    """Put names of tests behind a word that opens them, fit tables, and make each picture a link to itself."""

    def behind(match: re.Match[str]) -> str:
        names = [
            re.sub(r"(::|/|_)", r"\1<wbr>", name) for name in _TEST.findall(match[1])
        ]
        shown = "".join(f"<li><code>{name}</code></li>" for name in names)
        title = "1 test" if len(names) == 1 else f"{len(names)} tests"
        return f'<td><details class="tests"><summary>{title}</summary><ul>{shown}</ul></details></td>'

    html = _TABLE.sub(fitted, _TESTS.sub(behind, html))
    return _PICTURE.sub(
        lambda match: f'<a href="{match[1]}" title="Open the picture">{match[0]}</a>',
        html,
    )


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warn, which is an error in a strict build, of what a page would fetch from another host."""
    for tag in _FETCHED.findall(output):
        _log.warning("%s is not readable without a network: %s", page.file.src_uri, tag)
    return output
