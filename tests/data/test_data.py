"""Text, tokenizer and packing against what was put in."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplm.data.packing import Document, DocumentStore, pack
from looplm.data.permutation import permute
from looplm.data.rows import stack
from looplm.data.streams import MemoryStream
from looplm.data.text import read_documents
from looplm.data.tokenizer import train_tokenizer
from looplm.data.windows import TextWindows, split_documents


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(read_documents()[:10], 400, ["<e1>", "<e10>", "<ask>"])


@pytest.mark.parametrize("text", ["plain text", "hi 😀 ďáb 汉\n\ttabs", "<e1><e10><ask>", "a<e1> b", ""])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_are_single_tokens_and_the_size_holds(tokenizer, tmp_path):
    assert len(tokenizer.encode("<e1><e10><ask>")) == 3
    assert len(tokenizer) == 400
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.encode("x <e10> y") == tokenizer.encode("x <e10> y")
    with pytest.raises(ValueError, match="vocab_size=256 is too small"):
        train_tokenizer(["x"], 256)


def test_the_default_text_is_the_manual_in_python():
    documents = read_documents()
    assert len(documents) > 50
    assert any("for_stmt" in document for document in documents)


def test_files_and_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub" / "c.md").write_text("third")
    assert read_documents(tmp_path) == ["first", "second", "third"]
    assert read_documents(tmp_path / "b.txt") == ["second"]
    with pytest.raises(ValueError, match="does not exist"):
        read_documents(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is empty"):
        read_documents(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_documents(tmp_path / "binary")
    with pytest.warns(UserWarning, match="left out 1 files that are not UTF-8 text"):
        assert read_documents(tmp_path) == ["first", "second", "third"]


def test_half_a_character_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "fine \\ud83d\\ude00"}\n{"text": "ab\\ud800"}\n')
    with pytest.raises(ValueError, match=r"t.jsonl line 2: character 3 of a text is '\\ud800', half a character"):
        read_documents(tmp_path / "t.jsonl")


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(lengths)
def test_packing_keeps_every_document_whole(sizes):
    documents = [
        Document(tokens=[10 * i + j for j in range(n)], is_target=[j % 2 == 1 for j in range(n)])
        for i, n in enumerate(sizes, start=1)
    ]
    batch = stack(pack(documents, 9))
    found = []
    for ids, labels, positions in zip(*(batch[k] for k in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [i for i, position in enumerate(positions.tolist()) if position == 0] + [9]
        for start, end in itertools.pairwise(starts):
            if ids[start] == 0:
                assert end == start + 1  # padding is one document a token
                assert labels[start] == -100
                continue
            found.append(ids[start:end].tolist())
            wanted = [t if j % 2 == 1 else -100 for j, t in enumerate(ids[start:end].tolist())]
            assert labels[start:end].tolist() == wanted
    assert sorted(found) == sorted(list(document.tokens) for document in documents)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()))))
def test_a_store_gives_back_its_documents(pairs):
    documents = [Document(tokens=[t for t, _ in pair], is_target=[counts for _, counts in pair]) for pair in pairs]
    store = DocumentStore(iter(documents))
    assert [store[number] for number in range(len(store))] == documents
    assert [store.size(number) for number in range(len(store))] == [len(pair) for pair in pairs]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="5 tokens does not fit into rows of 4"):
        pack([Document(tokens=[1] * 5, is_target=[True] * 5)], 4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 64, 100, 257, 1000])
def test_a_permutation_visits_every_number_once(size):
    found = permute(np.arange(size), size, [3, 1])
    assert sorted(found.tolist()) == list(range(size))
    again = [int(permute([i], size, [3, 1])[0]) for i in range(min(size, 50))]
    assert again == found[:50].tolist()
    if size > 16:
        assert found.tolist() != permute(np.arange(size), size, [3, 2]).tolist()
        assert found.tolist() != list(range(size))


def test_a_permutation_is_well_mixed():
    """Neighbours are sent far apart, and each place is hit about equally by many seeds."""
    found = permute(np.arange(1000), 1000, [0])
    assert np.abs(np.diff(found)).mean() == pytest.approx(1000 / 3, rel=0.15)
    firsts = np.bincount([int(permute([0], 8, [seed])[0]) for seed in range(4000)], minlength=8)
    assert firsts.min() > 400


DOCUMENTS = [list(range(100 * i, 100 * i + 60)) for i in range(1, 6)]


def windows_of(length=8, held_out=0.25, seed=3, **changes):
    return TextWindows(*split_documents(DOCUMENTS, held_out), length, seed, **changes)


def test_windows_of_an_epoch_tile_the_training_part_once():
    windows = windows_of()
    per_epoch = windows.rows_in_epochs(1)
    assert per_epoch == 5 * 45 // 8
    epochs = [[windows.row(epoch * per_epoch + i)["input_ids"] for i in range(per_epoch)] for epoch in range(4)]
    missed = []
    for rows in epochs:
        seen = torch.cat(rows).tolist()
        assert len(set(seen)) == len(seen) == per_epoch * 8
        missed.append({token for document in DOCUMENTS for token in document[:45]} - set(seen))
        assert len(missed[-1]) == 225 - per_epoch * 8
    assert len(set(map(frozenset, missed))) > 1  # the rest moves
    assert [row.tolist() for row in epochs[0]] != [row.tolist() for row in epochs[1]]


def test_windows_never_mix_the_parts_nor_the_documents():
    windows = windows_of()
    train = [windows.row(index) for index in range(64)]
    held_out = windows.held_out()
    assert all((row["input_ids"] % 100 < 45).all() for row in train)
    assert all((row["input_ids"] % 100 >= 45).all() for row in held_out)
    assert len(held_out) == 9  # 75 held-out tokens
    assert len(windows_of(held_out_rows=4).held_out()) == 4
    assert not windows_of(held_out=0.0).held_out()
    for row in (*train, *held_out):
        ids, positions, labels = (row[name].tolist() for name in ("input_ids", "position_ids", "labels"))
        for i in range(8):
            starts_here = i == 0 or ids[i] != ids[i - 1] + 1
            assert positions[i] == (0 if starts_here else positions[i - 1] + 1)
            assert labels[i] == (-100 if starts_here else ids[i])


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="held-out text has 1 tokens; a window needs 8"):
        TextWindows(*split_documents([list(range(20))], 0.05), 8, 0)
    with pytest.raises(ValueError, match="training text has 3 tokens"):
        TextWindows(MemoryStream([[1, 2, 3]]), None, 8, 0)
