"""What programs ask to learn whether ``accelerate`` is installed, under the alias, in every kind of process.

The questions of libraries are asked in their way: by the same functions of Python, in the same order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.alias import INTERFACE_VERSION

# Each is run by itself and leaves its answer, plain values, in `answer`.
QUESTIONS: dict[str, tuple[str, Any]] = {
    "find_spec": (
        "answer = [find_spec(name) is not None for name in ('accelerate', 'accelerate.utils', 'accelerate.absent')]",
        [True, True, False],
    ),
    "attribute": ("import accelerate; answer = accelerate.__version__", INTERFACE_VERSION),
    "version": (
        "answer = [metadata.version(name) for name in ('accelerate', 'Accelerate', 'ACCELERATE')]",
        [INTERFACE_VERSION] * 3,
    ),
    "own version": ("answer = metadata.version('accelerate-cpp') != metadata.version('accelerate')", True),
    "home page": ("answer = metadata.metadata('accelerate')['Home-page']", "https://github.com/huggingface/accelerate"),
    "fields": (
        "fields = metadata.metadata('accelerate')\n"
        "names = ['Name', 'Version', 'License', 'Requires-Python', 'Author', 'Summary']\n"
        "answer = [fields[name] for name in names[:4]] + [bool(fields[name]) for name in names[4:]]",
        ["accelerate", INTERFACE_VERSION, "Apache-2.0", ">=3.10", True, True],
    ),
    "fields as json": (
        "fields = metadata.metadata('accelerate').json\n"
        "answer = ['huggingface' in fields['home_page'], 'torch' in fields['requires_dist']]",
        [True, True],
    ),
    "fields of several values": (
        "fields = metadata.metadata('accelerate')\n"
        "urls = dict(url.split(', ') for url in fields.get_all('Project-URL'))\n"
        "licenses = [one for one in fields.get_all('Classifier') if one.startswith('License')]\n"
        "answer = ['huggingface' in urls['Interface'], licenses]",
        [True, ["License :: OSI Approved :: Apache Software License"]],
    ),
    "requirements": (
        "import re\n"
        "named = [re.match('[a-z-]+', one).group() for one in metadata.requires('accelerate')]\n"
        "answer = sorted(named) if named == [one.metadata['Name'].lower().replace('_', '-') for one in map("
        "metadata.distribution, named)] else 'not all are installed'",
        ["accelerate-cpp", "numpy", "packaging", "pyyaml", "safetensors", "torch"],
    ),
    "files": (
        "files = metadata.files('accelerate')\n"
        "answer = [all(file.locate().is_file() for file in files), 'PKG-INFO' in {file.name for file in files}]",
        [True, True],
    ),
    "texts": (
        "found = metadata.distribution('accelerate')\n"
        "answer = [found.read_text('top_level.txt'), found.read_text('absent.txt')]",
        ["accelerate\n", None],
    ),
    "entry points": (
        "points = [one for one in metadata.distribution('accelerate').entry_points if one.group == 'console_scripts']\n"
        "answer = [[one.name for one in points], [one.load().__module__.partition('.')[0] for one in points]]",
        [
            ["accelerate", "accelerate-config", "accelerate-estimate-memory", "accelerate-launch"],
            ["accelerate_cpp"] * 4,
        ],
    ),
    "entry points by name": (
        "answer = {one.value for one in metadata.entry_points(group='console_scripts', name='accelerate-launch')}",
        ["accelerate.commands.launch:main"],
    ),
    "packages": ("answer = set(metadata.packages_distributions()['accelerate'])", ["accelerate"]),
    "distributions": (
        "found = [one for one in metadata.distributions() if one.metadata['Name'] == 'accelerate']\n"
        "answer = 'huggingface' in found[0].metadata['Home-page'] and found[0].version",
        INTERFACE_VERSION,
    ),
    "distributions elsewhere": (
        "answer = [one.metadata['Name'] for one in metadata.distributions(name='accelerate', path=['.'])]",
        [],
    ),
    "a path of one's own": (
        "before = sys.path\n"
        "sys.path = [one for one in before if 'alias/distribution' not in one]\n"
        "try:\n"
        "    first = next(one for one in metadata.distributions() if one.metadata['Name'] == 'accelerate')\n"
        "    answer = [metadata.metadata('accelerate')['Author'], first.metadata['Author']]\n"
        "finally:\n"
        "    sys.path = before",
        ["The authors of accelerate-cpp"] * 2,
    ),
    "the backport of importlib.metadata": (
        "import importlib_metadata as backport\n"
        "answer = [backport.version('accelerate'), 'huggingface' in backport.metadata('accelerate')['Home-page']]",
        [INTERFACE_VERSION, True],
    ),
    "pkg_resources": (
        "found = pkg_resources().get_distribution('accelerate')\n"
        "named = [one for one in pkg_resources().working_set if one.project_name == 'accelerate']\n"
        "answer = [found.version, found.key, len(named), 'torch' in {one.key for one in found.requires()}]",
        [INTERFACE_VERSION, "accelerate", 1, True],
    ),
    "pkg_resources by requirement": (
        "answer = pkg_resources().require('accelerate>=1.1.0')[0].version\n"
        "pkg_resources().working_set.require('accelerate')",
        INTERFACE_VERSION,
    ),
    # by whom a package was made, from its home page
    "sentence-transformers": (
        "fields = metadata.metadata('accelerate')\n"
        "answer = fields['Name'] == 'accelerate' and 'huggingface' in fields['Home-page']",
        True,
    ),
    # by import name, then by the version of the distribution, which has to be one
    "transformers": (
        "from packaging import version\n"
        "answer = find_spec('accelerate') is not None and "
        "version.parse(metadata.version('accelerate')) >= version.parse('1.1.0')",
        True,
    ),
    # the first distribution that declares the package, or that has a file in it
    "diffusers": (
        "packages = {}\n"
        "for one in metadata.distributions():\n"
        "    declared = (one.read_text('top_level.txt') or '').split()\n"
        "    inferred = {file.parts[0] for file in one.files or [] if len(file.parts) > 1}\n"
        "    for name in declared or [name for name in inferred if '.' not in name]:\n"
        "        packages.setdefault(name, []).append(one.metadata['Name'])\n"
        "answer = metadata.version(packages['accelerate'][0])",
        INTERFACE_VERSION,
    ),
    # by Python's own map from packages to distributions
    "trl": (
        "names = metadata.packages_distributions()['accelerate']\n"
        "answer = metadata.version('accelerate' if 'accelerate' in names else names[0])",
        INTERFACE_VERSION,
    ),
    # by names that are imported at once
    "peft, setfit, lm_eval": (
        "import accelerate\n"
        "from accelerate import Accelerator, InitProcessGroupKwargs, find_executable_batch_size\n"
        "from accelerate.utils import get_max_memory\n"
        "answer = accelerate.__version__",
        INTERFACE_VERSION,
    ),
    # of other libraries than accelerate, which must be found as before
    "datasets, evaluate": (
        "answer = find_spec('torch') is not None and metadata.version('torch').startswith('2.')",
        True,
    ),
}

PROGRAM = """
import importlib.metadata as metadata
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec


