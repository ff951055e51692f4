import ast
import doctest
import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import benchmark_stand_ins
import pytest
import torch
from click.testing import CliRunner
from test_flashinfer_signatures import parameters_of

import pagedattn
from benchmarks import cases, plots, readme, results_file, run
from benchmarks.command import bench
from benchmarks.inputs import Memory
from benchmarks.oracle import expect, judge, sample_rows
from benchmarks.peer import Call, Peer
from benchmarks.peers import PEERS, select
from benchmarks.peers.flash_attention import FA3_MODULE, FA4_MODULE
from benchmarks.session import Session
from benchmarks.standing import standings
from benchmarks.work import H200, Work
from pagedattn import PagedAttention
from pagedattn.backends.reference import visible_range
from pagedattn.checking.bound import FLASHINFER, FLOAT32_SUMS, allowed_error
from pagedattn.checking.step import Step, oracle
from pagedattn.cli import main

CPU = torch.device("cpu")
SMALL = cases.small()
BY_NAME = {case.name: case for case in cases.CASES}
PEER_OF_NAME = {peer.name: peer for peer in PEERS}


def run_bench(*arguments: object):
    return CliRunner().invoke(bench, [str(a) for a in arguments])


def result(backend: str, median_time: float, case: str = "decode 1x32k") -> results_file.Result:
    setting = results_file.Setting(replace(results_file.Machine.here(CPU), gpu="H200"), 0, True)
    work = Work.of(BY_NAME[case])
    row = results_file.result_of(
        BY_NAME[case], PEER_OF_NAME[backend], setting, work.num_bytes, work.flops
    )
    return replace(row, median_time=median_time, verdict="right", tflops=1.0, plan_time_us=2.0)


def test_the_cases_that_are_measured_in_every_run_come_first():
    names = [case.name for case in cases.CASES]
    anchors = [case.name for case in cases.CASES if case.group == "anchors"]
    assert names[: len(anchors)] == anchors == [case.name for case in cases.anchors()]
    assert len(set(names)) == len(names)


def test_the_example_in_a_docstring_prints_what_it_says():
    tried = doctest.testmod(cases)
    assert (tried.attempted, tried.failed) == (1, 0)


def test_mixed_cases_have_their_decode_rows_first():
    for case in cases.CASES:
        if case.kind == "mixed":
            assert all(n == 1 for n in case.qo_lens[: case.num_decodes]), case.name
            assert all(n > 1 for n in case.qo_lens[case.num_decodes :]), case.name


def test_cases_are_selected_by_name_group_glob_or_part():
    assert [c.name for c in cases.select("decode 1x32k", "cuda")] == ["decode 1x32k"]
    assert cases.select("anchors", "cpu") == cases.anchors()
    assert {c.kind for c in cases.select("mixed", "cuda")} == {"mixed"}
    assert {c.head_dim for c in cases.select("*dim 64", "cuda")} == {64}
    assert cases.select(None, "cpu") == SMALL
    assert not set(SMALL) & set(cases.select(None, "cuda"))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_work_is_what_a_count_of_visible_keys_gives(case):
    pairs, keys = 0, set()
    for request, (kv_len, qo_len) in enumerate(zip(case.kv_lens, case.qo_lens, strict=True)):
        for position in range(kv_len - qo_len, kv_len):
            low, high = visible_range(case.spec, kv_len, position)
            pairs += high - low
            keys |= {(request, key) for key in range(low, high)}
    work = Work.of(case)
    assert work.flops == 4 * pairs * case.num_qo_heads * case.head_dim
    row_bytes = case.num_qo_heads * case.head_dim * 2
    assert work.num_bytes == len(keys) * case.token_bytes + 2 * case.num_tokens * row_bytes


