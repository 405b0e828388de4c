"""Recorded core steps: here the recording is a plain call, so that what is recorded is what is tested."""

import pytest
import torch
from engine_models import huginn_like, ouro_like

from looplm.engine import Engine, ExitCDF, SamplingParams
from looplm.engine.graphs import StepGraphs, bucket

PROMPTS = [[1, 2, 3], list(range(1, 36)), [7], [9, 8, 7, 6, 5]]


def recorded(engine):
    """The engine with steps that are recorded, which computes them once on nobody's lanes, and replayed."""

    def capture(work):
        work()
        return work

    runner = engine.runner
    runner.graphs = StepGraphs(lambda call: runner._advance([call]), runner._idle, capture)
    return engine


@pytest.mark.parametrize("kv", ["full", "averaged"])
@pytest.mark.parametrize("build", [ouro_like, huginn_like])
def test_replayed_steps_make_the_same_tokens(build, kv):
    model = build(dtype=torch.float64)
    depth = ExitCDF(0.6) if model.config.exit_gate else None
    params = [SamplingParams(max_tokens=4 + 3 * number) for number in range(len(PROMPTS))]
    plain, ours = (Engine(model, depth=depth, kv=kv, max_rows=3, max_length=48) for _ in range(2))
    recorded(ours)
    wanted, made = plain.generate(PROMPTS, params), ours.generate(PROMPTS, params)
    assert [(one.token_ids, one.loops) for one in made] == [(one.token_ids, one.loops) for one in wanted]
    # Rows and pages are powers of two alone, however many compositions there were.
    shapes = set(ours.runner.graphs._recorded)
    assert 1 < len(shapes) <= 9
    assert {bucket(part) for shape in shapes for part in shape} == {part for shape in shapes for part in shape}


def test_buckets_are_powers_of_two():
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]


def test_graphs_without_a_gpu_are_refused():
    with pytest.raises(ValueError, match="cuda_graphs needs a model on a GPU; this one is on 'cpu'"):
        Engine(ouro_like(), max_length=64, cuda_graphs=True)
