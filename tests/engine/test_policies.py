"""Every depth policy against its rule written out for one token in plain Python, and against hand numbers."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from engine_models import ouro_like

import looplm.engine as engine_room
from conftest import tiny_config
from looplm.engine import (
    AnyOf,
    ArgmaxStable,
    Certificate,
    CosineConverged,
    DepthPolicy,
    Engine,
    EntropyBelow,
    EntropyDifference,
    ExitCDF,
    ExitSampled,
    FixedLoops,
    GateAbove,
    LogitsKL,
    LookAhead,
    Margin,
    MinPKL,
    SamplingParams,
    SecondDifference,
    StateConverged,
    StepBelow,
)
from looplm.engine.policies import Seen, first_exits
from looplm.models.exits import exit_loops

LOOPS, TOKENS, WIDTH, VOCAB = 9, 24, 8, 13
CONFIG = tiny_config(
    vocab_size=VOCAB, hidden_size=WIDTH, num_attention_heads=2, num_key_value_heads=2, loops=LOOPS, exit_gate=True
)
PLAIN = [
    FixedLoops(4), ExitCDF(0.5), ExitCDF(0.97), GateAbove(0.7), StateConverged(0.25), StepBelow(0.6),
    CosineConverged(0.05), SecondDifference(0.5), SecondDifference(0.6, times=1), SecondDifference(0.9, times=3),
    LogitsKL(0.1), MinPKL(0.05), EntropyDifference(0.05), EntropyBelow(1.1), Margin(0.4), ArgmaxStable(2),
    ArgmaxStable(1), Certificate(),
]  # fmt: skip
NESTED = [
    LookAhead(ExitCDF(0.5)), LookAhead(Margin(0.4)), LookAhead(StateConverged(0.25, every=2, min_loops=2)),
    LookAhead(FixedLoops(3)), AnyOf(ExitCDF(0.9), LogitsKL(0.05, every=2), Margin(0.6)),
    AnyOf(SecondDifference(0.5), ArgmaxStable(3), GateAbove(0.8)),
    AnyOf(LookAhead(Certificate()), AnyOf(FixedLoops(7), StepBelow(0.3, every=3)), EntropyDifference(0.02)),
    LookAhead(AnyOf(ExitCDF(0.8, every=2), LookAhead(CosineConverged(0.05)))),
]  # fmt: skip


class Token:
    """The way of one token, should it do all loops: start state and states, gates, hidden and logits by loop from 1."""

    def __init__(self, generator: torch.Generator, head: torch.Tensor) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        speed = 0.3 + 0.6 * torch.rand(1, generator=generator)
        fade = speed ** torch.arange(LOOPS + 1)[:, None]
        self.states = normal(WIDTH) + 2 * fade * normal(LOOPS + 1, WIDTH)
        self.gates = 2 * normal(LOOPS + 1) - 1
        self.hidden = normal(WIDTH) + fade * normal(WIDTH)[None] + 0.02 * fade * normal(LOOPS + 1, WIDTH)
        self.logits = self.hidden @ head.T
        self.head = head

    def probs(self, loop: int) -> list[float]:
        return self.logits[loop].double().softmax(-1).tolist()


def tokens(seed: int = 0) -> list[Token]:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    return [Token(generator, head) for _ in range(TOKENS)]


def norm(vector: torch.Tensor) -> float:
    return math.sqrt(sum(float(value) ** 2 for value in vector))


def few(probs: list[float], least: float) -> list[float]:
    kept = [1 / len(probs) if p < least * max(probs) else p for p in probs]
    return [p / sum(kept) for p in kept]


def entropy(probs: list[float], tiny: float = 0.0) -> float:
    return -sum(p * math.log(p + tiny) for p in probs)


def divergence(policy: LogitsKL, token: Token, loop: int) -> float:
    now, last = token.probs(loop), token.probs(loop - policy.every)
    if isinstance(policy, MinPKL):
        now, last = few(now, policy.min_p), few(last, policy.min_p)
    if loop == policy.every:
        last = [1 / VOCAB] * VOCAB
    return sum(p * math.log(p / q) for p, q in zip(last, now, strict=True))


def certain(policy: Certificate, token: Token, loop: int) -> bool:
    if loop < 3 * policy.every:
        return False
    now, mid, old = (token.hidden[loop - back * policy.every].double() for back in (0, 1, 2))
    step, before = norm(now - mid), norm(mid - old)
    if step >= before:
        return False
    rest = sum(step * (step / before) ** count for count in range(1, 2000))
    ranked = sorted(((float(x), token.head[i].double()) for i, x in enumerate(token.logits[loop])), key=lambda x: -x[0])
    (top, first), (following, second) = ranked[:2]
    return rest * norm(first - second) < top - following


def rule(policy: DepthPolicy, token: Token, loop: int) -> bool:
    """What the policy says at a check; the check before was `every` loops earlier, at first at the start."""
    back = loop - policy.every
    now, last = token.states[loop].double(), token.states[back].double()
    match policy:
        case FixedLoops():
            return loop >= policy.loops
        case ExitCDF():
            survival = math.prod(1 / (1 + math.exp(float(gate))) for gate in token.gates[1 : loop + 1])
            return policy.q < 1 and 1 - survival >= policy.q
        case GateAbove():
            return 1 / (1 + math.exp(-float(token.gates[loop]))) >= policy.threshold
        case StateConverged():
            return norm(now - last) / norm(now) < policy.eps
        case StepBelow():
            return norm(now - last) < policy.eps
        case CosineConverged():
            return 1 - float(now @ last) / norm(now) / norm(last) < policy.eps
        case SecondDifference():
            for check in range(loop, loop - policy.times * policy.every, -policy.every):
                if check < 2 * policy.every:
                    return False
                new, mid, old = (token.states[check - times * policy.every].double() for times in (0, 1, 2))
                if norm((new - mid) - (mid - old)) / norm(new) >= policy.eps:
                    return False
            return True
        case LogitsKL():
            return divergence(policy, token, loop) < policy.eps
        case EntropyDifference():
            before = 100.0 if back == 0 else entropy(token.probs(back), 1e-10)
            return abs(entropy(token.probs(loop), 1e-10) - before) < policy.eps
        case EntropyBelow():
            return entropy(token.probs(loop)) < policy.nats
        case Margin():
            first, second = sorted(token.probs(loop))[:-3:-1]
            return first - second >= policy.margin
        case ArgmaxStable():
            checks = range(loop, loop - (policy.times + 1) * policy.every, -policy.every)
            return checks[-1] > 0 and len({int(token.logits[check].argmax()) for check in checks}) == 1
        case Certificate():
            return certain(policy, token, loop)
        case LookAhead():
            return any(votes(policy.policy, token, earlier) for earlier in range(1, loop))
        case AnyOf():
            return any(votes(one, token, loop) for one in policy.policies)
    raise AssertionError(policy)


def votes(policy: DepthPolicy, token: Token, loop: int) -> bool:
    return loop % policy.every == 0 and loop >= policy.min_loops and rule(policy, token, loop)


def exit_loop(policy: DepthPolicy, token: Token, last: int = LOOPS) -> int:
    return next((loop for loop in range(1, last) if votes(policy, token, loop)), last)


def seen(policy: DepthPolicy, batch: list[Token], loops: list[int]) -> Seen:
    """Just what the policy says that it needs."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        assert policy.needs_logits, "read without saying so"
        pairs = list(zip(batch, loops, strict=True))
        return torch.stack([t.hidden[at] for t, at in pairs]), torch.stack([t.logits[at] for t, at in pairs])

    def rows(name: str, back: int) -> torch.Tensor:
        return torch.stack([getattr(token, name)[loop - back] for token, loop in zip(batch, loops, strict=True)])

    return Seen(
        loop=torch.tensor(loops), before=rows("states", 1), after=rows("states", 0),
        gate=rows("gates", 0) if policy.needs_gate else None, read=read, head=batch[0].head, config=CONFIG, loops=LOOPS,
    )  # fmt: skip


