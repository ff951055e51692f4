"""`pagedattn check`: what it prints and how it exits."""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

from pagedattn import backends
from pagedattn.backends.reference import ReferenceBackend
from pagedattn.checking.place import describe_row
from pagedattn.checking.profiles import PROFILES, batch_of_seed
from pagedattn.checking.properties import PROPERTIES
from pagedattn.checking.schedule import Schedule, groups_of, shared_out
from pagedattn.checking.subject import backend_subject
from pagedattn.cli import main


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Capsules of what fails on purpose go to a folder of their own."""
    monkeypatch.chdir(tmp_path)


def run(*arguments: str):
    """The agreement alone, where no property is named."""
    if "--property" not in arguments:
        arguments = ("--property", "agreement", *arguments)
    return CliRunner().invoke(main, ["check", "--device", "cpu", *arguments])


class Wrong(ReferenceBackend):
    """One too much everywhere."""

    def run(self, q, kv_cache, out, lse):
        super().run(q, kv_cache, out, lse)
        out += 1


class Raising(ReferenceBackend):
    """Cannot compute anything, and finds out late."""

    def run(self, q, kv_cache, out, lse):
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


class Interrupted(ReferenceBackend):
    """Somebody presses Ctrl-C in its third run."""

    calls = 0

    def run(self, q, kv_cache, out, lse):
        type(self).calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        super().run(q, kv_cache, out, lse)


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
    assert result.stdout.splitlines()[-1].startswith("ok: reference; ")
    assert all(re.search(r" 2 +\d\.\de[-+]\d\d (out|lse) +\d\.\de[-+]\d\d ", row) for row in rows)


def test_a_wrong_backend_exits_with_1_and_shows_the_first_case(monkeypatch):
    plant(monkeypatch, Wrong)
    result = run("--backend", "wrong", "--mode", "decode", "--examples", "3", "--seed", "5")
    assert result.exit_code == 1
    assert re.search(r"wrong vs float64 reference +decode +3 .* 3 wrong", result.stdout)
    report = result.stdout[result.stdout.index("MISMATCH") :]
    assert "wrong vs float64 reference, agreement, decode: 3 of 3 steps" in report
    batch = batch_of_seed("decode", 5)
    for part in (
        str(batch.spec),
        f"page_size={batch.page_size}",
        f"kv_lens={batch.kv_lens}",
        f"qo_lens={batch.qo_lens}",
        f"values={batch.values!r}",
        "--backend wrong --property agreement --mode decode --seed 5 --examples 1 --device cpu",
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
        ["--property", "beauty"],
        ["--profile", "endless"],
        ["--time", "0"],
        ["--jobs", "-1"],
        ["--target", "no_such_module:attention"],
        ["--target", "math:no_such_function"],
        ["--target", "math"],
        ["--target", "math:pi"],
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


def schedule_of(name, props=("agreement",), modes=("decode",), num_tasks=3, **options):
    subject, cpu = backend_subject(name), torch.device("cpu")
    groups, _ = groups_of([subject], props, modes, cpu, lambda *_: num_tasks)
    return Schedule(groups, [subject], PROFILES["quick"], 0, cpu, **options)


def taken(schedule, at_most=1000):
    tasks = []
    while len(tasks) < at_most and (task := schedule.take()) is not None:
        tasks.append(task)
    return tasks


def test_a_backend_with_limits_gets_steps_that_it_supports(monkeypatch):
    plant(monkeypatch, OnlyHeadDim64)
    tasks = taken(schedule_of("onlyheaddim64", num_tasks=20))
    assert len(tasks) == 20
    assert {batch_of_seed(task.mode, task.seed).spec.head_dim for task in tasks} == {64}
    assert tasks[-1].seed > 20


def test_a_backend_that_supports_no_step_ends_the_schedule(monkeypatch):
    plant(monkeypatch, Nothing)
    assert taken(schedule_of("nothing")) == []
    assert taken(schedule_of("nothing", endless=True)) == []


def test_every_part_of_a_schedule_is_a_fair_one():
    tasks = taken(schedule_of("reference", ("agreement", "poison"), ("decode", "mixed"), 8))
    for part in (tasks[:4], tasks[8:12]):
        assert {(task.prop, task.mode) for task in part} == {
            (prop, mode) for prop in ("agreement", "poison") for mode in ("decode", "mixed")
        }
    assert len(set(tasks)) == len(tasks) == 16
    assert len(taken(schedule_of("reference", endless=True), at_most=50)) == 50


def test_a_declined_task_is_replaced_but_not_for_ever():
    schedule = schedule_of("reference", num_tasks=2)
    seeds = []
    while (task := schedule.take()) is not None:
        seeds.append(task.seed)
        schedule.declined(task)
    assert seeds == list(range(400))


def test_a_number_of_steps_in_all_is_shared_out():
    subject, cpu = backend_subject("reference"), torch.device("cpu")
    groups, left_out = groups_of(
        [subject], list(PROPERTIES), ("decode", "mixed"), cpu, lambda *_: 1
    )
    shared = {group.prop: group.num_tasks for group in shared_out(groups, 2700)}
    assert shared["agreement"] == 12 * shared["poison"]
    assert 2600 <= sum(shared.values()) <= 2700
    assert len(left_out) == 2


def test_properties_are_listed_with_what_they_compare():
    result = CliRunner().invoke(main, ["check", "--list-properties"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(PROPERTIES)
    assert all(" vs " in line or "two sizes" in line for line in lines)


def test_a_property_that_cannot_run_is_listed_with_the_reason():
    result = run("--backend", "reference", "--property", "no host sync", "--property", "poison")
    assert result.exit_code == 0, result.output
    reason = "needs an NVIDIA GPU, got device cpu"
    assert f"reference: no host sync is not tried: {reason}" in result.stdout
    assert re.search(r"reference: poison +any +1 .* ok", result.stdout)
    alone = run("--backend", "reference", "--property", "graph replay")
    assert alone.exit_code == 2
    assert f"nothing was checked: reference: graph replay is not tried: {reason}" in alone.output
    mode = run("--backend", "reference", "--property", "decode row", "--mode", "decode")
    assert mode.exit_code == 2
    assert "decode row is not tried: it is tried on prefill, mixed steps" in mode.output


def test_by_default_every_property_is_tried_or_left_out_with_a_reason():
    result = CliRunner().invoke(main, ["check", "--device", "cpu", "--backend", "reference"])
    assert result.exit_code == 0, result.output
    for name in set(PROPERTIES) - {"agreement"}:
        assert re.search(rf"reference: {name} ( *any +1 .* ok|is not tried: )", result.stdout), name


def test_a_broken_property_is_shown_with_what_was_compared(monkeypatch):
    plant(monkeypatch, Wrong)
    monkeypatch.setattr(Wrong, "run", by_page_number)
    result = run("--backend", "wrong", "--property", "page renaming", "--examples", "2")
    assert result.exit_code == 1
    assert re.search(r"wrong: page renaming +any +2 .* [12] wrong", result.stdout)
    assert "keys moved to other page numbers vs where they were, bit for bit: " in result.stdout
    again = re.search(r"again: pagedattn (check .*)", result.stdout).group(1)
    assert "keys moved" in CliRunner().invoke(main, shlex.split(again)).stdout


def by_page_number(self, q, kv_cache, out, lse):
    ReferenceBackend.run(self, q, kv_cache, out, lse)
    out += sum(int(pages.sum()) for pages in self.pages)


def test_time_ends_a_check():
    begin = time.monotonic()
    result = run("--backend", "reference", "--time", "1.5")
    assert result.exit_code == 0, result.output
    assert 1.5 <= time.monotonic() - begin < 30


def test_json_is_one_document_and_so_is_the_record(monkeypatch, tmp_path):
    plant(monkeypatch, Wrong)
    arguments = ["--mode", "decode", "--examples", "2", "--json", "--record", "new/record.json"]
    result = run("--backend", "wrong", "--backend", "reference", *arguments)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "new" / "record.json").read_text())
    assert (document["verdict"], document["cases"], document["device"]) == ("wrong", 4, "cpu")
    assert document["versions"]["torch"] == torch.__version__
    wrong, right = document["counts"]
    assert (wrong["subject"], wrong["property"], wrong["mode"]) == ("wrong", "agreement", "decode")
    assert (wrong["checked"], wrong["wrong"], right["wrong"]) == (2, 2, 0)
    assert right["worst_error_over_allowed"] < 1 < wrong["worst_error_over_allowed"]
    first, second = document["mismatches"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert (tmp_path / first["capsule"]).is_file()
    assert second["capsule"] is None
    assert "--seed 1" in second["again"]
    assert json.loads(run("--backend", "reference", *arguments).stdout)["verdict"] == "ok"


def test_a_row_is_described_by_its_request():
    batch = batch_of_seed("mixed", 0)
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
        "check(['--property', 'agreement', '--examples', '1', '--mode', 'decode'])\n"
    )
    assert re.search(r"triton vs float64 reference +decode +1 .* ok", run_fresh(code))


def test_it_works_without_hypothesis():
    code = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "from pagedattn.checking.run import check\n"
        "check(['--property', 'poison', '--examples', '1', '--backend', 'reference'])\n"
    )
    assert "reference: poison" in run_fresh(code)


def test_what_was_tried_before_an_interruption_is_told(monkeypatch):
    plant(monkeypatch, Interrupted)
    monkeypatch.setattr(Interrupted, "calls", 0)
    result = run("--backend", "interrupted", "--examples", "50", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "ok"
    assert document["cases"] == 2
    assert document["not_tried"][-1].startswith("interrupted")
