"""Reading records: by content, from files and folders; what is wrong is said in a line that names the file."""

import json
import os
import re

import pytest

import epimer
import found
from epimer.errors import DataError
from epimer.records import Diagnosis, Experiment, MergeRecord, SweepRecord
from epimer.report.citations import CITATIONS
from epimer.report.performance import Performance
from epimer.report.read import gather, read_records


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_folder_is_searched_one_level_deep_and_other_json_is_passed_over(tmp_path):
    found.write_all(tmp_path / "run", {"performance.json": found.performance()})
    found.write_all(tmp_path / "run" / "merged", {"epimer.json": found.merge_record(), "config.json": {"hidden": 4}})
    found.write_all(tmp_path / "run" / "merged" / "deeper", {"sweep.json": found.sweep()})
    written(tmp_path / "run" / "broken.json", "{")
    records = read_records([tmp_path / "run"])
    kinds = {source: type(record) for source, record in records.entries}
    assert kinds == {"performance.json": Performance, "merged/epimer.json": MergeRecord}


def test_pipes_and_devices_in_a_folder_are_passed_over(tmp_path):
    written(tmp_path / "sweep.json", found.sweep())
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert [source for source, _ in read_records([tmp_path]).entries] == ["sweep.json"]
    with pytest.raises(DataError, match="is larger than any record"):
        read_records(["/dev/zero"])


def test_every_kind_is_told_by_its_content(tmp_path):
    for i, record in enumerate(found.everything().values()):
        written(tmp_path / f"{i}.json", record)
    records = read_records([tmp_path / f"{i}.json" for i in range(len(found.everything()))])
    names = [record.name for record in records.of(Experiment)]
    assert names == ["performance", "alpha", "eta", "landscape", "tasks", "cost"]
    (diagnosis,), (merge,), (sweep,) = (records.of(kind) for kind in (Diagnosis, MergeRecord, SweepRecord))
    assert diagnosis.to_dict() == {
        **diagnosis.to_dict(),
        **{key: found.diagnosis()[key] for key in ("curvature", "rank", "base", "recipe")},
    }
    assert diagnosis.conflict.cosine[0][0] == 1.0
    assert merge.tensors["layers.1.weight"].status == "damped"
    assert (sweep.best.method, sweep.data[0].tasks) == ("tsv", {})


def test_the_winner_is_chosen_by_validation_not_by_test():
    record = found.performance()
    merges = [row for row in record["data"] if not row.get("reference")]
    merges[0]["validation"], merges[-1]["average"] = 0.99, 0.99
    performance = gather([record]).of(Performance)[0]
    assert performance.winner.method == merges[0]["method"]
    for row in merges:
        del row["validation"]
    assert gather([record]).of(Performance)[0].winner.method == merges[-1]["method"]
    assert (performance.suite, performance.against, performance.tasks) == ("glyphs8", "tsv", list(found.TASKS))


def without(record, *path):
    at = record
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return record


def changed(record, value, *path):
    at = record
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON; expected a record of epimer"),
        ("[" * 100_000, "is not JSON; expected a record of epimer"),
        ([1, 2], "is JSON, but not a record of epimer"),
        ({"hidden_size": 4}, "is JSON, but not a record of epimer"),
        ({"kind": "poem"}, "is JSON of kind 'poem', but not a record of epimer"),
        (changed(found.performance(), 2, "format"), "is of format 2, and this epimer reads 1"),
        (without(found.performance(), "rows"), "rows: field required"),
        (without(found.performance(), "data", 0, "method"), "data[0].method: field required"),
        (changed(found.performance(), "much", "data", 1, "average"), "data[1].average: input should be a valid number"),
        (changed(found.performance(), ["a"], "rows", 0), "a row has not as many cells as there are headings"),
        (changed(found.landscape(), [[1.0]], "figure", "joint"), "map 'joint' is not of 15 x 15 values"),
        (changed(found.landscape(), [0.0] * 15, "figure", "a"), "a must be two or more rising numbers"),
        (changed(found.landscape(), [1e300 * i for i in range(15)], "figure", "a"), "rising numbers that can be drawn"),
        (
            changed(found.landscape(), [5e-324 * i for i in range(15)], "figure", "b"),
            "rising numbers that can be drawn",
        ),
        ('{"kind": "experiment", "format": ' + "7" * 4500 + "}", "is not JSON; expected a record of epimer"),
        ('{"kind": "\\ud800"}', "is not JSON; expected a record of epimer"),
        (changed(found.alpha(), "pie", "figure", "kind"), "figure: input tag 'pie' found using 'kind'"),
        (changed(found.diagnosis(), [1.0], "norms"), "norms has 1 values, and there are 4 models"),
        (changed(found.diagnosis(), [[1.0]], "conflict", "sign"), "conflict.sign has 1 values, and there are 4 models"),
        (without(found.diagnosis(), "total", "eta"), "total.eta: field required"),
        (changed(found.merge_record(), 3, "tensors"), "tensors: input should be a valid dictionary"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, content, said):
    path = written(tmp_path / "given.json", content)
    with pytest.raises(DataError, match=re.escape(said)) as error:
        read_records([path])
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_record_that_is_damaged_is_an_error_in_a_folder_too(tmp_path):
    found.write_all(tmp_path, {"good.json": found.eta(), "bad.json": without(found.performance(), "rows")})
    with pytest.raises(DataError, match=r"bad\.json: rows"):
        read_records([tmp_path])


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="holds no record of epimer"):
        read_records([tmp_path])
    with pytest.raises(DataError, match="No such file"):
        read_records([tmp_path / "absent.json"])


def test_citations_are_those_of_the_registry():
    assert {name: epimer.describe_method(name).citation for name in epimer.list_methods()} == CITATIONS
