"""What others wrote is seen on a screen or in a page, and does nothing there."""

from __future__ import annotations

import html
import io
import logging
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from rich.table import Table

import nosync
from nosync.cli import main
from nosync.cli.console import Screen, VisibleFormatter, err, out, show_rows, table_of
from nosync.html_diff.page import diff_page
from nosync.job.explain import Explanation
from nosync.job.reports import RecoveryReport
from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.platform.notebook import facts_html, rows_html
from nosync.lsm.visible import visible
from tests.conftest import OpenStore

ACTING = {
    "ESC": "\x1b[2J\x1b]0;title\x07", "C0": "\x00\x07\x08\x0b\x0c\x0e", "C1": "\x9b2J\x85\x90", "DEL": "\x7f", "return": "\r",
    "marks of direction": "\u202e\u202a\u2066\u2069\u200f\u061c", "no width": "\u200b\u2060\ufeff\u00ad",
    "separators": "\u2028\u2029", "tags": "\U000e0041", "half a pair": "\udc9b",
}  # fmt: skip
ALL = "".join(ACTING.values())
ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt])")
EVIL = f"be{ALL}fore"
NOT_SEEN = frozenset(ALL) - frozenset("[2J];title0")


def acting(text: str, but: str = "\n") -> str:
    """Said anew, without the filter that is tested."""
    return "".join(c for c in text if c not in but and (c < " " or "\x7f" <= c < "\xa0" or c in NOT_SEEN))


@pytest.mark.parametrize("kind", ACTING)
def test_what_acts_is_escaped(kind: str) -> None:
    shown = visible(f"a{ACTING[kind]}b")
    assert shown.startswith("a\\")
    assert ESCAPED.sub("", shown.replace("[2J", "").replace("]0;title", "").replace("2J", "")) == "ab"


def test_what_is_seen_stays() -> None:
    for text in ("plain", "größe", "数", "שלום", "a\u00a0b", "naïve \u2212 5", "🙂", "\\x1b", "$\\frac{$"):
        assert visible(text) == text
    assert visible("a\nb\tc", keep="\n\t") == "a\nb\tc"
    assert visible("a\nb\tc") == "a\\nb\\tc"


def printed(show: object, monkeypatch: pytest.MonkeyPatch) -> str:
    screen = Screen(file=io.StringIO(), highlight=False, emoji=False, width=2000, force_terminal=True, no_color=True)
    monkeypatch.setattr(screen, "_color_system", None)
    screen.print(show)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_whatever_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by code that forgets to ask for it."""
    assert not acting(printed(EVIL, monkeypatch))
    careless = Table()
    careless.add_column(EVIL)
    careless.add_row(EVIL)
    assert not acting(printed(careless, monkeypatch))


def test_a_table_says_what_is_in_it_and_nothing_is_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(EVIL, "[red]x[/]")
    table.add_row("two\nlines", "[/][link=http://evil.example]here[/link]")
    shown = printed(table, monkeypatch)
    assert not acting(shown)
    assert "two\\nlines" in shown
    assert "[/][link=http://evil.example]here[/link]" in shown
    assert "[red]x[/]" in shown


@pytest.fixture
def evil(open_store: OpenStore) -> Path:
    store = open_store()
    for t in range(2):
        rows = pa.table({"k": pa.array([EVIL.replace("\udc9b", ""), "b"]), f"v{EVIL}".replace("\udc9b", ""): [t, 2]})
        store.append("words", t=t, rows=rows, key=["k"])
        store.seal(t)
    store.close()
    return store.directory.root


@pytest.mark.parametrize("how", [[], ["--json"], ["--limit", "1"]])
def test_rows_of_others(evil: Path, capsys: pytest.CaptureFixture[str], how: list[str]) -> None:
    main(["get", str(evil), "words", *how])
    assert not acting(capsys.readouterr().out)


def test_csv_in_a_terminal_and_in_a_file(
    evil: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["get", str(evil), "words", "--csv"])
    assert "\x1b[2J" in capsys.readouterr().out, "a file gets what is there"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["get", str(evil), "words", "--csv"])
    assert not acting(capsys.readouterr().out)


def test_an_error_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["get", f"{tmp_path}/no\x1b[2Jwhere", "words"],
        ["no\x1b[2Jcommand"],
        ["get", str(tmp_path), "--x\x9b"],
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert not acting(capsys.readouterr().err)


def test_names_on_disk_that_are_markup(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of layers may have any name: `[/]` ended the command with a stack trace of Rich's."""
    layer = next((evil / "layers" / "words").rglob("*.layer"))
    for stage in ("[/]", "[link=x]y", "\x1b[2J"):
        target = evil / "layers" / stage / layer.relative_to(evil / "layers" / "words")
        target.parent.mkdir(parents=True)
        target.write_bytes(layer.read_bytes())
    for command in ("status", "layers", "verify"):
        try:
            main([command, str(evil)])
        except SystemExit:
            assert command == "verify"
        shown = capsys.readouterr()
        assert not acting(shown.out + shown.err)


