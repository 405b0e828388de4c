"""Byte-level BPE trained with the `tokenizers` library."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocab_size: int, words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, in which every one of `words` is a single token.

    Any text round-trips, since all 256 bytes are tokens.

    Raises:
        ValueError: if the vocabulary is too small for the bytes and the words.
    """
    added = [AddedToken(word, normalized=False) for word in words]
    fewest = 256 + 1 + len(added)
    if vocab_size < fewest:
        raise ValueError(f"vocab_size={vocab_size} is too small; bytes and task words alone take {fewest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer beside a checkpoint, from its own files alone: the model's config is not asked, nor any code run.

    Raises:
        ValueError: if the folder has no tokenizer.json.
    """
    if not (Path(folder) / "tokenizer.json").exists():
        raise ValueError(f"{folder} has no tokenizer.json, so it cannot read text")
    return PreTrainedTokenizerFast.from_pretrained(folder)
