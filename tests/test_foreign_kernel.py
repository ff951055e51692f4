"""The README's ten lines, run on another project's kernel: a planted fault is found and named."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import Phase, settings

README = Path(__file__).parents[1] / "README.md"
HEADING = "## Check your own kernel"


def foreign_attention(mistake: int = 0):
    """A paged attention that knows nothing of this package; its window is `mistake` too long."""

    def paged_attention(q, cache, block_table, seq_lens, query_start, scale, causal, window):
        out = torch.zeros_like(q)
        for request, seq_len in enumerate(seq_lens.tolist()):
            begin, end = query_start[request : request + 2].tolist()
            key = torch.arange(seq_len)
            pages = block_table[request].long()[key // cache.shape[2]]
            k, v = (cache[pages, i, key % cache.shape[2]].double().transpose(0, 1) for i in (0, 1))
            group = q.shape[1] // k.shape[0]
            for row in range(begin, end):
                position = seq_len - end + row
                first = max(0, position - max(window + mistake, 0)) if window >= 0 else 0
                seen = slice(first, position + 1 if causal else seq_len)
                if first >= (seen.stop or 0):
                    continue
                heads = q[row].double().view(k.shape[0], group, -1)
                scores = heads @ k[:, seen].transpose(1, 2) * scale
                out[row] = (scores.softmax(-1) @ v[:, seen]).flatten(0, 1).to(q.dtype)
        return out

    return paged_attention


def code_of_the_readme() -> str:
    section = README.read_text().split(HEADING)[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    return code[1]


def property_of_the_readme(monkeypatch, kernel):
    """The test that the README shows, of this kernel; and the batches that the kernel was given."""
    engine = ModuleType("my_engine")
    given = []

    def paged_attention(q, cache, block_table, seq_lens, *rest):
        given.append((seq_lens.tolist(), rest[0].diff().tolist(), rest[-1]))
        return kernel(q, cache, block_table, seq_lens, *rest)

    engine.paged_attention = paged_attention
    monkeypatch.setitem(sys.modules, "my_engine", engine)
    names: dict = {"__name__": "test_of_the_readme"}
    exec(code_of_the_readme(), names)
    return names["test_paged_attention"], given


def quick(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )


def test_it_is_ten_lines():
    assert len([line for line in code_of_the_readme().splitlines() if line]) <= 10


def test_a_right_kernel_passes(monkeypatch):
    test, given = property_of_the_readme(monkeypatch, foreign_attention())
    quick(25)(test)()
    assert len(given) >= 25


@pytest.mark.parametrize(
    ("mistake", "name"), [(1, "window one key long"), (-1, "window one key short")]
)
def test_a_window_off_by_one_is_found_and_named_and_shrinks_to_one_request(
    monkeypatch, mistake, name
):
    test, given = property_of_the_readme(monkeypatch, foreign_attention(mistake))
    with pytest.raises(AssertionError, match=f"Diagnosis: {name}"):
        quick(300)(test)()
    kv_lens, qo_lens, window_left = given[-1]  # what hypothesis shows is what it ran last
    assert len(kv_lens) == len(qo_lens) == 1
    assert kv_lens[0] <= 4
    assert window_left in (0, 1)


def test_the_readme_quotes_the_message():
    assert '"Diagnosis: window one key long."' in README.read_text()