def test_messages_of_errors_and_of_the_log() -> None:
    error = CorruptionError(f"{EVIL}: is damaged\nsecond line")
    assert not acting(str(error))
    assert "\nsecond line" in str(error)
    assert isinstance(error, NosyncError)
    record = logging.LogRecord("nosync", logging.ERROR, "", 0, "not kept: %s", (EVIL,), None)
    assert not acting(VisibleFormatter("%(message)s").format(record))


def test_pages_and_notebooks() -> None:
    shown = facts_html(EVIL, {EVIL: EVIL}, rows_html([EVIL], [[EVIL]], EVIL))
    assert not acting(shown)
    assert "\\x1b" in html.unescape(shown)
    rows = pa.table({"k\x1b[2J": ["v\x9b\u202e\r\n"], "_epoch": [1]})
    explained = Explanation("s", {"k\x1b": EVIL}, 1, rows, ())
    assert not acting(explained._repr_html_())
    assert not acting(str(explained))
    assert str(explained).count("\n") == 0, "a value makes no line of its own"
    assert not acting(str(RecoveryReport(3, 9, 2, 0, 1, 4, {EVIL: EVIL}, {})))


NAMES = [
    "$\\frac{$",
    "$$",
    "$a$ $b",
    "v\x1b[2J",
    "\u202ev",
    "<b>v</b>",
    "%s {x}",
    "\\",
    "_v",
    "--><script>",
    "^{",
    "$\\sqrt{x}$",
    "a\nb",
]


@pytest.mark.parametrize("column", NAMES)
def test_a_report_of_columns_that_are_formulas(open_store: OpenStore, column: str) -> None:
    store = open_store()
    store.append("s", t=0, rows=pa.table({f"k{column}": [1, 2], column: [1.0, 2.0]}), key=[f"k{column}"])
    store.seal(0)
    store.append("s", t=1, rows=pa.table({f"k{column}": [1], column: [5.0]}))
    store.seal(1)
    store.rewind(0, "b")
    store.append("s", t=1, rows=pa.table({f"k{column}": [1], column: [7.0]}))
    store.seal(1)
    page = diff_page(store, "s", "main", "b")
    assert not acting(page)
    assert html.escape(visible(column)) in page
    assert "<svg" in page, "the plot is in it"
    assert "<script" not in page


def test_the_screens_of_commands_are_those_that_filter() -> None:
    assert isinstance(out, Screen)
    assert isinstance(err, Screen)
    assert nosync.NosyncError is NosyncError


def test_values_in_a_table_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(pa.table({"[bold]c": ["\x1b[31mred", "[red]x", "a\rb"]}), 3)
    shown = capsys.readouterr().out
    assert not acting(shown)
    for text in ("[bold]c", "\\x1b[31mred", "[red]x", "a\\rb"):
        assert text in shown
