"""What a fingerprint sees: every change of what a function computes, and nothing that differs from process to process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

import nosync
from nosync.flow.binder import bind
from nosync.flow.fingerprint import fingerprint, hashed_of
from nosync.flow.imported_names import imported_by
from nosync.flow.meanings import Meanings
from nosync.flow.per_key import PerKey
from nosync.flow.pickled_function import PickledFunction
from nosync.lsm.errors import FlowError
from tests.helpers.runner import parse_ddl

PAIRS = {
    "constant": "def f(r): return r + {}",
    "global": "X = {}\ndef f(r): return r + X",
    "helper": "def h(r): return {}\ndef f(r): return h(r)",
    "default": "def f(r, a={}): return r + a",
    "keyword default": "def f(r, *, a={}): return r + a",
    "closure": "def make(a):\n    return lambda r: r + a\nf = make({})",
    "list comprehension": "def f(r): return [x['c{}'] for x in r]",
    "generator": "def f(r): return sum(x['c{}'] for x in r)",
    "dict comprehension": "def f(r): return {{'a{}': 1 for x in r}}",
    "nested function": "def f(r):\n    def g(x):\n        return 'c{}'\n    return g(r)",
    "lambda": "f = lambda r: 'c{}'",
    "class in a function": "class S:\n    def go(self, r): return r * {}\ndef f(r): return S().go(r)",
    "constant of a class": "class S:\n    K = {}\ndef f(r): return r * S.K",
    "base class": "class B:\n    def go(self, r): return r * {}\nclass S(B): pass\ndef f(r): return S().go(r)",
    "callable object": "class S:\n    def __call__(self, r): return r * {}\nf = S()",
    "field": "class S:\n    def __init__(self): self.a = {}\n    def __call__(self, r): return r * self.a\nf = S()",
    "slot": "class S:\n    __slots__ = ('a',)\n    def __init__(self): self.a = {}\n    def __call__(self, r): return r\nf = S()",
    "property": "class S:\n    @property\n    def a(self): return {}\n    def __call__(self, r): return r * self.a\nf = S()",
    "bound method": "class S:\n    def go(self, r): return self.h(r)\n    def h(self, r): return r * {}\nf = S().go",
    "array": "import pyarrow as pa\nA = pa.array(range({}))\ndef f(r): return A",
    "table": "import pyarrow as pa\nA = pa.table({{'a': [0] * 500 + [{}] + [0] * 500}})\ndef f(r): return A",
    "NumPy": "import numpy as np\nA = np.zeros(5000); A[2500] = {}\ndef f(r): return A",
    "Pandas": "import pandas as pd\nA = pd.DataFrame({{'a': [0] * 500 + [{}] + [0] * 500}})\ndef f(r): return A",
    "Series": "import pandas as pd\nA = pd.Series([0] * 500 + [{}] + [0] * 500)\ndef f(r): return A",
    "digits of a Series": "import pandas as pd\nA = pd.Series([0.123456789{}])\ndef f(r): return A",
    "index": "import pandas as pd\nA = pd.Index([0] * 500 + [{}] + [0] * 500)\ndef f(r): return A",
    "index of a Series": "import pandas as pd\nA = pd.Series([1], index=[{}])\ndef f(r): return A",
    "categories": "import pandas as pd\nA = pd.Categorical([0] * 500 + [{}] + [0] * 500)\ndef f(r): return A",
    "expression of Arrow": "import pyarrow.compute as pc\nA = pc.field('a').isin([0] * 50 + [{}] + [0] * 50)\ndef f(r): return A",
    "object of a library": "import string\nA = string.Template('$a {}')\ndef f(r): return A.template",
    "named tuple with a method": (
        "import typing\nclass P(typing.NamedTuple):\n    a: int\n    def go(self): return self.a * {}\n"
        "A = P(1)\ndef f(r): return A.go()"
    ),
    "dictionary with a method": "class D(dict):\n    def __missing__(self, k): return {}\nA = D(a=1)\ndef f(r): return A[r]",
    "text with a method": "class T(str):\n    def go(self): return {}\nA = T('a')\ndef f(r): return A.go()",
    "constant of a list": "class L(list):\n    limit = {}\nA = L([1])\ndef f(r): return A.limit",
    "enum with a method": (
        "import enum\nclass E(enum.IntEnum):\n    A = 1\n    def go(self): return {}\ndef f(r): return E.A.go()\nX = E.A\n"
        "def f(r): return X.go()"
    ),
    "base of a tuple": "class B:\n    def go(self): return {}\nclass T(B, tuple): pass\nA = T((1,))\ndef f(r): return A.go()",
    "default of a dictionary": (
        "import collections\nA = collections.defaultdict(int if {} == 1 else list)\ndef f(r): return A[r]"
    ),
    "attribute of a function": "def f(r): return f.limit\nf.limit = {}",
    "pattern": "import re\nP = re.compile('a' * 300 + '{}')\ndef f(r): return P.match(r)",
    "builtin of an object": "f = {{'a': {}}}.get",
    "itemgetter": "import operator\nf = operator.itemgetter({})",
    "partial": "import functools\nf = functools.partial(max, {})",
    "cached": "import functools\n@functools.cache\ndef g(r): return {}\ndef f(r): return g(r)",
    "decorated": (
        "import functools\ndef d(g):\n    @functools.wraps(g)\n    def w(r): return g(r)\n    return w\n"
        "@d\ndef f(r): return {}"
    ),
    "singledispatch": (
        "import functools\n@functools.singledispatch\ndef g(r): return 0\n@g.register(int)\ndef _(r): return {}\n"
        "def f(r): return g(r)"
    ),
    "vectorized": "import numpy as np\nf = np.vectorize(lambda x: x + {})",
    "nested lambdas": "K = {}\ndef f(r): return (lambda: (lambda: K)())()",
}  # fmt: skip


def function_of(text: str) -> Any:
    module = types.ModuleType("code_of_users")
    exec(compile(textwrap.dedent(text), "code_of_users.py", "exec"), module.__dict__)
    return module.__dict__["f"]


@pytest.mark.parametrize("what", PAIRS)
def test_every_change_is_seen(what: str) -> None:
    one, same, other = (fingerprint(function_of(PAIRS[what].format(value))) for value in (1, 1, 2))
    assert one == same
    assert one != other


def test_what_moves_into_else_is_another_function() -> None:
    inside = "def f(r):\n    try:\n        g(r)\n        h(r)\n    except KeyError: return None\n    return 1"
    beside = (
        "def f(r):\n    try:\n        g(r)\n    except KeyError: return None\n    else:\n        h(r)\n    return 1"
    )
    assert fingerprint(function_of(inside)) != fingerprint(function_of(beside))


def test_lines_comments_and_docstrings_do_not_count() -> None:
    plain = "def f(r):\n    def g(x):\n        return x\n    return g(r)"
    told = (
        "# why\n\n\ndef f(r):\n    'What.'\n    def g(x):\n        'That.'\n        return x  # here\n\n    return g(r)"
    )
    assert fingerprint(function_of(plain)) == fingerprint(function_of(told))


def test_a_module_of_the_users_counts_by_what_is_taken_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # written in one second, they would be taken for each other
    text = "import helpers_of_users\ndef f(r): return helpers_of_users.g(r) + helpers_of_users.LIMIT"
    found = []
    for g, limit, unused in ((1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1)):
        (tmp_path / "helpers_of_users.py").write_text(
            f"LIMIT = {limit}\ndef g(r): return {g}\ndef other(r): return {unused}\n"
        )
        sys.modules.pop("helpers_of_users", None)
        found.append(fingerprint(function_of(text)))
    sys.modules.pop("helpers_of_users", None)
    assert found[0] == found[1], "what it does not take does not count"
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "def f(r):\n    from helpers_of_users import g, LIMIT\n    return g(r) + LIMIT",
        "def f(r):\n    import helpers_of_users\n    return helpers_of_users.g(r) + helpers_of_users.LIMIT",
        "def f(r):\n    import helpers_of_users as h\n    return [h.g(x) + h.LIMIT for x in r]",
        "def f(r):\n    def i(x):\n        import helpers_of_users as h\n        return h.g(x) + h.LIMIT\n    return i(r)",
        "def f(r):\n    from package_of_users.sub import h\n    return h.g(r) + h.LIMIT",
        "def f(r):\n    import package_of_users.sub.h\n    return package_of_users.sub.h.g(r) + package_of_users.sub.h.LIMIT",
        "__package__ = 'package_of_users.sub'\ndef f(r):\n    from .h import g, LIMIT\n    return g(r) + LIMIT",
        "__package__ = 'package_of_users.sub'\ndef f(r):\n    from . import h\n    return h.g(r) + h.LIMIT",
    ],
)  # fmt: skip
def test_what_a_function_imports_when_it_runs_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "package_of_users/sub").mkdir(parents=True)
    for package in ("package_of_users", "package_of_users/sub"):
        (tmp_path / package / "__init__.py").touch()
    found = []
    for g, limit, unused in ((1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1)):
        for path in ("helpers_of_users.py", "package_of_users/sub/h.py"):
            (tmp_path / path).write_text(f"LIMIT = {limit}\ndef g(r): return {g}\ndef other(r): return {unused}\n")
        for name in [name for name in sys.modules if name.partition(".")[0].endswith("_of_users")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        found.append(fingerprint(function_of(text)))
    assert found[0] == found[1], "what it does not take does not count"
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "imports",
    ["import turtledemo.clock", "from turtledemo import clock", "import nowhere_at_all", "from .. import beyond"],
)
def test_what_is_installed_is_not_imported_for_a_fingerprint(imports: str) -> None:
    """Nor a package that such a module is in: what takes long is imported in a body for just that reason."""
    text = f"def f(r):\n    {imports}\n    return r"
    function = function_of(text)
    assert imported_by(function) == {}
    assert not [name for name in sys.modules if name.startswith("turtledemo")]
    assert fingerprint(function) == fingerprint(function_of(text))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_package_without_a_file_of_its_own_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "space_of_users").mkdir()
    (tmp_path / "space_of_users/h.py").write_text("def g(r): return r\n")
    try:
        if is_loaded:
            importlib.import_module("space_of_users.h")
        found = imported_by(function_of("def f(r):\n    from space_of_users.h import g\n    return g(r)"))
        assert {"space_of_users.h", "space_of_users.h.g"} <= found.keys()
    finally:
        for name in ("space_of_users", "space_of_users.h"):
            sys.modules.pop(name, None)


STABLE = """
import abc, dataclasses, functools, json, logging, pickle, re, threading
from json import dumps
import pyarrow as pa
from nosync.flow.fingerprint import fingerprint
BLOCKED, LOCK, LOG, SETS = pa.array(["a", "b"]), threading.Lock(), logging.getLogger("x"), {"a", "b", "c"}
class Config(abc.ABC):
    def __init__(self): self.limit = 3
