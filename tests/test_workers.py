"""Workers: what hangs or dies is a mismatch with its seed, and the rest goes on."""

import json
import os
import re

import pytest
import targets
import torch
from click.testing import CliRunner

from pagedattn.checking.capsule import load_capsule
from pagedattn.checking.compare import Difference
from pagedattn.checking.profiles import batch_of_seed
from pagedattn.checking.task import Outcome, Task
from pagedattn.cli import main

EXAMPLES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capsules")


@pytest.fixture(scope="module")
def document(folder):
    """The record of a function that ends its process for one step and hangs for another."""
    arguments = ["--property", "agreement", "--mode", "decode", "--examples", EXAMPLES]
    limits = ["--jobs", 2, "--case-time", 8, "--capsule-dir", folder]
    command = ["check", "--target", "targets:hostile", "--device", "cpu", *arguments, *limits]
    fates = {targets.DIES: str(num_keys(1)), targets.HANGS: str(num_keys(4))}
    result = CliRunner(env=fates).invoke(main, [*map(str, command), "--json"])
    assert result.exit_code == 1, result.output
    return json.loads(result.stdout)


def num_keys(seed):
    return sum(batch_of_seed("decode", seed).kv_lens)


def test_what_ends_its_process_or_hangs_is_a_mismatch_with_its_seed(document):
    problems = {m["seed"]: m["problem"] for m in document["mismatches"]}
    same = [[s for s in range(EXAMPLES) if num_keys(s) == num_keys(seed)] for seed in (1, 4)]
    assert set(problems) == {*same[0], *same[1]}
    assert problems[1].startswith("its process died of SIGABRT: ")
    assert "about to die" in problems[1]
    assert problems[4].startswith("its process gave no answer in time, and was killed")


def test_the_rest_goes_on(document):
    (counts,) = document["counts"]
    assert counts["checked"] == document["cases"] == EXAMPLES
    assert counts["wrong"] == len(document["mismatches"]) < EXAMPLES


def test_the_first_is_kept_and_told_how_to_be_seen_again(document, folder):
    kept = [m for m in document["mismatches"] if m["capsule"]]
    assert len(kept) == len(list(folder.iterdir())) == 1
    capsule = load_capsule(next(folder.iterdir()))
    assert capsule.got is None
    assert tuple(capsule.step.kv_lens) == batch_of_seed("decode", kept[0]["seed"]).kv_lens
    assert all(m["again"].endswith("--examples 1 --device cpu --jobs 1") for m in kept)


def test_workers_find_what_one_process_finds_and_shrink_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["check", "--target", "targets:window_one_short", "--device", "cpu", "--json"]
    command += ["--property", "agreement", "--mode", "mixed", "--examples", "3"]
    here = json.loads(CliRunner().invoke(main, command).stdout)
    there = json.loads(CliRunner().invoke(main, [*command, "--jobs", "1"]).stdout)
    for document in (here, there):
        del document["seconds"]
    assert here["mismatches"]
    assert here == there


def test_workers_that_cannot_start_end_the_check(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    command = ["check", "--backend", "reference", "--device", "cpu", "--jobs", "1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert re.search(r"Error: a worker process ended with code 1", result.output)


def test_outcomes_travel_as_json():
    task = Task("triton", "poison", "mixed", 7)
    worst = Difference("lse", 1, 2, None, float("nan"), 1.0, float("inf"), 0.5)
    outcome = Outcome(task, worst, "a vs b: lse", None, None, "lines", "capsule.safetensors")
    line = json.dumps(outcome.to_json(), allow_nan=False)
    back = Outcome.from_json(json.loads(line))
    assert str(back) == str(outcome)
    assert back.worst.excess == torch.inf
    assert Outcome.from_json(json.loads(json.dumps(Outcome(task).to_json()))) == Outcome(task)
    assert os.sep not in line