def leaves(policy: DepthPolicy, token: Token) -> int:
    """What the policy itself does with one token."""
    steps = (seen(policy, [token], [loop]) for loop in range(1, LOOPS + 1))
    return int(first_exits(policy, steps, torch.tensor([LOOPS])))


def changed(policy: DepthPolicy, **changes: int) -> DepthPolicy:
    return AnyOf(*policy.policies, **changes) if isinstance(policy, AnyOf) else dataclasses.replace(policy, **changes)


def short(policy: DepthPolicy) -> str:
    return repr(policy).replace("min_loops=1, every=1, ", "").replace(", min_loops=1, every=1", "")


@pytest.mark.parametrize("min_loops", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("policy", PLAIN + NESTED, ids=short)
def test_tokens_at_mixed_loops_leave_where_the_rule_says(policy: DepthPolicy, every: int, min_loops: int) -> None:
    """The votes at every loop, before and after the first; memories lie in a store, and are zeros at loop 1."""
    policy, batch = changed(policy, every=every, min_loops=min_loops), tokens()
    order = torch.Generator().manual_seed(every)
    store = torch.full((TOKENS, policy.memory(CONFIG, LOOPS)), math.nan)
    starts = torch.randint(0, 6, (TOKENS,), generator=order).tolist()
    said: dict[tuple[int, int], bool] = {}
    for tick in range(LOOPS + 6):
        shuffled = torch.randperm(TOKENS, generator=order).tolist()
        rows = [row for row in shuffled if 1 <= tick - starts[row] + 1 <= LOOPS]
        if not rows:
            continue
        loops = [tick - starts[row] + 1 for row in rows]
        memory = torch.where(torch.tensor(loops)[:, None] == 1, 0.0, store[rows])
        leave, store[rows] = policy.decide(seen(policy, [batch[row] for row in rows], loops), memory)
        said |= {(row, loop): bool(vote) for row, loop, vote in zip(rows, loops, leave, strict=True)}
    expected = {(row, loop): votes(policy, batch[row], loop) for row in range(TOKENS) for loop in range(1, LOOPS + 1)}
    assert said == expected


@pytest.mark.parametrize("policy", PLAIN + NESTED, ids=short)
def test_first_exits(policy: DepthPolicy) -> None:
    batch = tokens(1)
    last = torch.randint(1, LOOPS + 1, (TOKENS,), generator=torch.Generator().manual_seed(0))
    steps = (seen(policy, batch, [loop] * TOKENS) for loop in range(1, LOOPS + 1))
    expected = [exit_loop(policy, *pair) for pair in zip(batch, last.tolist(), strict=True)]
    assert first_exits(policy, steps, last).tolist() == expected


@pytest.mark.parametrize("policy", PLAIN + NESTED, ids=short)
def test_the_tokens_above_do_not_all_leave_alike(policy: DepthPolicy) -> None:
    """Else the tests above would show little."""
    exits = Counter(exit_loop(policy, token) for token in tokens())
    fixed = isinstance(policy, FixedLoops) or policy == LookAhead(FixedLoops(3))
    assert len(exits) == 1 if fixed else len(exits) >= 3


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("policy", PLAIN + NESTED, ids=short)
def test_no_token_needs_more_than_the_deepest_loop(policy: DepthPolicy, every: int) -> None:
    for min_loops in (1, 2, 5):
        policy = changed(policy, every=every, min_loops=min_loops)
        exits = [exit_loop(policy, token) for token in tokens()]
        assert max(exits) <= policy.deepest(LOOPS) <= LOOPS
        if isinstance(policy, FixedLoops):
            assert set(exits) == {policy.deepest(LOOPS)}


@pytest.mark.parametrize("policy", [Margin(0.4, every=3), LogitsKL(0.1, every=3), ArgmaxStable(1, every=3)], ids=short)
def test_between_two_checks_nothing_is_read(policy: DepthPolicy) -> None:
    """An interval is there to save readouts."""
    batch, reads = tokens(), []
    for loop in range(1, LOOPS + 1):
        here = seen(policy, batch, [loop] * TOKENS)
        here = dataclasses.replace(here, read=lambda here=here, loop=loop: (reads.append(loop), here.read())[1])
        policy.decide(here, torch.zeros(TOKENS, policy.memory(CONFIG, LOOPS)))
    assert reads == [3, 6, 9]


# The gate -----------------------------------------------------------------------------------------------------


def gate_exits(policy: DepthPolicy, gates: torch.Tensor) -> list[int]:
    count, loops = gates.shape
    state = torch.zeros(count, WIDTH)
    steps = [
        Seen(
            loop=torch.full((count,), loop), before=state, after=state, gate=gates[:, loop - 1],
            read=lambda: (state, state), head=state, config=CONFIG, loops=loops,
        )
        for loop in range(1, loops + 1)
    ]  # fmt: skip
    return first_exits(policy, steps, torch.full((count,), loops)).tolist()


@pytest.mark.parametrize("q", [0, 0.2, 0.5, 0.999999, 1, 1.5])
def test_the_gate_leaves_where_exit_loops_says(q: float) -> None:
    generator = torch.Generator().manual_seed(3)
    gates = 3 * torch.randn(500, 6, generator=generator) - 1
    places = torch.rand(500, 6, generator=generator)
    gates[places < 0.1], gates[places > 0.9] = 50.0, -50.0
    for min_loops in (1, 2, 6):
        assert gate_exits(ExitCDF(q, min_loops=min_loops), gates) == exit_loops(gates, q, min_loops).tolist()


@pytest.mark.parametrize(("draws", "exit_loop"), [((0.2, 0.9, 0.9), 1), ((0.4, 0.29, 0.9), 2), ((0.31, 0.5, 0.9), 3)])
def test_sampled_exits_leave_where_the_hazard_exceeds_the_draw(draws: tuple[float, ...], exit_loop: int) -> None:
    state, gate = torch.zeros(1, WIDTH), torch.logit(torch.tensor([0.3]))
    steps = [
        Seen(
            loop=torch.tensor([loop]), before=state, after=state, gate=gate, read=lambda: (state, state), head=state,
            config=CONFIG, loops=3, uniform=lambda draw=draw: torch.tensor([draw]),
        )
        for loop, draw in enumerate(draws, start=1)
    ]  # fmt: skip
    assert first_exits(ExitSampled(), steps, torch.tensor([3])).tolist() == [exit_loop]


def test_hazards_by_hand() -> None:
    third = torch.logit(torch.tensor([[0.3, 0.3, 0.3, 0.3]]))
    assert gate_exits(ExitCDF(0.5), third) == [2]  # 0.30, 0.51
    assert gate_exits(ExitCDF(0.5, every=3), third) == [3]  # the hazards of loops 1 and 2 count, checked or not
    assert gate_exits(ExitCDF(0.6, every=2), third) == [4]  # 0.51 at loop 2, 0.76 at loop 4
    assert gate_exits(ExitCDF(1.0), torch.full((1, 4), 50.0)) == [4]
    assert gate_exits(ExitCDF(0.0, min_loops=3), torch.full((1, 4), -50.0)) == [3]
    assert gate_exits(LookAhead(ExitCDF(0.5)), third) == [3]
    assert gate_exits(LookAhead(ExitCDF(0.0)), third) == [2]
    assert gate_exits(AnyOf(ExitCDF(0.9), LookAhead(ExitCDF(0.2))), third) == [2]
    assert gate_exits(GateAbove(0.5), torch.tensor([[5.0, -1.0, 0.0, 5.0]])) == [3]
    assert gate_exits(GateAbove(0.3, min_loops=1), third + 1e-6) == [1]


# The state and the prediction, by hand ------------------------------------------------------------------------


def test_a_fixed_point_is_certain() -> None:
    """Nothing is left of the way once two hiddens are equal, whatever came before."""
    token = tokens()[0]
    token.hidden[3:], token.logits[3:] = token.hidden[3], token.logits[3]
    assert leaves(Certificate(min_loops=5), token) == 5


def test_argmax_stability_counts_the_checks_after_the_first() -> None:
    token = tokens()[0]
    token.logits[:] = torch.nn.functional.one_hot(torch.tensor([0, 3, 4, 4, 4, 4, 4, 4, 4, 4]), VOCAB)
    assert leaves(ArgmaxStable(), token) == 7  # loop 2 gives it, five repeat it


def test_a_second_difference_takes_two_checks() -> None:
    """A token that never moves has its first one at check 2, though nothing differs at check 1 either."""
    token = tokens()[0]
    token.states[:] = token.states[0].clone()
    for times, every, loop in ((1, 1, 2), (2, 1, 3), (3, 1, 4), (1, 3, 6), (2, 2, 6)):
        assert leaves(SecondDifference(0.01, times=times, every=every), token) == loop


@pytest.mark.parametrize("policy", [p for p in PLAIN if hasattr(p, "eps")], ids=short)
def test_a_state_that_is_no_number_never_leaves(policy: DepthPolicy) -> None:
    """The engine ends such a row; a policy must not take it for one that has settled."""
    token = tokens()[0]
    token.states[:], token.hidden[:], token.logits[:] = math.nan, math.nan, math.nan
    assert leaves(policy, token) == LOOPS


# Values and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PLAIN + NESTED, ids=short)
def test_policies_are_values(policy: DepthPolicy) -> None:
    again = eval(repr(policy), vars(engine_room))
    assert (again, hash(again)) == (policy, hash(policy))
    assert changed(policy, min_loops=4) != policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.every = 2


NO_COUNT = [0, -1, 1.5, True, math.nan, "2", None]
NO_SIZE = [0, -1, math.nan, math.inf, True, "1", None]


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda v: Margin(0.5, min_loops=v), "min_loops", NO_COUNT),
        (lambda v: AnyOf(Margin(0.5), every=v), "every", NO_COUNT), (FixedLoops, "loops", NO_COUNT),
        (ArgmaxStable, "times", NO_COUNT), (lambda v: SecondDifference(0.1, times=v), "times", NO_COUNT),
        *((make, "eps", NO_SIZE) for make in (StateConverged, StepBelow, CosineConverged, SecondDifference, LogitsKL)),
        (MinPKL, "eps", NO_SIZE), (EntropyDifference, "eps", NO_SIZE), (EntropyBelow, "nats", [-0.1, *NO_SIZE[2:]]),
        (ExitCDF, "q", [-0.1, math.nan, True, "0.5", None]), (GateAbove, "threshold", [1, *NO_SIZE]),
        (Margin, "margin", [1.1, *NO_SIZE[1:]]), (lambda v: MinPKL(min_p=v), "min_p", [1.1, *NO_SIZE[1:]]),
        (LookAhead, "policy", [None, "ExitCDF(0.5)"]), (AnyOf, "depth policy", [None, (Margin(0.5),)]),
        (lambda v: AnyOf(*v), "depth policy", [()]),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(make, name: str, values: list) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}\b") as caught:
            make(value)
        assert "\n" not in str(caught.value)
        assert str(value).strip("()") in str(caught.value)


