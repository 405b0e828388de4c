"""The sampler against transformers' processors, hand numbers and the distributions that it should draw from."""

import itertools
import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from looplm.engine import SamplingParams
from looplm.engine.intake import mixed
from looplm.engine.sampling import Asked, _filtered, best_alternatives, choose

VOCAB = 61


def ask(params: SamplingParams, seed: int = 0, index: int = 0, prompt=(1,), made=(), ends=()) -> Asked:
    return Asked(params=params, seed=seed, index=index, prompt=prompt, made=made, ends=frozenset(ends))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 2.5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draws(logits: torch.Tensor, params: SamplingParams, count: int, **rest) -> torch.Tensor:
    """`count` tokens [count] for one row of logits, half by seeds and half by places."""
    rows = [ask(params, seed=mixed(7, n // 2), index=n % 2 + 40 * (n % 3), **rest) for n in range(count)]
    return torch.tensor(choose(logits.expand(count, -1), rows).tokens)


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations Pearson's statistic lies from what it is for draws of `probs` [V] (double).

    Tokens expected fewer than 5 times are one class.
    """
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs * len(tokens)
    rare = expected < 5
    assert counts[probs == 0].sum() == 0
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert freedom > 2
    return (statistic - freedom) / math.sqrt(2 * freedom)


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities [V] by transformers, in the order of its own `generate`."""
    nothing, scores = torch.zeros(1, 1, dtype=torch.long), logits[None].double()
    for processor in (
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k or len(logits)),
        TopPLogitsWarper(params.top_p),
        MinPLogitsWarper(params.min_p),
    ):
        scores = processor(nothing, scores)
    return scores[0].log_softmax(-1)


# Filters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.0, 5, 1.0, 0.0), (1.5, 0, 1.0, 0.1), (1.3, 12, 0.9, 0.02),
        (0.5, 500, 0.99, 0.001), (2.0, 20, 0.5, 0.05), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0),
    ],
)  # fmt: skip
def test_the_filters_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Exactly the same tokens may come, whatever row they are in, and the likely ones do."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(40)
    allowed = torch.stack([processed(row, params) for row in logits]) > -math.inf
    beside = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    scores = torch.cat([logits[:1], logits]).double() / torch.tensor([1.0] + [temperature] * 40)[:, None]
    assert torch.equal(_filtered(scores, [beside] + [params] * 40)[1:].isfinite(), allowed)
    drawn = draws(logits[0], params, 3000)
    assert bool(allowed[0][drawn].all())
    likely = processed(logits[0], params).exp() > 0.01
    assert set(likely.nonzero()[:, 0].tolist()) <= set(drawn.tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (0.7, 0, 1.0, 0.0), (1.4, 15, 0.95, 0.0), (1.2, 0, 1.0, 0.03),
     (1.8, 30, 0.9, 0.02)],
)  # fmt: skip
def test_frequencies_are_those_of_the_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(1, seed=5)[0] / 2
    tokens = draws(logits, params, 24_000)
    assert abs(chi_square(tokens, processed(logits, params).exp())) < 4


def test_a_wrong_distribution_would_be_noticed() -> None:
    logits = random_logits(1, seed=5)[0] / 2
    tokens = draws(logits, SamplingParams(temperature=0.75), 24_000)
    assert chi_square(tokens, processed(logits, SamplingParams(temperature=0.7)).exp()) > 4


def test_places_and_seeds_are_independent() -> None:
    """Pairs of tokens at neighbouring places, seeds and samples are distributed as a product."""
    logits = random_logits(1, vocab=7, seed=1)[0] / 2
    params = SamplingParams(temperature=1.0)
    probs = logits.double().softmax(-1)
    pairs = (probs[:, None] * probs).flatten()
    seeds = {
        "places of one seed": [(3, 2 * n, 3, 2 * n + 1) for n in range(10_000)],
        "places of neighbouring seeds": [(n, 0, n, 1) for n in range(10_000)],
        "neighbouring seeds": [(2 * n, 5, 2 * n + 1, 5) for n in range(10_000)],
        "samples of one seed": [(mixed(11, 2 * n), 0, mixed(11, 2 * n + 1), 0) for n in range(10_000)],
        "seeds of one sample": [(mixed(2 * n, 0), 0, mixed(2 * n + 1, 0), 0) for n in range(10_000)],
        "along a diagonal": [(n, 20_000 - n, n + 1, 20_000 - n - 1) for n in range(10_000)],
    }
    for name, quads in seeds.items():
        first = choose(logits.expand(10_000, -1), [ask(params, seed=s, index=i) for s, i, _, _ in quads]).tokens
        second = choose(logits.expand(10_000, -1), [ask(params, seed=s, index=i) for _, _, s, i in quads]).tokens
        joint = torch.tensor(first) * 7 + torch.tensor(second)
        assert abs(chi_square(joint, pairs)) < 4, name


