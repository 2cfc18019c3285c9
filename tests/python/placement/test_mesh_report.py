"""The text of an estimate for a mesh."""

from __future__ import annotations

from typing import Any

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.parallel.costs.links import Links
from accelerate_cpp.parallel.costs.parts import Decoder
from accelerate_cpp.parallel.costs.steps import Step, stages_of
from accelerate_cpp.placement.mesh_memory import Held
from accelerate_cpp.placement.mesh_report import MeshReport, text

DECODER = Decoder(layers=4, hidden=1024, heads=8, kv_heads=8, intermediate=2048, vocabulary=1024, tied=True)
KIB = 2**10
LINKS = Links(4, bandwidth_within=1.0, bandwidth_between=0.5, latency_within=0.0, latency_between=1000.0)


def report(sizes: dict[str, int], **options: Any) -> MeshReport:
    step = Step(**{"rows": 1, "tokens": 256, **options})
    mesh = Mesh(0, sizes)
    held = [
        Held(
            2,
            10,
            KIB,
            KIB,
            2 * KIB,
            0,
            place * KIB,
        )
        for place in (1, 1, 2, 1)[: mesh.size("pp")]
    ]
    stages = DECODER.parts(len(stages_of(mesh, step.schedule)))
    return MeshReport("tiny", "Llama", "float32", "sgd", mesh, step, LINKS, stages, held)


def lines(sizes: dict[str, int], **options: Any) -> list[str]:
    return text(report(sizes, **options)).splitlines()


def test_it_begins_with_the_model_the_mesh_and_the_batch() -> None:
    shown = lines({"pp": 4, "dp_replicate": 2, "tp": 2}, micro_batches=8)
    assert shown[:3] == [
        f"tiny: Llama, {DECODER.parameters:,} parameters",  # the tied table of the last stage is counted once
        "16 ranks: pp 4 x dp_replicate 2 x tp 2; 4 hosts of 4",
        "A step: 2 batches of 8 micro-batches of 1 x 256 tokens, 4,096 tokens together",
    ]


def test_places_that_hold_the_same_share_a_row() -> None:
    shown = lines({"pp": 4}, micro_batches=8)
    start = shown.index("What a rank holds, float32, sgd:")
    assert [line.split()[:2] for line in shown[start + 1 : start + 5]] == [
        ["pp", "layers"],
        ["0-1,", "3"],
        ["2", "2"],
        [],
    ]
    assert shown[start + 2].split("  ")[-1] == "5.00 KiB"


def test_each_axis_says_whether_it_leaves_a_host_and_how_long_it_takes() -> None:
    shown = lines({"dp_replicate": 2, "tp": 4})
    rows = {line.split()[0]: line for line in shown if line.startswith(("tp ", "dp_replicate "))}
    hidden = 256 * 1024 * 4
    assert rows["tp"].split()[1:4] == ["within", "a", "host"]
    # 16 all-reduces of 1 MiB, 4 for each layer, of which each rank sends 3/2, at 1 GB/s
    assert rows["tp"].endswith(f"{16 * hidden * 1.5 / 1e9 * 1e3:.1f} ms")
    assert rows["tp"].split()[4:8] == ["all_reduce", "16", "16.00", "MiB"]
    assert rows["dp_replicate"].split()[1:3] == ["between", "hosts"]
    assert shown[-1].startswith("Together ")


def test_a_pipeline_says_how_long_it_waits() -> None:
    shown = lines({"pp": 4}, micro_batches=8, schedule="gpipe")
    assert shown[-1] == "Pipeline gpipe: ranks wait for 27.3 % of a step, apart from communication."
    assert "of the one that communicates longest" not in shown[-1]


def test_one_process_sends_nothing() -> None:
    shown = lines({})
    assert shown[1] == "1 rank: 1 process; 1 host of 4"
    assert shown[-1] == "Nothing is sent."
