"""Text made token by token is the text of the whole, up to the first stop string, and takes nothing back."""

import random
from collections.abc import Sequence

import pytest
import torch
from tokenizers import decoders

from looplm.data.tokenizer import CHAT_TOKENS, END_OF_TEXT, train_tokenizer
from looplm.engine import Engine, SamplingParams
from looplm.engine.text import TextBuilder
from looplm.models import LoopLMConfig, LoopLMForCausalLM

BROKEN = "\ufffd"
HARD = "hi 😀 ďáb 汉"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "own fox END ENDING .😀 !汉 naïve 汉字 👩‍👩‍👧",
    "a\n\n b\tc",
]


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level with merges, some of which end within a character."""
    return train_tokenizer(CORPUS * 5, 420, [*CHAT_TOKENS, "<|x|>"])


@pytest.fixture(scope="module")
def byte_tokenizer():
    """A token a byte."""
    return train_tokenizer(["x"], 257)


class Pieces:
    """A tokenizer whose tokens are given strings."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[token] for token in tokens)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def fed(tokenizer, tokens: Sequence[int], stops: Sequence[str] = (), least: int = 0) -> tuple[list[str], bool]:
    """What each token adds to the text, and last what the end does; whether a stop string ended it."""
    builder, sent, stopped = TextBuilder(tokenizer, stops), [], False
    for place, token in enumerate(tokens, start=1):
        before = builder.text
        stopped = builder.add(token, may_stop=place > least)
        assert builder.text.startswith(before)
        sent.append(builder.text[len(before) :])
        if stopped:
            break
    before = builder.text
    builder.finish()
    assert builder.text.startswith(before)
    assert builder.pending == ""
    if stopped:
        assert builder.text == before
    return [*sent, builder.text[len(before) :]], stopped


def letters(text: str, stops: Sequence[str], least: int = 0) -> tuple[str, bool]:
    """The truth: read letter by letter, the text ends where some stop string is first complete."""
    for end in range(least + 1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return text[: end - max(map(len, here))], True
    return text, False


# R20: stop strings --------------------------------------------------------------------------------------------


def test_r20_a_stop_over_three_pieces() -> None:
    sent, stopped = fed(Pieces("The quick br", "own f", "ox jumps"), [0, 1, 2], ["own fox"])
    assert (sent, stopped) == (["The quick br", "", "", ""], True)


def test_r20_what_was_held_is_not_lost_at_the_end() -> None:
    assert fed(Pieces("abc", "EN"), [0, 1], ["END"]) == (["abc", "", "EN"], False)


def test_nothing_is_held_longer_than_it_may_begin_a_stop() -> None:
    assert fed(Pieces("aab", "aa", "c", "EN", "X"), range(5), ["aac!", "END"])[0] == ["aab", "", "", "aac", "ENX", ""]
    assert fed(Pieces("a", "b", "a", "b", "c"), range(5), ["ababd"])[0] == ["", "", "", "", "ababc", ""]


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["a own fox jumps"], ["fox", "own fox"], "a "),  # they end together
        (["a own f", "ox jumps"], ["own fox", "fox"], "a "),
        (["xEND", "ING"], ["ENDING", "END"], "x"),
        (["xENDING"], ["ENDING", "DI"], "xEN"),  # as letter by letter: DI is complete first
        (["xE", "ND", "ING"], ["ENDING", "DI"], "xEN"),
        (["one END two STOP"], ["STOP", "END"], "one "),
        (["one END two END"], ["END"], "one "),
        (["aa", "aab"], ["aab"], "aa"),
        (["\n", "\n", "x"], ["\n\n"], ""),
        (["xSTOPy"], ["STOP"], "x"),
    ],
)
def test_the_earliest_match_wins(pieces: list[str], stops: list[str], text: str) -> None:
    for order in (stops, stops[::-1]):
        sent, stopped = fed(Pieces(*pieces), range(len(pieces)), order)
        assert ("".join(sent), stopped) == (text, True)


