"""The pages in Markdown: links lead somewhere, the site has them all, lines are short, and names of files are right."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import nosync

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WIDTH = 120
OF_THE_PROJECT = re.compile(r"(?:lsm|replication|nosync|proto|tests|bench|tools|deploy|docs|examples)/[\w./-]*\w")


def without_code(text: str) -> str:
    """Returns a page without fenced blocks, blocks that are indented, and code in lines."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?:\A|\n)\n(?: {4}[^\n]*\n)+", "\n\n", text)
    return re.sub(r"`[^`]*`", "", text)


def links(page: Path) -> Iterator[str]:
    """Yields where the links and pictures of a page lead, but for those to other hosts."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not target.startswith(("https://", "http://", "mailto:")):
            yield target


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that the headings of a page have, on the site and where the repository is shown."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", line) for line in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def lines_outside_tables(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name} links to {target}"
        assert there.is_relative_to(ROOT), f"{name} links to {target}, which is not of the project"
        assert not anchor or anchor in anchors(there), (
            f"{name} links to {target}; the page has {sorted(anchors(there))}"
        )


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One `two`, three\n\n[x](b.md#c) and `[y](d.md)`\n\n    [z](e.md)\n\n```\n[w](f.md)\n```\n![v](g.svg)\n"
    )
    assert list(links(page)) == ["b.md#c", "g.svg"]
    assert anchors(page) == {"one-two-three"}


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w./-]+\.md$", nav, re.MULTILINE)) == NAMES


def test_readme_has_at_most_100_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_readme_says_early_when_not_to_use_it() -> None:
    early = " ".join((ROOT / "README.md").read_text().splitlines()[:12])
    for word in ("For whom", "Not for you", "alpha", "Linux", "Spark 4.1 to 4.3", "local disks", "object store"):
        assert word in early, word


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short(name: str) -> None:
    """Rows of tables cannot be wrapped; all else can."""
    long = [f"{name}:{number}" for number, line in lines_outside_tables(ROOT / name) if len(line) > WIDTH]
    assert long == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_files_that_a_page_names_are_there(name: str) -> None:
    words = [word for code in re.findall(r"`([^`\n]+)`", (ROOT / name).read_text()) for word in code.split()]
    named = [word for word in words if OF_THE_PROJECT.fullmatch(word)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_of_the_api_has_every_public_name() -> None:
    described = re.findall(r"^::: nosync\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(nosync.__all__)


def test_no_page_names_a_host_of_packages() -> None:
    for name in [*NAMES, "mkdocs.yml", "Makefile", "pyproject.toml"]:
        assert not re.search(r"pypi\.|index-url|pythonhosted", (ROOT / name).read_text()), name
