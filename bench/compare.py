"""`python -m bench.compare`: is anything worse by more than 20 % than in the results that are committed? Exit 1 if it is.

Compared is each result with a goal: its ratio, or its value where there is no ratio or the goal is about the value; whether
the goal is still met; and that it is still there. Results of other scales or of other code say nothing, and are said so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from bench.harness import RESULTS, source_digest

WORSE = 0.20


def regressions(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Returns what became worse. Only results with a goal say which direction is the better one."""
    known, found = {_key(r): r for r in now}, []
    for old in before:
        if not old["goal"]:
            continue
        what = f"{old['workload']}: {old['engine']} beside {old['baseline']}"
        new = known.get(_key(old))
        if new is None:
            found.append(f"{what}: not measured any more")
            continue
        if old.get("met") and new.get("met") is False:
            found.append(f"{what}: its goal {old['goal']} is not met any more")
        fields = [] if old["ratio"] is None else ["ratio"]
        for field in [*fields, "value"] if _is_of_value(old["goal"]) or not fields else fields:
            a, b = old.get(field), new.get(field)
            if a and b and _worse(old["goal"], a, b) > 1 + WORSE:
                found.append(f"{what}: {field} {b:.3g}, committed {a:.3g}")
    return found


def _is_of_value(goal: str) -> bool:
    """Returns whether a goal names a unit, as `<= 1 ms` does."""
    return len(goal.split()) > 2


def _worse(goal: str, before: float, now: float) -> float:
    """Returns how many times worse the result is."""
    return before / now if goal.startswith(">") else now / before


def _key(r: dict[str, Any]) -> tuple[str, ...]:
    return (r["workload"], r["engine"], r["baseline"], r["unit"])


def committed(name: str) -> dict[str, Any] | None:
    """Returns a benchmark's results in the last commit; None where it has none."""
    done = subprocess.run(["git", "show", f"HEAD:bench/results/{name}"], capture_output=True, text=True, check=False)
    found: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return found


def main() -> None:
    worse, compared, passed_over = list[str](), 0, list[str]()
    for path in sorted(RESULTS.glob("*.json")):
        now, before = json.loads(path.read_text()), committed(path.name)
        if before is None or now == before:
            continue
        if now.get("scale") != before.get("scale") or now.get("code") != source_digest():
            passed_over.append(path.stem)
            continue
        worse += [f"{path.stem}: {text}" for text in regressions(now["results"], before["results"])]
        compared += sum(bool(r["goal"]) for r in before["results"])
    if passed_over:
        print(
            "not compared, for they were measured at another scale than what is committed, or with other code than this: "
            f"{', '.join(passed_over)}"
        )
    elif not compared:
        print(
            "nothing was measured since the last commit: run `python -m bench NAME` at the scale of the committed results"
        )
    print("\n".join(worse) or f"of {compared} results with a goal none is worse by more than 20 %")
    sys.exit(bool(worse) or not compared)


if __name__ == "__main__":
    main()