def test_two_distributions_under_one_noise_agree_as_often_as_coupling_promises() -> None:
    """(1 - TV) / (1 + TV) at least (arXiv 2408.07978), which is what speculation lives on."""
    params = SamplingParams(temperature=1.0)
    for seed, mix in itertools.product(range(3), (0.0, 0.1, 0.3, 1.0)):
        first, other = random_logits(2, seed=seed) / 2
        second = first + mix * (other - first)
        distance = 0.5 * float((first.double().softmax(-1) - second.double().softmax(-1)).abs().sum())
        agreed = float((draws(first, params, 8000) == draws(second, params, 8000)).double().mean())
        assert agreed >= (1 - distance) / (1 + distance) - 4 * math.sqrt(0.25 / 8000) * (mix > 0)
        assert agreed <= 1 - distance + 4 * math.sqrt(0.25 / 8000)


# Penalties, biases, bans --------------------------------------------------------------------------------------


def probabilities_match(logits: torch.Tensor, edited: torch.Tensor, params: SamplingParams, **rest) -> bool:
    """Greedy picks the best of `edited`, and sampling at temperature 1 draws from its softmax."""
    greedy = SamplingParams(**{**vars(params), "temperature": 0.0})
    tokens = draws(logits, params, 8_000, **rest)
    first = choose(logits[None], [ask(greedy, **rest)]).tokens[0]
    return first == int(edited.argmax()) and abs(chi_square(tokens, edited.double().softmax(-1))) < 4


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(1, seed=2)[0] / 2
    prompt, made = (3, 3, 17, int(logits.argmax())), (4, 5, 4)
    for penalty in (1.6, 0.7):
        edited = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *made]]), logits[None].clone())[0]
        params = SamplingParams(temperature=1.0, repetition_penalty=penalty)
        assert probabilities_match(logits, edited, params, prompt=prompt, made=made)
        assert not probabilities_match(logits, logits, params, prompt=prompt, made=made)


def test_presence_and_frequency_count_the_completion_alone() -> None:
    logits = random_logits(1, seed=3)[0] / 2
    best = int(logits.argmax())
    edited = logits.clone()
    edited[9] -= 0.4 + 3 * 0.3
    edited[11] -= 0.4 + 0.3
    edited[2] -= 0.4 + 2 * 0.3
    params = SamplingParams(temperature=1.0, presence_penalty=0.4, frequency_penalty=0.3)
    assert probabilities_match(logits, edited, params, prompt=(best, 7, 7, 7), made=(9, 2, 9, 11, 9, 2))
    assert probabilities_match(logits, logits, params, prompt=(best, 7, 7, 7), made=())
    liked = SamplingParams(temperature=1.0, presence_penalty=-1.5)
    edited = logits.clone()
    edited[30] += 1.5
    assert probabilities_match(logits, edited, liked, made=(30, 30))


def test_penalties_of_one_row_by_hand() -> None:
    """Repetition first, then presence and frequency, then bias: 4 / 2 - 0.5 - 2 * 0.25 + 0.1 = 1.1."""
    logits = torch.tensor([[4.0, 1.05, -1.0, 1.0]])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 0.1, 2: -5.0}
    )
    found = choose(logits, [ask(params, prompt=(2,), made=(0, 0))])
    assert found.tokens == [0]
    assert found.leads == pytest.approx([0.05], abs=1e-6)
    nearly = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 0.04, 2: -5.0}
    )
    assert choose(logits, [ask(nearly, prompt=(2,), made=(0, 0))]).tokens == [1]
    assert logits.tolist() == torch.tensor([[4.0, 1.05, -1.0, 1.0]]).tolist()


def test_biases_move_logits() -> None:
    logits = random_logits(1, seed=4)[0] / 2
    edited = logits.clone()
    edited[0] += 3.0
    edited[60] -= 100.0
    params = SamplingParams(temperature=1.0, logit_bias={0: 3.0, 60: -100.0})
    assert probabilities_match(logits, edited, params)


