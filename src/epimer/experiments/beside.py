"""Published numbers beside ours: a column for each who reports them, and what to know when reading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epimer.evaluation.suite import Suite
from epimer.experiments.results import Result, Row


def beside(result: Result, suite: Suite) -> Result:
    """Return the table of performance with what others report for the same methods, where the suite knows of it."""
    if result.name != "performance" or not suite.published:
        return result

    def column(who: str) -> Callable[[Row], str]:
        return lambda row: f"{row['published'][who]:.1f}" if who in row["published"] else ""

    data = []
    for row in result.data:
        found = {who: averages[row["method"]] for who, averages in suite.published.items() if row["method"] in averages}
        data.append({**row, "published": found})
    columns = {**result.columns, **{who: column(who) for who in suite.published}}
    return replace(result, columns=columns, data=data, notes=[*result.notes, *suite.remarks])
