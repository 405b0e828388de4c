"""looplm under lm-eval: against lm-eval's own `hf` model, against separate runs, and at any batch size."""

from dataclasses import replace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate as run_tasks
from lm_eval.models.huggingface import HFLM
from tests.conftest import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from harness_tasks import character_tokenizer, choice, rolling, written
from looplm.engine import FixedLoops
from looplm.evals.depths import Depth, exit_depth, fixed_depths
from looplm.evals.harness import Protocol, evaluate, run_at
from looplm.evals.lm import LoopLM, Reader
from looplm.evals.memo import Memo
from looplm.evals.parity import parity
from looplm.evals.results import Effort
from looplm.evals.scoring import Pair, likelihoods
from looplm.models import load

KINDS = {
    "ouro": {"vocab_size": 98},
    "huginn": {
        "vocab_size": 98, "prelude_layers": 1, "coda_layers": 1, "norm_placement": "sandwich_dual",
        "norm_in_loop": False, "injection": "concat", "state_init": "normal", "exit_gate": False,
    },
}  # fmt: skip


def reader_of(model, depths, tokenizer=None, **settings):
    return Reader(model=model, tokenizer=tokenizer or character_tokenizer(), depths=depths, **settings)


@pytest.fixture(scope="module", params=[False, True], ids=["no start", "start"])
def llama(request, tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=98, max_position_embeddings=512, initializer_range=0.3, bos_token_id=0, eos_token_id=1,
        pad_token_id=1, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer(request.param).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_lm_evals_own_model(llama, chat):
    ours = LoopLM(llama, batch_size=3)
    tasks = {"choice": choice(), "written": written(), "rolling": rolling()}
    if ours.reader.begins:  # there `hf` puts a second start token before a whole text, and scores the first
        del tasks["rolling"]
    theirs = HFLM(pretrained=str(llama), batch_size=1, device="cpu", dtype="float32")
    found = []
    for lm in (ours, theirs):
        for task in tasks.values():
            task.set_fewshot_seed(0)
        found.append(run_tasks(lm, tasks, bootstrap_iters=0, apply_chat_template=chat, fewshot_as_multiturn=chat))
    for name in tasks:
        results = [{k: v for k, v in one["results"][name].items() if isinstance(v, float)} for one in found]
        assert results[0] == pytest.approx(results[1], rel=1e-6)
        for mine, other in zip(*(one["samples"][name] for one in found), strict=True):
            assert mine["arguments"] == other["arguments"]
            if name == "written":
                assert mine["resps"] == other["resps"]
            elif name == "choice":
                for (logprob, greedy), (expected, same) in zip(
                    (resp for (resp,) in mine["resps"]), (resp for (resp,) in other["resps"]), strict=True
                ):
                    assert (logprob, greedy) == (pytest.approx(expected, abs=1e-4), same)


def test_parity_says_how_far_a_model_lies_from_its_checkpoint(llama):
    tasks, same = {"choice": choice(), "written": written()}, LoopLM(llama).reader
    other = replace(same, model=load(llama), memo=Memo())
    with torch.no_grad():
        other.model.lm_head.weight.mul_(2)
    assert all(row.difference < 1e-6 and row.furthest < 1e-4 for row in parity(same, llama, tasks, Protocol()))
    found = [run_at(LoopLM(reader), tasks, Protocol())["samples"] for reader in (same, other)]
    likely, texts = ([[one["resps"] for one in each[name]] for each in found] for name in ("choice", "written"))
    apart = [
        abs(a[0] - b[0]) for mine, theirs in zip(*likely, strict=True) for (a,), (b,) in zip(mine, theirs, strict=True)
    ]
    assert max(apart) > 1
    furthest = {row.task: row.furthest for row in parity(replace(other, memo=Memo()), llama, tasks, Protocol())}
    unlike = sum(mine != theirs for mine, theirs in zip(*texts, strict=True)) / len(texts[0])
    assert furthest == {"choice": pytest.approx(max(apart), rel=1e-4), "written": unlike}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sweep_from_one_forward_gives_the_digits_of_separate_runs(kind):
    model, tasks = tiny_model(**kind), {"choice": choice(), "rolling": rolling(), "written": written()}
    depths = fixed_depths([1, 2, 3, 5])
    scores, items = evaluate(reader_of(model, depths), tasks, Protocol())
    apart = [evaluate(reader_of(model, [depth]), tasks, Protocol()) for depth in depths]
    assert len(scores) == len(depths) * 5
    assert sorted(scores, key=repr) == sorted((one for found, _ in apart for one in found), key=repr)
    for name in tasks:
        assert items[name] == {depth: told for _, found in apart for depth, told in found[name].items()}
    assert len({score.value for score in scores if score.metric == "bits_per_byte"}) == len(depths)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_likelihoods_are_those_of_a_plain_loop_over_pairs(kind):
    model = tiny_model(**kind)
    generator = torch.Generator().manual_seed(0)
    pairs = [
        Pair(
            context=tuple(torch.randint(0, 98, (size,), generator=generator).tolist()),
            continuation=tuple(torch.randint(0, 98, (1 + size % 3,), generator=generator).tolist()),
        )
        for size in (1, 9, 30, 4, 2, 17)
    ]  # fmt: skip
    pairs += [replace(pairs[1], continuation=(5,)), replace(pairs[1], continuation=(7,))]
    for batch in (1, 2, 7):
        told = likelihoods(model, pairs, fixed_depths([1, 3]), batch, max_length=20)
        for pair, row in zip(pairs, told, strict=True):
            for loops, one in zip((1, 3), row, strict=True):
                ids = torch.tensor([(pair.context + pair.continuation)[-21:]])
                with torch.no_grad():
                    log_p = model(ids[:, :-1], loops=loops).logits.log_softmax(-1)[0]
                wanted = torch.tensor(pair.continuation)
                log_p = log_p[-len(wanted) :]
                assert one.logprob == pytest.approx(float(log_p.gather(-1, wanted[:, None]).sum()), rel=1e-5)
                assert one.greedy == bool(log_p.argmax(-1).equal(wanted))
                assert one.loops == loops


def test_under_an_exit_rule_each_token_is_read_at_its_own_loop():
    model, pair = tiny_model(vocab_size=98), Pair(context=(3, 4, 5), continuation=(6, 7, 8, 9))
    with torch.no_grad():
        model.model.exit_gate.weight.mul_(50)
    ((told,),) = likelihoods(model, [pair], [exit_depth("q=0.4", model.config)], 1, 64)
    with torch.no_grad():
        out = model.model(torch.tensor([[3, 4, 5, 6, 7, 8]]), loops=model.config.loops, keep_loops="all")
        exits = model.exit_loops(out, 0.4)[0, 2:]
        log_p = model.logits_at_exit(out, 0.4).log_softmax(-1)[0, 2:]
    assert told.loops == float(exits.double().mean())
    assert len(set(exits.tolist())) > 1
    assert told.logprob == pytest.approx(float(log_p.gather(-1, torch.tensor([[6], [7], [8], [9]])).sum()), abs=1e-6)


def test_exit_rules_and_fixed_loops_share_a_forward():
    model = tiny_model(vocab_size=98)
    depths = [*fixed_depths([1, 5]), exit_depth("q=0.5", model.config), exit_depth("margin=0.01", model.config)]
    together = evaluate(reader_of(model, depths), {"choice": choice()}, Protocol())
    for depth in depths:
        (one, *_), _ = evaluate(reader_of(model, [depth]), {"choice": choice()}, Protocol())
        assert one in together[0]
    for bad in ("q", "q=x", "nothing=1"):
        with pytest.raises(ValueError, match=f"'{bad}' is no exit rule"):
            exit_depth(bad, model.config)
    with pytest.raises(ValueError, match="reads the exit gate"):
        exit_depth("q=0.5", tiny_model(exit_gate=False).config)


def test_scores_do_not_depend_on_the_batch_size():
    model = tiny_model(vocab_size=98)
    tasks = {"choice": choice(), "written": written(), "rolling": rolling()}
    depths = [*fixed_depths([2]), exit_depth("q=0.5", model.config)]
    found = [evaluate(reader_of(model, depths, batch_size=size), tasks, Protocol()) for size in (1, 7, 32)]
    for scores, items in found[1:]:
        for score, first in zip(scores, found[0][0], strict=True):
            assert replace(score, value=first.value) == first
            assert score.value == pytest.approx(first.value, rel=1e-5)
        assert items["choice"] == found[0][1]["choice"]
        assert items["written"] == found[0][1]["written"]


def test_a_start_token_stands_once():
    model, starts, plain = tiny_model(vocab_size=98), character_tokenizer(True), character_tokenizer()
    with_start = LoopLM(reader_of(model, fixed_depths([1]), starts))
    assert with_start.tok_encode("ab") == [0, 68, 69]
    assert with_start.tok_encode("<s>ab") == [0, 68, 69]
    assert with_start.tok_encode("ab", add_special_tokens=False) == [68, 69]
    assert LoopLM(reader_of(model, fixed_depths([1]), plain)).tok_encode("ab") == [68, 69]
    assert LoopLM(reader_of(model, fixed_depths([1]), plain, add_bos=True)).tok_encode("<s>ab") == [0, 68, 69]
    assert LoopLM(reader_of(model, fixed_depths([1]), starts, add_bos=False)).tok_encode("ab") == [68, 69]
    ((one,),) = likelihoods(model, [Pair(context=(0,), continuation=(68, 69))], fixed_depths([1]), 1, 64)
    for lm in (with_start, LoopLM(reader_of(model, fixed_depths([1]), plain))):
        assert lm.loglikelihood([Instance("loglikelihood", {}, ("", "ab"), 0)]) == [(one.logprob, one.greedy)]
        assert lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("ab",), 0)]) == [one.logprob]
        assert lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("<s>ab",), 0)]) == [one.logprob]