def test_ends_may_not_come_before_the_least_length() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3)
        for index in range(6):
            rows = [ask(params, seed=seed, index=index, ends=(1, 2)) for seed in range(200)]
            found = set(choose(logits.expand(200, -1), rows).tokens)
            assert found.isdisjoint({1, 2}) == (index < 3)
    params = SamplingParams(min_tokens=3)
    assert choose(logits[None], [ask(params)]).tokens == [1]  # nothing ends it
    # An end token of the tokenizer that the model does not have cannot come anyway; it must not stand for another.
    assert choose(logits[None], [ask(params, ends=(4, 99, -3))]).tokens == [1]


# Rows, ties, log-probabilities --------------------------------------------------------------------------------


def a_crowd() -> tuple[torch.Tensor, list[Asked]]:
    kinds = [
        {}, {"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}, {"repetition_penalty": 1.3}, {"min_tokens": 9},
        {"temperature": 1.1, "top_k": 4}, {"temperature": 1.5, "min_p": 0.1, "presence_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {5: 2.0}}, {"frequency_penalty": 0.4, "top_k": 3},
    ]  # fmt: skip
    rows = [
        ask(
            SamplingParams(**kinds[n % len(kinds)]), seed=n, index=n % 4, prompt=(n % VOCAB, 5), made=(7, n % 11),
            ends=(8,),
        )
        for n in range(45)
    ]  # fmt: skip
    return random_logits(45, seed=6), rows


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, rows = a_crowd()
    together = choose(logits, rows)
    for n in range(45):
        alone = choose(logits[n : n + 1], [rows[n]])
        assert (alone.tokens, alone.logprobs, alone.leads) == (
            [together.tokens[n]], [together.logprobs[n]], [together.leads[n]],
        )  # fmt: skip
    for seed in range(5):
        order = torch.randperm(45, generator=torch.Generator().manual_seed(seed)).tolist()[: 45 - 8 * seed]
        assert choose(logits[order], [rows[n] for n in order]).tokens == [together.tokens[n] for n in order]
    assert choose(logits, rows).tokens == together.tokens


def test_greedy_rows_stay_greedy_beside_others() -> None:
    logits, rows = a_crowd()
    tokens = choose(logits, rows).tokens
    assert tokens[::9] == logits[::9].argmax(-1).tolist()
    sampled = [n for n in range(45) if rows[n].params.temperature > 0]
    assert sum(tokens[n] != int(logits[n].argmax()) for n in sampled) > 5


@pytest.mark.parametrize("vocab", [9, 61, 2048])
def test_of_equal_logits_the_first_is_chosen(vocab: int) -> None:
    """As argmax does, with or without penalties that change nothing; ties are usual in bfloat16."""
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(20):
        places = torch.randint(0, vocab, (4, 3), generator=generator)
        logits = torch.randn(4, vocab, generator=generator).bfloat16().scatter(1, places, 9.0)
        logits[3] = 0.0
        for params in (SamplingParams(), SamplingParams(min_tokens=1), SamplingParams(repetition_penalty=1.1)):
            rows = [ask(params, prompt=(int(logits[n].argmin()),)) for n in range(3)]
            rows.append(ask(params, prompt=(vocab - 1,)))
            found = choose(logits, rows)
            assert found.tokens == [*places[:3].amin(-1).tolist(), 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-3])
def test_the_least_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(20) * 10
    rows = [ask(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), seed=n) for n in range(20)]
    assert choose(logits, rows).tokens == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits, rows = a_crowd()
    found = choose(logits.bfloat16(), rows)
    raw = logits.bfloat16().float().log_softmax(-1)
    assert found.logprobs == pytest.approx([float(raw[n, token]) for n, token in enumerate(found.tokens)], abs=1e-5)
    best = best_alternatives(logits[0], 3)
    expected = sorted(((float(x), n) for n, x in enumerate(logits[0].log_softmax(-1))), reverse=True)[:3]
    assert [token for token, _ in best] == [n for _, n in expected]
    assert [x for _, x in best] == pytest.approx([x for x, _ in expected], abs=1e-6)
    assert len(best_alternatives(logits[0], 1000)) == VOCAB


