"""Names, counts, times and YAML, in the terms of Slurm, Kubernetes and Google Cloud."""

import json
import re
from pathlib import Path

from jaxrl_llm.errors import UserError


def seconds(time: str) -> int:
    """Of a time as Slurm takes it: minutes, m:s, h:m:s, days-hours, d-h:m, d-h:m:s."""
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", time, re.ASCII):
        raise UserError(f"--time {time}: write it as Slurm does, as in 24:00:00")
    days, _, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86_400 * int(days or 0) + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def count(name: str, value: int) -> str:
    """How many, one at least."""
    if value < 1:
        raise UserError(f"--{name} {value} must be at least 1")
    return str(value)


def name(name: str, flag: str = "name") -> str:
    """A name that Slurm, Kubernetes and Google Cloud take, and no shell or YAML reads anything into."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--{flag} {name}: at most 40 lower-case letters, digits and -, a letter first"
        )
    return name


def yaml(value: object) -> str:
    """JSON, which is YAML."""
    return json.dumps(value, ensure_ascii=False)


def block(path: Path) -> str:
    """A file's text as a block of YAML four columns in, to the letter; the template ends its last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.replace("\t", "").removesuffix("\n").isprintable():
            raise UserError(f"{path}, line {number}: a character that YAML cannot hold")
    indented = "".join(line if line == "\n" else f"    {line}" for line in lines)
    return "|2+\n" + indented.removesuffix("\n")