def asked(kind, *arguments, doc=0):
    return Instance(kind, {}, arguments, 0, ("some", doc, 1))


def test_long_texts_lose_their_beginning_which_is_told_and_limits_are_kept():
    lm = LoopLM(reader_of(tiny_model(vocab_size=98), fixed_depths([1]), max_length=32))
    settings = {"until": ["", "never"], "max_gen_toks": 8}
    done, same = lm.generate_until([asked("generate_until", "a" * size, settings, doc=size) for size in (50, 24)])
    assert done == same
    assert [lm.effort("some", size) for size in (50, 24)] == [
        Effort(tokens=8, loops=1, cut=cut) for cut in (True, False)
    ]
    lm.loglikelihood([asked("loglikelihood", "a" * size, "bcd", doc=-size) for size in (30, 31)])
    assert [lm.effort("some", -size).cut for size in (30, 31)] == [False, True]  # of 33 tokens, 32 are read
    lm.loglikelihood_rolling([asked("loglikelihood_rolling", "a" * 90, doc=1)])
    assert lm.effort("some", 1) == Effort(tokens=90, loops=1, cut=False)
    with pytest.raises(ValueError, match="32 tokens to generate leave no room in max_length=32"):
        lm.generate_until([asked("generate_until", "a", {"until": "x", "max_gen_toks": 32})])
    with pytest.raises(ValueError, match="'num_beams' is not supported"):
        lm.generate_until([asked("generate_until", "a", {"num_beams": 3})])


