"""Records: what one class writes it reads back; older files, the repository's own among them, are still read."""

import json
from pathlib import Path

import pytest

import found
from epimer.errors import DataError
from epimer.records import (
    KINDS,
    Diagnosis,
    EvaluationRecord,
    Experiment,
    HarnessRecord,
    HarnessScore,
    Lines,
    MergeRecord,
    OverallScore,
    SweepRecord,
    TaskScore,
    Trial,
    checked,
)
from epimer.report.read import NotARecordError, read_record

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
WRITTEN = sorted(RESULTS.glob("**/*.json"))


def stored(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_results_to_read():
    assert sum(stored(path).get("kind") == "experiment" for path in WRITTEN) > 20


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_repositorys_results_are_read_and_written_as_they_were(path):
    data = stored(path)
    if "kind" not in data:
        with pytest.raises(NotARecordError, match="is JSON, but not a record of epimer"):
            read_record(data, path.name)
        return
    record = read_record(data, path.name)
    again = json.loads(json.dumps(record.to_dict()))
    figure, drawn = data.pop("figure"), again.pop("figure")
    assert {key: again[key] for key in data} == data
    assert again.keys() - data.keys() <= {"suite", "metric", "made"}  # minilm8's are of an earlier version
    assert (figure is None) is (drawn is None)
    if figure is not None:
        assert {key: drawn[key] for key in figure} == figure


@pytest.mark.parametrize("name", list(found.everything()))
def test_what_is_written_is_read_back(name):
    data = found.everything()[name]
    record = read_record(data, name)
    assert read_record(json.loads(json.dumps(record.to_dict())), name) == record
    assert type(record).from_dict(record.to_dict()) == record


def test_every_kind_has_its_version():
    for kind, record in KINDS.items():
        assert (record.kind, record.format) == (kind, 1)
    written = read_record(found.merge_record(), "").to_dict()
    assert (written["kind"], written["format"]) == ("merge", 1)
    assert MergeRecord.from_dict({key: written[key] for key in written if key not in ("kind", "format")}).method


@pytest.mark.parametrize("kind", list(KINDS))
def test_another_version_is_refused_in_a_line(kind):
    said = "it.json is of format 7, and this epimer reads 1; make it again, or install the epimer that made it."
    with pytest.raises(DataError) as error:
        KINDS[kind].from_dict({"kind": kind, "format": 7}, "it.json")
    assert str(error.value) == said


def test_what_is_wrong_is_named_with_its_place():
    said = r"^it\.json: data\[3\]\.average: input should be a valid number.* Got 'x' instead\.$"
    with pytest.raises(DataError, match=said):
        checked(Trial, {"method": "tsv", "average": "x"}, "it.json", "data", 3)
    short_row = {"name": "a", "title": "a", "headings": ["x"], "rows": [["1", "2"]], "data": [], "format": 1}
    with pytest.raises(DataError, match=r"^it\.json: a row has not as many cells as there are headings\.$"):
        Experiment.from_dict(short_row, "it.json")
    with pytest.raises(DataError, match=r"^it\.json: norms has 1 values, and there are 4 models\.$"):
        Diagnosis.from_dict(found.diagnosis() | {"norms": [1.0]}, "it.json")


def test_what_is_not_known_is_left_out_of_the_file():
    task = TaskScore("t", "accuracy", 10, 0.5, 0.4, 0.6)
    written = EvaluationRecord("s", "m", "test", [task], OverallScore(0.5, 0.4, 0.6), made={"limit": None}).to_dict()
    assert written["tasks"] == [
        {"name": "t", "metric": "accuracy", "samples": 10, "score": 0.5, "low": 0.4, "high": 0.6}
    ]
    assert written["average"] == {"score": 0.5, "low": 0.4, "high": 0.6}
    assert "worst" not in written
    assert written["made"] == {"limit": None}
    (trial,) = SweepRecord("e", [Trial("tsv", 1.0, 0.5)]).to_dict()["data"]
    assert "kl" not in trial
    assert (trial["average"], trial["tasks"]) == (None, None)
    (row,) = HarnessRecord("m", "lm-eval", [HarnessScore("t", "acc", 0.5)]).to_dict()["results"]
    assert row["stderr"] is None


def test_points_are_kept_in_order_of_x():
    lines = Lines("x", "y")
    for x in (3.0, 1.0, 2.0):
        lines.add("one", x, 10 * x)
    lines.add("two", 1.0, 5.0, 4.0, 6.0)
    assert lines.lines == {"one": [(x, 10 * x, 10 * x, 10 * x) for x in (1.0, 2.0, 3.0)], "two": [(1.0, 5.0, 4.0, 6.0)]}


def test_some_columns_of_a_table():
    table = Experiment("a", "A", ["x", "y", "z"], [["1", "2", "3"], ["4", "5", "6"]], [], ["beware"])
    assert table.only(("z", "x")).rows == [["1", "3"], ["4", "6"]]
    assert table.only(("z", "x")).markdown() == "## A\n\n| x | z |\n|---|---|\n| 1 | 3 |\n| 4 | 6 |\n\n- beware\n"