def test_work_is_what_published_rates_and_times_say():
    decode, prefill = Work.of(BY_NAME["decode 64x4k"]), Work.of(BY_NAME["prefill 1x8k"])
    assert round(decode.num_bytes / 258.1e-6 / 1e9) == 4164
    assert round(prefill.flops / 1812e-6 / 1e12) == 303
    assert round(1e3 * prefill.bound_ms(H200)) == 750
    both = Work.of(BY_NAME["mixed 32x8k + 1x8k"])
    assert round(both.num_bytes / 4.4e12 * 1e6) == 282


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_sampled_rows_are_those_of_the_oracle_with_its_bounds(case, device):
    inputs = Memory([case], CPU).inputs(case)
    expected = expect(inputs, (FLOAT32_SUMS, FLASHINFER))
    step = Step(case.spec, inputs.table, inputs.qo_indptr, inputs.q, inputs.kv_cache)
    right, rows = oracle(step), expected.rows
    torch.testing.assert_close(expected.out, right.out[rows], rtol=0, atol=1e-12)
    for arithmetic, band in expected.bands.items():
        bound = allowed_error(step, right, arithmetic).out[rows]
        torch.testing.assert_close(expected.low + band, bound, rtol=1e-6, atol=0)
    there = replace(inputs, q=inputs.q.to(device), kv_cache=inputs.kv_cache.to(device))
    again = expect(there, (FLOAT32_SUMS,))
    torch.testing.assert_close(again.out.cpu(), expected.out, rtol=0, atol=1e-12)


def test_a_sample_has_the_ends_of_the_step_and_of_its_extremes():
    case = replace(SMALL[0], kv_lens=(40, 90, 20, 50), qo_lens=(30, 9, 12, 20))
    rows = sample_rows(Memory([case], CPU).inputs(case), max_rows=10)
    assert len(rows) == 10
    assert {0, 29, 30, 38, 39, 50, 51, 70} <= {row.row for row in rows}
    assert {row.row: row.position for row in rows}[30] == 90 - 9
    assert rows == sorted(rows, key=lambda row: row.row)


def test_a_wrong_element_and_one_that_was_never_written_are_seen():
    case = replace(SMALL[0], kv_lens=(40, 90), qo_lens=(30, 9))
    inputs = Memory([case], CPU).inputs(case)
    expected = expect(inputs, (FLOAT32_SUMS,))
    out = torch.zeros_like(inputs.q)
    out[expected.rows] = expected.out.to(out.dtype)
    assert judge(out, expected, FLOAT32_SUMS).word == "right"
    not_sampled = next(r for r in range(len(out)) if r not in expected.rows.tolist())
    out[not_sampled, 0, 0] = torch.nan
    assert judge(out, expected, FLOAT32_SUMS).word == "not all written"
    out[not_sampled, 0, 0] = 0
    out[expected.rows[3], 1, 2] += 0.1
    verdict = judge(out, expected, FLOAT32_SUMS)
    assert verdict.word == "wrong"
    assert verdict.error == pytest.approx(0.1, rel=0.2)
    out[expected.rows[3], 1, 2] = torch.nan
    assert judge(out, expected, FLOAT32_SUMS).error == torch.inf


@pytest.mark.parametrize("name", [peer.name for peer in PEERS if not peer.ours])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_peer_computes_the_small_cases_that_it_takes(name, monkeypatch):
    for module in ("flashinfer", FA3_MODULE, FA4_MODULE):
        monkeypatch.setitem(sys.modules, module, benchmark_stand_ins)
    peer = PEER_OF_NAME[name]
    taken = [case for case in SMALL if peer.takes(case)]
    for case in taken:
        inputs = Memory([case], CPU).inputs(case)
        inputs.out.fill_(torch.nan)
        call = peer.build(inputs)
        call.plan()
        expected = expect(inputs, (peer.arithmetic,))
        verdict = judge(call.rows(call.run()), expected, peer.arithmetic)
        assert verdict.word == "right", f"{case.name}: {verdict}"
    assert taken


METHODS = [
    ("attention/_core.py", "BatchAttention"),
    ("pod.py", "PODWithPagedKVCacheWrapper"),
    ("pod.py", "BatchPODWithPagedKVCacheWrapper"),
]


