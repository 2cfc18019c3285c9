"""What ``estimate-memory --parallelism`` shows: what ranks hold, what they send, and how long they wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate_cpp.comm.mesh import AXES, Mesh
from accelerate_cpp.parallel.costs.links import Links, crosses_hosts
from accelerate_cpp.parallel.costs.operations import Operation
from accelerate_cpp.parallel.costs.parts import Part
from accelerate_cpp.parallel.costs.steps import Step, operations_of
from accelerate_cpp.placement.memory_report import size, table
from accelerate_cpp.placement.mesh_memory import Held

__all__ = ["MeshReport", "text"]


@dataclass(frozen=True)
class MeshReport:
    """A model on a mesh.

    Attributes:
        name, title: of the model.
        precision: of forward passes, as its user calls it.
        optimizer: its name.
        stages: of the model.
        held: by the place along ``pp``.
    """

    name: str
    title: str
    precision: str
    optimizer: str
    mesh: Mesh
    step: Step
    links: Links
    stages: Sequence[Part]
    held: Sequence[Held]

    def operations(self) -> list[list[Operation]]:
        """Of the first rank at each place along ``pp``."""
        width = self.mesh.world_size // self.mesh.size("pp")
        first = [Mesh(place * width, self.mesh.sizes) for place in range(self.mesh.size("pp"))]
        return [operations_of(self.stages, mesh, self.step) for mesh in first]

    def seconds(self, operations: Sequence[Operation]) -> dict[tuple[str, ...], float]:
        """By the axes along which they are, how long ``operations`` take."""
        return {
            axes: self.links.seconds(given, crosses_hosts(self.mesh, axes, self.links.ranks_per_host))
            for axes, given in by_axes(operations).items()
        }


def by_axes(operations: Sequence[Operation]) -> dict[tuple[str, ...], list[Operation]]:
    """The operations along each group of axes, the innermost axes first."""
    found: dict[tuple[str, ...], list[Operation]] = {}
    for one in operations:
        found.setdefault(one.axes, []).append(one)
    return dict(sorted(found.items(), key=lambda item: [-AXES.index(axis) for axis in item[0]]))


def text(report: MeshReport) -> str:
    """The whole report."""
    mesh, step = report.mesh, report.step
    sizes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1) or "1 process"
    per_host = report.links.ranks_per_host
    hosts = math.ceil(mesh.world_size / per_host)
    tokens = mesh.data_size * step.micro_batches * step.rows * step.tokens
    parameters = sum(weight.elements() for part in report.stages for weight in part.weights)
    parameters -= sum(sum(part.tied) for part in report.stages[1:])
    lines = [
        f"{report.name}: {report.title}, {parameters:,} parameters",
        f"{_plural(mesh.world_size, 'rank')}: {sizes}; {_plural(hosts, 'host')} of {per_host}",
        f"A step: {_plural(mesh.data_size, 'batch', 'es')} of {_plural(step.micro_batches, 'micro-batch', 'es')} of "
        f"{step.rows} x {step.tokens} tokens, {tokens:,} tokens together",
        "",
        f"What a rank holds, {report.precision}, {report.optimizer}:",
        *_held_table(report),
        "",
        *_sent(report),
    ]
    if mesh.size("pp") > 1:
        share = step.bubble(mesh.size("pp"))
        lines += [
            "",
            f"Pipeline {step.schedule}: ranks wait for {100 * share:.1f} % of a step, apart from communication.",
        ]
    return "\n".join(line.rstrip() for line in lines)


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def _held_table(report: MeshReport) -> list[str]:
    places: dict[Held, list[int]] = {}
    for place, one in enumerate(report.held):
        places.setdefault(one, []).append(place)
    rows = [
        (
            _ranges(at),
            str(one.layers),
            *map(size, (one.weights, one.gradients, one.optimizer, one.gathered, one.activations, one.together)),
        )
        for one, at in places.items()
    ]
    head = ("pp", "layers", "weights", "gradients", "optimizer", "gathered", "activations", "together")
    return table(head, rows)


def _ranges(numbers: Sequence[int]) -> str:
    """``numbers``, in order, as in "0, 2-5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _sent(report: MeshReport) -> list[str]:
    everywhere = report.operations()
    totals = [sum(report.seconds(operations).values()) for operations in everywhere]
    busiest = totals.index(max(totals))
    operations = everywhere[busiest]
    if not operations:
        return ["Nothing is sent."]
    where = f" at place {busiest} of pp, the one that communicates longest," if report.mesh.size("pp") > 1 else ""
    seconds = report.seconds(operations)
    rows = []
    for axes, given in by_axes(operations).items():
        over = "between hosts" if crosses_hosts(report.mesh, axes, report.links.ranks_per_host) else "within a host"
        for number, (kind, same) in enumerate(_by_kind(given).items()):
            rows.append(
                (
                    ", ".join(axes) if number == 0 else "",
                    over if number == 0 else "",
                    kind,
                    f"{sum(one.count for one in same):,}",
                    size(sum(one.count * one.size_bytes for one in same)),
                    size(float(sum(one.sent_bytes for one in same))),
                    f"{1e3 * seconds[axes]:,.1f} ms" if number == 0 else "",
                )
            )
    head = ("axis", "over links", "operation", "messages", "put in", "sent", "time")
    links = report.links
    return [
        f"What a rank{where} puts in and sends per step:",
        *table(head, rows, left=3),
        f"Together {1e3 * totals[busiest]:,.1f} ms if nothing overlaps, with {links.bandwidth_within:g} GB/s and "
        f"{links.latency_within:g} µs within a host, {links.bandwidth_between:g} GB/s and {links.latency_between:g} µs "
        "between hosts.",
    ]


def _by_kind(operations: Sequence[Operation]) -> Mapping[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for one in operations:
        found.setdefault(one.kind, []).append(one)
    return found
