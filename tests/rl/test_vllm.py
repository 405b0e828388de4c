"""Rollouts through a server are those of the engine behind it, on the weights in training, or one line says why."""

import json
import threading
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from rl_runs import policy, read_log, write_recipe
from safetensors.torch import load_file
from stub_vllm import NAME, serving
from typer.testing import CliRunner

import looplm
from looplm.cli.main import app
from looplm.data.tokenizer import load_tokenizer
from looplm.engine import FixedLoops
from looplm.models import save
from looplm.rl import vllm
from looplm.rl.rollouts import EngineRollouts
from looplm.rl.run import reinforce
from looplm.rl.vllm import VLLMRollouts, VLLMServer
from looplm.training.distribution import World

QUIET = Console(file=StringIO())
PROMPTS, SEEDS = [[3, 4, 5], [7], [2, 2, 9, 1, 6]], [11, 2**62, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policy(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(vllm, "_PAUSE", 0.001)


def client(stub, folder, server=None, **changes):
    values = {
        "loops": 3, "vocab_size": 16, "ends": {1},
        "write": lambda path: save(looplm.load(folder), path, "ouro"), "folder": folder.parent / "handed",
        "temperature": 0.6, "max_tokens": 10, "max_prompt": 32,
    }  # fmt: skip
    return VLLMRollouts(VLLMServer(url=stub.url, **(server or {})), load_tokenizer(folder), **values | changes)


def run(recipe):
    return reinforce(recipe, QUIET)


def through(stub, *more):
    return (f"sampling.server.url={stub.url}", *more)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_rollouts_are_those_of_the_engine_behind_the_server(folder, temperature):
    """Token for token; depth, end and text, too, with end tokens and a stop string."""
    model, tokenizer = looplm.load(folder), load_tokenizer(folder)
    model.generation_config.eos_token_id = 3
    common, group = {"temperature": temperature, "stop": ("4",), "max_tokens": 12}, 4 if temperature else 1
    local = EngineRollouts(model, tokenizer, FixedLoops(3), **common).sample(PROMPTS, SEEDS, group)
    with serving(folder) as stub:
        served = client(stub, folder, ends={3}, **common).sample(PROMPTS, SEEDS, group)
    assert [len(group) for group in served] == [group] * 3
    pairs = [pair for groups in zip(served, local, strict=True) for pair in zip(*groups, strict=True)]
    for one, other in pairs:
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert replace(one, logprobs=[]) == replace(other, logprobs=[])
    assert {one.finished for one, _ in pairs} == ({True, False} if temperature else {True})


def test_every_request_asks_for_the_whole_distribution(folder):
    """What a server's own generation config would set otherwise is said."""
    with serving(folder) as stub:
        client(stub, folder).sample([[3, 4]], [9], 2)
    ((_, body),) = [request for request in stub.seen if request[0] == "/v1/completions"]
    assert body == {
        "model": NAME, "prompt": [3, 4], "seed": 9, "n": 2, "max_tokens": 10, "temperature": 0.6, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": [], "stop_token_ids": [1], "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def test_all_prompts_are_asked_at_once(folder):
    """No request is answered before all three are there."""
    together = threading.Barrier(3)

    def before(path, body):
        if path == "/v1/completions":
            together.wait(timeout=30)

    with serving(folder, before=before) as stub:
        assert len(client(stub, folder).sample(PROMPTS, SEEDS, 2)) == 3


def test_without_a_step_every_ratio_stays_one(tmp_path):
    recipe = write_recipe(tmp_path)
    with serving(tmp_path / "model") as stub:
        run(write_recipe(tmp_path, through(stub, "optimizer.lr=1e-30")))
    records = [record for record in read_log(tmp_path / "run") if "updates" in record]
    assert len(records) == recipe.steps == 3
    for record in records:
        assert record["updates"] == 1
        assert record["mean_loops"] == 3
        assert abs(record["ratio"] - 1) < 1e-4
        assert record["sampler_drift"] < 1e-4


@pytest.mark.parametrize("more", [(), ("lora={rank: 2}",)], ids=["whole", "adapters"])
def test_a_run_through_the_server_is_the_one_on_the_local_engine(tmp_path, more):
    """So the server has sampled each step from the weights that the step before left, adapters in them. In float64."""
    more = ("optimizer.lr=0.01", "precision=float64", *more)
    local = run(write_recipe(tmp_path, more, out="local"))
    with serving(tmp_path / "model", dtype=torch.float64) as stub:
        served = run(write_recipe(tmp_path, through(stub, *more), out="served"))
        assert len(stub.loaded) == 4  # before the first step, and after each of three
        kept = list((tmp_path / "served/served").iterdir())
        assert kept == stub.loaded[-1:]
    ours, theirs = (load_file(done.checkpoint / "model.safetensors") for done in (served, local))
    before = load_file(tmp_path / "model/model.safetensors")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-9, rtol=0)
    assert any((theirs[name] - tensor).abs().max() > 1e-3 for name, tensor in before.items())
    handed = looplm.load(kept[0], torch.float64).state_dict()
    assert all(torch.equal(handed[name], tensor) for name, tensor in ours.items())


def test_a_server_of_other_weights_is_brought_to_the_policy_or_refused(tmp_path):
    """A run that starts or resumes on a server that holds anything; and one that answers, but loads nothing."""
    write_recipe(tmp_path)
    torch.manual_seed(1)
    other = policy(tmp_path / "other")
    model = looplm.load(other)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    model.save_pretrained(other)
    with serving(other) as stub:
        assert run(write_recipe(tmp_path, through(stub), out="brought")).step == 3
    with (
        serving(other, deaf=True) as stub,
        pytest.raises(ValueError, match=r"step 0: log-probabilities in training lie .* more than max_drift=0.001"),
    ):
        run(write_recipe(tmp_path, through(stub), out="refused"))


def test_another_depth_than_the_server_does_is_refused(tmp_path):
    write_recipe(tmp_path)
    with (
        serving(tmp_path / "model") as stub,
        pytest.raises(ValueError, match=r"log-probabilities in training lie .* from the sampler's"),
    ):
        run(write_recipe(tmp_path, through(stub, "sampling.depth={kind: fixed, loops: 2}")))


def test_what_max_drift_lets_pass_is_weighed_by_its_ratio_clipped_and_told(tmp_path):
    """A server that computes otherwise: what it drew is likelier in training, by e^0.3."""

    def after(path, answer):
        for choice in answer["choices"] if path == "/v1/completions" else ():
            choice["logprobs"]["token_logprobs"] = [value - 0.3 for value in choice["logprobs"]["token_logprobs"]]
        return answer

    write_recipe(tmp_path)
    with serving(tmp_path / "model", after=after) as stub:
        run(write_recipe(tmp_path, through(stub, "steps=1", "max_drift=0.5")))
    (record,) = [record for record in read_log(tmp_path / "run") if "updates" in record]
    assert record["sampler_drift"] == pytest.approx(0.3, abs=1e-4)
    assert record["ratio"] == pytest.approx(2.718281828**0.3, abs=1e-4)
    assert 0 < record["clipped"] < 1  # those of a positive advantage, beyond 1 + 0.2


def test_the_leading_process_alone_hands_weights_over(folder, monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda fault: None)
    with serving(folder) as stub:
        for rank in (1, 0):
            client(stub, folder, world=World(rank=rank, size=2)).weights_changed()
            assert len(stub.loaded) == (rank == 0)


def drops(path, times):
    """Let the first `times` requests of `path` find the connection lost, or the server busy."""
    left = [times]

    def before(asked, body):
        if asked == path and left[0]:
            left[0] -= 1
            if left[0] % 2:
                return 503, {"error": "busy"}
            raise ConnectionResetError
        return None

    return before


def test_lost_connections_are_tried_again(folder):
    with serving(folder) as stub:
        whole = client(stub, folder).sample([[3, 4]], [9], 2)
        stub.before = drops("/v1/completions", 2)
        assert client(stub, folder).sample([[3, 4]], [9], 2) == whole
        stub.before = drops("/v1/completions", 3)
        with pytest.raises(
            ValueError, match=r"at http://127.* did not answer /v1/completions in 3 tries of at most 600 s"
        ):
            client(stub, folder).sample([[3, 4]], [9], 2)


def test_a_server_that_is_silent_is_left(folder):
    silent = threading.Event()
    with serving(folder, before=lambda path, body: silent.wait(30) and None) as stub:
        with pytest.raises(ValueError, match=r"did not answer /v1/models in 2 tries of at most 0.05 s: ReadTimeout"):
            client(stub, folder, {"limit": 0.05, "tries": 2})
        silent.set()


def test_no_server_is_one_line(tmp_path):
    write_recipe(tmp_path)
    done = CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "sampling.server.url=http://127.0.0.1:9"])
    assert done.exit_code == 1
    assert done.output.startswith("looplm: the vLLM server at http://127.0.0.1:9 did not answer /v1/models in 3 tries")
    assert done.output.count("\n") == 1
    assert not (tmp_path / "run/recipe.json").exists()


