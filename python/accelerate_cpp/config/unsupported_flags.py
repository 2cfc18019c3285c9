"""The flags of the original's ``launch`` that do nothing here yet: known by name, and refused by a launch."""

from __future__ import annotations

from dataclasses import dataclass

INSTEAD = "leave it out: plain data parallelism over the processes is used"


@dataclass(frozen=True)
class Flag:
    """One flag, without its dashes, and what it says in the original."""

    name: str
    meaning: str
    takes_value: bool = True


@dataclass(frozen=True)
class Group:
    """Flags that belong together, and the purpose that does not work yet."""

    title: str
    purpose: str
    flags: tuple[Flag, ...]

    def sentence(self, flag: Flag) -> str:
        """The refusal of ``flag``."""
        return f"--{flag.name}: {self.purpose} does not work in accelerate_cpp yet; {INSTEAD}"


GROUPS: tuple[Group, ...] = (
    Group(
        "AWS",
        "starting jobs on SageMaker",
        (
            Flag("aws_access_key_id", "key of an AWS account"),
            Flag("aws_secret_access_key", "secret of an AWS account"),
        ),
    ),
)