@pytest.mark.parametrize(("path", "class_name"), METHODS, ids=[name for _, name in METHODS])
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_stand_ins_take_what_flashinfer_takes(path, class_name, method):
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer-python is not installed: nothing to compare the stand-ins with")
    source = ast.parse((Path(spec.origin).parent / path).read_text())
    real_class = next(n for n in source.body if getattr(n, "name", "") == class_name)
    real = parameters_of(next(n for n in real_class.body if getattr(n, "name", "") == method))
    stand_in = getattr(getattr(benchmark_stand_ins, class_name), method)
    ours = list(inspect.signature(stand_in).parameters)
    assert ours == [name for name in real if name in ours], "unknown, or in another order"
    positional = [name for name, default in real.items() if default is None]
    assert set(positional) <= set(ours)


def test_a_run_is_checked_timed_written_and_drawn(device, backend, tmp_path):
    file = tmp_path / "results.csv"
    done = run_bench(
        *("--device", device, "--case", "small decode", "--backends", f"pagedattn-{backend}"),
        *("--csv", file, "--plot", tmp_path / "plots", "--seconds", 0.01),
    )
    assert done.exit_code == 0, done.output
    (row,) = results_file.read(file)
    assert (row.case_tag, row.backend) == ("small decode", f"pagedattn-{backend}")
    assert row.refcheck
    assert row.is_usable
    assert row.error <= row.allowed_error
    assert row.median_time > 0
    assert row.plan_time_us > 0
    assert row.no_cuda_graph == (device.type == "cpu" or backend == "reference")
    assert row.tflops == pytest.approx(row.flops / row.median_time / 1e9, rel=1e-4)


def test_batch_invariance_is_timed_where_it_is_asked_for(device, monkeypatch):
    attentions = []

    def record(*args, **options):
        attentions.append(PagedAttention(*args, **options))
        return attentions[-1]

    monkeypatch.setattr("benchmarks.peers.ours.PagedAttention", record)
    for name in ("pagedattn-triton", "pagedattn-triton-invariant"):
        (peer,) = select((name,))
        if missing := peer.missing(device):
            pytest.skip(missing)
        peer.build(Memory(SMALL[:1], device).inputs(SMALL[0]))
    assert [attn.batch_invariant for attn in attentions] == [False, True]
    assert peer not in select(())


def test_a_backend_that_raises_becomes_a_row_and_the_rest_go_on(device, monkeypatch, tmp_path):
    def build(inputs):
        raise RuntimeError("no\nsuch kernel")

    broken = Peer("pagedattn-broken", "none", build, ours=True)
    monkeypatch.setattr("benchmarks.peers.PEERS", (broken, PEER_OF_NAME["pagedattn-reference"]))
    file = tmp_path / "results.csv"
    done = run_bench(
        *("--device", device, "--case", "small window", "--csv", file, "--seconds", 0.01),
        *("--backends", "pagedattn-*"),
    )
    assert done.exit_code == 1
    first, second = results_file.read(file)
    assert (first.failure, first.verdict) == ("RuntimeError: no such kernel", "")
    assert second.is_usable


def test_a_wrong_backend_is_timed_and_named():
    def build(inputs):
        return Call(plan=lambda: None, run=lambda: inputs.out.zero_())

    session = Session(SMALL[:1], CPU, 0.01)
    row = session.measure(SMALL[0], Peer("zeros", "none", build))
    assert row.verdict == "wrong"
    assert row.error > row.allowed_error
    assert row.median_time is not None
    assert not row.is_usable


def test_a_budget_stops_before_the_next_measurement(device):
    asked = ("--device", device, "--case", "small", "--backends", "pagedattn-reference")
    done = run_bench(*asked, "--budget", 0)
    assert done.exit_code == 0
    assert "stopped by the budget with 6 left" in done.output


