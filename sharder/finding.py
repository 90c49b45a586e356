"""A reason why a run cannot start, as data: what, where, the numbers, and options that would mend it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from sharder.config import RunConfig, UserError

Options = Mapping[str, object]
"""Values by option, {"--parallel.tensor": 4}: what to set, for a program as for a person. None means None on the command line."""


@dataclass(frozen=True)
class Finding:
    """One reason; `nearest` removes it when applied, and is empty where no option can."""

    rule: str
    message: str
    """For people: what, the numbers, the way out. Findings with one cause share one message."""
    nearest: Options = field(default_factory=dict)
    set_at: str | None = None
    """The option that the value at fault comes from."""
    path: str | None = None
    """Parameter."""
    shape: tuple[int, ...] | None = None
    spec: tuple | None = None
    """For each dimension the mesh axes that divide it."""
    factor: int | None = None
    """Number that should divide."""

    def to_json(self) -> dict:
        return asdict(self)


class Refused(UserError):
    """All findings of a run that cannot start, in one message."""

    def __init__(self, findings: Sequence[Finding]):
        self.findings = tuple(findings)
        reasons = list(dict.fromkeys(f.message for f in findings))
        counted = "1 reason why" if len(reasons) == 1 else f"{len(reasons)} reasons why"
        super().__init__(f"{counted} this run cannot start:\n" + "\n".join(f"- {reason}" for reason in reasons))


def applied(config: RunConfig, options: Options) -> RunConfig:
    """The configuration with these options set. Raises UserError where a section refuses the values."""
    sections: dict[str, dict] = {}
    for option, value in options.items():
        section, _, name = option.removeprefix("--").replace("-", "_").partition(".")
        sections.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    return replace(config, **{s: replace(getattr(config, s), **fields) for s, fields in sections.items()})


def as_arguments(options: Options) -> list[str]:
    """The options as a command line takes them."""
    words = []
    for option, value in options.items():
        words += [option, *map(str, value if isinstance(value, (list, tuple)) else (value,))]
    return words


def around(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` next to `value`, nearest first; never 0."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return tuple(sorted({n for n in (below, above) if n}, key=lambda n: abs(n - value)))


def either(numbers: Sequence[int]) -> str:
    """`28 or 32`, ascending."""
    return " or ".join(str(n) for n in sorted(numbers))
