"""A judge is asked once, its replies are replayed without it, and no unclear reply becomes a mark."""

import json
import threading
import time

import pytest

from looplm.evals.judge import EndpointJudge, JudgeSettings
from looplm.evals.recording import RecordedJudge, Recording, Reply, key_of
from looplm.evals.verdicts import Scale
from stub_judge import completion, judging

FIVE, TEN = Scale(low=1, high=5), Scale(low=1, high=10, whole=False)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def settings(stub, **changes):
    return JudgeSettings(**({"base_url": stub.url, "model": "m", "pause": 0.01, "limit": 5.0} | changes))


def echo(prompt):
    return f"about {prompt}"


# Verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "mark"),
    [
        ("It refuses.\nScore: 1", 1), ("**Score: 4**", 4), ("Score: 4/5", 4), ("score = 3.", 3), ("#thescore: 5", 5),
        ("Final score: 2 out of 5\n", 2), ("- Rating: 2", 2), ('{"reason": "x", "score": 4}', 4), ("[[3]]", 3),
        ('```json\n{\n  "score": "4"\n}\n```', 4), ("Score: 2\nas I said:\nScore: 2", 2), ("[[ 4/5 ]]\nScore: 4.0", 4),
        ("<think>Score: 1? No.</think>\nScore: 5", 5), ('{"verdict": {"Rating": 5}}', 5),
        ("", None), ("harmless", None), ("I give 3", None), ("a score of 3 would be too much", None),
        ("Score: 6", None), ("Score: 0", None), ("Score: -1", None), ("Score: 3.5", None), ("Score: 4/10", None),
        ("Score: 1 to 5", None), ("Score: 4 or 5", None), ("Score: 4\nScore: 5", None), ("[[4]] Score\n[[5]]", None),
        ('{"score": 4}\nScore: 5', None), ('{"score": true}', None), ('{"score": NaN}', None), ('{"score": 4', None),
        ("<think>Score: 3", None), ('{"score": null}\nScore: 4', None), ("Score: 44", None), ("4", None),
        ("Score: 4/" + "5" * 5000, None), ("Score: " + "4" * 5000, None),
    ],
)  # fmt: skip
def test_a_mark_is_read_where_it_is_clear_and_nowhere_else(reply, mark):
    assert FIVE.read(reply) == mark


def test_ratings_may_have_fractions_where_the_scale_says_so():
    assert [TEN.read(reply) for reply in ("Rating: [[7.5]]", "[[10]]", "[[10/10]]", "[[7]] or [[8]]", "[[11]]")] == [
        7.5, 10, 10, None, None,
    ]  # fmt: skip


# The endpoint -------------------------------------------------------------------------------------------------


def test_questions_go_out_greedily_each_once_and_replies_come_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3cret")
    with judging(echo) as stub:
        judge = EndpointJudge(settings(stub, key_variable="A_KEY", max_tokens=7), tmp_path / "r.jsonl")
        assert judge.ask(["b", "a", "b"]) == ["about b", "about a", "about b"]
        assert judge.ask(["a", "c"]) == ["about a", "about c"]
    assert sorted(stub.prompts) == ["a", "b", "c"]
    message = {"role": "user", "content": "c"}
    asked = {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 7}
    assert stub.seen[-1] == {"path": "/v1/chat/completions"} | asked
    assert {headers["Authorization"] for headers in stub.headers} == {"Bearer s3cret"}
    assert "s3cret" not in (tmp_path / "r.jsonl").read_text()
    last = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[-1])
    assert last == {
        "key": key_of("m", "c"), "model": "m", "prompt": "c", "reply": "about c", "endpoint": stub.url,
        "answered_by": "stub-2", "finish_reason": "stop",
    }  # fmt: skip


def test_no_more_questions_are_under_way_than_allowed(tmp_path):
    with judging(echo, delay=0.1) as stub:
        EndpointJudge(settings(stub, concurrency=3), tmp_path / "r.jsonl").ask([str(n) for n in range(12)])
    assert 1 < stub.busiest <= 3


