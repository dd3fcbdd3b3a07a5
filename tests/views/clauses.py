"""Small queries, one for each clause that a view can have, over three inputs with nulls in every column.

`orders` and `people` are tables, whose rows are changed and deleted; to `clicks` rows are only added.
"""

from __future__ import annotations

SCHEMAS = {
    "orders": "id bigint, person bigint, item string, price double, at timestamp, tax decimal(9, 2)",
    "people": "pid bigint, city string, score double",
    "clicks": "who bigint, weight double, page string, seen timestamp",
}
KEYS = {"orders": ["id"], "people": ["pid"]}

CLAUSES: dict[str, str] = {
    # --- rows
    "columns": "SELECT id, person + 1 AS next, lower(item) AS item FROM orders",
    "star": "SELECT * FROM orders WHERE price > 4 AND item IS NOT NULL",
    "conditions": "SELECT id FROM orders WHERE item IN ('tea', 'ink') AND person BETWEEN 1 AND 5 AND item LIKE 't%'",
    "case": """SELECT id, CASE WHEN person > 3 THEN 'late' WHEN person IS NULL THEN 'nobody' ELSE 'early' END AS who,
               coalesce(price, -1) AS price, CAST(tax AS string) AS tax FROM orders""",
    "times": "SELECT id, date_trunc('hour', at) AS hour, at + INTERVAL 90 MINUTES AS later, year(at) AS y FROM orders",
    "nested": "SELECT id, named_struct('p', person, 'i', item) AS both, array(person, id) AS list FROM orders",
    "maps": "SELECT id, map('person', person, 'id', id) AS numbers FROM orders",
    "lambdas": "SELECT id, filter(array(person, id, 3), x -> x % 2 = 1) AS odd FROM orders",
    "texts": "SELECT id, regexp_extract(item, '(.)$', 1) AS last, item RLIKE '^t' AS t, split(item, 'e') AS parts FROM orders",
    "json": "SELECT id, get_json_object(concat('{\"v\":', id, '}'), '$.v') AS v FROM orders",
    "other schemas": """SELECT item, count(from_json(j, 'v string').v) AS texts, count(from_json(j, 'v int').v) AS numbers,
                        max(to_csv(named_struct('a', person, 'b', id), map('sep', '|'))) AS a,
                        max(to_csv(named_struct('a', person, 'b', id), map('sep', ';'))) AS b
                        FROM (SELECT item, person, id, concat('{"v": "', item, '"}') AS j FROM orders) GROUP BY item""",
    "other casts": """SELECT id, to_json(CAST(l AS array<double>)) AS d, to_json(CAST(l AS array<string>)) AS s,
                      transform(l, x -> try_add(x, 1)) AS a, transform(l, x -> x + 1) AS b
                      FROM (SELECT id, array(person, id) AS l FROM orders)""",
    "decimals in functions": """SELECT id, nullif(tax, 1.00) AS n, transform(array(person), x -> x * 1.5) AS a,
                                transform(array(person), x -> x * 2.5) AS b, filter(array(tax), x -> x > 0.5) AS c,
                                CAST(make_dt_interval(0, 0, 0, person) AS string) AS d FROM orders""",
    "decimals in sums": "SELECT sum(tax) / nullif(sum(tax), 0.0) AS v FROM orders",
    "spans of time": """SELECT person, min(at - TIMESTAMP '2026-01-01 00:00:00') AS first,
                        max(at - TIMESTAMP '2026-01-01 00:00:00') AS last FROM orders GROUP BY person""",
    "any at all": """SELECT id, CASE WHEN NOT EXISTS (SELECT * FROM people WHERE score > 90) THEN 'none' END AS few
                     FROM orders WHERE person = 1 OR EXISTS (SELECT 1 FROM people WHERE score > 50)""",
    "names in quotes": "SELECT id, person AS `x``y`, person + 1 AS `a ``b`` c` FROM orders",
    "maps in lambdas": """SELECT id, transform(map_keys(m), k -> m[k] + 1) AS a,
                          transform(map_keys(m), k -> try_element_at(m, k)) AS b
                          FROM (SELECT id, map('id', id, 'person', person) AS m FROM orders)""",
    "one name for two": """SELECT p.twice AS before, c.person * 2 AS twice
                           FROM (SELECT id, person * 2 AS twice FROM orders) p JOIN orders c ON c.id = p.id + 1""",
    "newest by subqueries": """SELECT pid,
                         (SELECT o.item FROM orders o WHERE o.person = people.pid ORDER BY o.id DESC LIMIT 1) AS item,
                         (SELECT o.price FROM orders o WHERE o.person = people.pid ORDER BY o.id LIMIT 1 OFFSET 1) AS second
                         FROM people""",
    "some of each": """SELECT pid, o.item FROM people, LATERAL (
                       SELECT item FROM orders WHERE person = pid ORDER BY id DESC LIMIT 2) o""",
    "lists of nothing": """SELECT collect_list(item) AS l, size(collect_set(item)) AS n, count(*) AS k,
                           coalesce(array_join(collect_list(item), ','), 'none') AS j, median(price) AS m
                           FROM orders WHERE id > 100000""",
    "extremes of some": """SELECT max_by(10 / person, id) FILTER (WHERE person <> 0) AS m FROM
                           (SELECT id, person % 3 AS person FROM orders)""",
    "a column twice inside": "WITH c AS (SELECT id, id FROM orders) SELECT count(*) AS n FROM c",
    "numbers of each": """SELECT pid, o.r, o.id FROM people JOIN LATERAL (
                          SELECT id, row_number() OVER (ORDER BY id DESC) AS r FROM orders WHERE person = pid) o""",
    "aliases": "SELECT o.*, 1 AS one FROM (SELECT id, person FROM orders) o",
    "order": "SELECT id, price FROM orders ORDER BY price DESC",
    # --- groups
    "groups": """SELECT item, count(*) AS n, count(price) AS priced, sum(person) AS people, avg(price) AS mean,
                 min(price) AS least, max(at) AS newest FROM orders GROUP BY item""",
    "one group": "SELECT count(*) AS n, sum(price) AS total, max(item) AS item FROM orders",
    "decimals": "SELECT item, sum(tax) AS total, avg(tax) AS mean, min(tax) AS least FROM orders GROUP BY item",
    "parts of means": """SELECT item, avg(tax) AS mean, count(tax) AS n, stddev_pop(price) AS s, stddev(price) AS d FROM orders
                         GROUP BY item""",
    "having without a call": "SELECT 1 AS one FROM orders WHERE id < 0 HAVING true",
    "fine decimals": "SELECT item, avg(CAST(price / 3 AS decimal(14, 8))) AS mean FROM orders GROUP BY item",
    "having": """SELECT person % 3 AS rest, avg(price) * 2 + count(*) AS mix FROM orders WHERE person IS NOT NULL
                 GROUP BY person % 3 HAVING count(*) > 1 AND max(price) > 3""",
    "spread": """SELECT item, stddev(price) AS s, var_samp(price) AS v, stddev_pop(price) AS sp, var_pop(price) AS vp
                 FROM orders GROUP BY item""",
    "filtered": """SELECT item, count(*) FILTER (WHERE person > 2) AS n, sum(price) FILTER (WHERE person > 2) AS total,
                   count_if(price > 5) AS dear, bool_or(price > 8) AS any_dear, every(price > 1) AS all
                   FROM orders GROUP BY item""",
    "extremes": "SELECT item, max_by(id, id) AS newest, min_by(price, id) AS first FROM orders GROUP BY item",
    "distinct counts": """SELECT item, count(DISTINCT person) AS people, count(DISTINCT person, price) AS pairs, count(*) AS n
                          FROM orders GROUP BY item""",
    "distinct sums": """SELECT item, sum(DISTINCT person) AS total, avg(DISTINCT price) AS mean, count(*) AS n FROM orders
                        GROUP BY item""",
    "distinct sums of all": "SELECT sum(DISTINCT person) AS total, count(*) AS n FROM orders",
    "collected": "SELECT item, collect_list(price) AS prices, collect_set(person) AS people FROM orders GROUP BY item",
    "percentiles": """SELECT item, percentile(price, 0.25) AS low, median(price) AS middle, count(*) AS n FROM orders
                      GROUP BY item""",
    "median of what lambdas make": """SELECT item,
                                      median(get(filter(array((id % 2 * 2 - 1) * 9000000000000000000), v -> v <> 1), 0)) AS m,
                                      median(get(transform(array(CAST(price AS decimal(9, 2))), v -> v), 0)) AS d
                                      FROM orders GROUP BY item""",
    "median of all": "SELECT median(price) AS middle FROM orders",
    "groups of groups": "SELECT n, count(*) AS items FROM (SELECT item, count(*) AS n FROM orders GROUP BY item) GROUP BY n",
    "cube": "SELECT person, item, count(*) AS n, grouping_id() AS level FROM orders GROUP BY CUBE (person, item)",
    "rollup": "SELECT item, person, sum(price) AS total FROM orders GROUP BY ROLLUP (item, person)",
    "grouping sets": "SELECT item, person, max(price) AS p FROM orders GROUP BY GROUPING SETS ((item), (person), ())",
    "pivot": "SELECT * FROM (SELECT person, item, price FROM orders) PIVOT (sum(price) FOR item IN ('tea', 'ink'))",
    "tumbling": "SELECT window(seen, '1 hour') AS w, who, count(*) AS n FROM clicks GROUP BY window(seen, '1 hour'), who",
    "sliding": """SELECT window.start AS begin, page, max(weight) AS most FROM clicks
                  GROUP BY window(seen, '1 hour', '20 minutes'), page""",
    "windows that change": "SELECT window(at, '2 hours') AS w, count(*) AS n FROM orders GROUP BY window(at, '2 hours')",
    "group by a double": "SELECT price, count(*) AS n FROM orders GROUP BY price",
    # --- sets
    "distinct": "SELECT DISTINCT person, item FROM orders",
    "union all": "SELECT person AS p, item AS i FROM orders UNION ALL SELECT pid, city FROM people",
    "union": "SELECT person AS p, item AS i FROM orders UNION SELECT pid, city FROM people",
    "union with itself": "SELECT person FROM orders UNION ALL SELECT person FROM orders",
    "union of types": "SELECT person AS v FROM orders UNION ALL SELECT score FROM people",
    "intersect": "SELECT item FROM orders INTERSECT SELECT city FROM people",
    "intersect all": "SELECT person FROM orders INTERSECT ALL SELECT pid FROM people",
    "except": "SELECT item FROM orders EXCEPT SELECT city FROM people",
    "except all": "SELECT person FROM orders EXCEPT ALL SELECT pid FROM people",
    # --- joins
    "inner": "SELECT o.id, p.score FROM orders o JOIN people p ON o.person = p.pid",
    "inner beyond": "SELECT o.id, p.score FROM orders o JOIN people p ON o.person = p.pid AND o.price < p.score",
    "inner by expressions": """SELECT o.id, p.pid FROM orders o JOIN people p
                               ON o.person % 3 = p.pid % 3 AND upper(o.item) = upper(p.city)""",
    "null-safe": "SELECT o.id, p.pid FROM orders o JOIN people p ON o.item <=> p.city",
    "left": "SELECT o.id, p.score FROM orders o LEFT JOIN people p ON o.person = p.pid",
    "left with a filter": "SELECT o.id, p.score FROM orders o LEFT JOIN people p ON o.person = p.pid AND p.score > 5",
    "left beyond": "SELECT o.id, p.score FROM orders o LEFT JOIN people p ON o.person = p.pid AND o.price < p.score",
    "left of some": "SELECT o.id, p.score FROM orders o LEFT JOIN people p ON o.person = p.pid AND o.price > 5",
    "left without equality": "SELECT o.id, p.pid FROM orders o LEFT JOIN people p ON o.price > p.score",
    "right": "SELECT o.id, p.score, p.pid FROM orders o RIGHT JOIN people p ON o.person = p.pid",
    "right beyond": "SELECT o.id, p.pid FROM orders o RIGHT JOIN people p ON o.person = p.pid AND o.price < p.score",
    "full": "SELECT o.id, p.pid FROM orders o FULL JOIN people p ON o.person = p.pid",
    "full beyond": "SELECT o.id, p.pid FROM orders o FULL JOIN people p ON o.person = p.pid AND o.price < p.score",
    "using": "SELECT * FROM (SELECT person AS pid, id FROM orders) JOIN people USING (pid)",
    "with itself": "SELECT a.id AS one, b.id AS other FROM orders a JOIN orders b ON a.person = b.person AND a.id < b.id",
    "cross": "SELECT o.id, p.pid FROM orders o CROSS JOIN people p",
    "unequal": "SELECT o.id, p.pid FROM orders o JOIN people p ON o.price > p.score",
    "three": """SELECT p.city, count(*) AS n FROM clicks c JOIN orders o ON c.who = o.person JOIN people p ON o.person = p.pid
                GROUP BY p.city""",
    # --- subqueries
    "in": "SELECT * FROM orders WHERE person IN (SELECT pid FROM people WHERE score > 3)",
    "in over a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                         WHERE o.item IN (SELECT page FROM clicks)""",
    "in over the right of a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                                      WHERE p.city IN (SELECT page FROM clicks WHERE who > 1)""",
    "in of both sides of a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                                     WHERE (o.item, p.city) IN (SELECT page, page FROM clicks)""",
    "not in over a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                             WHERE o.item NOT IN (SELECT page FROM clicks WHERE page IS NOT NULL)""",
    "not in nulls over a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                                   WHERE p.city NOT IN (SELECT page FROM clicks)""",
    "exists over a join": """SELECT o.id FROM orders o JOIN people p ON o.person = p.pid JOIN clicks c ON c.who = p.pid
                             WHERE EXISTS (SELECT 1 FROM orders WHERE item = p.city AND price > c.who)""",
    "not exists over a join": """SELECT o.id, p.city FROM orders o JOIN people p ON o.person = p.pid
                                 WHERE NOT EXISTS (SELECT 1 FROM clicks WHERE page = o.item AND who > o.price)""",
    "in over an outer join": """SELECT o.id, p.city FROM orders o LEFT JOIN people p ON o.person = p.pid
                                WHERE o.item IN (SELECT page FROM clicks)""",
    "in over the other of an outer join": """SELECT o.id, p.city FROM orders o LEFT JOIN people p ON o.person = p.pid
                                             WHERE p.city NOT IN (SELECT page FROM clicks WHERE page IS NOT NULL)""",
    "exists": "SELECT id FROM orders WHERE EXISTS (SELECT 1 FROM people WHERE pid = person)",
    "exists beyond": "SELECT id FROM orders WHERE EXISTS (SELECT 1 FROM people WHERE pid = person AND score > price)",
    "not exists": "SELECT id FROM orders WHERE NOT EXISTS (SELECT 1 FROM people WHERE pid = person)",
    "not exists beyond": """SELECT item, price FROM orders
                            WHERE NOT EXISTS (SELECT 1 FROM people WHERE pid = person AND score > price)""",
    "not in": "SELECT id FROM orders WHERE person NOT IN (SELECT pid FROM people)",
    "not in nulls": "SELECT id FROM orders WHERE item NOT IN (SELECT city FROM people)",
    "not in nothing": "SELECT id FROM orders WHERE item NOT IN (SELECT city FROM people WHERE score > 1000)",
    "exists of what is always there": """SELECT id FROM orders
                                         WHERE EXISTS (SELECT max(score) FROM people WHERE pid = person)""",
    "exists of an aggregate": "SELECT id FROM orders WHERE EXISTS (SELECT max(score) FROM people)",
    "or exists": "SELECT id FROM orders WHERE person = 1 OR EXISTS (SELECT 1 FROM people WHERE pid = person)",
    "or exists beyond": """SELECT id FROM orders
                           WHERE id < 5 OR EXISTS (SELECT 1 FROM people WHERE pid = person AND score > price)""",
    "or not in": "SELECT id FROM orders WHERE id < 5 OR item NOT IN (SELECT city FROM people)",
    "not or in": "SELECT id FROM orders WHERE NOT (person = 1 OR item IN (SELECT city FROM people))",
    "not and in": "SELECT id FROM orders WHERE NOT (person = 1 AND item IN (SELECT city FROM people))",
    "not not in": "SELECT id FROM orders WHERE NOT (person = 1 OR item NOT IN (SELECT city FROM people))",
    "not in beside not in": """SELECT id FROM orders WHERE NOT (person IN (SELECT pid FROM people)
                               OR item IN (SELECT page FROM clicks))""",
    "not of two in": "SELECT id FROM orders WHERE NOT (id < 5 OR (person, item) IN (SELECT pid, city FROM people))",
    "in is false": "SELECT id FROM orders WHERE (item IN (SELECT city FROM people)) = false",
    "in is one of": "SELECT id FROM orders WHERE (item IN (SELECT city FROM people)) IN (false)",
    "in is not true": "SELECT id FROM orders WHERE (item IN (SELECT city FROM people)) <> true",
    "not or in of a side": """SELECT o.id, p.pid FROM orders o JOIN people p
                              ON o.person = p.pid AND NOT (o.id < 3 OR o.item IN (SELECT page FROM clicks))""",
    "not or in of a left join": """SELECT o.id, p.pid FROM orders o LEFT JOIN people p
                                   ON o.person = p.pid AND NOT (o.id < 3 AND p.city IN (SELECT page FROM clicks))""",
    "not or in after groups": """SELECT item, count(*) AS n FROM orders GROUP BY item
                                 HAVING NOT (count(*) > 3 OR item IN (SELECT city FROM people))""",
    "not or in inside of in": """SELECT id FROM orders WHERE person IN (SELECT pid FROM people
                                 WHERE NOT (score > 6 OR city IN (SELECT page FROM clicks)))""",
    "not or in inside of exists": """SELECT id FROM orders WHERE NOT (id < 3 OR EXISTS (SELECT 1 FROM people WHERE pid = person
                                     AND NOT (score > 6 OR city IN (SELECT page FROM clicks WHERE who = pid))))""",
    "not or in inside of a scalar": """SELECT id FROM orders WHERE price > (SELECT max(score) FROM people
                                       WHERE NOT (score > 6 OR city IN (SELECT page FROM clicks)))""",
    "not or in as a column": """SELECT id, NOT (id < 5 OR item IN (SELECT city FROM people)) AS a,
                                CASE WHEN NOT (id < 5 AND item IN (SELECT city FROM people)) THEN 'x' ELSE 'y' END AS b,
                                (item IN (SELECT city FROM people)) = false AS c FROM orders""",
    "not or in in sums": """SELECT item, sum(CASE WHEN NOT (id < 5 OR item IN (SELECT city FROM people)) THEN 1 ELSE 0 END) AS a,
                            count_if(NOT (id < 5 AND person IN (SELECT pid FROM people))) AS b FROM orders GROUP BY item""",
    "scalar": "SELECT id FROM orders WHERE price > (SELECT avg(price) FROM orders)",
    "scalar of nothing": "SELECT id, (SELECT max(score) FROM people WHERE score > 1000) AS none FROM orders",
    "scalar column": "SELECT id, price - (SELECT max(score) FROM people) AS below FROM orders",
    "correlated": "SELECT id FROM orders o WHERE price > (SELECT avg(price) FROM orders x WHERE x.item = o.item)",
    "correlated count": "SELECT id FROM orders WHERE 1 = (SELECT count(*) FROM people WHERE pid = person)",
    "lateral": "SELECT o.id, l.most FROM orders o, LATERAL (SELECT max(score) AS most FROM people WHERE pid = o.person) l",
    "with": """WITH counts AS (SELECT person, count(*) AS n FROM orders GROUP BY person),
                    top AS (SELECT max(n) AS most FROM counts)
               SELECT counts.person FROM counts, top WHERE counts.n = top.most""",
    "sums with and without distinct inside": """SELECT item, a - b AS more FROM (SELECT item, sum(DISTINCT person) AS b,
                                                sum(person) AS a, count(DISTINCT person, id) AS c, count(person) AS d
                                                FROM orders GROUP BY item) WHERE a >= b AND c >= d - 3""",
    # --- limits
    "limit of one row": "SELECT count(*) AS n, max(price) AS most FROM orders LIMIT 100",
    "limit of no row": "SELECT id FROM orders LIMIT 0",
    "limit of a limit": "SELECT id FROM (SELECT id, item FROM orders ORDER BY id LIMIT 6) LIMIT 4",
    "limit of columns": "SELECT id FROM (SELECT * FROM orders ORDER BY price DESC, id LIMIT 3 OFFSET 1)",
    "limit of what is computed": """SELECT twice, twice + 1 AS more FROM (SELECT id * 2 AS twice FROM
                                    (SELECT * FROM orders ORDER BY id)) LIMIT 3""",
    "limit by a subquery": "SELECT id FROM orders ORDER BY abs(id - (SELECT max(pid) FROM people)), id LIMIT 3",
    # --- lists
    "explode": "SELECT id, explode(split(item, '')) AS letter FROM orders",
    "lateral view": "SELECT id, letter, place FROM orders LATERAL VIEW posexplode(split(item, '')) AS place, letter",
    "explode outer": "SELECT id, letter FROM orders LATERAL VIEW OUTER explode(split(item, '')) AS letter",
    "explode a map": "SELECT id, explode(map('person', person, 'id', id)) AS (name, number) FROM orders",
    "inline": "SELECT id, inline(array(struct(person AS a, item AS b), struct(id AS a, 'x' AS b))) AS (a, b) FROM orders",
    # --- places
    "row number": """SELECT * FROM (SELECT id, item, price,
                     row_number() OVER (PARTITION BY item ORDER BY price DESC NULLS LAST, id) AS place FROM orders)
                     WHERE place <= 2""",
    "newest of each": """SELECT id, person, at FROM (SELECT *, row_number() OVER (PARTITION BY person ORDER BY at DESC, id) AS n
                         FROM orders) WHERE n = 1""",
    "top by rank": """SELECT id, place + 1 AS next, mean FROM (SELECT id, price, rank() OVER w AS place, avg(price) OVER w AS mean
                      FROM orders WINDOW w AS (PARTITION BY item ORDER BY price)) WHERE 3 > place AND price > 1""",
    "top by ranks": """SELECT * FROM (SELECT *, CAST(d AS bigint) AS e FROM (SELECT id, item, rank() OVER w AS r,
                       dense_rank() OVER w AS d FROM orders WINDOW w AS (PARTITION BY item ORDER BY person)) WHERE id <> 3)
                       WHERE e <= 2 AND r < 5""",
    "top of top": """SELECT * FROM (SELECT *, row_number() OVER (ORDER BY place, id) AS n FROM (SELECT id, row_number() OVER
                     (PARTITION BY item ORDER BY price, id) AS place FROM orders) WHERE place <= 3) WHERE n <= 4""",
    "top beside all": """WITH placed AS (SELECT id, row_number() OVER (ORDER BY price, id) AS n FROM orders)
                         SELECT a.id, b.n FROM placed a JOIN placed b ON a.id = b.id + 1 WHERE a.n <= 3""",
    "ranks": """SELECT id, rank() OVER w AS r, dense_rank() OVER w AS d, percent_rank() OVER w AS p, cume_dist() OVER w AS c
                FROM orders WINDOW w AS (PARTITION BY person ORDER BY price)""",
    "ntile": "SELECT id, ntile(3) OVER (PARTITION BY item ORDER BY id) AS part FROM orders",
    "sums over": "SELECT id, sum(price) OVER (PARTITION BY item) AS total, count(*) OVER (PARTITION BY item) AS n FROM orders",
    "running": """SELECT id, sum(price) OVER w AS total, avg(price) OVER w AS mean, count(price) OVER w AS n,
                  min(price) OVER w AS least,
                  max(item) OVER w AS item, sum(tax) OVER w AS tax FROM orders WINDOW w AS (PARTITION BY person ORDER BY id)""",
    "moving frames": """SELECT id,
        avg(price) OVER (PARTITION BY item ORDER BY at, id ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) AS m,
        sum(tax) OVER (ORDER BY id ROWS BETWEEN 1 FOLLOWING AND 3 FOLLOWING) AS t,
        max(price) OVER (PARTITION BY item ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best,
        first_value(price) IGNORE NULLS OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS f,
        count(price) OVER (PARTITION BY person ORDER BY id ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS n FROM orders""",
    "frames by values": """SELECT id,
        sum(price) OVER (PARTITION BY item ORDER BY person RANGE BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS near,
        count(*) OVER (ORDER BY price DESC NULLS LAST RANGE BETWEEN UNBOUNDED PRECEDING AND 2.5D FOLLOWING) AS n,
        max(price) OVER (PARTITION BY person ORDER BY at RANGE BETWEEN INTERVAL 90 MINUTES PRECEDING AND CURRENT ROW) AS best,
        count(*) OVER (PARTITION BY item ORDER BY at RANGE BETWEEN INTERVAL 2 DAYS PRECEDING AND INTERVAL 1 DAY PRECEDING) AS day,
        avg(person) OVER (ORDER BY to_date(at) RANGE BETWEEN 1 PRECEDING AND 0 FOLLOWING) AS m,
        min(id) OVER (PARTITION BY item ORDER BY person DESC RANGE BETWEEN 3 PRECEDING AND 2 PRECEDING) AS f FROM orders""",
    "frames to the end": """SELECT id,
        sum(price) OVER (PARTITION BY item ORDER BY id ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS s,
        sum(tax) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND UNBOUNDED FOLLOWING) AS t,
        last_value(price) IGNORE NULLS OVER (ORDER BY id ROWS BETWEEN 2 FOLLOWING AND UNBOUNDED FOLLOWING) AS l,
        min(price) OVER (PARTITION BY person ORDER BY at RANGE BETWEEN INTERVAL 1 HOUR FOLLOWING AND UNBOUNDED FOLLOWING) AS m,
        count(*) OVER (ORDER BY item, person RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS n,
        count(*) OVER (ORDER BY item RANGE BETWEEN CURRENT ROW AND CURRENT ROW) AS same FROM orders""",
    "frames by decimals": """SELECT id,
        sum(price) OVER (ORDER BY tax RANGE BETWEEN 1 PRECEDING AND CURRENT ROW) AS s,
        count(*) OVER (ORDER BY tax DESC RANGE BETWEEN 0.5 PRECEDING AND 0.25 FOLLOWING) AS n,
        sum(person) OVER (ORDER BY cast(price AS float) RANGE BETWEEN 0.1F PRECEDING AND 2F FOLLOWING) AS f FROM orders""",
    "other places": """SELECT id, lag(price) IGNORE NULLS OVER w AS before, lead(price, 2) IGNORE NULLS OVER w AS after,
        nth_value(price, 2) OVER w AS second, nth_value(price, 2) IGNORE NULLS OVER w AS there,
        nth_value(item, 3) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND UNBOUNDED FOLLOWING) AS third
        FROM orders WINDOW w AS (PARTITION BY item ORDER BY id)""",
    "running by rows": """SELECT id, sum(person) OVER (PARTITION BY item ORDER BY price, id ROWS UNBOUNDED PRECEDING) AS s,
                          sum(person) OVER (PARTITION BY item ORDER BY price) AS peers FROM orders""",
    "lag": """SELECT id, lag(price) OVER w AS before, lead(item, 2, 'none') OVER w AS after
              FROM orders WINDOW w AS (PARTITION BY item ORDER BY id DESC)""",
    "first and last": """SELECT id, first_value(price) OVER w AS f, last_value(price) OVER w AS l,
                         first_value(price) IGNORE NULLS OVER w AS some
                         FROM orders WINDOW w AS (PARTITION BY item ORDER BY id)""",
    "over all": "SELECT id, row_number() OVER (ORDER BY id) AS place, count(*) OVER () AS n FROM orders",
    "over groups": """SELECT item, sum(price) AS total, rank() OVER (ORDER BY count(*) DESC, item) AS place FROM orders
                      GROUP BY item""",
    "limit": "SELECT id, price FROM orders ORDER BY price DESC, id LIMIT 3",
    "offset": "SELECT id FROM orders ORDER BY id LIMIT 4 OFFSET 2",
    "offset only": "SELECT id FROM orders ORDER BY id OFFSET 3",
    "limit of groups": "SELECT item, count(*) AS n FROM orders GROUP BY item ORDER BY n DESC, item LIMIT 2",
    "distinct pairs": """SELECT person, count(DISTINCT coalesce(item, '-'), coalesce(price, 0)) AS known,
                         count(DISTINCT coalesce(item, '-'), price) AS priced, count(DISTINCT id, item) AS ids
                         FROM orders GROUP BY person""",
    "distinct pairs of groups": """SELECT count(DISTINCT n, m) AS pairs
                                   FROM (SELECT count(price) AS n, count(tax) AS m FROM orders GROUP BY item)""",
    "lambdas of two": """SELECT id, zip_with(array(person, id), array(id, 2), (x, y) -> x - y) AS p,
                         zip_with(array(person, id), array(id, 2), (x, y) -> y - x) AS q,
                         transform(array(person), x -> aggregate(array(id), 0L, (all, y) -> all + x)) AS of_outer,
                         transform(array(person), x -> aggregate(array(id), 0L, (all, y) -> all + y)) AS of_inner
                         FROM orders""",
    "finer decimals": "SELECT item, avg(CAST(tax AS decimal(24, 12))) AS mean FROM orders GROUP BY item",
    "with inside": """SELECT id FROM orders WHERE person > (WITH d AS (SELECT min(pid) AS m FROM people) SELECT m FROM d)""",
    "with inside of with": """WITH e AS (SELECT * FROM orders WHERE id > 1)
                              SELECT e.id, c.n FROM e JOIN (WITH d AS (SELECT item, count(*) AS n FROM e GROUP BY item)
                              SELECT * FROM d) c ON c.item = e.item""",
    "pipes": "FROM orders |> WHERE price > 1 |> AGGREGATE count(*) AS n GROUP BY item",
    "two lists": """SELECT id, a.x AS a, b.x AS b FROM orders LATERAL VIEW explode(split(item, '')) a AS x
                    LATERAL VIEW explode(split(item, '')) b AS x""",
    "subqueries in groups": """SELECT CASE WHEN person IN (SELECT pid FROM people) THEN 'known' ELSE 'new' END AS who,
                               price > (SELECT min(score) FROM people) AS dear, count(*) AS n FROM orders GROUP BY 1, 2""",
    "subqueries in sums": """SELECT item, sum(price - (SELECT min(score) FROM people)) + (SELECT max(pid) FROM people) AS s,
                             max(id) FILTER (WHERE person > (SELECT min(pid) FROM people)) AS m FROM orders
                             WHERE id > (SELECT min(pid) FROM people) AND person + 1 > (SELECT min(pid) FROM people)
                             GROUP BY item""",
    "order by fields": """SELECT id, rank() OVER (ORDER BY struct(price, item)) AS r,
                          row_number() OVER (PARTITION BY item ORDER BY named_struct('s', struct(person), 'i', id) DESC) AS n,
                          sum(id) OVER (PARTITION BY person ORDER BY IF(price > 3, struct(item, price), NULL) NULLS LAST) AS s
                          FROM orders""",
    "limit by fields": "SELECT id, price FROM orders ORDER BY struct(price, id) DESC LIMIT 3",
    "lag of fields": """SELECT id, lag(named_struct('p', person, 'i', item), 1, named_struct('p', id, 'i', 'z'))
                        OVER (PARTITION BY person ORDER BY id) AS before FROM orders""",
    "collations of conditions": "SELECT id FROM orders WHERE item COLLATE UTF8_LCASE = 'TEA'",
}