def test_a_model_without_what_it_takes_is_refused() -> None:
    plain = tiny_config(exit_gate=False)
    for policy in (ExitCDF(0.5), GateAbove(), LookAhead(ExitCDF(0.5)), AnyOf(Margin(0.5), LookAhead(GateAbove()))):
        with pytest.raises(ValueError, match="exit gate") as caught:
            policy.check_model(plain, 4)
        assert "\n" not in str(caught.value)
        policy.check_model(CONFIG, 4)
    deep = Margin(0.5, min_loops=5)
    for policy in (deep, LookAhead(deep), AnyOf(ExitCDF(0.5), deep), FixedLoops(5), AnyOf(FixedLoops(5), Margin(0.5))):
        with pytest.raises(ValueError, match=r"loops must be at most the engine's loops, 4"):
            policy.check_model(CONFIG, 4)
        policy.check_model(CONFIG, 5)


def test_a_request_may_ask_for_fewer_loops_than_its_policy() -> None:
    engine = Engine(ouro_like())
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert engine.generate([[1, 2, 3]], params, max_loops=2)[0].loops == [2, 2, 2]
    assert engine.generate([[1, 2, 3]], params, max_loops=2, depth=FixedLoops(3))[0].loops == [2, 2, 2]
    assert engine.generate([[1, 2, 3]], params, depth=FixedLoops(3))[0].loops == [3, 3, 3]
    assert engine.generate([[1, 2, 3]], params, max_loops=3, depth=LookAhead(FixedLoops(1)))[0].loops == [2, 2, 2]
    with pytest.raises(ValueError, match="max_loops=5"):
        engine.generate([[1, 2, 3]], params, max_loops=5)
    with pytest.raises(ValueError, match="loops must be at most the engine's loops, 4"):
        Engine(ouro_like(), depth=FixedLoops(5))
