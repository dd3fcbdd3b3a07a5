"""The page that compares two branches: what it says against plain Python, that it needs nothing else, how it looks on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import nosync
from nosync.cli import main
from tests.pipelines import Op, build, change, table
from tests.runner import StoreRunner

EPOCHS, FORK = 6, 2
OPS = [Op("scale", 1, 0, 0), Op("sums", 0, 1, 0)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[nosync.Store]:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        runner = StoreRunner(build(OPS), store, 1)
        for t in range(EPOCHS):
            runner.advance(t, table([(k, 1, k + t) for k in range(20)]))
        branch = runner.make_branch("other", FORK, build(change(OPS, 0, 3)))
        for t in range(FORK + 1, EPOCHS):
            branch.replay(t)
        store.sync()
        yield store


class Page(HTMLParser):
    """Collects the cells of tables and the addresses that a page asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [v for n, v in attrs if n in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1].append(data)


def write(store: nosync.Store, path: Path, *options: str) -> str:
    main(["diff", str(store.directory.root), "s1", "main", "other", "--html", str(path), *options])
    return path.read_text()


def test_it_says_what_the_states_are(store: nosync.Store, tmp_path: Path) -> None:
    text = write(store, tmp_path / "page.html")
    page = Page(text)
    a, b = ({r["k"]: r["v"] for r in store.read("s1", branch=name).to_pylist()} for name in ("main", "other"))
    largest = sorted(((b[k] - a[k], k) for k in a), key=lambda x: (-abs(x[0]), x[1]))
    shown = [row for row in page.rows if row]
    assert len(shown) == 12
    assert int(shown[0][3].replace(",", "")) == largest[0][0]
    assert {int(row[0]): int(row[3].replace(",", "")) for row in shown} == {
        k: b[k] - a[k] for k in (int(row[0]) for row in shown)
    }
    assert f"share everything up to epoch {FORK}." in text
    assert f"differ from epoch {FORK + 1} on" in text
    assert f"{sum(a.values()):,}" in text
    assert f"{sum(b.values()):,}" in text
    assert "<strong>20</strong>keys changed" in text


def test_it_needs_nothing_else(store: nosync.Store, tmp_path: Path) -> None:
    text = write(store, tmp_path / "page.html")
    page = Page(text)
    assert (page.addresses, page.scripts) == ([], 0)
    assert "url(http" not in text
    assert text.count("<svg") == 3
    assert 'name="viewport" content="width=device-width' in text
    assert write(store, tmp_path / "again.html") == text, "the same comparison is the same page"


def test_branches_that_agree(store: nosync.Store, tmp_path: Path) -> None:
    text = write(store, tmp_path / "page.html", "--as-of", str(FORK))
    assert "They agree." in text
    assert Page(text).rows == []


def test_errors(store: nosync.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["s1", "main", "nope", "--html", "x.html"], "no branch 'nope'; branches: main, other"),
        (["s1", "main", "other", "--html", str(tmp_path / "no" / "x.html")], "cannot write"),
        (["rows", "main", "other", "--html", str(tmp_path / "x.html")], "is a log"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["diff", str(store.directory.root), *arguments])
        assert stop.value.code == 1
        assert message in " ".join(capsys.readouterr().err.split())


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width_px", [500, 1200])
def test_in_a_browser(store: nosync.Store, tmp_path: Path, width_px: int) -> None:
    """Nothing sticks out of a narrow screen, every plot has a size, and the text is not tiny."""
    text = write(store, tmp_path / "page.html")
    probe = """<script>addEventListener("load", () => {
        const wide = [...document.querySelectorAll("svg")].map(e => Math.round(e.getBoundingClientRect().width));
        document.title = JSON.stringify([document.documentElement.scrollWidth, innerWidth, wide,
            parseFloat(getComputedStyle(document.querySelector("td")).fontSize)]); });</script>"""
    (tmp_path / "probe.html").write_text(text.replace("</body>", probe + "</body>"))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width_px},900", "--dump-dom",
            (tmp_path / "probe.html").as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    (title,) = re.findall(r"<title>\[(.*)\]</title>", done.stdout)
    scroll, inner, *rest = title.split(",", 2)
    assert int(scroll) <= int(inner)
    widths = [int(w) for w in re.findall(r"\d+", rest[0].rpartition("]")[0])]
    assert len(widths) == 3
    assert min(widths) >= 300
    assert float(rest[0].rpartition(",")[2]) >= 14