REFUSED: dict[str, tuple[str, str]] = {
    "first": ("SELECT item, first(price) AS p FROM orders GROUP BY item", r"first\(.*line 1.*min_by"),
    "approximate": ("SELECT approx_count_distinct(person) AS n FROM orders", r"approx_count_distinct.*count\(DISTINCT"),
    "sessions": (
        "SELECT session_window(seen, '5 minutes') AS w, count(*) AS n FROM clicks GROUP BY session_window(seen, '5 minutes')",
        r"window\(gap=\)",
    ),
    "random": ("SELECT id,\n rand() AS r FROM orders", r"rand\(\), line 2: it is another value each time"),
    "now": ("SELECT id FROM orders WHERE at < current_timestamp()", r"current_timestamp\(\).*line 1.*when"),
    "limit alone": ("SELECT id FROM orders\nLIMIT 3", r"Limit 3, line 1: without ORDER BY|Limit 3.*without ORDER BY"),
    "two fields of one name": (
        "SELECT id, arrays_zip(array(id), array(id), array(person)) AS z, struct(id, id) AS s FROM orders",
        r"column 's' has a struct with two fields named 'id'.*named_struct",
    ),
    "median of intervals": (
        "SELECT item, median(make_dt_interval(id)) AS m FROM orders GROUP BY item",
        r"median\(.*line 1: a percentile of intervals.*seconds",
    ),
    "months": (
        "SELECT id, make_ym_interval(1, 2) AS m FROM orders",
        r"column m is INTERVAL YEAR TO MONTH.*number of months",
    ),
    "left lateral of a list": (
        "SELECT id, e FROM orders LEFT JOIN LATERAL explode(split(item, '')) AS a(e)",
        r"LateralJoin.*LATERAL VIEW OUTER",
    ),
    "sample": ("SELECT * FROM orders TABLESAMPLE (50 PERCENT)", r"Sample.*chance"),
    "recursion": (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT n FROM r",
        r"WITH RECURSIVE.*iterate",
    ),
    "two names": ("SELECT id, id FROM orders", r"two of its columns are named 'id'"),
    "names in two cases": ("SELECT id, person AS ID FROM orders", r"two of its columns are named 'ID'"),
    "our name": ("SELECT id AS _hash FROM orders", r"column '_hash': names that begin with _"),
    "constants": ("SELECT 1 AS one", r"SELECT without FROM"),
    "values": ("SELECT * FROM VALUES (1), (2) AS v(x)", r"rows that are written in a query are no input"),
    "unknown table": ("SELECT * FROM ordres", r"TABLE_OR_VIEW_NOT_FOUND"),
    "unknown column": ("SELECT pricee FROM orders", r"UNRESOLVED_COLUMN.*price"),
    "itself": ("SELECT * FROM mine", r"TABLE_OR_VIEW_NOT_FOUND"),
    "syntax": ("SELEC id FROM orders", r"PARSE_SYNTAX_ERROR|Syntax error"),
    "correlation": ("SELECT corr(person, price) AS c FROM orders", r"corr\(.*no such aggregate"),
    **{
        f"{function} of groups": (
            f"SELECT item, {function}({of}) AS a FROM orders GROUP BY item",
            rf"{function}\(.*no such aggregate",
        )
        for function, of in [
            ("bit_and", "person"),
            ("bit_or", "person"),
            ("bit_xor", "person"),
            ("mode", "item"),
            ("listagg", "item"),
            ("covar_pop", "price, person"),
            ("kurtosis", "price"),
            ("skewness", "price"),
        ]
    },
    "any value": ("SELECT item, any_value(price) AS p FROM orders GROUP BY item", r"any_value\(.*chance: say min_by"),
    **{
        f"{function} of windows": (
            f"SELECT id, {function} OVER (PARTITION BY person) AS a FROM orders",
            r"line 1: of functions OVER a window, ranks",
        )
        for function in ("stddev(price)", "bool_and(id > 1)", "count_if(id > 1)", "collect_list(price)")
    },
    "filtered windows": (
        "SELECT id, count(*) FILTER (WHERE price > 1) OVER (PARTITION BY person) AS n FROM orders",
        r"line 1: DISTINCT and FILTER are not translated OVER",
    ),
    "exists within": (
        """SELECT id FROM orders WHERE EXISTS (SELECT 1 FROM people WHERE pid = person
           AND EXISTS (SELECT 1 FROM clicks WHERE who = pid))""",
        r"outer\(people.pid\), line 2: it is a column of a query around",
    ),
    "ranges of months": (
        "SELECT id, count(*) OVER (ORDER BY at RANGE BETWEEN INTERVAL 1 MONTH PRECEDING AND CURRENT ROW) AS n FROM orders",
        r"count\(.*frames of RANGE are by",
    ),
    "percentiles at once": (
        "SELECT percentile(price, array(0.1, 0.9)) AS p FROM orders",
        r"percentile.*call it once for each",
    ),
    "percentiles of distinct": ("SELECT median(DISTINCT price) AS m FROM orders", r"median\(DISTINCT.*query inside"),
    "means of many digits": (
        "SELECT avg(CAST(tax AS decimal(38, 18))) AS m FROM orders",
        r"avg\(.*CAST the argument to 24 digits, say decimal\(24, 12\)",
    ),
    "now in a text": (
        "SELECT id FROM orders\nWHERE at < CAST(' Now' AS TIMESTAMP)",
        r"CAST.*line 2: it depends on when",
    ),
    "today in a text": (
        "SELECT id FROM orders WHERE date(at) < 'today'",
        r"CAST\('today' AS DATE.*line 1: it depends on when",
    ),
    "now in comments": (
        "SELECT id FROM orders\nWHERE at < TIMESTAMP/* as of */'now'",
        r"'now', line 2: it depends on when",
    ),
    "now in letters": (r"SELECT id FROM orders WHERE at < TIMESTAMP '\u006eow'", r"ow', line 1: it depends on when"),
    "today as it is": (
        "SELECT (SELECT max(id) FROM orders WHERE at < date r'today') AS m",
        r"'today', line 1: it depends",
    ),
    "times of day": (
        "SELECT id, TIME '12:00:00' AS c FROM orders",
        r"cannot be recorded: give its text|TIME|PARSE|UNSUPPORTED",
    ),
    "any of each": (
        "SELECT pid, (SELECT item FROM orders WHERE person = pid LIMIT 1) AS item FROM people",
        r"LIMIT without ORDER BY|SCALAR|without ORDER BY|is no input|more than one",
    ),
    "now as a constant": (
        "SELECT id FROM orders\nWHERE at < TIMESTAMP 'now'",
        r"TIMESTAMP 'now', line 2: it depends on when",
    ),
    "now in pieces": (
        "SELECT id FROM orders WHERE at < CAST(concat('no', 'w') AS TIMESTAMP)",
        r"CAST.*line 1: it depends on when",
    ),
    "sums that may not fit": ("SELECT try_sum(id) AS s FROM orders", r"try_sum\(.*line 1.*decimal\(38, 0\)"),
    "largest of fields": (
        "SELECT item, max(struct(price, id)) AS m FROM orders GROUP BY item",
        r"max\(.*line 1: structs, lists and maps are not compared: max_by",
    ),
    "fields by which": ("SELECT max_by(struct(id), price) AS m FROM orders", r"max_by\(.*line 1.*take its fields"),
    "distinct fields": ("SELECT count(DISTINCT struct(id)) AS n FROM orders", r"count\(DISTINCT.*to_json"),
    "largest of fields over": (
        "SELECT id, max(array(id)) OVER (PARTITION BY item) AS m FROM orders",
        r"max\(.*line 1: lists and structs are not compared OVER",
    ),
    "variants": ("SELECT id, parse_json(item) AS v FROM orders", r"column v is VARIANT, .*to_json"),
    "empty lists": ("SELECT id, array() AS l FROM orders", r"column l is ARRAY<VOID>, .*CAST\(array\(\)"),
    "insertions": ("INSERT INTO kept SELECT 2 AS id", r"InsertInto.*a view is a query"),
    "insertions of with": (
        "WITH c AS (SELECT 2 AS id) INSERT INTO kept SELECT * FROM c",
        r"InsertInto.*a view is a query",
    ),
    "procedures": ("CALL spark_catalog.system.nothing()", r"Call.*a view is a query"),
    "means that may not fit": ("SELECT try_avg(id) AS s FROM orders", r"try_avg\(.*line 1.*decimal\(38, 0\)"),
    "sums over that may not fit": (
        "SELECT try_sum(id) OVER () AS s FROM orders",
        r"try_sum\(.*line 1.*decimal\(38, 0\)",
    ),
    "commands": ("DROP TABLE kept", r"DropTable.*a view is a query"),
    "rows written into a directory": (
        "INSERT OVERWRITE DIRECTORY '/nowhere/at/all' USING csv SELECT 1",
        r"InsertIntoDir.*a view is a query",
    ),
    "settings": ("SET spark.sql.ansi.enabled = false", r"SetCommand.*a view is a query"),
    "scripts": ("BEGIN DROP TABLE kept; END", r"a view is a query"),
    "texts that are run": ("EXECUTE IMMEDIATE 'DROP TABLE kept'", r"a view is a query"),
    "groups by a collation": (
        "SELECT lower(item) COLLATE UTF8_LCASE AS item, count(*) AS n FROM orders GROUP BY 1",
        r"line 1: it has the collation UTF8_LCASE.*give lower\(column\)",
    ),
    "joins by a collation": (
        "SELECT id FROM orders JOIN people ON item COLLATE UNICODE_CI = city",
        r"it has the collation UNICODE_CI",
    ),
    "lists in a collation": (
        "SELECT array(item COLLATE UTF8_LCASE) AS l FROM orders",
        r"it has the collation UTF8_LCASE",
    ),
}
