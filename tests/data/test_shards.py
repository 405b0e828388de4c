"""Token shards: what was written is read, wherever shards begin; nothing half-written is ever taken for whole."""

import json

import numpy as np
import pytest

from looplm.data.shards import TokenShards, write_shards
from looplm.data.streams import MemoryStream
from looplm.data.tokenizer import train_tokenizer
from looplm.data.windows import TextWindows

DOCUMENTS = [list(range(start, start + size)) for start, size in ((0, 7), (10, 1), (20, 30), (60, 13), (80, 9))]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text"], 300)


@pytest.mark.parametrize("shard_tokens", [1, 4, 7, 30, 1000])
def test_shards_are_the_stream(tmp_path, tokenizer, shard_tokens):
    meta = write_shards([*DOCUMENTS, []], tmp_path / "shards", tokenizer, shard_tokens)
    assert (meta.num_tokens, meta.num_documents) == (60, 5)
    assert len(list((tmp_path / "shards").glob("shard-*.npy"))) == -(-60 // shard_tokens)
    shards, memory = TokenShards(tmp_path / "shards", tokenizer), MemoryStream(DOCUMENTS)
    for start, stop in ((0, 60), (0, 1), (6, 9), (29, 31), (37, 60), (59, 60)):
        assert shards.read(start, stop).tolist() == memory.read(start, stop).tolist()
        assert shards.offsets(start, stop).tolist() == memory.offsets(start, stop).tolist()
    ours, theirs = TextWindows(shards, None, 8, 1), TextWindows(memory, None, 8, 1)
    for index in range(20):
        row = theirs.row(index)
        assert all(values.equal(row[name]) for name, values in ours.row(index).items())


def test_a_large_vocabulary_takes_wider_numbers(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 2**16 + 1)
    with pytest.raises(ValueError, match="document 1 holds a token outside the vocabulary of 65537"):
        write_shards([[2**16 + 1]], tmp_path / "bad", tokenizer)
    write_shards([[2**16, 5]], tmp_path / "shards", tokenizer)
    assert TokenShards(tmp_path / "shards").read(0, 2).tolist() == [2**16, 5]


def test_another_process_opens_the_folder_again(tmp_path, tokenizer):
    write_shards([list(range(200)) * 50], tmp_path / "shards", tokenizer)
    kind, arguments = TokenShards(tmp_path / "shards").__reduce__()
    again = kind(*arguments)
    assert arguments == (tmp_path / "shards",)
    assert again.read(0, 9).tolist() == list(range(9))


def test_an_interrupted_writing_leaves_no_folder(tmp_path, tokenizer):
    def dies():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(dies(), tmp_path / "shards", tokenizer, 2)
    assert not (tmp_path / "shards").exists()
    write_shards([[4, 5]], tmp_path / "shards", tokenizer)  # and the rest of it is no hindrance
    assert TokenShards(tmp_path / "shards").read(0, 2).tolist() == [4, 5]


def test_what_cannot_be_read_is_named(tmp_path, tokenizer):
    folder = tmp_path / "shards"
    with pytest.raises(ValueError, match="holds no token shards"):
        TokenShards(folder)
    with pytest.raises(ValueError, match="there is no text to write"):
        write_shards([[]], folder, tokenizer)
    write_shards(DOCUMENTS, folder, tokenizer, 30)
    with pytest.raises(ValueError, match="exists already"):
        write_shards(DOCUMENTS, folder, tokenizer)
    with pytest.raises(ValueError, match="another tokenizer"):
        TokenShards(folder, train_tokenizer(["other words entirely"], 290))
    np.save(folder / "shard-00001.npy", np.zeros(3, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"shard-00001.npy holds \(3,\) numbers of uint16 where 30"):
        TokenShards(folder)
    np.save(folder / "shard-00001.npy", np.zeros(30))
    with pytest.raises(ValueError, match="of float64 where 30 of uint16"):
        TokenShards(folder)
    (folder / "shard-00001.npy").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"shard-00001.npy cannot be read"):
        TokenShards(folder)
    (folder / "shards.json").write_text(json.dumps({"num_tokens": 3}))
    with pytest.raises(ValueError, match=r"shards.json is damaged"):
        TokenShards(folder)