@dataclasses.dataclass(frozen=True)
class Limits:
    low: int = 1
LIMITS = Limits()
CONFIG, MEMO = Config(), functools.cache(lambda x: x)
def f(r):
    with LOCK:
        LOG.info("x")
        return dumps(r), BLOCKED, CONFIG.limit, LIMITS.low, MEMO(r), re.sub("a", "b", r), json.loads(r), SETS
first = fingerprint(f)
f("1"); pickle.dumps(CONFIG); pickle.dumps(LIMITS); isinstance(1, Config); LOG.setLevel(10); re.compile("other")
assert fingerprint(f) == first, "using it changes nothing"
print(first)
"""


def test_another_process_says_the_same() -> None:
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", STABLE], env=environment, capture_output=True, text=True, check=True
        )
        found.add(run.stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import pandas as pd\nA = pd.Timestamp('2026-01-01', tz='UTC'), pd.NaT, pd.Timedelta('1s')\ndef f(r): return A",
        "import pandas as pd\nA = pd.Series(pd.to_datetime(['2026-01-01'], utc=True))\ndef f(r): return A",
        "import pandas as pd\nA = pd.Series(['a', None, pd.Timestamp('2026-01-01')])\ndef f(r): return A",
        "import pandas as pd\nA = pd.date_range('2026-01-01', periods=3, tz='Europe/Rome')\ndef f(r): return A",
        "import typing\nA = typing.Optional[int], typing.Callable[..., int], typing.List[str]\ndef f(r): return A",
        "import pyspark.sql.types as t\nA = t.StructType([t.StructField('a', t.DecimalType(9, 2))])\ndef f(r): return A",
        "import datetime, decimal, pathlib, uuid, http\n"
        "A = datetime.timedelta(1), decimal.Decimal('1'), pathlib.Path('a'), uuid.UUID(int=1), http.HTTPStatus.OK\n"
        "def f(r): return A",
    ],
)
def test_ordinary_objects_of_libraries_have_one(text: str) -> None:
    assert fingerprint(function_of(text)) == fingerprint(function_of(text))


def test_what_a_function_sets_itself_is_no_code() -> None:
    function = function_of("def f(r):\n    f.calls += 1\n    return r + f.limit\nf.calls, f.limit, f.cache = 0, 1, {}")
    before = fingerprint(function)
    function(1)
    function.cache["a"] = object()
    assert fingerprint(function) == before
    function.limit = 2
    assert fingerprint(function) != before


def test_what_says_a_part_of_itself_alone_is_refused() -> None:
    text = (
        "import pyarrow as pa, pyarrow.compute as pc\nA = pc.SetLookupOptions(pa.array(range(100)))\ndef f(r): return A"
    )
    with pytest.raises(FlowError, match="give the stage a version="):
        fingerprint(function_of(text))


def test_which_watermark_counts_in_a_join_is_seen() -> None:
    def bound(kind: str, policy: str | None) -> dict[str, str]:
        flow = nosync.Dataflow("f")
        left = flow.source("a", "k string, at timestamp, x bigint")
        right = flow.source("b", "k string, bt timestamp, y bigint")
        if kind == "interval":
            left.join(
                "j",
                right,
                on=["k"],
                time=("at", "bt"),
                within=("0 seconds", "5 seconds"),
                watermark="5 seconds",
                policy=policy,
            )
        else:
            left.join_asof("j", right, on=["k"], time=("at", "bt"), watermark="5 seconds", policy=policy)
        return {name: stage.fingerprint for name, stage in bind(flow, parse_ddl).stages.items() if name.startswith("j")}

    for kind in ("interval", "as of"):
        slowest, fastest = bound(kind, "min"), bound(kind, "max")
        assert bound(kind, None) == slowest
        assert all(slowest[name] != fastest[name] for name in slowest)


def test_what_has_only_an_address_is_refused() -> None:
    text = "import socket\nS = socket.socket.__new__(socket.socket)\nG = (x for x in ())\ndef f(r): return G"
    with pytest.raises(FlowError, match="give the stage a version="):
        fingerprint(function_of(text))


@pytest.mark.timeout(60)
def test_helpers_that_share_helpers_are_hashed_once() -> None:
    """And not once for each way to them, which would take years."""
    lines = ["def h0(r): return {}"]
    for i in range(1, 40):
        lines.append(f"def h{i}(r): return h{i - 1}(r) + " + " + ".join(f"h{j}(r)" for j in range(max(0, i - 4), i)))
    text = "\n".join([*lines, "def f(r): return h39(r)"])
    assert fingerprint(function_of(text.format(1))) != fingerprint(function_of(text.format(2)))


def test_functions_that_call_each_other_end() -> None:
    text = "def a(r): return b(r)\ndef b(r): return a(r) + {}\ndef f(r): return a(r)"
    assert fingerprint(function_of(text.format(1))) != fingerprint(function_of(text.format(2)))


@pytest.mark.parametrize("what", PAIRS)
def test_a_frozen_function_has_the_fingerprint_that_it_had(what: str) -> None:
    """And not another one than where nothing was frozen, for stores are opened by it."""
    for function in (function_of(PAIRS[what].format(1)), PerKey(("k",), function_of(PAIRS[what].format(2)))):
        parts = {"n": ("count", None)}, ["about it", None], ["of its input"]
        live = fingerprint("map", ("k",), function, "", *parts)
        assert fingerprint("map", ("k",), PickledFunction(b"", hashed_of(function)), "", *parts) == live


def test_what_is_hashed_of_the_options_of_windows_and_joins_is_pinned() -> None:
    """What the golden store does not have: a window over several inputs, and a join of rows that change with others."""
    rows = "k bigint, v bigint, at timestamp"
    flow = nosync.Dataflow("f")
    both = flow.source("a", rows).union("both", flow.source("b", rows))
    both.window("w", time="at", size="1 hour", watermark="5 minutes", idle_after=2, n=nosync.count())
    counts = both.aggregate("counts", key=["k"], n=nosync.count())
    counts.join("j", flow["a"], on=["k"], how="left")
    bound = bind(
        flow, parse_ddl, meanings=Meanings(strict={"w"}, unnamed={"a", "b"})
    )  # as stores of versions before have it
    assert {name: stage.fingerprint for name, stage in bound.stages.items()} == {
        "a": "08f39a0d21836e52",
        "b": "08f39a0d21836e52",
        "both": "9eb843c45235c61b",
        "w__watermark": "ee8d19a938f5a38d",
        "w__late": "7749c3b93b6395c1",
        "w": "5dbded6f6b7742b7",
        "counts": "240f6d61c8d30cef",
        "j__left": "7a79967dddcd2a07",
        "j__right": "bd8a0f5d90f2b7d2",
        "j": "74a9c24f85e4f646",
    }


def all_of(rows: Any) -> Any:
    return rows


def reading(which: str) -> nosync.Dataflow:
    """Returns a flow whose stages read one of two sources, and one of two outputs, of the same columns."""
    flow = nosync.Dataflow("f")
    for name in "ab":
        flow.source(name, "k string, n bigint")
    read = flow[which]
    read.filter("some", all_of, version="1").aggregate("sums", key=["k"], n=nosync.sum("n"))
    read.dedupe("once")
    flow["a"].join("joined", read, on=["k"], how="semi")
    given = flow["a"].update_per_key(
        "u", key=["k"], state="n bigint", fn=lambda key, rows, state: (None, {}), version="1",
        outputs={"a": "k string", "b": "k string"},
    )  # fmt: skip
    given.output(which).aggregate("alerts", key=["k"], n=nosync.count())
    return flow


def test_a_stage_that_reads_another_source_or_output_of_the_same_columns_is_another_one() -> None:
    one, other = ({name: s.fingerprint for name, s in bind(reading(w), parse_ddl).stages.items()} for w in "ab")
    changed = {name for name in one if name in other and one[name] != other[name]}
    assert changed == {"some", "sums", "once", "joined", "joined__right", "alerts"}
    # In stores of versions before they are what they were.
    before = Meanings(unnamed={"a", "b", "u__a", "u__b"})
    was, is_now = (
        {n: s.fingerprint for n, s in bind(reading(w), parse_ddl, meanings=before).stages.items()} for w in "ab"
    )
    assert (was["a"], was["alerts"], was["sums"]) == (was["b"], is_now["alerts"], is_now["sums"])