def test_however_the_text_is_cut_it_ends_alike() -> None:
    """Random texts of few letters, random stops, random cuts: the text read letter by letter is the truth."""
    choice, ends = random.Random(0), 0
    for _ in range(4000):
        text = "".join(choice.choices("abc", k=choice.randint(1, 14)))
        stops = ["".join(choice.choices("abc", k=choice.randint(1, 5))) for _ in range(choice.randint(1, 3))]
        cuts = sorted(choice.sample(range(1, len(text)), choice.randint(0, len(text) - 1)))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        least = choice.choice([0, 0, 1, 2])
        sent, stopped = fed(Pieces(*pieces), range(len(pieces)), stops, least)
        expected = letters(text, stops, len("".join(pieces[:least])))
        assert ("".join(sent), stopped) == expected, (pieces, stops, least)
        ends += stopped
    assert 1000 < ends < 3500


def test_a_stop_counts_from_the_least_length_on() -> None:
    """One that is complete before passes, one that is complete only then ends the text, wherever it began."""
    pieces = Pieces("END", " a E", "ND", " END")
    assert fed(pieces, range(4), ["END"], least=1) == (["END", " a ", "", ""], True)
    assert fed(pieces, range(4), ["END"], least=2) == (["END", " a ", "", ""], True)
    assert fed(pieces, range(4), ["END"], least=3) == (["END", " a ", "END", " ", ""], True)
    assert fed(pieces, range(4), ["END"], least=4) == (["END", " a ", "END", " END", ""], False)
    # "ab" was complete before; that it may still become "abcd" does not make it count now.
    assert fed(Pieces("xab", "y"), [0, 1], ["ab", "abcd"], least=1) == (["x", "aby", ""], False)
    assert fed(Pieces("xab", "y"), [0, 1], ["ab", "zzzz"], least=1) == (["xab", "y", ""], False)


# R21: characters of several bytes -----------------------------------------------------------------------------


def test_r21_only_whole_characters_are_sent(tokenizer, byte_tokenizer) -> None:
    for one in (tokenizer, byte_tokenizer):
        tokens = ids(one, HARD)
        sent, _ = fed(one, tokens)
        assert "".join(sent) == HARD
        assert not any(BROKEN in part for part in sent)
        assert sent[-1] == ""
        face = next(n for n in range(len(tokens)) if "😀" in one.decode(tokens[: n + 1]))
        assert "".join(sent[:face]).startswith("hi")
        assert "".join(sent[: face + 1]) == "hi 😀"


def test_each_character_is_sent_as_soon_as_it_is_whole(byte_tokenizer) -> None:
    text = HARD * 8
    sent, _ = fed(byte_tokenizer, ids(byte_tokenizer, text))
    expected = [part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]]
    assert sent == [*expected, ""]


def test_a_cut_character_comes_once_at_the_end(tokenizer, byte_tokenizer) -> None:
    for one in (tokenizer, byte_tokenizer):
        for text in ("汉", "ab😀", "hi 汉字"):
            tokens = bytes_of(one, text)[:-1]
            sent, stopped = fed(one, tokens)
            assert not stopped
            assert "".join(sent) == one.decode(tokens)
            assert sent[-1] == BROKEN
            assert not any(BROKEN in part for part in sent[:-1])


def bytes_of(tokenizer, text: str) -> list[int]:
    """Tokens of single bytes, which every byte-level vocabulary has."""
    return tokenizer.convert_tokens_to_ids([byte_letters()[byte] for byte in text.encode()])


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def test_random_bytes_come_out_as_the_whole_would(byte_tokenizer) -> None:
    """Broken sequences anywhere, more of them than any window holds."""
    choice = random.Random(1)
    for _ in range(300):
        tokens = [choice.randrange(257) for _ in range(choice.randint(1, 60))]
        whole = byte_tokenizer.decode(tokens, skip_special_tokens=True)
        sent, _ = fed(byte_tokenizer, tokens)
        assert "".join(sent) == whole