def test_a_question_that_comes_twice_counts_its_own_tokens_alone():
    lm = LoopLM(reader_of(tiny_model(vocab_size=98), fixed_depths([2])))
    lm.loglikelihood([asked("loglikelihood", "ab", end, doc=doc) for doc in (0, 1) for end in ("cde", "f")])
    assert [lm.effort("some", doc) for doc in (0, 1)] == [Effort(tokens=4, loops=2, cut=False)] * 2


@pytest.mark.parametrize("context", ["the end", "the end ", ""])
def test_empty_continuations_are_refused(context):
    lm = LoopLM(reader_of(tiny_model(vocab_size=98), fixed_depths([1])))
    with pytest.raises(ValueError, match=f"the continuation of '{context}' is empty"):
        lm.loglikelihood([asked("loglikelihood", context, "")])


def test_likelihoods_that_are_no_numbers_are_refused():
    model = tiny_model(vocab_size=98)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match="not numbers at loops=2; leave that depth out"):
        evaluate(reader_of(model, fixed_depths([2])), {"choice": choice()}, Protocol())


def test_sampled_requests_draw_for_themselves_and_come_again_with_the_seed():
    model = tiny_model(vocab_size=98)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely, so that texts tell what was drawn alone
    hot = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}

    def drawn(seed, *prompts):
        lm = LoopLM(reader_of(model, fixed_depths([2]), seed=seed))
        return lm.generate_until([asked("generate_until", prompt, hot) for prompt in prompts])

    first = drawn(0, "ab", "ab", "ab", "cd", "ef")
    assert drawn(0, "ef", "cd", "ab", "ab", "ab") == [first[4], first[3], *first[:3]]
    assert len({*first, *drawn(1, "ab", "ab", "ab", "cd", "ef")}) == 10


