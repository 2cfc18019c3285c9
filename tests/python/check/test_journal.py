"""Journals: what each rank has written, also when it was stopped in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from accelerate_cpp.check.journal import Finding, Journal, of_kind, read_journals


def test_records_of_all_ranks_are_read_in_order(tmp_path: Path) -> None:
    for rank in (10, 2):
        journal = Journal(tmp_path, rank)
        journal.write("call", name="gather")
        journal.write("end", how="end")
    journals = read_journals(tmp_path)
    assert list(journals) == [2, 10]
    assert of_kind(journals[2], "call") == [{"kind": "call", "name": "gather"}]


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path, 0).write("end", how="end")
    with open(tmp_path / "rank-0.jsonl", "a") as file:
        file.write('{"kind": "fin')
    assert [record["kind"] for record in read_journals(tmp_path)[0]] == ["end"]


def test_a_finding_as_data_has_all_of_its_fields() -> None:
    assert Finding("note", "a", "b", "c:1", "d", (1,)).as_data() == {
        "level": "note",
        "code": "a",
        "what": "b",
        "where": "c:1",
        "advice": "d",
        "ranks": [1],
    }
