"""One captured CUDA graph serves every later plan: replays are what an eager run gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedattn.attention import AttentionOutput, PagedAttention
from pagedattn.capacity import Capacity
from pagedattn.checking.compare import compare
from pagedattn.checking.properties.base import Answer, Finding, Property, Trial, related
from pagedattn.checking.properties.objects import no_gpu
from pagedattn.checking.step import Step
from pagedattn.checking.transforms import last_queries, select_requests

SPARE_ROWS, SPARE_PAGES = 3, 2


def _graph_replay(trial: Trial) -> Iterator[Finding]:
    step = trial.step()
    everyone = list(range(len(step.kv_lens)))
    cut = trial.choices.integer(0, len(everyone))
    # shorter, smaller and reordered steps, and the first one again
    others = [
        select_requests(step, everyone[::-1]),
        select_requests(step, everyone[cut:]),
        last_queries(step, 1),
    ]
    graph = CapturedRun(str(trial.subject.backend), step)
    for number, each in enumerate([step, *others, step]):
        replayed, eager = Answer(each, graph.replay(each)), trial.answer(each)
        truth = trial.subject.truth(each)
        what = f"replay {number} of one graph"
        comparison = compare(replayed.got, *truth)
        problem = None if comparison.ok else f"{what} vs float64: {comparison.worst}"
        yield Finding((replayed,), comparison.worst, problem)
        answers, bound = (replayed, eager), truth.bound
        yield related(f"{what} vs eager", replayed.got, eager.got, answers, bound, bound)


class CapturedRun:
    """`run_return_lse` of an object with a capacity, captured once for the largest step."""

    def __init__(self, backend: str, largest: Step) -> None:
        batch_size = len(largest.kv_lens)
        capacity = Capacity(
            max_batch_size=batch_size + 1,
            max_tokens=max(largest.q.shape[0], batch_size) + SPARE_ROWS,
            max_pages=largest.page_table.kv_indices.shape[0] + SPARE_PAGES,
        )
        device = largest.q.device
        self.attn = PagedAttention(
            largest.spec, largest.page_size, backend=backend, device=device, capacity=capacity
        )
        self.q = largest.q.new_zeros(capacity.max_tokens, *largest.q.shape[1:])
        self.kv_cache = largest.kv_cache.clone()
        self.attn.plan(largest.page_table, largest.qo_indptr)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.attn.run_return_lse(self.q, self.kv_cache)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.answer = self.attn.run_return_lse(self.q, self.kv_cache)

    def replay(self, step: Step) -> AttentionOutput:
        """Plan a step, whose cache is as large as the first one's, and replay the graph."""
        num_rows = step.q.shape[0]
        self.attn.plan(step.page_table, step.qo_indptr)
        self.q.fill_(1)[:num_rows] = step.q
        self.kv_cache.copy_(step.kv_cache)
        for tensor in self.answer:
            tensor.fill_(torch.nan)
        self.graph.replay()
        return AttentionOutput(*(tensor[:num_rows].clone() for tensor in self.answer))


GRAPH_REPLAY = Property(
    "graph replay",
    "replays of one captured graph after other plans vs eager, and vs float64",
    _graph_replay,
    reason_against=no_gpu,
)