def test_answers_are_kept_under_their_settings_alone(tmp_path):
    model, tasks = tiny_model(vocab_size=98), {"choice": choice(), "written": written()}
    depths = fixed_depths([1, 2])
    first = evaluate(reader_of(model, depths, memo=Memo({"model": "a"}, tmp_path / "m.jsonl")), tasks, Protocol())
    kept = (tmp_path / "m.jsonl").read_text()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # what is remembered is not asked again
    again = evaluate(reader_of(model, depths, memo=Memo({"model": "a"}, tmp_path / "m.jsonl")), tasks, Protocol())
    assert again == first
    assert (tmp_path / "m.jsonl").read_text() == kept


def test_an_interrupt_loses_no_completion_that_has_ended(tmp_path):
    model, heard = tiny_model(vocab_size=98), []

    def stop(what, done, total):
        heard.append(done)
        if done == 3:
            raise KeyboardInterrupt

    def lm(advance):
        memo = Memo({}, tmp_path / "m.jsonl")
        return LoopLM(reader_of(model, fixed_depths([1]), memo=memo, batch_size=2, advance=advance))

    requests = [asked("generate_until", prompt, {"until": [], "max_gen_toks": 5}) for prompt in "abcdefg"]
    with pytest.raises(KeyboardInterrupt):
        lm(stop).generate_until(requests)
    heard.clear()
    told = lm(lambda what, done, total: heard.append(total)).generate_until(requests)
    assert set(heard) == {4}
    assert told == LoopLM(reader_of(model, fixed_depths([1]))).generate_until(requests)


def test_a_depth_beyond_the_models_own_is_a_depth_too():
    model = tiny_model(vocab_size=98)
    deep = Depth(name="loops=7", loops=7, policy=FixedLoops(7))
    scores, _ = evaluate(reader_of(model, [deep]), {"choice": choice()}, Protocol(limit=2))
    assert {(score.depth, score.items) for score in scores} == {("loops=7", 2)}


def test_lm_eval_makes_it_from_a_string_of_arguments(llama):
    lm = LoopLM.create_from_arg_string(f"pretrained={llama},loops=2,batch_size=4")
    assert (lm.depth.name, lm.reader.batch_size, lm.reader.max_length) == ("loops=2", 4, 512)
    assert load(llama).config.loops == 1
    with pytest.raises(ValueError, match="reads the exit gate"):
        LoopLM.create_from_arg_string(f"pretrained={llama},exit=q=0.5")
