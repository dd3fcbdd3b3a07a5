"""Queries of chance over the inputs of `clauses`: nested, joined, grouped, united, with subqueries and window functions.

Whatever they are, their answer is one: no order among equal rows, no division, no approximation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

INT, TEXT, DOUBLE, TIME = "bigint", "string", "double", "timestamp"
TABLES = {
    "orders": {"id": INT, "person": INT, "item": TEXT, "price": DOUBLE, "at": TIME},
    "people": {"pid": INT, "city": TEXT, "score": DOUBLE},
    "clicks": {"who": INT, "weight": DOUBLE, "page": TEXT, "seen": TIME},
}
CONSTANTS = {INT: ["0", "2", "3", "NULL"], TEXT: ["'tea'", "'ink'", "''"], DOUBLE: ["0.0D", "3.0D", "6.5D"]}
HOWS = ["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN"]


@dataclass(frozen=True)
class Rel:
    """A query in brackets, and its columns."""

    sql: str
    columns: dict[str, str]


class Queries:
    """Makes queries, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._n = 0

    def query(self) -> str:
        rel = self._rel(self._chance.choice([2, 2, 3]))
        return f"SELECT {', '.join(rel.columns)} FROM {rel.sql}"

    def _rel(self, depth: int) -> Rel:
        if depth == 0:
            name = self._chance.choice(list(TABLES))
            columns = {self._name(): (column, type_) for column, type_ in TABLES[name].items()}
            texts = ", ".join(f"{column} AS {new}" for new, (column, _) in columns.items())
            return self._named(f"SELECT {texts} FROM {name}", {new: type_ for new, (_, type_) in columns.items()})
        makers: list[Callable[[int], Rel]] = [
            self._filtered, self._projected, self._grouped, self._grouped, self._joined, self._joined, self._united,
            self._distinct, self._over, self._with_subquery,
        ]  # fmt: skip
        return self._chance.choice(makers)(depth - 1)

    def _name(self) -> str:
        self._n += 1
        return f"c{self._n}"

    def _named(self, sql: str, columns: dict[str, str]) -> Rel:
        return Rel(f"({sql}) AS {self._name()}", columns)

    def _of(self, rel: Rel, *types: str) -> str | None:
        found = [name for name, type_ in rel.columns.items() if type_ in types]
        return self._chance.choice(found) if found else None

    # --- expressions --------------------------------------------------------------------------------------------------

    def _condition(self, rel: Rel) -> str:
        column = self._of(rel, INT, TEXT, DOUBLE)
        if column is None:
            return f"{self._chance.choice(list(rel.columns))} IS NOT NULL"
        type_ = rel.columns[column]
        simple = [
            f"{column} {self._chance.choice(['=', '<>', '<', '>=', '<=>'])} {self._chance.choice(CONSTANTS[type_])}",
            f"{column} IS {self._chance.choice(['', 'NOT '])}NULL",
            f"{column} IN ({', '.join(self._chance.sample(CONSTANTS[type_], 2))})",
        ]
        one = self._chance.choice(simple)
        if self._chance.random() < 0.3:
            return f"({one} {self._chance.choice(['AND', 'OR'])} {self._condition(rel)})"
        return f"NOT ({one})" if self._chance.random() < 0.15 else one

    def _expression(self, rel: Rel) -> tuple[str, str]:
        column = self._of(rel, INT, TEXT, DOUBLE)
        if column is None:
            return self._chance.choice(CONSTANTS[INT][:3]), INT
        type_ = rel.columns[column]
        made = {
            INT: [f"{column} + 1", f"{column} % 3", f"coalesce({column}, 7L)", f"-{column}"],
            TEXT: [
                f"upper({column})",
                f"coalesce({column}, 'none')",
                f"concat({column}, 'x')",
                f"nullif({column}, 'tea')",
            ],
            DOUBLE: [f"{column} * 2", f"coalesce({column}, 0D)", f"greatest({column}, 3D)"],
        }[type_]
        made.append(f"CASE WHEN {self._condition(rel)} THEN {column} END")
        return self._chance.choice(made), type_

    # --- relations ----------------------------------------------------------------------------------------------------

    def _filtered(self, depth: int) -> Rel:
        rel = self._rel(depth)
        return self._named(f"SELECT {', '.join(rel.columns)} FROM {rel.sql} WHERE {self._condition(rel)}", rel.columns)

    def _projected(self, depth: int) -> Rel:
        rel = self._rel(depth)
        columns, texts = dict[str, str](), []
        for _ in range(self._chance.randint(1, 3)):
            text, type_ = self._expression(rel)
            name = self._name()
            columns[name] = type_
            texts.append(f"{text} AS {name}")
        kept = self._chance.sample(list(rel.columns), min(2, len(rel.columns)))
        columns |= {name: rel.columns[name] for name in kept}
        return self._named(f"SELECT {', '.join([*texts, *kept])} FROM {rel.sql}", columns)

    def _grouped(self, depth: int) -> Rel:
        rel = self._rel(depth)
        keys = self._chance.sample(list(rel.columns), min(self._chance.choice([0, 1, 1, 2]), len(rel.columns)))
        columns = {name: rel.columns[name] for name in keys}
        texts = []
        for _ in range(self._chance.randint(1, 3)):
            text, type_ = self._call(rel)
            if self._chance.random() < 0.2:
                text += f" FILTER (WHERE {self._condition(rel)})"
            name = self._name()
            columns[name] = type_
            texts.append(f"{text} AS {name}")
        sql = f"SELECT {', '.join([*keys, *texts])} FROM {rel.sql}"
        if keys:
            sql += f" GROUP BY {', '.join(keys)}"
        if keys and self._chance.random() < 0.3:
            sql += f" HAVING count(*) {self._chance.choice(['> 1', '= 1', '< 3'])}"
        return self._named(sql, columns)

    def _call(self, rel: Rel) -> tuple[str, str]:
        column = self._of(rel, INT, TEXT, DOUBLE)
        if column is None or self._chance.random() < 0.2:
            return "count(*)", INT
        type_ = rel.columns[column]
        calls = [("count({})", INT), ("count(DISTINCT {})", INT), ("min({})", type_), ("max({})", type_)]
        if type_ in (INT, DOUBLE):
            calls += [("sum({})", type_), ("avg({})", DOUBLE), ("sum(DISTINCT {})", type_), ("median({})", DOUBLE)]
        text, made = self._chance.choice(calls)
        return text.format(column), made

    def _joined(self, depth: int) -> Rel:
        left, right = self._rel(depth), self._rel(max(depth - 1, 0))
        how = self._chance.choice(HOWS)
        a = self._of(left, INT, TEXT)
        b = None if a is None else self._of(right, left.columns[a])
        if a is None or b is None:
            return self._filtered(depth)
        conditions = [f"{a} {self._chance.choice(['=', '=', '=', '<=>'])} {b}"]
        if self._chance.random() < 0.4:
            x, y = self._of(left, DOUBLE, INT), self._of(right, DOUBLE, INT)
            if x is not None and y is not None:
                conditions.append(f"{x} {self._chance.choice(['<', '>=', '<>'])} {y}")
        if self._chance.random() < 0.3:
            conditions.append(self._condition(self._chance.choice([left, right])))
        columns = left.columns if "SEMI" in how or "ANTI" in how else {**left.columns, **right.columns}
        on = " AND ".join(conditions)
        return self._named(f"SELECT {', '.join(columns)} FROM {left.sql} {how} {right.sql} ON {on}", columns)

    def _united(self, depth: int) -> Rel:
        left, right = self._rel(depth), self._rel(max(depth - 1, 0))
        pairs = []
        for _ in range(2):
            type_ = self._chance.choice([INT, TEXT, DOUBLE])
            sides = self._of(left, type_), self._of(right, type_)
            known = {side for pair in pairs for side in pair[:2]}
            if None not in sides and not known & {*sides}:  # Spark cannot plan ALL over a column that is there twice
                pairs.append((*sides, type_))
        if not pairs:
            return self._distinct(depth)
        how = self._chance.choice(["UNION ALL", "UNION", "INTERSECT", "EXCEPT", "EXCEPT ALL", "INTERSECT ALL"])
        names = [self._name() for _ in pairs]
        first = ", ".join(f"{a} AS {name}" for (a, _, _), name in zip(pairs, names, strict=True))
        second = ", ".join(str(b) for _, b, _ in pairs)
        sql = f"SELECT {first} FROM {left.sql} {how} SELECT {second} FROM {right.sql}"
        return self._named(sql, {name: type_ for name, (_, _, type_) in zip(names, pairs, strict=True)})

    def _distinct(self, depth: int) -> Rel:
        rel = self._rel(depth)
        kept = self._chance.sample(list(rel.columns), min(2, len(rel.columns)))
        return self._named(
            f"SELECT DISTINCT {', '.join(kept)} FROM {rel.sql}", {name: rel.columns[name] for name in kept}
        )

    def _over(self, depth: int) -> Rel:
        rel = self._rel(depth)
        by, order = self._chance.choice(list(rel.columns)), self._chance.choice(list(rel.columns))
        ordered = (
            f"PARTITION BY {by} ORDER BY {order} {self._chance.choice(['', 'DESC', 'NULLS LAST', 'DESC NULLS FIRST'])}"
        )
        number = self._of(rel, INT, DOUBLE)
        frames = ["", "RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING", "RANGE BETWEEN CURRENT ROW AND CURRENT ROW"]
        if rel.columns[order] == INT:
            frames += ["RANGE BETWEEN 2 PRECEDING AND 1 FOLLOWING", "RANGE BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING"]
        framed = f"{ordered} {self._chance.choice(frames)}"
        made = [
            (f"rank() OVER ({ordered})", INT),
            (f"dense_rank() OVER ({ordered})", INT),
            (f"count(*) OVER ({framed})", INT),
        ]
        if number is not None:
            type_ = rel.columns[number]
            made += [
                (f"sum({number}) OVER ({framed})", type_), (f"max({number}) OVER (PARTITION BY {by})", type_),
                (f"min({number}) OVER ({framed})", type_), (f"avg({number}) OVER (PARTITION BY {by})", DOUBLE),
            ]  # fmt: skip
        text, type_ = self._chance.choice(made)
        name = self._name()
        columns = {**rel.columns, name: type_}
        return self._named(
            f"SELECT {', '.join(rel.columns)}, CAST({text} AS {type_}) AS {name} FROM {rel.sql}", columns
        )

    def _with_subquery(self, depth: int) -> Rel:
        rel, other = self._rel(depth), self._rel(max(depth - 1, 0))
        a = self._of(rel, INT, TEXT)
        b = None if a is None else self._of(other, rel.columns[a])
        if a is None or b is None:
            return self._filtered(depth)
        number, compared = self._of(rel, INT, DOUBLE), self._of(other, INT, DOUBLE)
        conditions = [
            f"{a} IN (SELECT {b} FROM {other.sql})",
            f"{a} NOT IN (SELECT {b} FROM {other.sql} WHERE {self._condition(other)})",
            f"EXISTS (SELECT 1 FROM {other.sql} WHERE {a} = {b} AND {self._condition(other)})",
            f"NOT EXISTS (SELECT 1 FROM {other.sql} WHERE {a} = {b})",
            f"({self._condition(rel)} OR {a} IN (SELECT {b} FROM {other.sql}))",
            f"NOT ({self._condition(rel)} OR {a} IN (SELECT {b} FROM {other.sql}))",
            f"NOT ({self._condition(rel)} AND {a} NOT IN (SELECT {b} FROM {other.sql}))",
            f"({a} IN (SELECT {b} FROM {other.sql})) = ({self._condition(rel)})",
        ]
        if number is not None and compared is not None:
            conditions += [
                f"{number} >= (SELECT max({compared}) FROM {other.sql})",
                f"{number} <= (SELECT avg({compared}) FROM {other.sql} WHERE {a} = {b})",
                f"EXISTS (SELECT 1 FROM {other.sql} WHERE {a} = {b} AND {number} < {compared})",
            ]
        condition = self._chance.choice(conditions)
        return self._named(f"SELECT {', '.join(rel.columns)} FROM {rel.sql} WHERE {condition}", rel.columns)
