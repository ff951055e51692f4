"""Capsules that a shadow writes: they hold the wrong answer, and replay."""

import re

import pytest
import torch
from click.testing import CliRunner
from planted_backends import build, looked_at, planted, serve, step_of  # noqa: F401

from pagedattn.checking.capsule import load_capsule
from pagedattn.checking.diagnose import diagnose
from pagedattn.checking.shadow import QUERIES_BEFORE
from pagedattn.cli import main

pytestmark = pytest.mark.usefixtures("planted")


@pytest.mark.parametrize("pair", [False, True])
def test_a_capsule_is_written_and_replays(device, tmp_path, caplog, pair):
    folder = tmp_path / "some where"
    attn = build("WindowOneShort", "reference", device, on_mismatch="capsule", capsule_dir=folder)
    step = step_of(device, ((40, 90), (6, 80)))
    kv_cache = tuple(step.kv_cache.transpose(0, 1).clone()) if pair else step.kv_cache
    attn.plan(step.page_table, step.qo_indptr)
    attn.run_return_lse(step.q, kv_cache)
    (path,) = folder.iterdir()
    assert re.fullmatch(r"shadow-WindowOneShort-step0-layer0-\d+-0\.safetensors", path.name)
    command = caplog.records[-1].message
    assert f"pagedattn replay '{path}' --backend WindowOneShort" in command

    capsule = load_capsule(path)
    assert capsule.metadata.num_pages == step.kv_cache.shape[0]
    pages = capsule.original_table.kv_indices.tolist()
    assert pages in [step.page_table.pages_of(r)[: len(pages)].tolist() for r in (0, 1)]
    assert 1 < capsule.step.q.shape[0] <= QUERIES_BEFORE + 1
    assert diagnose(capsule.step, capsule.got).names[0] == "window one key short"
    arguments = ["replay", str(path), "--device", device.type, "--backend"]
    for backend, code in (("WindowOneShort", 1), ("reference", 0)):
        result = CliRunner().invoke(main, [*arguments, backend])
        assert result.exit_code == code, result.output
        assert "Diagnosis: window one key short" in result.output


def test_a_capsule_of_the_shadows_fault_holds_the_shadows_answer(device, tmp_path):
    attn = build("reference", "WindowOneShort", device, on_mismatch="capsule", capsule_dir=tmp_path)
    serve(attn, step_of(device))
    (path,) = tmp_path.iterdir()
    capsule = load_capsule(path)
    assert capsule.metadata.backend == "WindowOneShort"
    assert "WindowOneShort (shadow) is WRONG" in capsule.metadata.problem
    assert diagnose(capsule.step, capsule.got).names[0] == "window one key short"


def test_a_capsule_of_a_run_without_lse_is_explained_by_its_output_alone(device, tmp_path):
    attn = build("WindowOneShort", "reference", device, on_mismatch="capsule", capsule_dir=tmp_path)
    step = step_of(device)
    attn.plan(step.page_table, step.qo_indptr)
    attn.run(step.q, step.kv_cache)
    (path,) = tmp_path.iterdir()
    capsule = load_capsule(path)
    assert not capsule.has_lse
    assert torch.equal(capsule.got.lse, capsule.expected.lse)
    result = CliRunner().invoke(
        main, ["replay", str(path), "--device", device.type, "--backend", "reference"]
    )
    assert "Diagnosis: window one key short. It explains the whole answer." in result.output


def test_capsules_end_and_logging_goes_on(device, tmp_path, caplog):
    attn = build(
        "WindowOneShort", "reference", device,
        on_mismatch="capsule", capsule_dir=tmp_path, max_capsules=2,
    )  # fmt: skip
    for _ in range(4):
        serve(attn, step_of(device))
    assert len(list(tmp_path.iterdir())) == 2
    assert len(looked_at(caplog)) == 4


def test_objects_that_share_a_folder_do_not_overwrite_one_anothers_capsules(device, tmp_path):
    for _ in range(2):
        attn = build(
            "WindowOneShort", "reference", device, on_mismatch="capsule", capsule_dir=tmp_path
        )
        serve(attn, step_of(device))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_said_and_serving_goes_on(device, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    attn = build("WindowOneShort", "reference", device, on_mismatch="capsule", capsule_dir=blocked)
    serve(attn, step_of(device))
    assert len(looked_at(caplog)) == 1
    assert "no capsule written" in caplog.records[-1].message