def test_the_verb_runs_through_a_server(tmp_path):
    write_recipe(tmp_path)
    with serving(tmp_path / "model") as stub:
        done = CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "steps=1", *through(stub)])
        assert done.exit_code == 0, done.output
        assert sum(path == "/v1/completions" for path, _ in stub.seen) == 4
        # Resumed on another server, or on none: where completions are made decides nothing that the run is known by.
        assert CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "steps=2"]).exit_code == 0


def spoilt(**changes):
    """A change of the first completion in an answer."""

    def after(path, answer):
        if path == "/v1/completions":
            for name, change in changes.items():
                answer["choices"][0][name] = change(answer["choices"][0][name])
        return answer

    return after


SPOILT = {
    "choices.0.token_ids: Input should be a valid list": spoilt(token_ids=lambda ids: None),
    "choices.0.logprobs": spoilt(logprobs=lambda told: None),
    "log-probabilities for 3 tokens": spoilt(token_ids=lambda ids: [5, 5, 5]),
    "answers another prompt": spoilt(prompt_token_ids=lambda ids: ids[1:]),
    "beyond the policy's 16": spoilt(token_ids=lambda ids: [99 for _ in ids]),
    "choices.0.finish_reason: Input should be 'stop' or 'length'": spoilt(finish_reason=lambda reason: "abort"),
    "gives 1 completions where 2 were asked for": lambda path, answer: {"choices": answer["choices"][:1]},
    "/v1/completions with no JSON": lambda path, answer: b"hello",
}