def test_a_process_of_its_own_that_takes_too_long_becomes_a_row():
    apart = run.Apart(CPU, seconds=0.01, limit=0.05)
    row = apart.measure(SMALL[0], PEER_OF_NAME["pagedattn-reference"])
    assert row.failure == "no answer in 0.05 s"


def test_a_process_of_its_own_hands_its_row_back():
    apart = run.Apart(CPU, seconds=0.01, limit=60)
    row = apart.measure(SMALL[0], PEER_OF_NAME["pagedattn-reference"])
    assert row.is_usable, row.failure


def test_results_survive_the_file(tmp_path):
    file = tmp_path / "new" / "results.csv"
    rows = [result("pagedattn-triton", 0.25), replace(result("torch-sdpa", 1.5), failure="a, b")]
    for row in rows:
        results_file.append(file, row)
    assert results_file.read(file) == rows


def test_a_file_with_other_columns_is_refused(tmp_path):
    file = tmp_path / "results.csv"
    file.write_text("case,us\n")
    with pytest.raises(ValueError, match="use another file"):
        results_file.append(file, result("pagedattn-triton", 1))


def test_a_case_is_measured_by_the_fastest_right_answer_that_reads_pages():
    wrong = replace(result("flashinfer-fa3", 0.01), verdict="wrong")
    slow, fast = result("flashinfer-decode", 0.3), result("pagedattn-flashinfer", 0.2)
    ours, dense = result("pagedattn-triton", 0.1), result("torch-sdpa", 0.05)
    invariant = result("pagedattn-triton-invariant", 0.11)
    alone = result("pagedattn-triton", 0.1, "decode 8x512")
    outdated = result("pagedattn-triton", 9)
    (standing,) = standings([outdated, wrong, slow, fast, ours, invariant, dense, alone])
    assert standing.best_peer is fast
    assert set(standing.results) == {slow, fast, ours, invariant, dense}
    assert standing.speed(ours) == pytest.approx(2)
    assert standing.time_of("flashinfer-fa3") is None


def test_both_plots_are_drawn_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [result("pagedattn-triton", 0.1), result("flashinfer-decode", 0.2)]
    written = plots.draw_all(rows, tmp_path)
    assert [path.name for path in written] == ["roofline.svg", "relative.svg"]
    assert all("<svg" in path.read_text() for path in written)


def test_the_readme_is_in_step_with_the_newest_results():
    text = readme.README.read_text()
    expected = readme.updated(text, readme.section(readme.newest_results()))
    assert text == expected, "run python -m benchmarks.readme"


def test_the_table_gives_the_ratio_to_the_fastest_peer(tmp_path):
    for folder, triton in (("2026-01-01-a", 0.5), ("2026-02-01-a", 0.09)):
        file = tmp_path / "benchmarks" / "results" / folder / "benchmark.csv"
        for row in (result("pagedattn-triton", triton), result("flashinfer-decode", 0.1)):
            results_file.append(file, row)
    newest = readme.newest_results(tmp_path)
    assert newest == file
    table = readme.section(newest, tmp_path)
    assert "| decode 1x32k | 90.0 |  |  | flashinfer-decode | 100.0 | 0.90 |" in table
    assert "benchmarks/results/2026-02-01-a/benchmark.csv" in table


def test_pagedattn_bench_is_the_same_command(device):
    asked = ["bench", "--device", str(device), "--list", "--case", "small mixed"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert "small mixed" in done.output
    assert "small decode" not in done.output


def test_pagedattn_bench_of_an_installed_package_says_where_the_benchmark_is(monkeypatch, tmp_path):
    monkeypatch.setattr(pagedattn, "__file__", str(tmp_path / "pagedattn" / "__init__.py"))
    done = CliRunner().invoke(main, ["bench", "--list"])
    assert done.exit_code == 1
    assert "python -m benchmarks" in done.output


def test_unknown_names_are_refused(device):
    assert run_bench("--device", device, "--case", "nothing like it").exit_code == 2
    with pytest.raises(ValueError, match="expected some of"):
        select(("nothing like it",))
