"""Text, tokenizer and packing against what was put in."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplm.data.packing import Document, pack
from looplm.data.text import read_documents
from looplm.data.tokenizer import train_tokenizer
from looplm.data.windows import TextWindows


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


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(lengths)
def test_packing_keeps_every_document_whole(sizes):
    documents = [
        Document(tokens=[10 * i + j for j in range(n)], is_target=[j % 2 == 1 for j in range(n)])
        for i, n in enumerate(sizes, start=1)
    ]
    batch = pack(documents, 9)
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


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="5 tokens does not fit into rows of 4"):
        pack([Document(tokens=[1] * 5, is_target=[True] * 5)], 4)


def test_windows_are_pure_and_never_mix_the_parts():
    documents = [list(range(100 * i, 100 * i + 60)) for i in range(1, 6)]
    windows = TextWindows(documents, 8, held_out=0.25)
    batch = windows.train(64, [3, 1])
    assert all(torch.equal(batch[name], windows.train(64, [3, 1])[name]) for name in batch)
    assert not torch.equal(batch["input_ids"], windows.train(64, [3, 2])["input_ids"])
    assert (batch["input_ids"] % 100 < 45).all()
    held_out = windows.held_out(100)
    assert (held_out["input_ids"] % 100 >= 45).all()
    assert held_out["input_ids"].shape == (9, 8)  # 75 held-out tokens
    for part in (batch, held_out):
        for ids, positions, labels in zip(part["input_ids"], part["position_ids"], part["labels"], strict=True):
            for i in range(8):
                starts_here = i == 0 or ids[i] != ids[i - 1] + 1
                assert positions[i] == (0 if starts_here else positions[i - 1] + 1)
                assert labels[i] == (-100 if starts_here else ids[i])


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="held-out text has 1 tokens; a window needs 8"):
        TextWindows([list(range(20))], 8)
