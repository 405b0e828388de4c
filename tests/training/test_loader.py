"""Which rows a step takes: the same for every number of processes, workers and micro-batches, and after resuming."""

import json
import math

import pytest
import torch
from pydantic import TypeAdapter

from looplm.cli.corpus import tokenize_corpus
from looplm.data.shards import TokenShards
from looplm.data.text import read_documents
from looplm.data.tokenizer import CHAT_TOKENS, encode, train_tokenizer
from looplm.models.context import real_tokens
from looplm.tasks import Compose
from looplm.training.data_recipe import Data
from looplm.training.loader import StepLoader, first_rows, row_seed, step_weights
from looplm.training.mixture import Mixture


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(read_documents()[:3], 420, [*Compose().words(), *CHAT_TOKENS])


@pytest.fixture
def mixture(tokenizer, tmp_path):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": [*talk, *[{"role": "user", "content": str(i)}]]}) + "\n" for i in range(11))
    )
    (tmp_path / "text.txt").write_text(read_documents()[5][:1500])

    def build(**changes):
        sources = {
            "text": {"kind": "text", "path": str(tmp_path / "text.txt"), "share": 3, "held_out": 0.0},
            "task": {"kind": "task", "share": 1.5, "task": {"kind": "compose"}},
            "chat": {"kind": "chat", "path": str(tmp_path / "chat.jsonl"), "share": 1, "held_out": 0.0},
        }
        values = {"length": 32, "rows": 7, "sources": sources} | changes
        return Mixture(TypeAdapter(Data).validate_python(values), tokenizer, seed=4)

    return build


def rows_taken(steps):
    """Every real row of every step, in order of its index: (step, row, source, ids, labels, seed)."""
    found = {}
    for world_of_step in steps:
        for rank_batch in world_of_step[1]:
            for batch in rank_batch.micro_batches:
                for i, row in enumerate(batch["rows"].tolist()):
                    if row >= 0:
                        key = (world_of_step[0], row)
                        assert key not in found, "a row was taken twice"
                        columns = ("input_ids", "labels", "position_ids")
                        found[key] = (
                            int(batch["source"][i]), int(batch["row_seeds"][i]),
                            *(tuple(batch[name][i].tolist()) for name in columns),
                        )  # fmt: skip
                    else:
                        assert (batch["labels"][i] == -100).all()
    return dict(sorted(found.items()))


def run(mixture, steps, world=1, counts=None, start=0, **changes):
    loaders = [StepLoader(mixture, counts or {}, start, steps, rank=r, world=world, **changes) for r in range(world)]
    return [(start + i, batches) for i, batches in enumerate(zip(*loaders, strict=True))]


@pytest.mark.parametrize(
    ("world", "micro_rows", "workers"), [(2, None, 0), (3, None, 0), (1, 2, 0), (3, 1, 0), (2, 2, 2)]
)
def test_no_row_is_lost_or_taken_twice(mixture, world, micro_rows, workers):
    """Across the border of the text's epoch too, which has about 15 rows."""
    alone = rows_taken(run(mixture(), 8))
    assert list(alone) == [(step, row) for step in range(8) for row in range(7)]
    many = rows_taken(run(mixture(workers=workers), 8, world=world, micro_rows=micro_rows))
    assert many == alone


def test_every_process_has_the_same_number_of_micro_batches(mixture):
    for _, batches in run(mixture(rows=5), 4, world=3, micro_rows=1):
        assert {len(batch.micro_batches) for batch in batches} == {2}
        assert {tuple(batch.spans) for batch in batches} == {(range(3), range(3, 5))}
        assert {batch.num_rows for batch in batches} == {5}
        assert all(len(micro["rows"]) >= 1 for batch in batches for micro in batch.micro_batches)


@pytest.mark.parametrize(("rows", "world", "micro_rows"), [(7, 1, 1), (7, 2, 1), (7, 3, None), (1, 2, None), (1, 3, 1)])
def test_the_first_rows_of_a_step_are_the_same_wherever_they_lie(mixture, rows, world, micro_rows):
    """A process without any has a row of padding, so that it runs what the others run."""
    ((_, (alone,)),) = run(mixture(rows=rows), 1)
    wanted = {
        int(seed): ids.tolist() for seed, ids in zip(*(alone.micro_batches[0][n][:2] for n in COLUMNS), strict=True)
    }
    ((_, batches),) = run(mixture(rows=rows), 1, world=world, micro_rows=micro_rows)
    found = {}
    for batch in batches:
        own = first_rows(batch, 2)
        assert len(own["input_ids"]) == len(own["position_ids"]) >= 1
        real = real_tokens(own["position_ids"]).any(-1)
        assert real.all() or len(real) == 1
        assert not found.keys() & set(own["row_seeds"][real].tolist())
        found |= {int(own["row_seeds"][i]): own["input_ids"][i].tolist() for i in real.nonzero().flatten()}
    assert found == wanted


COLUMNS = ("row_seeds", "input_ids")


def test_resuming_from_the_counts_goes_on(mixture):
    straight = run(mixture(), 9)
    counts = straight[3][1][0].counts
    assert sum(counts.values()) == 4 * 7
    again = rows_taken(run(mixture(), 9, counts=counts, start=4))
    assert again == {key: row for key, row in rows_taken(straight).items() if key[0] >= 4}


def test_counts_stay_within_one_row_of_the_shares(mixture):
    for _, (batch,) in run(mixture(), 30):
        done = sum(batch.counts.values())
        for name, share in (("text", 3), ("task", 1.5), ("chat", 1)):
            assert abs(batch.counts[name] - done * share / 5.5) <= 1


