"""The inputs by which rows come to the windows of a flow, and which of their watermarks each window goes by. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nosync.flow.arguments import DedupeArguments
from nosync.flow.bound_stage import DISTINCT, BoundStage
from nosync.flow.dataflow import Dataflow
from nosync.flow.event_time import MOST_INPUTS
from nosync.flow.kinds import DEDUPE, STATELESS
from nosync.flow.stage import Stage
from nosync.kernels.windows import MAX, MIN
from nosync.lsm.errors import FlowError


class WindowInputs:
    """The inputs of the windows of a flow that is being bound."""

    def __init__(self, flow: Dataflow, policies: Mapping[str, str], bound: Mapping[str, BoundStage]) -> None:
        """`bound` has the stages that are bound so far, `policies` the policies of windows that state none."""
        self._flow, self._policies, self._bound = flow, policies, bound
        self._found: dict[str, tuple[str, ...]] = {}
        self._with_origins = self._before_minimum()

    def policy(self, stage: Stage) -> str | None:
        """Returns which watermark a window goes by. None: it has none, or is no window."""
        window = next(iter(stage.arguments.event_times), None)
        if window is None or window.delay_us is None:
            return None
        return window.policy or self._policies.get(stage.name, MIN)

    def origins(self, stage: Stage) -> tuple[str, ...]:
        """See `BoundStage.origins`. Raises FlowError where there are too many."""
        if stage.name not in self._with_origins:
            return ()
        found = self._of_all(stage.inputs)
        if len(found) > MOST_INPUTS:
            raise FlowError(
                f"stage {stage.name}: it gets rows by {len(found)} inputs, and a window can have watermarks of "
                f"{MOST_INPUTS}: "
                f"unite rows before they are given, or have the window after it go by policy={MAX!r}"
            )
        return found if len(found) > 1 else ()

    def of(self, name: str) -> tuple[str, ...]:
        """Returns the inputs that a stage's rows came by: sources, and stages that keep state.

        They are in the order in which the flow names them.
        """
        if name not in self._found:
            stage = self._bound[name]
            passes = stage.kind in (*STATELESS, DISTINCT)
            self._found[name] = self._of_all(stage.inputs) if passes else (name,)
        return self._found[name]

    def _of_all(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(found for name in names for found in self.of(name)))

    def _before_minimum(self) -> set[str]:
        """Returns the stages that rows pass, on the way from its inputs, to a window that goes by the minimum."""
        declared = {stage.name: stage for stage in self._flow.stages}
        found: set[str] = set()
        left = [name for stage in self._flow.stages if self.policy(stage) == MIN for name in stage.inputs]
        while left:
            stage = declared.get(left.pop())  # the late rows of a window are not declared
            if stage is None or stage.name in found or isinstance(stage.arguments, DedupeArguments):
                continue
            if stage.kind in (*STATELESS, DEDUPE):
                found.add(stage.name)
                left += stage.inputs
        return found
