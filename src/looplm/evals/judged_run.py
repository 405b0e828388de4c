"""Judged evaluations of a checkpoint: who judges, and the two kinds of questions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from looplm.evals.conversation import Speaking
from looplm.evals.harmful_prompts import PromptSet
from looplm.evals.judge import EndpointJudge, Judge, JudgeSettings
from looplm.evals.mt_bench import Dialogue, mt_bench
from looplm.evals.progress import Advance, unheard
from looplm.evals.recording import RecordedJudge
from looplm.evals.results import Evaluation
from looplm.evals.safety import safety_sweep
from looplm.evals.subject import ModelSettings, open_subject


@dataclass(frozen=True, kw_only=True)
class JudgeChoice:
    """An endpoint that judges, and the file that its replies are kept in; without an endpoint, that file alone judges.

    url, key_variable: as `JudgeSettings` has them · model: of the endpoint, or of the replies in the file.
    """

    record: Path
    url: str | None = None
    model: str | None = None
    key_variable: str | None = None


def open_judge(asked: JudgeChoice, advance: Advance = unheard) -> Judge:
    """The judge that is asked for.

    Raises:
        ValueError: for an endpoint without a model's name, or as `JudgeSettings`, `EndpointJudge` and `RecordedJudge`.
    """
    if asked.url is None:
        return RecordedJudge(asked.record, asked.model)
    if asked.model is None:
        raise ValueError(f"the judge at {asked.url} needs a model's name")
    settings = JudgeSettings(base_url=asked.url, model=asked.model, key_variable=asked.key_variable)
    return EndpointJudge(settings, asked.record, advance)


def run_safety(
    model: ModelSettings, prompts: PromptSet, judge: JudgeChoice, speaking: Speaking, advance: Advance = unheard
) -> Evaluation:  # fmt: skip
    """`safety_sweep` of a checkpoint at its depths.

    Raises:
        ValueError: for a judge, model or depth that cannot be, or a tokenizer without a chat template.
    """
    asked, subject = open_judge(judge, advance), open_subject(model)
    speaking = replace(speaking, kv=subject.kv)
    found = safety_sweep(subject.model, subject.tokenizer, prompts, asked, subject.depths, speaking, advance)
    return subject.result(found)


def run_mt_bench(
    model: ModelSettings, dialogues: Sequence[Dialogue], judge: JudgeChoice, speaking: Speaking,
    advance: Advance = unheard,
) -> Evaluation:  # fmt: skip
    """`mt_bench` of a checkpoint at its depths.

    Raises:
        ValueError: for a judge, model or depth that cannot be, or a tokenizer without a chat template.
    """
    asked, subject = open_judge(judge, advance), open_subject(model)
    speaking = replace(speaking, kv=subject.kv)
    found = mt_bench(subject.model, subject.tokenizer, dialogues, asked, subject.depths, speaking, advance)
    return subject.result(found)