@pytest.mark.parametrize("line", SPOILT)
def test_an_answer_that_training_cannot_use_is_one_line(folder, line):
    with serving(folder) as stub:
        source = client(stub, folder)
        stub.after = lambda path, answer: json_or_bytes(SPOILT[line](path, answer))
        with pytest.raises(ValueError, match=r"the vLLM server at http://127") as caught:
            source.sample([[3, 4]], [9], 2)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def json_or_bytes(answer):
    return answer if isinstance(answer, bytes) else json.loads(json.dumps(answer))


NOT_FOUND = (404, {"detail": "Not Found"})
UNKNOWN = (404, {"error": {"message": "The model `policy` does not exist.", "type": "NotFoundError", "code": 404}})
REFUSED = {
    "serves policy, and no 'other': set sampling.server.model": ("", None, {"model": "other"}),
    "takes 64 tokens, fewer than sampling.max_prompt + max_tokens = 132": ("", None, {}),
    "has no /server_info, which new weights need: start it with VLLM_SERVER_DEV_MODE=1": (
        "/server_info",
        NOT_FOUND,
        {},
    ),
    "has no /collective_rpc, which new weights need": ("/collective_rpc", NOT_FOUND, {}),
    "refuses /collective_rpc: HTTP 500": ("/collective_rpc", (500, {"error": {"message": "KeyError"}}), {}),
    "does not say its logprobs_mode": ("/server_info", (200, {}), {}),
    "does not let go of what its old weights computed": ("/reset_prefix_cache", (200, {"success": False}), {}),
    "The model `policy` does not exist.": ("/v1/completions", UNKNOWN, {}),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_server_that_cannot_serve_is_one_line(folder, line):
    path, answer, server = REFUSED[line]
    with (
        serving(folder, before=lambda asked, body: answer if asked == path else None) as stub,
        pytest.raises(ValueError, match=r"the vLLM server at http://127") as caught,
    ):
        one_step(stub, folder, server, 100 if "132" in line else 10)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def one_step(stub, folder, server, max_tokens):
    source = client(stub, folder, server, max_tokens=max_tokens)
    source.weights_changed()
    source.sample([[3, 4]], [9], 2)


def test_raw_log_probabilities_are_refused_before_anything_is_written(tmp_path):
    write_recipe(tmp_path)
    with (
        serving(tmp_path / "model", mode="raw_logprobs") as stub,
        pytest.raises(ValueError, match="reports raw_logprobs; start it with --logprobs-mode processed_logprobs"),
    ):
        run(write_recipe(tmp_path, through(stub)))
    assert not (tmp_path / "run/recipe.json").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("{url: 'http://localhost:8000/v1'}", "must be a server's root, as http://localhost:8000"),
        ("{url: 'localhost:8000'}", "must be a server's root"),
        ("{url: 'http://localhost:8000', limit: 0}", "server.limit=0.0 must be above 0"),
        ("{url: 'http://localhost:8000', port: 1}", "sampling.server.port"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path, more, line):
    with pytest.raises(ValueError, match=r".") as caught:
        write_recipe(tmp_path, (f"sampling.server={more}",))
    assert line in str(caught.value)


def test_early_exits_are_for_the_engine(tmp_path):
    early = "sampling.depth={kind: early, family: exit_cdf, threshold: 0.5}"
    with pytest.raises(ValueError, match=r"sampling.server does the same loops for every token"):
        write_recipe(tmp_path, ("sampling.server.url=http://localhost:8000", early))
