"""The tables and the queries of TPC-H, small: rows of chance in the proportions and with the keys of the benchmark.

Values are drawn so that every query has answers on a few thousand rows; they are not those of its generator. Queries are
those of the specification with the parameters that it validates with, but for sizes that would leave nothing here.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

SCHEMAS: Mapping[str, str] = {
    "region": "r_regionkey bigint, r_name string, r_comment string",
    "nation": "n_nationkey bigint, n_name string, n_regionkey bigint, n_comment string",
    "supplier": "s_suppkey bigint, s_name string, s_address string, s_nationkey bigint, s_phone string, "
    "s_acctbal decimal(15, 2), s_comment string",
    "customer": "c_custkey bigint, c_name string, c_address string, c_nationkey bigint, c_phone string, "
    "c_acctbal decimal(15, 2), c_mktsegment string, c_comment string",
    "part": "p_partkey bigint, p_name string, p_mfgr string, p_brand string, p_type string, p_size int, p_container string, "
    "p_retailprice decimal(15, 2), p_comment string",
    "partsupp": "ps_partkey bigint, ps_suppkey bigint, ps_availqty int, ps_supplycost decimal(15, 2), ps_comment string",
    "orders": "o_orderkey bigint, o_custkey bigint, o_orderstatus string, o_totalprice decimal(15, 2), o_orderdate date, "
    "o_orderpriority string, o_clerk string, o_shippriority int, o_comment string",
    "lineitem": "l_orderkey bigint, l_linenumber int, l_partkey bigint, l_suppkey bigint, l_quantity decimal(15, 2), "
    "l_extendedprice decimal(15, 2), l_discount decimal(15, 2), l_tax decimal(15, 2), l_returnflag string, "
    "l_linestatus string, l_shipdate date, l_commitdate date, l_receiptdate date, l_shipinstruct string, "
    "l_shipmode string, l_comment string",
}
KEYS: Mapping[str, list[str]] = {
    "region": ["r_regionkey"], "nation": ["n_nationkey"], "supplier": ["s_suppkey"], "customer": ["c_custkey"],
    "part": ["p_partkey"], "partsupp": ["ps_partkey", "ps_suppkey"], "orders": ["o_orderkey"],
    "lineitem": ["l_orderkey", "l_linenumber"],
}  # fmt: skip
NATIONS = {
    "ALGERIA": 0, "ARGENTINA": 1, "BRAZIL": 1, "CANADA": 1, "EGYPT": 4, "FRANCE": 3, "GERMANY": 3, "INDIA": 2,
    "INDONESIA": 2, "IRAN": 4, "JAPAN": 2, "SAUDI ARABIA": 4, "UNITED STATES": 1, "CHINA": 2, "RUSSIA": 3,
}  # fmt: skip
REGIONS = ["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"]
SEGMENTS = ["AUTOMOBILE", "BUILDING", "FURNITURE", "MACHINERY", "HOUSEHOLD"]
PRIORITIES = ["1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW"]
MODES = ["REG AIR", "AIR", "RAIL", "SHIP", "TRUCK", "MAIL", "FOB"]
INSTRUCTIONS = ["DELIVER IN PERSON", "COLLECT COD", "NONE", "TAKE BACK RETURN"]
CONTAINERS = [
    "SM CASE",
    "SM BOX",
    "SM PACK",
    "SM PKG",
    "MED BAG",
    "MED BOX",
    "MED PKG",
    "MED PACK",
    "LG CASE",
    "LG BOX",
    "LG PKG",
]
TYPES = [
    f"{a} {b} {c}" for a in ("ECONOMY", "PROMO", "MEDIUM") for b in ("ANODIZED", "POLISHED") for c in ("STEEL", "BRASS")
]
COLORS = ["green", "forest", "almond", "navy", "azure", "snow"]
FIRST_DAY, DAYS = datetime.date(1992, 1, 1), 2400


class Tables:
    """Rows of the eight tables, by `orders` orders; others are in proportion."""

    def __init__(self, orders: int, seed: int = 7) -> None:
        self._chance = np.random.default_rng(seed)
        self.orders = orders
        self.customers, self.parts, self.suppliers = max(orders // 8, 15), max(orders // 6, 20), max(orders // 40, 8)

    def first(self) -> dict[str, pa.Table]:
        """Returns what an empty store is filled with."""
        partsupp = self._partsupp()
        orders, lines = self.ordered(np.arange(self.orders), partsupp)
        return {
            "region": self._region(), "nation": self._nation(), "supplier": self._supplier(), "customer": self._customer(),
            "part": self._part(np.arange(self.parts)), "partsupp": partsupp, "orders": orders, "lineitem": lines,
        }  # fmt: skip

    def ordered(self, keys: Any, partsupp: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Returns orders of some keys, and their lines."""
        chance, n = self._chance, len(keys)
        days = chance.integers(0, DAYS, n)
        orders = {
            "o_orderkey": keys, "o_custkey": _not_every_third(chance.integers(0, self.customers * 2 // 3, n)),
            "o_orderstatus": self._of(["F", "O", "P"], n), "o_totalprice": self._money(1_000, 400_000, n),
            "o_orderdate": self._dates(days), "o_orderpriority": self._of(PRIORITIES, n),
            "o_clerk": self._of([f"Clerk#{i}" for i in range(20)], n), "o_shippriority": np.zeros(n, np.int32),
            "o_comment": self._of(["fine", "special requests", "no special wrap, requests", "late"], n),
        }  # fmt: skip
        lines = chance.integers(1, 8, n)
        order = np.repeat(np.arange(n), lines)
        number = np.arange(len(order)) - np.repeat(np.cumsum(lines) - lines, lines) + 1
        supplied = partsupp.take(pa.array(chance.integers(0, partsupp.num_rows, len(order))))
        shipped = days[order] + chance.integers(1, 122, len(order))
        received = shipped + chance.integers(1, 31, len(order))
        m = len(order)
        lineitem = {
            "l_orderkey": np.asarray(keys)[order], "l_linenumber": number.astype(np.int32),
            "l_partkey": supplied["ps_partkey"], "l_suppkey": supplied["ps_suppkey"],
            "l_quantity": self._money(1, 51, m, whole=True), "l_extendedprice": self._money(900, 100_000, m),
            "l_discount": self._money(0, 0.11, m), "l_tax": self._money(0, 0.09, m),
            "l_returnflag": self._of(["A", "N", "R"], m), "l_linestatus": self._of(["O", "F"], m),
            "l_shipdate": self._dates(shipped), "l_commitdate": self._dates(days[order] + chance.integers(30, 91, m)),
            "l_receiptdate": self._dates(received), "l_shipinstruct": self._of(INSTRUCTIONS, m),
            "l_shipmode": self._of(MODES, m), "l_comment": self._of(["a", "b", "c"], m),
        }  # fmt: skip
        return self._table("orders", orders), self._table("lineitem", lineitem)

    def changed_customers(self, n: int) -> pa.Table:
        """Returns customers who have another balance and segment now."""
        return self._customer().take(pa.array(self._chance.choice(self.customers, n, replace=False)))

    def _region(self) -> pa.Table:
        return self._table("region", {"r_regionkey": range(5), "r_name": REGIONS, "r_comment": [""] * 5})

    def _nation(self) -> pa.Table:
        n = len(NATIONS)
        return self._table(
            "nation",
            {
                "n_nationkey": range(n),
                "n_name": list(NATIONS),
                "n_regionkey": list(NATIONS.values()),
                "n_comment": [""] * n,
            },
        )

    def _supplier(self) -> pa.Table:
        n = self.suppliers
        return self._table(
            "supplier",
            {
                "s_suppkey": range(n), "s_name": [f"Supplier#{i}" for i in range(n)],
                "s_address": [f"street {i}" for i in range(n)],
                "s_nationkey": np.arange(n) % len(NATIONS), "s_phone": [f"{10 + i}-1" for i in range(n)],
                "s_acctbal": self._money(-900, 9_000, n),
                "s_comment": self._of(["good", "Customer Complaints", "slow"], n),
            },
        )  # fmt: skip

    def _customer(self) -> pa.Table:
        n, codes = self.customers, [13, 31, 23, 29, 30, 18, 17, 40]
        return self._table(
            "customer",
            {
                "c_custkey": range(n), "c_name": [f"Customer#{i}" for i in range(n)],
                "c_address": [f"road {i}" for i in range(n)],
                "c_nationkey": np.arange(n) % len(NATIONS), "c_phone": [f"{codes[i % 8]}-{i}" for i in range(n)],
                "c_acctbal": self._money(-900, 9_000, n), "c_mktsegment": self._of(SEGMENTS, n), "c_comment": ["x"] * n,
            },
        )  # fmt: skip

    def _part(self, keys: Any) -> pa.Table:
        n = len(keys)
        names = [f"{a} {b}" for a, b in zip(self._of(COLORS, n), self._of(COLORS, n), strict=True)]
        return self._table(
            "part",
            {
                "p_partkey": keys, "p_name": names, "p_mfgr": self._of([f"Manufacturer#{i}" for i in range(1, 6)], n),
                "p_brand": self._of(["Brand#12", "Brand#23", "Brand#34", "Brand#45"], n), "p_type": self._of(TYPES, n),
                "p_size": self._chance.choice([1, 3, 5, 9, 14, 15, 19, 23, 36, 45, 49], n).astype(np.int32),
                "p_container": self._of(CONTAINERS, n), "p_retailprice": self._money(900, 2_000, n), "p_comment": ["x"] * n,
            },
        )  # fmt: skip

    def _partsupp(self) -> pa.Table:
        parts = np.repeat(np.arange(self.parts), 4)
        n = len(parts)
        suppliers = (parts + np.tile(np.arange(4), self.parts) * (self.suppliers // 4)) % self.suppliers
        return self._table(
            "partsupp",
            {
                "ps_partkey": parts, "ps_suppkey": suppliers, "ps_availqty": self._chance.integers(1, 9_999, n).astype(np.int32),
                "ps_supplycost": self._money(1, 1_000, n), "ps_comment": ["x"] * n,
            },
        )  # fmt: skip

    def _of(self, values: list[str], n: int) -> Any:
        return self._chance.choice(values, n)

    def _dates(self, days: Any) -> pa.Array:
        first = (FIRST_DAY - datetime.date(1970, 1, 1)).days
        return pa.array((np.asarray(days) + first).astype(np.int32), pa.int32()).cast(pa.date32())

    def _money(self, low: float, high: float, n: int, *, whole: bool = False) -> pa.Array:
        """Returns amounts as decimals: hundredths, of which `whole` has full hundreds."""
        step = 100 if whole else 1
        cents = self._chance.integers(int(low * 100) // step, int(high * 100) // step, n) * step
        words = np.stack([cents, cents >> 63], axis=1).astype(np.int64)  # 128 bits, the lower word first
        return pa.Array.from_buffers(pa.decimal128(15, 2), n, [None, pa.py_buffer(np.ascontiguousarray(words))])

    @staticmethod
    def _table(name: str, columns: Mapping[str, Any]) -> pa.Table:
        return pa.table(
            {
                column: columns[column]
                for column in (part.split()[0] for part in SCHEMAS[name].split(", ") if " " in part)
            }
        )


def _not_every_third(keys: Any) -> Any:
    """Returns keys without those that 3 divides: a third of the customers has no orders."""
    return keys // 2 * 3 + keys % 2 + 1


_REVENUE = "sum(l_extendedprice * (1 - l_discount))"
QUERIES: Mapping[str, str] = {
    "q1": f"""SELECT l_returnflag, l_linestatus, sum(l_quantity) AS sum_qty, sum(l_extendedprice) AS sum_base_price,
                {_REVENUE} AS sum_disc_price, sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) AS sum_charge,
                avg(l_quantity) AS avg_qty, avg(l_extendedprice) AS avg_price, avg(l_discount) AS avg_disc,
                count(*) AS count_order
              FROM lineitem WHERE l_shipdate <= DATE '1998-12-01' - INTERVAL 90 DAYS
              GROUP BY l_returnflag, l_linestatus ORDER BY l_returnflag, l_linestatus""",
    "q2": """SELECT s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
             FROM part, supplier, partsupp, nation, region
             WHERE p_partkey = ps_partkey AND s_suppkey = ps_suppkey AND p_size = 15 AND p_type LIKE '%BRASS'
               AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey AND r_name = 'EUROPE'
               AND ps_supplycost = (SELECT min(ps_supplycost) FROM partsupp, supplier, nation, region
                 WHERE p_partkey = ps_partkey AND s_suppkey = ps_suppkey AND s_nationkey = n_nationkey
                   AND n_regionkey = r_regionkey AND r_name = 'EUROPE')
             ORDER BY s_acctbal DESC, n_name, s_name, p_partkey LIMIT 100""",
    "q3": f"""SELECT l_orderkey, {_REVENUE} AS revenue, o_orderdate, o_shippriority FROM customer, orders, lineitem
              WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey
                AND o_orderdate < DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15'
              GROUP BY l_orderkey, o_orderdate, o_shippriority ORDER BY revenue DESC, o_orderdate, l_orderkey LIMIT 10""",
    "q4": """SELECT o_orderpriority, count(*) AS order_count FROM orders
             WHERE o_orderdate >= DATE '1993-07-01' AND o_orderdate < DATE '1993-07-01' + INTERVAL 9 MONTHS
               AND EXISTS (SELECT * FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_receiptdate)
             GROUP BY o_orderpriority ORDER BY o_orderpriority""",
    "q5": f"""SELECT n_name, {_REVENUE} AS revenue FROM customer, orders, lineitem, supplier, nation, region
              WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND l_suppkey = s_suppkey AND c_nationkey = s_nationkey
                AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey AND r_name = 'ASIA'
                AND o_orderdate >= DATE '1994-01-01' AND o_orderdate < DATE '1994-01-01' + INTERVAL 2 YEARS
              GROUP BY n_name ORDER BY revenue DESC""",
    "q6": """SELECT sum(l_extendedprice * l_discount) AS revenue FROM lineitem
             WHERE l_shipdate >= DATE '1994-01-01' AND l_shipdate < DATE '1994-01-01' + INTERVAL 1 YEAR
               AND l_discount BETWEEN 0.06 - 0.01 AND 0.06 + 0.01 AND l_quantity < 24""",
    "q7": """SELECT supp_nation, cust_nation, l_year, sum(volume) AS revenue FROM (
               SELECT n1.n_name AS supp_nation, n2.n_name AS cust_nation, year(l_shipdate) AS l_year,
                 l_extendedprice * (1 - l_discount) AS volume
               FROM supplier, lineitem, orders, customer, nation n1, nation n2
               WHERE s_suppkey = l_suppkey AND o_orderkey = l_orderkey AND c_custkey = o_custkey
                 AND s_nationkey = n1.n_nationkey AND c_nationkey = n2.n_nationkey
                 AND ((n1.n_name = 'FRANCE' AND n2.n_name = 'GERMANY') OR (n1.n_name = 'GERMANY' AND n2.n_name = 'FRANCE'))
                 AND l_shipdate BETWEEN DATE '1995-01-01' AND DATE '1996-12-31') AS shipping
             GROUP BY supp_nation, cust_nation, l_year ORDER BY supp_nation, cust_nation, l_year""",
    "q8": """SELECT o_year, sum(CASE WHEN nation = 'BRAZIL' THEN volume ELSE 0 END) / sum(volume) AS mkt_share FROM (
               SELECT year(o_orderdate) AS o_year, l_extendedprice * (1 - l_discount) AS volume, n2.n_name AS nation
               FROM part, supplier, lineitem, orders, customer, nation n1, nation n2, region
               WHERE p_partkey = l_partkey AND s_suppkey = l_suppkey AND l_orderkey = o_orderkey AND o_custkey = c_custkey
                 AND c_nationkey = n1.n_nationkey AND n1.n_regionkey = r_regionkey AND r_name = 'AMERICA'
                 AND s_nationkey = n2.n_nationkey AND o_orderdate BETWEEN DATE '1995-01-01' AND DATE '1996-12-31'
                 AND p_type = 'ECONOMY ANODIZED STEEL') AS all_nations
             GROUP BY o_year ORDER BY o_year""",
    "q9": """SELECT nation, o_year, sum(amount) AS sum_profit FROM (
               SELECT n_name AS nation, year(o_orderdate) AS o_year,
                 l_extendedprice * (1 - l_discount) - ps_supplycost * l_quantity AS amount
               FROM part, supplier, lineitem, partsupp, orders, nation
               WHERE s_suppkey = l_suppkey AND ps_suppkey = l_suppkey AND ps_partkey = l_partkey AND p_partkey = l_partkey
                 AND o_orderkey = l_orderkey AND s_nationkey = n_nationkey AND p_name LIKE '%green%') AS profit
             GROUP BY nation, o_year ORDER BY nation, o_year DESC""",
    "q10": f"""SELECT c_custkey, c_name, {_REVENUE} AS revenue, c_acctbal, n_name, c_address, c_phone, c_comment
               FROM customer, orders, lineitem, nation
               WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND o_orderdate >= DATE '1993-10-01'
                 AND o_orderdate < DATE '1993-10-01' + INTERVAL 9 MONTHS AND l_returnflag = 'R' AND c_nationkey = n_nationkey
               GROUP BY c_custkey, c_name, c_acctbal, c_phone, n_name, c_address, c_comment
               ORDER BY revenue DESC, c_custkey LIMIT 20""",
    "q11": """SELECT ps_partkey, sum(ps_supplycost * ps_availqty) AS value FROM partsupp, supplier, nation
              WHERE ps_suppkey = s_suppkey AND s_nationkey = n_nationkey AND n_name = 'GERMANY' GROUP BY ps_partkey
              HAVING sum(ps_supplycost * ps_availqty) > (SELECT sum(ps_supplycost * ps_availqty) * 0.01
                FROM partsupp, supplier, nation
                WHERE ps_suppkey = s_suppkey AND s_nationkey = n_nationkey AND n_name = 'GERMANY')
              ORDER BY value DESC""",
    "q12": """SELECT l_shipmode,
                sum(CASE WHEN o_orderpriority = '1-URGENT' OR o_orderpriority = '2-HIGH' THEN 1 ELSE 0 END) AS high_line_count,
                sum(CASE WHEN o_orderpriority <> '1-URGENT' AND o_orderpriority <> '2-HIGH' THEN 1 ELSE 0 END) AS low_line_count
              FROM orders, lineitem WHERE o_orderkey = l_orderkey AND l_shipmode IN ('MAIL', 'SHIP')
                AND l_commitdate < l_receiptdate AND l_shipdate < l_commitdate AND l_receiptdate >= DATE '1994-01-01'
                AND l_receiptdate < DATE '1994-01-01' + INTERVAL 1 YEAR
              GROUP BY l_shipmode ORDER BY l_shipmode""",
    "q13": """SELECT c_count, count(*) AS custdist FROM (
                SELECT c_custkey, count(o_orderkey) AS c_count FROM customer LEFT OUTER JOIN orders
                  ON c_custkey = o_custkey AND o_comment NOT LIKE '%special%requests%' GROUP BY c_custkey) AS c_orders
              GROUP BY c_count ORDER BY custdist DESC, c_count DESC""",
    "q14": f"""SELECT 100.00 * sum(CASE WHEN p_type LIKE 'PROMO%' THEN l_extendedprice * (1 - l_discount) ELSE 0 END)
                 / {_REVENUE} AS promo_revenue
               FROM lineitem, part WHERE l_partkey = p_partkey AND l_shipdate >= DATE '1995-09-01'
                 AND l_shipdate < DATE '1995-09-01' + INTERVAL 3 MONTHS""",
    "q15": f"""WITH revenue AS (SELECT l_suppkey AS supplier_no, {_REVENUE} AS total_revenue FROM lineitem
                 WHERE l_shipdate >= DATE '1996-01-01' AND l_shipdate < DATE '1996-01-01' + INTERVAL 3 MONTHS
                 GROUP BY l_suppkey)
               SELECT s_suppkey, s_name, s_address, s_phone, total_revenue FROM supplier, revenue
               WHERE s_suppkey = supplier_no AND total_revenue = (SELECT max(total_revenue) FROM revenue) ORDER BY s_suppkey""",
    "q16": """SELECT p_brand, p_type, p_size, count(DISTINCT ps_suppkey) AS supplier_cnt FROM partsupp, part
              WHERE p_partkey = ps_partkey AND p_brand <> 'Brand#45' AND p_type NOT LIKE 'MEDIUM POLISHED%'
                AND p_size IN (49, 14, 23, 45, 19, 3, 36, 9) AND ps_suppkey NOT IN (
                  SELECT s_suppkey FROM supplier WHERE s_comment LIKE '%Customer%Complaints%')
              GROUP BY p_brand, p_type, p_size ORDER BY supplier_cnt DESC, p_brand, p_type, p_size""",
    "q17": """SELECT sum(l_extendedprice) / 7.0 AS avg_yearly FROM lineitem, part
              WHERE p_partkey = l_partkey AND p_brand = 'Brand#23' AND p_container LIKE 'MED%'
                AND l_quantity < (SELECT 0.8 * avg(l_quantity) FROM lineitem WHERE l_partkey = p_partkey)""",
    "q18": """SELECT c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) AS quantity
              FROM customer, orders, lineitem
              WHERE o_orderkey IN (SELECT l_orderkey FROM lineitem GROUP BY l_orderkey HAVING sum(l_quantity) > 200)
                AND c_custkey = o_custkey AND o_orderkey = l_orderkey
              GROUP BY c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice
              ORDER BY o_totalprice DESC, o_orderdate, o_orderkey LIMIT 100""",
    "q19": f"""SELECT {_REVENUE} AS revenue FROM lineitem, part
               WHERE (p_partkey = l_partkey AND p_brand = 'Brand#12' AND p_container IN ('SM CASE', 'SM BOX', 'SM PACK', 'SM PKG')
                   AND l_quantity BETWEEN 1 AND 41 AND p_size BETWEEN 1 AND 15 AND l_shipmode IN ('AIR', 'REG AIR')
                   AND l_shipinstruct = 'DELIVER IN PERSON')
                 OR (p_partkey = l_partkey AND p_brand = 'Brand#23'
                   AND p_container IN ('MED BAG', 'MED BOX', 'MED PKG', 'MED PACK')
                   AND l_quantity BETWEEN 10 AND 50 AND p_size BETWEEN 1 AND 49 AND l_shipmode IN ('AIR', 'REG AIR')
                   AND l_shipinstruct = 'DELIVER IN PERSON')""",
    "q20": """SELECT s_name, s_address FROM supplier, nation WHERE s_suppkey IN (
                SELECT ps_suppkey FROM partsupp WHERE ps_partkey IN (SELECT p_partkey FROM part WHERE p_name LIKE 'forest%')
                  AND ps_availqty > (SELECT 0.5 * sum(l_quantity) FROM lineitem WHERE l_partkey = ps_partkey
                    AND l_suppkey = ps_suppkey AND l_shipdate >= DATE '1994-01-01'
                    AND l_shipdate < DATE '1994-01-01' + INTERVAL 2 YEARS))
                AND s_nationkey = n_nationkey AND n_name IN ('CANADA', 'FRANCE', 'CHINA', 'BRAZIL') ORDER BY s_name""",
    "q21": """SELECT s_name, count(*) AS numwait FROM supplier, lineitem l1, orders, nation
              WHERE s_suppkey = l1.l_suppkey AND o_orderkey = l1.l_orderkey AND o_orderstatus = 'F'
                AND l1.l_receiptdate > l1.l_commitdate
                AND EXISTS (SELECT * FROM lineitem l2 WHERE l2.l_orderkey = l1.l_orderkey AND l2.l_suppkey <> l1.l_suppkey)
                AND NOT EXISTS (SELECT * FROM lineitem l3 WHERE l3.l_orderkey = l1.l_orderkey
                  AND l3.l_suppkey <> l1.l_suppkey AND l3.l_receiptdate > l3.l_commitdate)
                AND s_nationkey = n_nationkey AND n_name IN ('ALGERIA', 'ARGENTINA', 'BRAZIL', 'CANADA', 'EGYPT')
              GROUP BY s_name ORDER BY numwait DESC, s_name LIMIT 100""",
    "q22": """SELECT cntrycode, count(*) AS numcust, sum(c_acctbal) AS totacctbal FROM (
                SELECT substring(c_phone, 1, 2) AS cntrycode, c_acctbal FROM customer
                WHERE substring(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17')
                  AND c_acctbal > (SELECT avg(c_acctbal) FROM customer WHERE c_acctbal > 0.00
                    AND substring(c_phone, 1, 2) IN ('13', '31', '23', '29', '30', '18', '17'))
                  AND NOT EXISTS (SELECT * FROM orders WHERE o_custkey = c_custkey)) AS custsale
              GROUP BY cntrycode ORDER BY cntrycode""",
}
"""The queries. Some intervals are longer and some bounds lower than in the specification, so that few rows have answers."""
