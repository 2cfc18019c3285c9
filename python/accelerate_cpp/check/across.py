"""Findings that only appear when the ranks of a check are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from accelerate_cpp.check.journal import LEVELS, Finding, Record, of_kind
from accelerate_cpp.check.meshes import judge_mesh
from accelerate_cpp.check.task import Task

Journals = Mapping[int, Sequence[Record]]

_NAMES_SHOWN = 4
# Consequences of another error, which are only reported if there is none.
_CONSEQUENCES = ("lost-peer", "ranks-diverge")
_ADVICE_DIVERGE = (
    "have all processes call it, and equally often: look for `if accelerator.is_main_process`, for loops of different "
    "lengths, and for an early end on some of them"
)


def judge(task: Task, journals: Journals, crash: tuple[int, str] | None = None) -> list[Finding]:
    """All findings: those of each rank, once each, and those on how ranks differ; the worst first.

    Args:
        crash: the rank whose process failed first, by itself, and how.
    """
    findings = _merged(journals)
    if crash is not None:
        findings.append(_crashed(*crash))
    has_cause = any(one.level == "error" and one.code not in _CONSEQUENCES for one in findings)
    if task.processes > 1:
        findings += _different_weights(journals, {one.code for one in findings})
        findings += _different_lengths(journals)
        if not has_cause:
            findings += _different_calls(journals)
        findings += _without_accelerator(task, journals)
        findings += judge_mesh(task, journals)
    errors = [one for one in findings if one.level == "error"]
    plain = [one for one in errors if one.code != "lost-peer"]
    if plain:  # one that was lost has its reason among the others
        findings = [one for one in findings if one.code != "lost-peer"]
    if any(one.code not in _CONSEQUENCES for one in plain):
        findings = [one for one in findings if one.code not in _CONSEQUENCES]
    return sorted(findings, key=lambda one: LEVELS.index(one.level))


def _merged(journals: Journals) -> list[Finding]:
    """Findings of ranks; the same of several ranks are one."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for rank, records in journals.items():
        for record in of_kind(records, "finding"):
            key = record["code"], record["where"]
            ranks_of.setdefault(key, []).append(rank)
            first.setdefault(key, {name: record[name] for name in ("level", "code", "what", "where", "advice")})
    found = [Finding(**data, ranks=tuple(ranks_of[key])) for key, data in first.items()]
    read_by_all = len(journals)
    # A loader that only one rank reads need not be divided.
    return [one for one in found if one.code != "unprepared-loader" or len(one.ranks) == read_by_all]


def _crashed(rank: int, how: str) -> Finding:
    what = f"the process of rank {rank} ended before it could say why: {how}"
    return Finding("error", "worker-crashed", what, "", "look at what it printed", (rank,))


def _different_weights(journals: Journals, found: set[str]) -> list[Finding]:
    """Parameters of prepared models that are not the same on all ranks after a step."""
    if found & {"unprepared-model", "mismatched-collective"}:
        return []
    by_rank = {rank: of_kind(records, "weights") for rank, records in journals.items()}
    for records in zip(*by_rank.values(), strict=False):
        sums = [record["checksums"] for record in records]
        names = [name for name in sums[0] if any(other.get(name) != sums[0][name] for other in sums)]
        if names:
            shown = ", ".join(name.removeprefix("module.") for name in names[:_NAMES_SHOWN])
            rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            what = f"after step {records[0]['steps']} the weights {shown}{rest} are not the same on all ranks"
            advice = "step only where gradients are synchronised, outside of no_sync, and change none on one rank alone"
            return [Finding("error", "weights-differ", what, records[0]["where"], advice, tuple(by_rank))]
    return []


def _different_lengths(journals: Journals) -> list[Finding]:
    """Loaders that have more batches on one rank than on another, and are not read within join_uneven_inputs."""
    found = []
    for loaders in zip(*(of_kind(records, "loader") for records in journals.values()), strict=False):
        lengths = [loader["length"] for loader in loaders]
        same_loop = len({loader["where"] for loader in loaders}) == 1
        differ = same_loop and None not in lengths and len(set(lengths)) > 1
        if differ and not any(one["joins"] for one in loaders):
            shown = ", ".join(f"rank {rank}: {length}" for rank, length in zip(journals, lengths, strict=True))
            advice = "even_batches=True, or read it within accelerator.join_uneven_inputs([model])"
            what = f"the loader has different numbers of batches ({shown}); ranks wait for each other at the end"
            found.append(Finding("error", "uneven-ranks", what, loaders[0]["where"], advice, tuple(journals)))
    return found


def _different_calls(journals: Journals) -> list[Finding]:
    """The first call of a method that all ranks have to call, but that one rank does not call."""
    calls = {rank: of_kind(records, "call") for rank, records in journals.items()}
    for row in zip_longest(*calls.values()):
        names = {None if call is None else call["name"] for call in row}
        if len(names) > 1:
            said = [
                f"rank {rank} calls {call['name']} at {call['where']}"
                if call
                else f"rank {rank} calls nothing any more"
                for rank, call in zip(calls, row, strict=True)
            ]
            where = next(call["where"] for call in row if call)
            return [Finding("error", "ranks-diverge", "; ".join(said), where, _ADVICE_DIVERGE, tuple(calls))]
    return []


def _without_accelerator(task: Task, journals: Journals) -> list[Finding]:
    ends = [record for records in journals.values() for record in of_kind(records, "end")]
    # One that was ended from outside has told nothing.
    if len(ends) < len(journals) or any(end["has_accelerator"] or end["how"] in ("failed", "slow") for end in ends):
        return []
    what = f"the script makes no Accelerator: each of {task.configured} processes does the same work"
    return [Finding("error", "no-accelerator", what, "", "make one, and prepare model, optimizer and loaders with it")]
