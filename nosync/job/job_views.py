"""What a job shows of its branch: states, changes, status. It reads, and takes nothing over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nosync.flow.bound_flow import BoundFlow
from nosync.flow.bound_stage import BoundStage
from nosync.job.explain import Explanation
from nosync.job.flow_versions import FlowVersions
from nosync.job.position import Position
from nosync.job.reading import Reading
from nosync.job.replay import Progress
from nosync.job.reports import job_html
from nosync.job.view_reports import ViewCheck, ViewPlan, plan_of, view_of
from nosync.job.watermarks import window_status
from nosync.lsm.facts.fencing import Instance
from nosync.lsm.model.as_of import AsOf
from nosync.lsm.status import StoreStatus
from nosync.lsm.store.store import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class JobViews:
    """The part of a job that only reads."""

    _store: Store
    _position: Position
    _versions: FlowVersions
    _reading: Reading
    _shards: int

    @property
    def branch_name(self) -> str:
        """Returns the branch that this job runs on."""
        return self._position.branch

    @property
    def instance(self) -> Instance | None:
        """Returns which instance of the job on its timeline this is; making a newer one stops this one from writing."""
        return self._position.instance

    @property
    def flow(self) -> BoundFlow:
        """Returns the flow with the fingerprints of epochs with inputs of their own; `flow_at` has those of others."""
        return self._versions.flow

    def flow_at(self, t: int) -> BoundFlow:
        """Returns the flow as it ran, or will run, at an epoch: a branch shares the recorded inputs of its parent."""
        return self._versions.at(t)

    def read(self, stage: str, as_of: AsOf | None = None) -> DataFrame:
        """Returns the state of a stage as of an epoch (default: the last sealed one) as a DataFrame.

        `as_of` may be a time of the wall clock, such as "2026-07-04T12:00" (UTC), a datetime or a date: the last epoch
        that was sealed at or before it. So it may wherever a job is read, and where it is branched.

        A select, where or join_static that is not recorded is this job's expressions over what is recorded below it.
        """
        return self._reading.state(stage, as_of)

    def changes(self, stage: str, after: AsOf, until: AsOf, *, include_expired: bool = False) -> DataFrame:
        """Returns the change feed of a stage: what turns its state as of `after` into the one as of `until`.

        The stage's columns, `_change_type` (insert, update_preimage, update_postimage, delete) and `_epoch`.
        `after=-1`, or a time before the first epoch, is the empty state before it. Rows that expired are left out, for
        what was made of them stays; with `include_expired` they come as `expire`.
        """
        return self._reading.changes(stage, after, until, include_expired=include_expired)

    def explain_view(self, name: str) -> ViewPlan:
        """Says what a view is made of: its stages, which of them keep a state, and what other views share.

        It prints as a table, and is one in a notebook. Raises UnknownStageError.
        """
        return plan_of(name, self._versions.declared, self.flow)

    def verify_view(self, name: str, as_of: AsOf | None = None) -> ViewCheck:
        """Compares a view as of an epoch (default: the last one) with what Spark's own query gives over the recorded inputs.

        Doubles are equal that agree in nine digits. The rows of both come to the driver. Raises UnknownStageError for
        something that is no view, NotAvailableError for an epoch that is not there, and for a view whose rows depend on when
        others came: it dropped late rows, or gives windows once.
        """
        return self._reading.verify(view_of(name, self._versions.declared), as_of)

    def stage(self, name: str, as_of: int | None = None) -> BoundStage:
        """Returns a stage with its schemas, as they are, or as they were at an epoch. Raises UnknownStageError."""
        return self._reading.stage(name, as_of)

    def last_sealed(self) -> int | None:
        """Returns the newest epoch of this job's branch."""
        return self._position.last_sealed()

    def sums_of(self, stage: str) -> tuple[str, ...]:
        """Returns the columns of a stage whose values may be added up over its rows: counts and sums."""
        return self.flow.sums.get(self.stage(stage).name, ())

    def shared_until(self, other: JobViews, stage: str) -> int:
        """Returns the last epoch up to which a stage's layers are the same files on another branch; -1: none are."""
        return self._reading.shared_until(other._position, stage)

    def range_of(self, after: AsOf, until: AsOf) -> tuple[int, int]:
        """Returns the epochs between which changes are asked for; a time of the wall clock before the first epoch is the
        empty state. Raises InvalidInputError unless they are in order.
        """
        return self._store.range_of(after, until, self.branch_name)

    def epoch_as_of(self, as_of: AsOf) -> int:
        """Returns the epoch of this job's branch that a time of the wall clock stands for: see `Store.epoch_as_of`."""
        return self._store.epoch_as_of(as_of, self.branch_name)

    def safe_point(self) -> int | None:
        """Returns the largest epoch up to which everything is complete and durable."""
        return self._store.safe_point(self.branch_name)

    def status(self) -> StoreStatus:
        """Returns `Store.status()`, with the watermarks of the branch's windows, and which inputs hold them back."""
        return dataclasses.replace(self._store.status(), windows=window_status(self._store, self.branch_name))

    def __repr__(self) -> str:
        branch, t = self.branch_name, self.last_sealed()
        return f"<nosync.Job {self.flow.name} on {self._position.root}, branch {branch}, epoch {t}>"

    def explain(
        self, stage: str, key: Mapping[str, Any], t: AsOf | None = None, *, progress: Progress | None = None
    ) -> Explanation:
        """Says why a key has its value as of an epoch (default: the last one): the input rows that led to it, stage by
        stage.

        `key`: the key's columns and values. Raises UnknownStageError, SchemaError, NotAvailableError.
        """
        return self._reading.explain(stage, key, t, progress)

    def _repr_html_(self) -> str:
        facts = {"store": self._position.root, "branch": self.branch_name, "epoch": self.last_sealed()}
        return job_html(self.flow, facts | {"safe point": self.safe_point(), "shards": self._shards})