def test_processed_logprobs_are_of_what_was_drawn_from() -> None:
    """After biases, penalties, temperature and filters; greedy after biases and penalties."""
    logits = random_logits(1)
    params = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.8, logit_bias={3: 1.5}, presence_penalty=0.7, logprobs_mode="processed"
    )
    chosen = choose(logits.expand(200, -1), [ask(params, seed=seed, made=(5, 9)) for seed in range(200)])
    edited = logits[0].clone()
    edited[3] += 1.5
    edited[[5, 9]] -= 0.7
    scores = TemperatureLogitsWarper(0.6)(None, edited[None])
    scores = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, scores)).log_softmax(-1)[0]
    torch.testing.assert_close(torch.tensor(chosen.logprobs), scores[chosen.tokens], atol=1e-5, rtol=0)
    greedy = choose(logits, [ask(SamplingParams(logprobs_mode="processed", logit_bias={3: 1.5}))])
    biased = logits[0] + 1.5 * (torch.arange(VOCAB) == 3)
    torch.testing.assert_close(torch.tensor(greedy.logprobs), biased.log_softmax(-1).max()[None])


def test_leads_are_those_of_the_choice() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0], [1.0, 3.0, 3.0 - 1e-6]])
    assert choose(logits, [ask(SamplingParams())] * 2).leads == pytest.approx([0.5, 1e-6], abs=3e-7)
    biased = SamplingParams(logit_bias={1: 0.5})
    assert choose(logits[:1], [ask(biased)]).leads == [0.0]  # a near-tie that only the bias makes


# Settings -----------------------------------------------------------------------------------------------------

NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [0, *NUMBERS, 1.5, -1]) for name in ("max_tokens", "n")),
        *((name, [*NUMBERS, 1.5, -1]) for name in ("min_tokens", "top_k", "logprobs")),
        ("temperature", [-0.1, *NUMBERS]), ("top_p", [0, -0.5, 1.01, *NUMBERS]), ("min_p", [-0.1, 1.01, *NUMBERS]),
        ("repetition_penalty", [0, -1.0, 1e-31, 1e31, *NUMBERS]), ("presence_penalty", [1e31, *NUMBERS]),
        ("frequency_penalty", [-1e31, *NUMBERS]),
        ("seed", [-1, 2**63, 1.0, True, "1", math.nan]), ("stop", ["", ["a", ""], [3], 5, None]),
        ("stop_token_ids", [5, [-1], [1.0], [True], ["a"], None]), ("ignore_eos", ["no", None, 0]),
        ("logit_bias", [{3: math.inf}, {3: math.nan}, {"3": 1.0}, {-1: 1.0}, {True: 1.0}, {3: "1"}, [(3, 1.0)], None]),
        ("logit_bias", [{3: 1e31}, {3: -1e31}]),
        ("min_tokens", [65]),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(name: str, values: list) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}=") as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ({"logit_bias": {3: 1e30, 4: -1e30}}, 3),
        ({"logit_bias": dict.fromkeys([*range(3), *range(4, VOCAB)], -1e30)}, 3),
        ({"presence_penalty": -1e30}, 5), ({"frequency_penalty": -1e30}, 5), ({"repetition_penalty": 1e-30}, 5),
        ({"presence_penalty": 1e30, "logit_bias": {5: 9.0, 3: 8.5}, "top_k": 1}, 3),
    ],
)  # fmt: skip
def test_the_largest_settings_are_no_nan(settings: dict, token: int, temperature: float) -> None:
    """Where logits are 0, too: what overflowed to infinity would be multiplied by them."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1e-3
    rows = [ask(SamplingParams(temperature=temperature, **settings), made=[5])]
    assert choose(logits, rows).tokens == [token]
    assert choose(logits, rows).leads[0] >= 0


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    logits = random_logits(8)
    for name in ("top_k", "logprobs"):
        rows = [ask(SamplingParams(temperature=1.0, **{name: 2**70}), seed=seed) for seed in range(8)]
        free = [ask(SamplingParams(temperature=1.0), seed=seed) for seed in range(8)]
        assert choose(logits, rows).tokens == choose(logits, free).tokens


def test_the_ends_of_the_ranges_are_taken() -> None:
    params = SamplingParams(
        max_tokens=1, min_tokens=1, temperature=0, top_p=1, min_p=1, seed=2**63 - 1, stop=("a", "b"),
        stop_token_ids=[0], logit_bias={0: -100}, n=1, repetition_penalty=1,
    )  # fmt: skip
    assert params.stops == ("a", "b")
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert choose(random_logits(1), [ask(SamplingParams(temperature=1.0), seed=2**63 - 1)]).tokens[0] < VOCAB