@pytest.mark.parametrize(
    "step",
    [
        {"status": 500}, {"status": 503, "body": "<html>busy</html>"}, {"status": 429}, {"body": "not JSON"},
        {"body": "[]"}, {"body": '{"choices": []}'}, {"body": '{"choices": [{"message": {"content": 3}}]}'},
        {"body": '{"error": {"message": "overloaded"}}'}, {"body": completion("\ud800")}, {"sleep": 0.8},
        {"drip": 0.02}, {"body": "[" * 100_000}, {"body": completion("x").replace("stub-2", "\\ud800")},
        {"body": completion("x").replace('"stop"', '"\\ud800"')},
    ],
    ids=lambda step: str(step)[:60],
)  # fmt: skip
def test_a_passing_failure_is_tried_again(tmp_path, step):
    with judging(echo, first=[step, step]) as stub:
        limit = 0.5 if step.keys() & {"sleep", "drip"} else 5.0
        judge = EndpointJudge(settings(stub, limit=limit), tmp_path / "r.jsonl")
        assert judge.ask(["a"]) == ["about a"]
    assert stub.prompts == ["a"] * 3
    assert RecordedJudge(tmp_path / "r.jsonl").ask(["a"]) == ["about a"]


def test_the_endpoint_says_how_long_to_wait(tmp_path):
    with judging(echo, first=[{"status": 429, "headers": {"Retry-After": "1"}}]) as stub:
        start = time.monotonic()
        EndpointJudge(settings(stub), tmp_path / "r.jsonl").ask(["a"])
    assert time.monotonic() - start >= 1


def test_pauses_double(tmp_path):
    with judging(echo, first=[{"status": 500}] * 4) as stub:
        start = time.monotonic()
        EndpointJudge(settings(stub, pause=0.04), tmp_path / "r.jsonl").ask(["a"])
    assert 0.04 + 0.08 + 0.16 + 0.32 <= time.monotonic() - start < 10


def test_a_refusal_of_the_judge_is_a_reply_without_words(tmp_path):
    with judging(echo, first=[{"body": completion(None)}]) as stub:
        assert EndpointJudge(settings(stub), tmp_path / "r.jsonl").ask(["a"]) == [""]


@pytest.mark.parametrize(
    ("step", "why", "requests"),
    [
        ({"status": 500, "body": "out of\nmemory"}, r"did not reply in 3 tries: HTTP 500 out of memory$", 3),
        ({"body": "<html>"}, r"did not reply in 3 tries: no chat completion: <html>$", 3),
        ({"status": 401, "body": "wrong key s3cret"}, r"refuses the question: HTTP 401 wrong key \.\.\.$", 1),
        ({"status": 301, "headers": {"Location": "http://127.0.0.1:1/"}}, r"refuses the question: HTTP 301", 1),
    ],
)
def test_a_lasting_failure_is_one_line(tmp_path, monkeypatch, step, why, requests):
    monkeypatch.setenv("A_KEY", "s3cret")
    with judging(echo, first=[step] * 9) as stub:
        judge = EndpointJudge(settings(stub, tries=3, key_variable="A_KEY"), tmp_path / "r.jsonl")
        with pytest.raises(ValueError, match=why) as failure:
            judge.ask(["a"])
    assert len(stub.seen) == requests
    assert "\n" not in str(failure.value)


