"""Reward functions with TRL's signature."""


def share_of_a(prompts, completions, completion_ids, **columns):
    """How much of each completion is the letter a."""
    return [text_of(done).count("a") / max(1, len(text_of(done))) for done in completions]


def longer_than(prompts, completions, completion_ids, bound, **columns):
    """Whether a completion has more tokens than its row's bound; None where a row has none."""
    return [
        None if least is None else float(len(ids) > least) for ids, least in zip(completion_ids, bound, strict=True)
    ]


def one_too_few(prompts, completions, completion_ids, **columns):
    return [0.0] * (len(prompts) - 1)


def endless(completions, **columns):
    return [float("inf")] * len(completions)


async def later(completions, **columns):
    return [0.0] * len(completions)


def enormous(completions, **columns):
    return [-1e200] * len(completions)


def nothing(**columns):
    return None


def words(completions, **columns):
    return ["1.0"] * len(completions)


def by_number(completions, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)


def narrow(completions):
    return [0.0] * len(completions)


def stumbling(completions, **columns):
    return columns["gold"]


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]
