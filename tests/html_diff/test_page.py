"""The page that compares two branches: what it says against plain Python, that it needs nothing else, how it looks on a phone."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import nosync
from nosync.cli import main
from nosync.html_diff.page import diff_page
from tests.helpers.pipelines import Op, build, change, table
from tests.helpers.runner import StoreRunner

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
        self.labels: list[list[str | None]] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self._in_cell = self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [v for n, v in attrs if n in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        if tag == "tr":
            self.rows.append([])
            self.labels.append([])
        if tag == "td":
            self.labels[-1].append(dict(attrs).get("data-label"))
        self._in_cell, self._in_heading = tag == "td", tag == "th"

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_heading = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1].append(data)
        elif self._in_heading:
            self.headings.append(data)


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


def test_on_a_phone_each_cell_says_what_it_is(store: nosync.Store, tmp_path: Path) -> None:
    """A row is a card there, so that nothing is beyond the edge; the difference was, as the last column."""
    text = write(store, tmp_path / "page.html")
    page = Page(text)
    (narrow,) = re.findall(r"@media \(max-width: 40rem\) \{(.*?)\n\}", text, re.DOTALL)
    for rule in (
        "thead { display: none; }",
        "tr { display: block;",
        "content: attr(data-label)",
        "white-space: normal",
    ):
        assert rule in narrow
    assert page.headings == ["k", "main", "other", "difference"]
    assert [labels for labels in page.labels if labels] == [page.headings] * 12


HOUR_US = 3_600_000_000


def scaled(by: int) -> Callable[[pa.Table], pa.Table]:
    return lambda rows: rows.set_column(1, "v", pc.multiply(rows["v"], by))


def windows(by: int) -> nosync.Dataflow:
    flow = nosync.Dataflow("f")
    rows = flow.source("rows", "k bigint, v bigint, at timestamp").map("scaled", scaled(by))
    rows.window(
        "hours", key=["k"], time="at", size="1 hour", watermark="0 seconds",
        n=nosync.count(), total=nosync.sum("v"), mean=nosync.mean("v"), least=nosync.min("v"),
    )  # fmt: skip
    return flow


@pytest.fixture
def hours(tmp_path: Path) -> Iterator[nosync.Store]:
    with nosync.open(tmp_path / "hours", settings=nosync.StoreSettings(background=False)) as store:
        runner = StoreRunner(windows(1), store, 1)
        for t in range(4):
            at = pa.array([t * HOUR_US] * 6).cast(pa.timestamp("us", "UTC"))
            runner.advance(t, pa.table({"k": [0, 0, 1, 1, 2, 2], "v": [t, 2, 3, 8, 13, 21], "at": at}))
        branch = runner.make_branch("other", 0, windows(10), own=["scaled"])
        for t in range(1, 4):
            branch.replay(t)
        store.sync()
        yield store


def test_only_what_can_be_added_is_added(hours: nosync.Store) -> None:
    text = diff_page(hours, "hours", "main", "other")
    a, b = (hours.read("hours", branch=name).to_pylist() for name in ("main", "other"))
    total = [sum(row["total"] for row in rows) for rows in (a, b)]
    assert f'Sum over all keys: <span class="a">{total[0]:,}</span> and <span class="b">{total[1]:,}</span>' in text
    for column in ("mean", "least"):
        medians = [statistics.median(row[column] for row in rows) for rows in (a, b)]
        shown = [f"{int(m) if m.is_integer() else m:,}" for m in map(float, medians)]
        assert f'Median over all keys: <span class="a">{shown[0]}</span> and <span class="b">{shown[1]}</span>' in text
        by_key = [{(row["k"], row["window_start"]): row[column] for row in rows} for rows in (a, b)]
        largest = max(by_key[1][k] - by_key[0][k] for k in by_key[0])
        assert f"largest difference of a key {largest:,.0f}." in text
        assert f"sum of {column}" not in text
    assert text.count("Sum over all keys") == 1, "counts are the same on both sides"


def test_axes_show_the_times_that_epochs_came_to(hours: nosync.Store, store: nosync.Store) -> None:
    text = diff_page(hours, "hours", "main", "other")
    assert "1970-01-01 02:00" in text
    assert "epoch, and the event time it came to" in text
    assert "event time" not in diff_page(store, "s1", "main", "other")


def test_sums_beyond_64_bits_are_shown_as_they_are(tmp_path: Path) -> None:
    with nosync.open(tmp_path / "s", settings=nosync.StoreSettings(background=False)) as store:
        runner = StoreRunner(windows(1), store, 1)
        at = pa.array([0, 0, 0]).cast(pa.timestamp("us", "UTC"))
        for t in range(2):
            runner.advance(t, pa.table({"k": [0, 1, 2], "v": [t * 2**62] * 3, "at": at}))
        runner.make_branch("other", 0, windows(0), own=["scaled"]).replay(1)
        text = diff_page(store, "hours", "main", "other")
        assert f"{3 * 2**62:,}" in text


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
        (["s1", "main", "other", "--html", str(tmp_path / "no" / "x.html")], "there is no directory"),
        (["rows", "main", "other", "--html", str(tmp_path / "x.html")], "stage rows has no key"),
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