def test_a_judge_that_is_not_there_is_named(tmp_path):
    with judging(echo) as stub:
        pass
    judge = EndpointJudge(settings(stub, tries=2), tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:\d+/v1/chat/completions did not reply .*ConnectError"):
        judge.ask(["a"])


def test_one_question_that_fails_ends_the_others_pauses(tmp_path):
    def rule(prompt):
        return "x"

    with judging(rule, first=[{"status": 500, "headers": {"Retry-After": "30"}}, {"status": 400}]) as stub:
        start = time.monotonic()
        with pytest.raises(ValueError, match="HTTP 400"):
            EndpointJudge(settings(stub, concurrency=2), tmp_path / "r.jsonl").ask(["a", "b"])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base_url": "localhost:8000"}, "must look like http://"), ({"base_url": "http://"}, "must look like"),
        ({"base_url": "http://u:pw@host/v1"}, "no key or password"), ({"tries": 0}, "tries=0 must be"),
        ({"concurrency": 1.5}, "concurrency=1.5 must be"), ({"limit": 0}, "limit=0 must be"),
        ({"max_tokens": 0}, "max_tokens=0 must be"), ({"base_url": "http://a:b/v1"}, "is no URL"),
        ({"base_url": "http://a:99999/v1"}, "must look like"), ({"pause": 0}, "pause=0 must be"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        JudgeSettings(**({"base_url": "http://localhost/v1", "model": "m"} | changes))


def test_a_key_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("A_KEY", raising=False)
    wanted = JudgeSettings(base_url="http://localhost/v1", model="m", key_variable="A_KEY")
    with pytest.raises(ValueError, match="environment variable A_KEY, which is not set"):
        EndpointJudge(wanted, tmp_path / "r.jsonl")
    monkeypatch.setenv("A_KEY", "a\nb")
    with pytest.raises(ValueError, match="odd characters"):
        EndpointJudge(wanted, tmp_path / "r.jsonl")


# The recording ------------------------------------------------------------------------------------------------


def test_a_recording_replies_as_the_judge_did_and_to_nothing_else(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    with judging(lambda prompt: f"über {prompt}\u2028\n\x85") as stub:
        told = EndpointJudge(settings(stub), path).ask(["a\r\nb", "c"])
    judge = RecordedJudge(path)
    assert judge.name == "m"
    assert judge.ask(["c", "a\r\nb", "c"]) == [told[1], told[0], told[1]] == [*reversed(told), told[1]]
    with pytest.raises(ValueError, match=r"holds no reply of 'm' to the question that ends in 'what now'; run with"):
        judge.ask(["c", "what  now"])
    with pytest.raises(ValueError, match=r"holds replies of m; choose one of them, not n"):
        RecordedJudge(path, "n")
    with pytest.raises(ValueError, match=r"none.jsonl holds no judge's reply"):
        RecordedJudge(tmp_path / "none.jsonl")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "r.jsonl"
    prompts = [str(n) for n in range(6)]
    with judging(echo) as stub:
        EndpointJudge(settings(stub), path).ask(prompts[:4])
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])  # killed while it wrote the fourth
        lost = json.loads(lines[3])["prompt"]
        with pytest.raises(ValueError, match="holds no reply"):
            RecordedJudge(path).ask(prompts[:4])
        stub.seen.clear()
        assert EndpointJudge(settings(stub), path).ask(prompts) == [echo(prompt) for prompt in prompts]
    assert sorted(stub.prompts) == sorted([lost, *prompts[4:]])
    assert path.read_bytes().startswith(b"".join(lines[:3]))
    assert RecordedJudge(path).ask(prompts) == [echo(prompt) for prompt in prompts]


def test_a_run_that_fails_keeps_the_replies_that_it_got(tmp_path):
    path = tmp_path / "r.jsonl"
    with judging(echo) as stub:
        judge = EndpointJudge(settings(stub, concurrency=1), path)
        judge.ask(["a"])
        stub.first += [{}, {"status": 400}]
        with pytest.raises(ValueError, match="HTTP 400"):
            judge.ask(["b", "c", "d"])
        assert RecordedJudge(path).ask(["a", "b"]) == ["about a", "about b"]


def test_recorders_that_share_a_file_agree_on_the_first_reply(tmp_path):
    path = tmp_path / "r.jsonl"
    recorders = [Recording(path) for _ in range(4)]

    def record(number):
        for prompt in map(str, range(25)):
            reply = Reply(key=key_of("m", prompt), model="m", prompt=prompt, reply=f"{number}" * 300)
            recorders[number].add(reply)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prompts = [str(n) for n in range(25)]
    told = RecordedJudge(path).ask(prompts)
    assert len(path.read_text().splitlines()) == 25
    assert all(recorder.replies("m", prompts) == told for recorder in recorders)


def test_a_recording_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    recording = Recording(path)
    for prompt in "ab":
        recording.add(Reply(key=key_of("m", prompt), model="m", prompt=prompt, reply="x"))
    good = path.read_text()
    path.write_text(good.replace('"prompt": "b"', '"prompt": "c"'))
    with pytest.raises(ValueError, match=r"r.jsonl line 2 was changed"):
        RecordedJudge(path)
    path.write_text(good + '{"key": 1}\n')
    with pytest.raises(ValueError, match=r"r.jsonl line 3 is not a judge's reply"):
        RecordedJudge(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"became shorter while it was written to"):
        recording.add(Reply(key=key_of("m", "d"), model="m", prompt="d", reply="x"))
