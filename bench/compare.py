"""`python -m bench.compare`: are ratios worse by more than 20 % than in the results that are committed? Exit 1 if any is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from bench.harness import RESULTS

WORSE = 0.20


def regressions(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """What became worse. Only results with a goal say which direction is the better one."""
    known = {_key(r): r for r in before}
    found = []
    for r in now:
        old = known.get(_key(r))
        if old is None or not r["ratio"] or not old["ratio"] or not r["goal"]:
            continue
        change = old["ratio"] / r["ratio"] if r["goal"].startswith(">") else r["ratio"] / old["ratio"]
        if change > 1 + WORSE:
            found.append(
                f"{r['workload']}: {r['engine']} beside {r['baseline']}: ratio {r['ratio']:.3g}, committed {old['ratio']:.3g}"
            )
    return found


def _key(r: dict[str, Any]) -> tuple[str, ...]:
    return (r["workload"], r["engine"], r["baseline"], r["unit"])


def committed(name: str) -> list[dict[str, Any]]:
    """The results of a benchmark in the last commit; none where it has none."""
    done = subprocess.run(["git", "show", f"HEAD:bench/results/{name}"], capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"] if done.returncode == 0 else []
    return found


def main() -> None:
    worse, compared = [], 0
    for path in sorted(RESULTS.glob("*.json")):
        now, before = json.loads(path.read_text())["results"], committed(path.name)
        worse += [f"{path.stem}: {text}" for text in regressions(now, before)]
        compared += len({_key(r) for r in now if r["ratio"] and r["goal"]} & {_key(r) for r in before})
    print(
        "\n".join(worse)
        or f"of {compared} ratios with a goal, which are also in the last commit, none is worse by more than 20 %"
    )
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
