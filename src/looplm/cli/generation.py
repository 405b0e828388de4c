"""`looplm generate`: a prompt continued by the engine, each token at its own depth."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from looplm.cli.paths import open_checkpoint
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.engine import DepthPolicy, Engine, ExitCDF, FixedLoops, SamplingParams, Speculation, TokenEvent
from looplm.engine.calibration import load_calibration
from looplm.engine.parallel import ParallelSampler, ParallelSettings
from looplm.models import LoopLMForCausalLM, load, quantize_int8
from looplm.models.backbone import check_loops


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What was made, and the loops that each token did."""

    text: str
    tokens: list[int]
    loops_per_token: list[int]


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How the user says when tokens leave: a fixed count, an exit threshold, or what was calibrated; all loops else."""

    loops: int | None = None
    exit_threshold: float | None = None
    calibrated: bool = False

    def policy(self, folder: Path, loops: int) -> tuple[DepthPolicy, int]:
        """The policy, and the most loops that it may ask for."""
        if self.calibrated:
            if self.loops is not None or self.exit_threshold is not None:
                raise ValueError("--calibrated brings its own depth; leave --loops and --exit out")
            found = load_calibration(folder)
            return found.policy(), found.max_loops
        most = loops if self.loops is None else check_loops(self.loops)
        return (FixedLoops(most) if self.exit_threshold is None else ExitCDF(self.exit_threshold)), most


@dataclass(frozen=True, kw_only=True)
class ParallelContinuation:
    """What was made, the core's applications that each token cost, and which tokens plain decoding would not choose.

    ticks: calls of the core, one after the other, after the prompt · disagreeing: places of the completion.
    """

    text: str
    tokens: list[int]
    loops_per_token: list[int]
    ticks: int
    disagreeing: list[int]


def continue_in_parallel(
    checkpoint: str, prompt: str, settings: ParallelSettings, sampling: SamplingParams, int8: bool = False
) -> ParallelContinuation:  # fmt: skip
    """Continue `prompt`, and compare each token with plain decoding's choice after the same text."""
    folder = open_checkpoint(checkpoint)
    tokenizer = load_tokenizer(folder)
    sampler = ParallelSampler(_open(folder, int8), tokenizer, settings=settings)
    (done,) = sampler.generate(encode(tokenizer, [prompt]), sampling)
    if done.error is not None:
        raise ValueError(f"the completion failed: {done.error}")
    plain = sampler.plain_choices(done, sampling)
    return ParallelContinuation(
        text=done.text or "", tokens=done.token_ids, loops_per_token=done.loops, ticks=sampler.stats.ticks,
        disagreeing=[index for index, token in enumerate(done.token_ids) if token != plain[index]],
    )  # fmt: skip


def parallel_settings(
    inner_loops: int | None, threshold: float | None, depth: Depth, kv: str, speculate: bool
) -> ParallelSettings:  # fmt: skip
    """How `--parallel` decodes: by its own depth and its own keys and values."""
    if depth.exit_threshold is not None or depth.calibrated or kv != "full" or speculate:
        raise ValueError(
            "--parallel freezes tokens by its own rule; leave --exit, --calibrated, --kv and --speculate out"
        )
    theirs = ParallelSettings(loops=depth.loops)
    return replace(
        theirs,
        inner_loops=theirs.inner_loops if inner_loops is None else inner_loops,
        threshold=theirs.threshold if threshold is None else threshold,
    )


def print_parallel(
    checkpoint: str, prompt: str, settings: ParallelSettings, sampling: SamplingParams, int8: bool = False
) -> None:  # fmt: skip
    """Write the text, and how far it is from plain decoding."""
    done = continue_in_parallel(checkpoint, prompt, settings, sampling, int8)
    typer.echo(prompt + done.text)
    count = len(done.tokens)
    typer.echo(
        f"[{count} tokens, {done.ticks / count:.2f} calls of the core a token; lossy: {len(done.disagreeing)} of them "
        "are not what plain decoding chooses after the same text]",
        err=True,
    )


def stream_prompt(
    checkpoint: str, prompt: str, depth: Depth, sampling: SamplingParams, kv: str, speculate: bool, int8: bool = False
) -> Iterator[TokenEvent]:  # fmt: skip
    """The events of continuing `prompt`."""
    folder = open_checkpoint(checkpoint)
    model, tokenizer = _open(folder, int8), load_tokenizer(folder)
    policy, loops = depth.policy(Path(folder), model.config.loops)
    (tokens,) = encode(tokenizer, [prompt])
    engine = Engine(
        model, tokenizer, depth=policy, kv=kv, loops=loops, max_rows=1, max_length=len(tokens) + sampling.max_tokens,
        kv_bytes=2**40, speculate=Speculation() if speculate else None,
    )  # fmt: skip
    return engine.stream(tokens, sampling)


def continue_prompt(
    checkpoint: str, prompt: str, depth: Depth, sampling: SamplingParams, kv: str = "full", speculate: bool = False,
    int8: bool = False,
) -> Continuation:  # fmt: skip
    """Continue `prompt`, and wait for the end."""
    done = None
    for event in stream_prompt(checkpoint, prompt, depth, sampling, kv, speculate, int8):
        done = event.completion or done
    assert done is not None
    if done.error is not None:
        raise ValueError(f"the completion failed: {done.error}")
    return Continuation(text=done.text or "", tokens=done.token_ids, loops_per_token=done.loops)


def print_stream(
    checkpoint: str, prompt: str, depth: Depth, sampling: SamplingParams, kv: str, speculate: bool, int8: bool = False
) -> None:  # fmt: skip
    """Write the text as it comes, and at its end how deep its tokens went."""
    events = stream_prompt(checkpoint, prompt, depth, sampling, kv, speculate, int8)
    typer.echo(prompt, nl=False)
    for event in events:
        if not event.provisional:
            typer.echo(event.text, nl=False)
        if event.completion is not None:
            typer.echo()
            if event.completion.error is not None:
                raise ValueError(f"the completion failed: {event.completion.error}")
            loops = event.completion.loops
            typer.echo(f"[{len(loops)} tokens, {sum(loops) / len(loops):.2f} mean loops]", err=True)


def _open(folder: Path, int8: bool) -> LoopLMForCausalLM:
    return quantize_int8(load(folder)) if int8 else load(folder)
