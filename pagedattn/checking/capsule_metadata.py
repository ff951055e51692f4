"""What a capsule says beside its tensors: a JSON object of known fields, written and read.

It comes from strangers: every field is checked for its kind and its range, none may be missing and
none may be unknown. Text is short and printable, since a terminal will show it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import NoReturn

from pagedattn.spec import DTYPES, AttentionSpec

FORMAT = "pagedattn capsule 1"
MAX_JSON_CHARACTERS = 2**16
MAX_TEXT = 400
MAX_INT32 = 2**31 - 1
MAX_PAGE_SIZE = 2**16
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class CapsuleMetadata:
    """Where a step comes from, and what is fixed of it.

    Args:
        spec: The layer kind.
        page_size: Tokens in one page.
        num_pages: Pages of the cache that the step's pages were taken from.
        backend: What computed the answer that is kept.
        problem: What was wrong with it, in words.
        seed: What the step was drawn from, where it was drawn.
        versions: Version of each package that took part.
    """

    spec: AttentionSpec
    page_size: int
    num_pages: int
    backend: str
    problem: str = ""
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON, which `from_json` reads."""
        spec = {**asdict(self.spec), "dtype": str(self.spec.dtype).removeprefix("torch.")}
        written = {f.name: getattr(self, f.name) for f in fields(self)}
        written |= {"format": FORMAT, "spec": spec, "versions": dict(self.versions)}
        return json.dumps(written, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CapsuleMetadata:
        """Read what `to_json` wrote.

        Raises:
            ValueError: It is no JSON, or a field is missing, unknown or wrong.
        """
        if len(text) > MAX_JSON_CHARACTERS:
            raise ValueError(
                f"metadata has {len(text)} characters, expected {MAX_JSON_CHARACTERS} at most"
            )
        try:
            read = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:  # nested too deep: RecursionError
            raise ValueError(f"metadata is not JSON: {error}") from None
        known = ["format", *(f.name for f in fields(cls))]
        values = _object(read, "metadata", known)
        if values["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {_kind(values['format'])}")
        versions = _object(values["versions"], "versions", None)
        return cls(
            _spec(values["spec"]),
            _integer(values["page_size"], "page_size", 1, MAX_PAGE_SIZE),
            _integer(values["num_pages"], "num_pages", 0, MAX_INT32),
            _text(values["backend"], "backend"),
            _text(values["problem"], "problem"),
            None if values["seed"] is None else _integer(values["seed"], "seed", 0, 2**63 - 1),
            {
                _text(name, "a name in versions"): _text(version, f"versions.{name}")
                for name, version in versions.items()
            },
        )


def printable(text: str) -> str:
    r"""Make a text fit to be kept: one line, printable, not too long.

    Example:
        >>> printable("two\nlines, a bell\a")
        'two lines, a bell?'
    """
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."


def _spec(value: object) -> AttentionSpec:
    values = _object(value, "spec", [f.name for f in fields(AttentionSpec)])
    dtype = values["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES_BY_NAME:
        raise ValueError(f"spec.dtype must be one of {list(DTYPES_BY_NAME)}, got {_kind(dtype)}")
    causal = values["causal"]
    if not isinstance(causal, bool):
        raise ValueError(f"spec.causal must be true or false, got {_kind(causal)}")
    sm_scale = values["sm_scale"]
    return AttentionSpec(
        _integer(values["num_qo_heads"], "spec.num_qo_heads", 1, MAX_HEADS),
        _integer(values["num_kv_heads"], "spec.num_kv_heads", 1, MAX_HEADS),
        _integer(values["head_dim"], "spec.head_dim", 1, MAX_HEAD_DIM),
        dtype=DTYPES_BY_NAME[dtype],
        causal=causal,
        window_left=_integer(values["window_left"], "spec.window_left", -1, MAX_INT32),
        sm_scale=None if sm_scale is None else _number(sm_scale, "spec.sm_scale"),
        logits_soft_cap=_number(values["logits_soft_cap"], "spec.logits_soft_cap"),
    )


def _object(value: object, name: str, known: Collection[str] | None) -> dict[str, object]:
    """A JSON object that has exactly the known fields, or any where `None` is given."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {_kind(value)}")
    if known is not None:
        for missing in (key for key in known if key not in value):
            raise ValueError(f"{name} lacks {missing}, expected {', '.join(known)}")
        for unknown in (key for key in value if key not in known):
            raise ValueError(f"{name} has the unknown field {_kind(unknown)}")
    return value


def _integer(value: object, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {_kind(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {_kind(value)}")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > 1e30:
        raise ValueError(f"{name} must be a number up to 1e30, got {_kind(value)}")
    return float(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise ValueError(
            f"{name} must be a printable text of {MAX_TEXT} characters at most, got {_kind(value)}"
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _kind(value: object) -> str:
    """A JSON value in an error, long ones by their kind."""
    written = json.dumps(value, default=repr)
    return written if len(written) <= 60 else f"a {type(value).__name__}"
