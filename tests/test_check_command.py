"""`pagedattn check`: what it prints and how it exits."""

import os
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from pagedattn import backends
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.tally import batch_of_seed, check_batches, describe_row, supported_batches
from pagedattn.cli import main


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Capsules of what fails on purpose go to a folder of their own."""
    monkeypatch.chdir(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(main, ["check", "--device", "cpu", *arguments])


class Wrong(ReferenceBackend):
    """One too much everywhere."""

    def run(self, q, k_pages, v_pages, out, lse):
        super().run(q, k_pages, v_pages, out, lse)
        out += 1


class Raising(ReferenceBackend):
    """Cannot compute anything, and finds out late."""

    def run(self, q, k_pages, v_pages, out, lse):
        raise ZeroDivisionError("no kernel for this")


class Nothing(ReferenceBackend):
    """Supports nothing."""

    @classmethod
    def unsupported_reasons(cls, spec, page_size, device):
        return ["needs a machine from the future", "needs patience"]


class OnlyHeadDim64(ReferenceBackend):
    """Supports some of what is drawn."""

    @classmethod
    def unsupported_reasons(cls, spec, page_size, device):
        return [] if spec.head_dim == 64 else [f"head_dim={spec.head_dim}"]


def plant(monkeypatch, *classes):
    for cls in classes:
        entry = backends._Entry(f"{__name__}.{cls.__name__}", needs="torch", install="")
        monkeypatch.setitem(backends._BACKENDS, cls.__name__.lower(), entry)


def test_a_right_backend_exits_with_0_and_says_what_was_compared(monkeypatch):
    result = run("--backend", "reference", "--examples", "2")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "reference vs dense float64" in line]
    assert [re.split(r"\s{2,}", row.strip())[1] for row in rows] == ["prefill", "decode", "mixed"]
    assert all(row.rstrip().endswith("ok") for row in rows)
    assert all(re.search(r" 2 +\d\.\de[-+]\d\d (out|lse) +\d\.\de[-+]\d\d ", row) for row in rows)


def test_a_wrong_backend_exits_with_1_and_shows_the_first_case(monkeypatch):
    plant(monkeypatch, Wrong)
    result = run("--backend", "wrong", "--mode", "decode", "--examples", "3", "--seed", "5")
    assert result.exit_code == 1
    assert re.search(r"wrong vs float64 reference +decode +3 .* 3 wrong", result.stdout)
    report = result.stdout[result.stdout.index("MISMATCH") :]
    assert "wrong vs float64 reference, decode: 3 of 3 steps" in report
    batch = batch_of_seed("decode", 5, torch.device("cpu"))
    for part in (
        str(batch.spec),
        f"page_size={batch.page_size}",
        f"kv_lens={batch.kv_lens}",
        f"qo_lens={batch.qo_lens}",
        f"values={batch.values!r}",
        "--backend wrong --mode decode --seed 5 --examples 1 --device cpu",
    ):
        assert part in report
    place = re.search(r"(out|lse)\[\d+, \d+.*\] is .*, expected .*: error .*, allowed .*", report)
    assert place
    assert re.search(r"request \d of \d, query \d of \d, kv_len \d", report)


def test_one_wrong_backend_does_not_hide_the_others(monkeypatch):
    plant(monkeypatch, Wrong)
    arguments = ["--mode", "decode", "--examples", "2"]
    result = run("--backend", "wrong", "--backend", "reference", *arguments)
    assert result.exit_code == 1
    assert re.search(r"reference vs dense float64 .* ok", result.stdout)
    assert result.stdout.count("MISMATCH") == 1


def test_the_command_that_it_prints_shows_the_same_case_again(monkeypatch):
    plant(monkeypatch, Wrong)
    first = run("--backend", "wrong", "--mode", "mixed", "--examples", "4").stdout
    again = re.search(r"again: pagedattn check (.*)", first).group(1).split()
    second = CliRunner().invoke(main, ["check", *again]).stdout
    place = re.compile(r"first: .*")
    assert place.search(first).group() == place.search(second).group()


def test_a_backend_that_raises_is_wrong(monkeypatch):
    plant(monkeypatch, Raising)
    result = run("--backend", "raising", "--mode", "decode", "--examples", "2")
    assert result.exit_code == 1
    assert "raised ZeroDivisionError: no kernel for this" in result.stdout


def test_an_unknown_backend_exits_with_2_and_lists_the_known_ones():
    result = run("--backend", "cutlass")
    assert result.exit_code == 2
    known = "flashinfer, triton, reference"
    assert f"unknown backend 'cutlass', expected one of {known}" in result.output


def test_a_named_backend_that_cannot_run_exits_with_2_and_all_its_reasons(monkeypatch):
    plant(monkeypatch, Nothing)
    result = run("--backend", "nothing")
    assert result.exit_code == 2
    assert "backend 'nothing' cannot run on cpu" in result.output
    assert "needs a machine from the future" in result.output
    assert "needs patience" in result.output


def test_without_names_all_that_run_are_checked_and_the_others_listed(monkeypatch):
    monkeypatch.delitem(backends._BACKENDS, "triton")
    plant(monkeypatch, Nothing)
    result = run("--examples", "1", "--mode", "decode")
    assert result.exit_code == 0, result.output
    assert "nothing is left out: needs a machine from the future; needs patience" in result.stdout
    assert re.search(r"reference vs dense float64 +decode +1 ", result.stdout)
    assert "nothing vs" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "training"],
        ["--examples", "0"],
        ["--examples", "many"],
        ["--seed", "-1"],
        ["--device", "toaster"],
        ["--device", "cuda:99"],
        ["--wat"],
        ["extra"],
    ],
)
def test_bad_usage_exits_with_2(arguments):
    result = run("--backend", "reference", *arguments)
    assert result.exit_code == 2, result.output
    assert "Error" in result.output


def test_the_same_seed_prints_the_same_and_another_seed_another():
    arguments = ["--backend", "reference", "--mode", "decode", "--examples", "2", "--seed"]
    assert run(*arguments, "3").stdout == run(*arguments, "3").stdout
    assert run(*arguments, "3").stdout != run(*arguments, "4").stdout


def test_a_backend_with_limits_gets_steps_that_it_supports(monkeypatch):
    plant(monkeypatch, OnlyHeadDim64)
    device = torch.device("cpu")
    drawn = list(supported_batches("onlyheaddim64", "decode", range(60), device))
    assert 0 < len(drawn) < 60
    assert {batch.spec.head_dim for _, batch in drawn} == {64}
    tally = check_batches("onlyheaddim64", "decode", iter(drawn[:2]), device)
    assert (tally.num_examples, tally.failures) == (2, ())


def test_a_row_is_described_by_its_request():
    batch = batch_of_seed("mixed", 0, torch.device("cpu"))
    described = [describe_row(batch, row) for row in range(sum(batch.qo_lens))]
    expected = [
        f"request {request} of {len(batch.kv_lens)}, query {i} of {qo_len}, kv_len {kv_len}"
        for request, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True))
        for i in range(qo_len)
    ]
    assert described == expected


def run_fresh(code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not need the interpreter")
def test_on_a_cpu_it_asks_triton_to_interpret_in_time():
    code = (
        "import sys, os\n"
        "from pagedattn.checking.run import check\n"
        "assert 'triton' not in sys.modules and 'TRITON_INTERPRET' not in os.environ\n"
        "check(['--examples', '1', '--mode', 'decode'])\n"
    )
    assert re.search(r"triton vs float64 reference +decode +1 .* ok", run_fresh(code))


def test_it_works_without_hypothesis():
    code = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "from pagedattn.checking.run import check\n"
        "check(['--examples', '1', '--mode', 'decode', '--backend', 'reference'])\n"
    )
    assert "reference vs dense float64" in run_fresh(code)