def pkg_resources():
    # setuptools has given it up; pip has a copy.
    try:
        import pkg_resources
    except ImportError:
        from pip._vendor import pkg_resources
    return pkg_resources


def answers(questions):
    found = {}
    for name, code in questions.items():
        names = dict(globals())
        try:
            exec(code, names)
        except BaseException as error:
            names["answer"] = f"{type(error).__name__}: {error}"
        answer = names["answer"]
        found[name] = sorted(answer) if isinstance(answer, set) else answer
    return found


if __name__ == "__main__":
    by, how, *early = sys.argv[1:]
    if early:
        pkg_resources()
    if by == "compat":
        import accelerate_cpp.compat
    questions = json.load(open("questions.json"))
    if how == "itself":
        print(json.dumps(answers(questions)))
    elif how == "executed":
        subprocess.run([sys.executable, "-W", "ignore", "ask.py", "nothing", "itself"], check=True)
    else:
        with ProcessPoolExecutor(1, multiprocessing.get_context(how)) as pool:
            print(json.dumps(pool.submit(answers, questions).result()))
"""

KINDS = ("itself", "executed", "spawn", "fork", "forkserver", "itself, after pkg_resources")
PROCESSES = [("compat", "itself"), ("variable", "itself"), ("variable", "spawn")]
PROCESSES_TOO = [
    (by, kind) for by in ("variable", "compat") for kind in KINDS if (by, kind) not in PROCESSES
]  # in test-full


def _asked(folder: Path, by: str, how: str) -> dict[str, Any]:
    (folder / "ask.py").write_text(PROGRAM)
    (folder / "questions.json").write_text(json.dumps({name: code for name, (code, _) in QUESTIONS.items()}))
    environment = {"PATH": "/usr/bin:/bin"} | ({"ACCELERATE_CPP_ALIAS": "1"} if by == "variable" else {})
    command = [sys.executable, "-W", "ignore", "ask.py", by, *how.split(", ")]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answers: dict[str, Any] = json.loads(result.stdout)
    return answers


@pytest.fixture(
    scope="module",
    params=[*PROCESSES, *(pytest.param(process, marks=pytest.mark.long) for process in PROCESSES_TOO)],
    ids=", ".join,
)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of this kind answered."""
    return _asked(tmp_path_factory.mktemp("asked"), *request.param)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_process_answers_alike(answers: dict[str, Any], question: str) -> None:
    if "pkg_resources" in question:
        pytest.importorskip("pip._vendor.pkg_resources")
    assert answers[question] == QUESTIONS[question][1]


@pytest.mark.parametrize("by", ["compat", "variable"])
@pytest.mark.long
def test_libraries_that_are_here_find_it(tmp_path: Path, by: str) -> None:
    (tmp_path / "ask.py").write_text(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def found():\n"
        "    import transformers, transformers.utils, peft.utils.other\n"
        "    from transformers.dependency_versions_check import dep_version_check\n"
        "    dep_version_check('accelerate')\n"
        "    utils = transformers.utils\n"
        "    available = utils.is_accelerate_available(), utils.is_accelerate_available('99')\n"
        "    return available, peft.utils.other.accelerate.__version__\n"
        "if __name__ == '__main__':\n" + ("    import accelerate_cpp.compat\n" if by == "compat" else "") + "    with "
        "ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:\n"
        "        print(found(), pool.submit(found).result())\n"
    )
    environment = {"PATH": "/usr/bin:/bin"} | ({"ACCELERATE_CPP_ALIAS": "1"} if by == "variable" else {})
    command = [sys.executable, "-W", "ignore", "ask.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{((True, False), INTERFACE_VERSION)} {((True, False), INTERFACE_VERSION)}\n"
