"""Byte-level BPE trained with the `tokenizers` library, and the one way to encode."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (TURN_START, TURN_END)
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(documents: Iterable[str], vocab_size: int, words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens, in which every one of `words` is a single token.

    Any text round-trips, since all 256 bytes are tokens. With `CHAT_TOKENS` among the words it has ChatML as its chat
    template, and these are special: text that is encoded as `plain` cannot forge them.

    Raises:
        ValueError: if the vocabulary is too small for the bytes and the words.
    """
    added = [AddedToken(word, normalized=False, special=word in CHAT_TOKENS) for word in words]
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
    special = [token.content for token in added if token.special]
    chat = {"extra_special_tokens": special, "chat_template": CHATML} if set(special) == set(CHAT_TOKENS) else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False, **chat,
    )  # fmt: skip


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are an end of text and `words`, for models that only ever see these."""
    tokenizer = Tokenizer(models.WordLevel({END_OF_TEXT: 0}))
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    tokenizer.decoder = decoders.Fuse()
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


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], plain: bool = False) -> list[list[int]]:
    """The token ids of every text and nothing besides: no start or end token is added.

    plain: special tokens written in the text are spelt out as ordinary characters, as corpora and conversations are
    read; a task's words stay single tokens, since they are not special.

    Raises:
        ValueError: for text with half a character, or beyond the words of a `word_tokenizer`.
    """
    if not texts:
        return []
    try:
        return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=plain, verbose=False)["input_ids"]
    except TypeError as error:  # what the tokenizer says of text that no encoding has
        for text in texts:
            _check_characters(text, error)
        raise
    except Exception as error:
        if "[UNK]" not in str(error):  # tokenizers has no type for a word that a vocabulary of words lacks
            raise
        raise ValueError("the text holds more than the words that this model's tokenizer consists of") from error


def _check_characters(text: str, cause: Exception) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character (a lone surrogate) at place {error.start}") from cause


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up rows: the padding token's, else the end token's, else 0; masked by place, not by id."""
    return next((found for found in (tokenizer.pad_token_id, tokenizer.eos_token_id) if found is not None), 0)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of everything that decides how text becomes tokens."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # how it was last called
        state.pop(setting, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
