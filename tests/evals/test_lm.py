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
from looplm.evals import memo
from looplm.evals.depths import Depth, exit_depth, fixed_depths
from looplm.evals.harness import Protocol, evaluate
from looplm.evals.lm import LoopLM, Reader
from looplm.evals.memo import Memo
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


def test_long_texts_lose_their_beginning_and_limits_are_kept():
    lm = LoopLM(reader_of(tiny_model(vocab_size=98), fixed_depths([1]), max_length=32))
    (done,) = lm.generated([("a" * 50, {"until": [], "max_gen_toks": 8})])
    (same,) = lm.generated([("a" * 24, {"until": ["", "never"], "max_gen_toks": 8})])
    assert done == same
    assert (done["tokens"], done["reason"]) == (8, "length")
    with pytest.raises(ValueError, match="32 tokens to generate leave no room in max_length=32"):
        lm.generated([("a", {"until": "x", "max_gen_toks": 32})])
    with pytest.raises(ValueError, match="'num_beams' is not supported"):
        lm.generated([("a", {"num_beams": 3})])


def test_empty_continuations_are_refused():
    lm = LoopLM(reader_of(tiny_model(vocab_size=98), fixed_depths([1])))
    with pytest.raises(ValueError, match="the continuation of 'the end' is empty"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("the end", ""), 0)])


def test_equal_sampled_requests_draw_anew_and_come_again_with_the_seed():
    model = tiny_model(vocab_size=98)
    hot = ("ab", {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0})
    first, again, other = (
        LoopLM(reader_of(model, fixed_depths([2]), seed=seed)).generate_until(
            [Instance("generate_until", {}, hot, number) for number in range(3)]
        )
        for seed in (0, 0, 100)
    )
    assert first == again
    assert len({*first, *other}) == 6


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
    (tmp_path / "m.jsonl").write_text(kept[:-7])  # a run that died while it wrote
    assert len(Memo({"model": "a"}, tmp_path / "m.jsonl")._found) == kept.count("\n") - 2
    with pytest.raises(ValueError, match="holds answers under other settings"):
        Memo({"model": "b"}, tmp_path / "m.jsonl")


def test_an_interrupt_loses_what_was_asked_last_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(memo, "_AT_ONCE", 3)

    def answer(some):
        if "g" in some:
            raise KeyboardInterrupt
        return [[one.upper(), len(one)] for one in some]

    with pytest.raises(KeyboardInterrupt):
        Memo({}, tmp_path / "m").answers(["1", "2"], list("abcdefg"), answer)
    asked = []

    def again(some):
        asked.extend(some)
        return [[one.upper(), len(one)] for one in some]

    told = Memo({}, tmp_path / "m").answers(["1", "2"], list("abcdefgab"), again)
    assert told == [[one.upper(), 1] for one in "abcdefgab"]
    assert asked == ["g"]


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
