"""The gallery of examples, made from the files in examples/: conf.py puts it into docs/gallery.md for the site.

Each example is shown beside plain PyTorch: beside ``<name>_plain.py`` in its folder; else, for the examples of single
features, beside ``by_feature/plain.py``, the training that all of them start from.
"""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLACE = "<!-- gallery -->"
ROW = re.compile(r"\| \[(?P<name>[^\]]+\.py)\]\([^)]+\) \| (?P<shows>[^|]+) \| `(?P<command>[^`]+)` \|")
CAPITALS = {"cv": "CV", "ddp": "DDP", "nlp": "NLP", "sgd": "SGD"}
SECTIONS = {"": "Whole programs", "by_feature": "One feature each"}
# Functions and classes that several examples have, which make data and models, or evaluate.
ALIKE = {"load_data", "load_sentences", "build_model", "LanguageModel", "parse_args", "evaluate", "Progress"}
CONTEXT = 3
BASE = "by_feature/plain.py"


def rows() -> list[re.Match[str]]:
    """The table of examples/README.md: the file, what it shows, and the command."""
    return [row for line in (EXAMPLES / "README.md").read_text().splitlines() if (row := ROW.fullmatch(line))]


def is_plain(name: str) -> bool:
    """Whether a file is there for comparison."""
    return Path(name).stem.endswith("plain")


def twin_of(name: str) -> str | None:
    """The program without this package that ``name`` is compared with; ``None`` for those that do not train."""
    if name == "show_digits.py":
        return None
    path = Path(name)
    own = path.with_name(f"{path.stem.removeprefix('complete_')}_plain.py")
    return str(own) if (EXAMPLES / own).is_file() else BASE


def training(name: str) -> list[str]:
    """The lines of the functions of a file that train, and of the classes that only it has."""
    text = (EXAMPLES / name).read_text()
    lines = text.splitlines()
    parts: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in ALIKE:
            parts += [*lines[node.lineno - 1 : node.end_lineno], ""]
    return parts[:-1]


def difference(name: str) -> str:
    """What the training of ``name`` adds to plain PyTorch and takes away, with a few lines around each change.

    Lines that are only indented differently count as the same.
    """
    twin = twin_of(name)
    assert twin is not None, name
    old, new = training(twin), training(name)
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], False)
    shown: list[str] = []
    for group in matcher.get_grouped_opcodes(CONTEXT):
        shown += ["  …"] if shown else []
        for kind, old_start, old_end, new_start, new_end in group:
            if kind == "equal":
                shown += [f"  {line}" for line in new[new_start:new_end]]
            else:
                shown += [f"- {line}" for line in old[old_start:old_end]]
                shown += [f"+ {line}" for line in new[new_start:new_end]]
    return "\n".join(line.rstrip() for line in shown)


def title(name: str) -> str:
    """``local_sgd.py`` as a heading: ``Local SGD``."""
    words = Path(name).stem.split("_")
    text = " ".join(CAPITALS.get(word, word) for word in words)
    return text[0].upper() + text[1:]


def source(name: str) -> str:
    """The whole file, folded."""
    text = (EXAMPLES / name).read_text()
    return f"<details>\n<summary>all of {name}</summary>\n\n````python\n{text}````\n\n</details>\n"


def entry(row: re.Match[str]) -> str:
    """The section of one example."""
    name = row["name"]
    shows = row["shows"][0].upper() + row["shows"][1:]
    parts = [f"### {title(name)}\n", f"{shows}.\n", f"```bash\n{row['command']}\n```\n"]
    twin = twin_of(name)
    if twin is not None:
        parts += [f"Compared with [{twin}](../examples/{twin}):\n", f"````diff\n{difference(name)}\n````\n"]
    return "\n".join([*parts, source(name)])


def markdown() -> str:
    """All sections."""
    shown: list[str] = []
    for folder, heading in SECTIONS.items():
        own = [row for row in rows() if str(Path(row["name"]).parent) == (folder or ".")]
        shown += [f"## {heading}\n", *(entry(row) for row in own if not is_plain(row["name"]))]
    shown.append("## The programs without this package\n")
    for row in rows():
        if is_plain(row["name"]):
            shown.append(f"`{row['command']}`: {row['shows']}.\n\n{source(row['name'])}")
    return "\n".join(shown)


def with_examples(page: str) -> str:
    """The page, with the gallery where it asks for it."""
    return page.replace(PLACE, markdown())