def test_random_tokens_come_out_as_the_whole_would(tokenizer) -> None:
    """Merged tokens, among them some that end within a character, and special ones, which are no text."""
    choice, cut = random.Random(2), 0
    for _ in range(300):
        tokens = [choice.randrange(len(tokenizer)) for _ in range(choice.randint(1, 80))]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        sent, _ = fed(tokenizer, tokens)
        assert "".join(sent) == whole
        stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
        if stop and BROKEN not in whole:
            cut += 1
            sent, stopped = fed(tokenizer, tokens, [stop])
            assert stopped
            assert "".join(sent) == whole[: whole.index(stop)]
    assert cut > 3


def test_text_before_a_cut_character_in_one_token() -> None:
    """It is sent, and may end in a stop string, without waiting for the character."""

    class Bytes(Pieces):
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
            return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    pieces = Bytes(b"one. \xf0\x9f", b"\x98", b"\x80 two")
    assert fed(pieces, [0, 1, 2]) == (["one. ", "", "😀 two", ""], False)
    assert fed(pieces, [0, 1, 2], [". "]) == (["one", ""], True)
    assert fed(pieces, [0], ["e."], least=1) == (["one. ", BROKEN], False)


def test_decoders_for_which_a_run_of_bytes_is_whole_or_broken() -> None:
    """SentencePiece's byte fallback: a window that begins within a character would never be text again."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    class Fallback(Pieces):
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
            return decoder.decode([self.pieces[token] for token in tokens])

    text = "😀汉ď" * 10
    one = Fallback(*(f"<0x{byte:02X}>" for byte in range(256)))
    sent, _ = fed(one, list(text.encode()))
    assert sent == [*(part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]), ""]


def test_streams_keep_to_themselves(tokenizer) -> None:
    texts = [f"{n} {HARD} naïve 汉字 {'x' * n}END and more" for n in range(8)]
    builders = [TextBuilder(tokenizer, ["END"]) for _ in texts]
    left = {n: ids(tokenizer, text) for n, text in enumerate(texts)}
    while left:
        for n in list(left):
            if builders[n].add(left[n].pop(0)):
                del left[n]
    assert [builder.text for builder in builders] == [text[: text.index("END")] for text in texts]


def test_special_tokens_are_no_text(tokenizer) -> None:
    special = tokenizer.convert_tokens_to_ids([END_OF_TEXT, *CHAT_TOKENS])
    hello, tail = ids(tokenizer, "The quick "), ids(tokenizer, "fox😀")
    tokens = [special[1], *hello, *special * 9, *tail, special[2], special[0]]
    sent, _ = fed(tokenizer, tokens)
    assert "".join(sent) == "The quick fox😀"
    assert "".join(fed(tokenizer, [*hello, tokenizer.convert_tokens_to_ids("<|x|>")])[0]) == "The quick <|x|>"


def test_long_texts_are_decoded_in_short_pieces(tokenizer) -> None:
    """Else the cost grows with the square of the length."""
    longest = 0

    class Watched:
        def decode(self, tokens: Sequence[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return tokenizer.decode(tokens, **options)

    text = f"{CORPUS[0]} {HARD} {CORPUS[1]}" * 5
    sent, _ = fed(Watched(), ids(tokenizer, text))
    assert "".join(sent) == text
    assert longest <= 24


# Through the engine -------------------------------------------------------------------------------------------


def test_streamed_text_is_the_completion_s(byte_tokenizer) -> None:
    config = LoopLMConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_attention_heads=4, core_layers=1, loops=2,
        initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    engine = Engine(LoopLMForCausalLM(config).eval(), byte_tokenizer)
    stopped = 0
    for seed in range(12):
        free = SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True)
        whole = engine.generate(["hi"], free)[0]
        assert whole.text == byte_tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        stops = [part for part in (whole.text[9:11], whole.text[20:22]) if part and BROKEN not in part]
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=True, stop=stops, min_tokens=3)
        once = engine.generate(["hi"], params)[0]
        events = list(engine.stream("hi", params))
        assert "".join(event.text for event in events) == once.text == events[-1].completion.text
        assert once.token_ids == whole.token_ids[: len(once.token_ids)]
        if once.finish_reason == "stop":
            stopped += 1
            made = byte_tokenizer.decode(once.token_ids, skip_special_tokens=True)
            assert any(made == once.text + stop for stop in stops)
    assert stopped > 2
