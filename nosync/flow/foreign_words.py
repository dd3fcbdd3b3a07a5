"""Words of Spark, Flink and Kafka Streams that users try here, and what is called so in nosync."""

from __future__ import annotations

from collections.abc import Collection

from nosync.lsm.errors import UnknownOperatorError
from nosync.lsm.platform.nearest import nearest

FUNCTIONS_ELSEWHERE = {
    "avg": "mean", "average": "mean", "countdistinct": "count_distinct", "nunique": "count_distinct",
    "approx_count_distinct": "count_distinct", "approxcountdistinct": "count_distinct", "var": "variance",
    "var_samp": "variance", "std": "stddev", "stddev_samp": "stddev", "collect_list": "collect", "array_agg": "collect",
    "collect_set": "collect", "first_value": "first", "last_value": "last", "min_by": "first", "max_by": "last",
    "sumdistinct": "sum", "total": "sum", "size": "count", "len": "count",
}  # fmt: skip
"""The names of aggregates here, by those that they have in Spark, Flink, Pandas and SQL."""

_AGGREGATE = 'aggregate("name", key=["k"], n=nosync.count(), total=nosync.sum("x")) groups and aggregates in one'
_UPDATE = 'update("name", key=["k"], state="total bigint", fn=function) keeps state of your own per key'
_SELECT = 'select("name", "*", "x * 2 AS doubled") makes, renames and leaves out columns'
_WINDOW = (
    'window("name", time="at", size="1 hour", watermark="10 minutes", n=nosync.count()) has windows and the watermark; '
    "join, dedupe and update take time= and watermark= as well"
)
_DEDUPE = (
    'dedupe("name", key=["k"]) keeps one row per key, dedupe("name", key=["k"], time="at", watermark="1 hour") within a '
    "time"
)
_MAP = 'map("name", function) applies a function of a pyarrow.Table'
_READ = (
    'a stage has no rows by itself: once job.advance(t, {...}) ran, job.read("stage", as_of=t) is a DataFrame of them'
)
_SINK = (
    'nosync.Job(flow, store, spark=spark, sinks={"stage": nosync.ParquetSink(path)}) gives a stage\'s changes to a sink'
)
_ORDER = (
    'rows of a stage have no order: nosync.top_k("x", 3) keeps the largest, and job.read("stage").orderBy(...) sorts'
)
_KEPT = 'the store records stages: persist="memory" or "disk" says how well, Job(..., shards=4) in how many shards'
_JOIN = (
    'join("name", other, on=["k"], how="left") joins two stages, join_static("name", table, on=["k"]) one with a '
    "DataFrame"
)
_ON_STAGE = {
    _AGGREGATE: (
        "groupBy groupby group_by agg keyBy key_by partitionBy partition_by rollup cube pivot reduce sum mean "
        "avg min max"
    ),
    _UPDATE: (
        "transformWithState transformWithStateInPandas applyInPandasWithState flatMapGroupsWithState "
        "mapGroupsWithState process"
    ),
    _SELECT: (
        "withColumn withColumns withColumnRenamed with_column selectExpr drop alias toDF add_columns "
        "drop_columns rename fillna "
        "na project"
    ),
    _WINDOW: (
        "withWatermark with_watermark assign_timestamps_and_watermarks assignTimestampsAndWatermarks "
        "timeWindow windowAll "
        "session_window windowedBy"
    ),
    _DEDUPE: "dropDuplicates drop_duplicates distinct dropDuplicatesWithinWatermark unique",
    _MAP: "mapInArrow mapInPandas applyInPandas mapPartitions transform foreach rdd assign",
    'flat_map("name", function) makes several rows of one': "flatMap explode",
    'filter("name", function) or where("name", "x > 1") keeps rows': "filterNot query",
    'union("name", other) has the rows of both': "unionAll unionByName union_all connect merge",
    _JOIN: (
        "crossJoin broadcast leftJoin left_outer_join outerJoin coGroup cogroup intersect intersectAll "
        "subtract exceptAll minus"
    ),
    (
        'join_asof("name", other, on=["k"], time=("at", "valid_from"), watermark="10 minutes") joins each row with the '
        "newest of another stage that is not younger"
    ): "merge_asof mergeAsof asof_join asofJoin lookup_join temporal_join",
    _READ: (
        "show collect count toPandas toArrow display printSchema take head tail first toLocalIterator columns "
        "dtypes print execute"
    ),
    _SINK: "write writeStream writeTo foreachBatch foreachPartition sink_to sinkTo addSink add_sink to",
    _ORDER: "orderBy order_by sort sort_values limit offset",
    _KEPT: "cache checkpoint localCheckpoint unpersist repartition repartitionById coalesce rebalance rescale shuffle",
    'iterate("name", body) is a loop': "iterative closeWith",
}
_IN_FLOW = {
    'source("name", "k string, x bigint") declares an input': (
        "read readStream table from_source fromSource add_source addSource from_collection from_elements input stream"
    ),
    'nosync.Job(flow, store, spark=spark) runs it: job.advance(t, {"source": dataframe}), or job.stream(...)': (
        "run execute start awaitTermination submit advance backfill"
    ),
    'flow["stage"] is the stage of a name': "stage get",
}


def _by_word(known: dict[str, str]) -> dict[str, str]:
    return {word: answer for answer, words in known.items() for word in words.split()}


_STAGE_WORDS, _FLOW_WORDS = _by_word(_ON_STAGE), _by_word(_IN_FLOW)


def unknown_operator(what: str, word: str, own: Collection[str], *, in_flow: bool = False) -> UnknownOperatorError:
    """Returns the error for an attribute that does not exist. `what` was asked for it, and has the attributes `own`."""
    answer = (_FLOW_WORDS if in_flow else _STAGE_WORDS).get(word)
    close = None if answer else nearest(word, own)
    if answer is None:
        answer = f"did you mean {close}?" if close else f"it has {', '.join(sorted(own))}"
    return UnknownOperatorError(f"{what} has no {word!r}: {answer}")
