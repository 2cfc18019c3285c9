"""estimate-memory as a command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import accelerate.commands.estimate as original
import huggingface_hub
import huggingface_hub.errors
import pytest

from accelerate_cpp.commands import estimate
from accelerate_cpp.errors import InvalidArgument

# Stands for timm: one layer with a bias, on images of 8 by 8.
TIMM = """
from torch import nn

def create_model(name, pretrained):
    model = Looking(192, 64) if name == "looking" else nn.Sequential(nn.Flatten(), nn.Linear(192, 64))
    model.pretrained_cfg = {"input_size": (3, 8, 8)}
    return model

class Looking(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) if x.sum() > 0 else x
"""
WEIGHTS = 4 * (192 * 64 + 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(TIMM)
    return tmp_path


def run(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "estimate-memory", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONIOENCODING": "utf-8",
            "CUDA_VISIBLE_DEVICES": "",
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def rows(shown: str) -> list[list[str]]:
    return [
        line.split()
        for line in shown.splitlines()
        if line.split()[:1] in (["float32"], ["float16"], ["int8"], ["int4"])
    ]


def test_sizes_and_training_are_shown(folder: Path) -> None:
    done = run(folder, "net", "--library_name", "timm", "--batch_size", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("net: Sequential of timm, 12,352 parameters\n")
    assert "Training with adam and batches of 4 x 3x8x8 pixels, on kernels of cpu:" in done.stdout
    stored, training = rows(done.stdout)[:4], rows(done.stdout)[4:6]
    assert [row[0] for row in stored] == ["float32", "float16", "int8", "int4"]
    assert stored[0][3:] == stored[0][1:3] == [f"{WEIGHTS / 1024:.2f}", "KiB"]
    assert stored[3][3:] == [f"{WEIGHTS / 8 / 1024:.2f}", "KiB"]
    # Weights, gradients, twice as much for Adam with one number more a parameter, and the input of the layer.
    bytes_of = [WEIGHTS, WEIGHTS, 2 * WEIGHTS + 2 * 4, 4 * 4 * 192]
    assert training[0][1::2] == [f"{count / 1024:.2f}" for count in (*bytes_of, sum(bytes_of))]


def test_figures_can_be_asked_for_by_programs(folder: Path) -> None:
    script = (
        "import json; from accelerate_cpp.commands.estimate import estimate_command_parser, gather_data; "
        "args = ['net', '--library_name', 'timm', '--batch_size', '4', '--dtypes', 'float32', 'int8']; "
        "print(json.dumps(gather_data(estimate_command_parser().parse_args(args))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (first, *sizes, training), (second, *small, nothing) = json.loads(done.stdout)
    assert (first, sizes, second, small, nothing) == ("float32", [WEIGHTS] * 2, "int8", [WEIGHTS // 4] * 2, {})
    assert list(training.values())[:2] == [WEIGHTS, WEIGHTS]


@pytest.mark.long
def test_dtypes_and_the_optimizer_may_be_chosen(folder: Path) -> None:
    done = run(folder, "net", "--library_name", "timm", "--dtypes", "int8", "float32", "--optimizer", "sgd")
    found = rows(done.stdout)
    assert [row[0] for row in found] == ["int8", "float32", "float32", "float32"]
    assert found[2][5:7] == ["0", "B"]
    assert "mixed precision" not in done.stdout
    assert "Training" not in run(folder, "net", "--library_name", "timm", "--dtypes", "int4").stdout


def test_a_forward_pass_that_needs_data_leaves_the_other_figures(folder: Path) -> None:
    done = run(folder, "looking", "--library_name", "timm")
    assert done.returncode == 0, done.stderr
    assert "Activations are not known: a forward pass without data fails (" in done.stdout
    assert f"{WEIGHTS / 1024:.2f} KiB" in done.stdout


def test_a_picture_is_written(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(folder, "net", "--library_name", "timm", "--picture", "memory.png")
    assert done.stdout.endswith("accelerate-cpp estimate-memory: wrote memory.png\n")
    assert (folder / "memory.png").stat().st_size > 0
    (folder / "theirs").touch()
    (folder / "again.png").symlink_to("theirs")
    run(folder, "net", "--library_name", "timm", "--picture", "again.png")
    assert (folder / "theirs").read_bytes() == b""
    refused = run(folder, "net", "--library_name", "timm", "--picture", "memory.doc")
    assert (refused.returncode, refused.stderr.count("\n"), refused.stdout) == (2, 1, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("someone/model",), "neither a folder nor a file here nor in the cache, and the Hub cannot be reached"),
        (("./no/such/folder",), "neither a folder nor a file here, and this is not a valid name on the Hub"),
        (("net", "--library_name", "keras"), "invalid choice: 'keras'"),
        (("net", "--library_name", "timm", "--device", "cuda"), "--device cuda: torch sees no GPU here"),
        (("net", "--batch_size", "0"), "expected an integer of at least 1"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(arguments: tuple[str, ...], words: str, folder: Path) -> None:
    pytest.importorskip("huggingface_hub")
    done = run(folder, *arguments, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "cache"))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_local_model_of_transformers_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    content = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for name in (".", "config.json"):
        done = run(tmp_path, name, "--sequence_length", "16", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{name}: BertForMaskedLM of transformers, ")
        assert "batches of 1 x 16 tokens" in done.stdout


def test_its_flags_are_known_without_loading_torch() -> None:
    script = "import sys; from accelerate_cpp.commands import estimate; "
    script += "from accelerate_cpp.placement import memory_report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "name", ["resnet50", "resnet50.a1_in1k", "timm/resnet50.a1_in1k", "hf-hub:timm/resnet50.a1_in1k", "local-dir:/m"]
)
def test_names_of_models_are_written_as_timm_finds_them(name: str) -> None:
    assert estimate.add_timm_hub_prefix(name) == original.add_timm_hub_prefix(name)


@pytest.mark.parametrize(
    ("error", "answer"), [(OSError("no network"), "gated"), (None, {"id": "a/b"})], ids=["unreachable", "found"]
)
def test_what_the_hub_knows_of_a_model_is_told(
    error: Exception | None, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_info(repo: str, token: str | None = None) -> object:
        if error is not None:
            raise error
        return {"id": repo}

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    assert estimate.verify_on_hub("a/b") == answer


@pytest.mark.parametrize(("kind", "answer"), [("GatedRepoError", "gated"), ("RepositoryNotFoundError", "repo")])
def test_a_model_that_the_hub_does_not_show_is_told(kind: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(repo: str, token: str | None = None) -> object:
        error = getattr(huggingface_hub.errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    assert estimate.verify_on_hub("a/b") == answer


def llama(folder: Path, **options: object) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "vocab_size": 96}
    (folder / "config.json").write_text(json.dumps(config | sizes | options))


def test_a_mesh_shows_what_ranks_hold_and_send(folder: Path) -> None:
    llama(folder)
    mesh = ["--parallelism", "pp=2, dp_shard_size=2, tp=2", "--sequence_parallel", "--micro_batches", "4"]
    batch = ["--batch_size", "2", "--sequence_length", "16", "--ranks_per_host", "2", "--optimizer", "sgd"]
    done = run(folder, str(folder), *mesh, *batch, "--dtypes", "float32")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert shown[1] == "8 ranks: pp 2 x dp_shard 2 x tp 2; 4 hosts of 2"
    assert shown[2] == "A step: 2 batches of 4 micro-batches of 2 x 16 tokens, 256 tokens together"
    assert [line.split()[:4] for line in shown if line.startswith("tp ")] == [["tp", "within", "a", "host"]]
    assert [line.split()[:3] for line in shown if line.startswith(("dp_shard ", "pp    "))] == [
        ["dp_shard", "between", "hosts"],
        ["pp", "between", "hosts"],
    ]
    assert shown[-1] == "Pipeline 1f1b: ranks wait for 20.0 % of a step, apart from communication."


@pytest.mark.long
def test_mixed_precision_sends_half_as_much(folder: Path) -> None:
    llama(folder)
    sent = {}
    for dtype in ("float32", "float16"):
        arguments = ["--parallelism", "dp_shard=2", "--dtypes", dtype, "--sequence_length", "16"]
        done = run(folder, str(folder), *arguments)
        assert done.returncode == 0, done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("dp_shard "))
        words = line.split()
        sent[dtype] = float(words[words.index("KiB") - 1])
    assert sent["float32"] == pytest.approx(2 * sent["float16"], abs=0.01)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("pp=2,cp=2", "parallelism_config: pp_size=2 with cp_size=2; a pipeline cuts batches"),
        ("sp=2", "parallelism_config: sp_size=2 splits sequences by the attention of DeepSpeed"),
        ("ep=2", "--parallelism 'ep=2': 'ep=2'; expected a size, 1 or more, of dp_replicate, dp_shard, tp, cp"),
        ("tp=0", "--parallelism 'tp=0': 'tp=0'; expected a size"),
        ("tp", "--parallelism 'tp': 'tp'; expected a size"),
    ],
)
def test_sizes_that_cannot_be_combined_are_refused(sizes: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        estimate.mesh_from(sizes)


def test_sizes_are_those_of_a_mesh() -> None:
    assert estimate.mesh_from("pp=2, dp_shard_size=4,tp=1").sizes == {"pp": 2, "dp_shard": 4}


def test_what_a_model_cannot_be_split_into_is_refused_in_one_line(folder: Path) -> None:
    llama(folder)
    done = run(folder, str(folder), "--parallelism", "tp=3", "--sequence_length", "16")
    assert done.returncode == 2
    assert "computes 4 heads, which cannot be shared out over tp_size=3" in done.stderr
    assert done.stdout == ""


def test_a_mesh_has_no_picture(folder: Path) -> None:
    done = run(folder, str(folder), "--parallelism", "tp=2", "--picture", "bars.png")
    assert done.returncode == 2
    assert "--picture: there are no bars of a mesh to draw" in done.stderr
