"""The CSV: one row a measurement, with the column names of FlashInfer's own benchmark where it has
them (`benchmarks/flashinfer_benchmark.py` of its repository), times in its units.
"""

from __future__ import annotations

import csv
import importlib.util
import platform
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import pagedattn
from benchmarks.cases import Case
from benchmarks.peer import Peer
from pagedattn.toolchain import FLASHINFER_PACKAGE, driver_version, package_version


@dataclass(frozen=True)
class Machine:
    """What a result depends on."""

    gpu: str
    driver: str
    python: str
    torch: str
    triton: str
    flashinfer: str
    pagedattn: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """Look at this one."""
        on_gpu = device.type == "cuda"
        return cls(
            gpu=torch.cuda.get_device_name(device) if on_gpu else "none",
            driver=(driver_version() or "") if on_gpu else "",
            python=platform.python_version(),
            torch=torch.__version__,
            triton=package_version("triton") or "",
            flashinfer=_flashinfer_version(on_gpu),
            pagedattn=pagedattn.__version__,
        )


@dataclass(frozen=True)
class Result:
    """One measurement; None where it was not reached. The fields are the columns."""

    # FlashInfer's names
    routine: str
    backend: str
    resolved_backend: str
    case_tag: str
    batch_size: int
    s_qo: int  # most query tokens of a request
    s_kv: int  # most keys of a request
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    causal: bool
    q_dtype: str
    kv_dtype: str
    avg_actual_seq_len: float
    random_actual_seq_len: bool
    random_seed: int
    no_cuda_graph: bool
    # ours
    case_group: str
    case_kind: str
    window_left: int
    num_tokens: int
    min_bytes: int  # what must be moved at least
    flops: int
    gpu: str
    driver: str
    python: str
    torch: str
    triton: str
    flashinfer: str
    pagedattn: str
    # FlashInfer's names, measured
    refcheck: bool = False  # whether sampled rows were compared with float64
    median_time: float | None = None  # ms
    std_time: float | None = None  # ms
    tflops: float | None = None
    tb_per_sec: float | None = None
    # ours, measured
    percent_of_ceiling: float | None = None
    plan_time_us: float | None = None  # of the host
    launch_time_us: float | None = None  # of the host, not captured
    first_call_s: float | None = None  # construction, first plan and run, with what they compile
    workspace_bytes: int | None = None  # what stays allocated beside inputs and output
    peak_bytes: int | None = None  # the most in the first plan and run
    error: float | None = None  # of the sampled element nearest to, or furthest above, its bound
    allowed_error: float | None = None  # of the same element
    verdict: str = ""  # "right", "wrong", or "not all written"
    failure: str = ""  # the exception that ended the measurement

    @property
    def is_usable(self) -> bool:
        """Whether this is the time of a right answer."""
        return self.median_time is not None and self.verdict == "right"


@dataclass(frozen=True)
class Setting:
    """What all rows of a run share."""

    machine: Machine
    seed: int
    on_gpu: bool


def result_of(case: Case, peer: Peer, setting: Setting, min_bytes: int, flops: int) -> Result:
    """The row of a measurement that has not begun."""
    dtype = str(case.dtype).removeprefix("torch.")
    return Result(
        routine=peer.routine,
        backend=peer.name,
        resolved_backend=peer.kernel,
        case_tag=case.name,
        batch_size=len(case.qo_lens),
        s_qo=max(case.qo_lens),
        s_kv=max(case.kv_lens),
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim_qk=case.head_dim,
        head_dim_vo=case.head_dim,
        page_size=case.page_size,
        causal=True,
        q_dtype=dtype,
        kv_dtype=dtype,
        avg_actual_seq_len=sum(case.kv_lens) / len(case.kv_lens),
        random_actual_seq_len=len(set(case.kv_lens)) > 1,
        random_seed=setting.seed,
        no_cuda_graph=not setting.on_gpu,
        case_group=case.group,
        case_kind=case.kind,
        window_left=case.window_left,
        num_tokens=case.num_tokens,
        min_bytes=min_bytes,
        flops=flops,
        **vars(setting.machine),
    )


COLUMNS = tuple(field.name for field in fields(Result))


def append(path: Path, result: Result) -> None:
    """Add a row, and the header to a new file.

    Raises:
        ValueError: The file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.exists() and path.stat().st_size > 0
    if begun:
        _check_header(path)
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if not begun:
            writer.writerow(COLUMNS)
        writer.writerow([_text(getattr(result, name)) for name in COLUMNS])


def read(path: Path) -> list[Result]:
    """All rows of a file.

    Raises:
        ValueError: The file has other columns.
    """
    _check_header(path)
    types = typing.get_type_hints(Result)
    with path.open(newline="") as file:
        return [
            Result(**{name: _value(row[name], types[name]) for name in COLUMNS})
            for row in csv.DictReader(file)
        ]


def _check_header(path: Path) -> None:
    with path.open(newline="") as file:
        header = tuple(next(csv.reader(file)))
    if header != COLUMNS:
        raise ValueError(f"{path} has the columns {header}, expected {COLUMNS}: use another file")


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())


def _value(text: str, kind: object) -> object:
    options = typing.get_args(kind) or (kind,)
    if text == "" and type(None) in options:
        return None
    parse = {bool: lambda t: t == "True", int: int, float: float, str: str}
    return parse[options[0]](text)


def _flashinfer_version(on_gpu: bool) -> str:
    """Of an unpacked wheel without metadata too, where it can be imported."""
    version = package_version(FLASHINFER_PACKAGE)
    if version is None and on_gpu and importlib.util.find_spec("flashinfer") is not None:
        version = importlib.import_module("flashinfer").__version__
    return version or ""