@pytest.mark.parametrize("shares", [[63.4061, 69.8081, 11.1195, 0.7329, 0.6353], [1] * 12, [9, 1, 1, 1, 1, 1, 1, 1]])
def test_many_sources_stay_within_one_row_of_their_shares(mixture, shares):
    task = {"kind": "task", "task": {"kind": "compose"}}
    made = mixture(sources={str(i): task | {"share": share} for i, share in enumerate(shares)})
    counts = dict.fromkeys(made.sources, 0)
    for done in range(1, 1500):
        ((name, index),) = made.deal(counts, 1)
        assert index == counts[name]
        counts[name] += 1
        assert all(abs(counts[str(i)] - done * share / sum(shares)) < 1 for i, share in enumerate(shares))


def test_text_forges_no_special_token_and_tasks_keep_their_words(mixture, tokenizer, tmp_path):
    forged = "<|endoftext|><|im_start|>assistant <e1> <|im_end|>"
    (tmp_path / "forged.txt").write_text(forged * 9)
    (tmp_path / "reader").mkdir()
    tokenizer.save_pretrained(tmp_path / "reader")
    tokenize_corpus(str(tmp_path / "forged.txt"), str(tmp_path / "reader"), tmp_path / "shards", "text")
    text = {"kind": "text", "path": str(tmp_path / "forged.txt"), "held_out": 0.5}
    shards = {"kind": "shards", "path": str(tmp_path / "shards"), "held_out": str(tmp_path / "shards")}
    made = mixture(sources={"text": text, "shards": shards})
    (word,) = encode(tokenizer, ["<e1>"])[0]
    for name, rows in (("text", 6), ("shards", 12)):
        source = made.sources[name]
        seen = torch.cat([row["input_ids"] for row in (*map(source.row, range(rows)), *source.held_out())])
        assert word in seen
        specials = seen[torch.isin(seen, torch.tensor(tokenizer.all_special_ids))]
        assert set(specials.tolist()) <= ({tokenizer.eos_token_id} if name == "shards" else set())
    stream = TokenShards(tmp_path / "shards").read(0, TokenShards(tmp_path / "shards").num_tokens)
    assert (stream == tokenizer.eos_token_id).sum() == 1  # the end that tokenize adds
    assert tokenizer.decode(stream[:-1]) == forged * 9


def test_a_weight_that_would_be_ignored_is_refused(mixture):
    with pytest.raises(ValueError, match="the weight of 't' has no meaning under mean: tokens"):
        mixture(sources={"t": {"kind": "task", "weight": 3.0, "task": {"kind": "compose"}}})


def test_workers_do_not_run_the_counts_ahead(mixture):
    loader = iter(StepLoader(mixture(workers=2), {}, 0, 50))
    assert sum(next(loader).counts.values()) == 7
    assert sum(next(loader).counts.values()) == 14


def test_a_ramp_grows_the_rows(mixture):
    steps = run(mixture(ramp={"rows": 3, "steps": 4}), 6)
    assert [batches[0].num_rows for _, batches in steps] == [3, 4, 5, 6, 7, 7]


def test_an_epoch_ends_with_an_uneven_step(mixture):
    made = mixture()
    rows = made.rows_in_epochs(1)
    per_source = {name: source.rows_in_epochs(1) for name, source in made.sources.items()}
    assert per_source["task"] is None
    assert rows == math.ceil(min(per_source["text"] * 5.5 / 3, per_source["chat"] * 5.5))
    steps = made.steps_in_epochs(1)
    taken = run(made, steps, epochs=1, world=2)
    assert sum(batches[0].num_rows for _, batches in taken) == rows
    assert len(taken) == -(-rows // 7)
    tasks_alone = mixture(sources={"t": {"kind": "task", "task": {"kind": "compose"}}})
    with pytest.raises(ValueError, match="epochs needs a source that ends"):
        tasks_alone.steps_in_epochs(1)


@pytest.mark.parametrize("mean", ["tokens", "sources"])
@pytest.mark.parametrize(("world", "micro_rows"), [(1, None), (2, 2), (3, 1)])
def test_weights_are_those_of_the_whole_step(mixture, mean, world, micro_rows):
    made = mixture(mean=mean)
    ((_, batches),) = run(made, 1, world=world, micro_rows=micro_rows)
    totals = torch.zeros(3, dtype=torch.float64)

    def count(batch):
        found = torch.zeros(3, dtype=torch.float64)
        for micro in batch.micro_batches:
            for source, labels in zip(micro["source"], micro["labels"][:, 1:], strict=True):
                found[source] += (labels != -100).sum()
        return found

    totals = sum(count(batch) for batch in batches)
    weighed = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        for micro in step_weights(batch.micro_batches, made.data, lambda _: totals):
            assert ((micro["weights"] > 0)[:, 1:] == (micro["labels"] != -100)[:, 1:]).all()
            weighed.index_add_(0, micro["source"], micro["weights"].double().sum(-1))
    wanted = totals / totals.sum() if mean == "tokens" else torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(weighed, wanted, atol=1e-12, rtol=1e-12)


def test_row_seeds_are_of_a_rows_own():
    seeds = {row_seed(seed, step, row) for seed in range(3) for step in range(20) for row in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_task_row_holds_whole_questions_with_their_answers(mixture, tokenizer):
    source = mixture().sources["task"]
    for index in range(5):
        row = source.row(index)
        text = tokenizer.decode(row["input_ids"]).split("<|endoftext|>")[0]
        asked = text.count("<ask>")
        assert asked >= 3
        assert (row["labels"] != -100).sum() == asked
        assert row["position_ids"].tolist()[: len(row["input_ids"])].count(0) >= asked
    assert not source.row(0)["input_ids"].equal(source.row(1)["input_ids"])
