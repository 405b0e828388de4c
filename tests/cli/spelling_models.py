"""Checkpoints whose answers a test knows: after a character, always the one that follows it in a given text."""

import json

import torch

import looplm
from conftest import tiny_config
from harness_tasks import character_tokenizer

UNKNOWN = 2  # what the tokenizer makes of a line break


def speller(folder, text, after=""):
    """Writes `text` after a line break or any character of `after`, then ends; no character may come twice.

    Its layers add nothing, so it does so at every depth.
    """
    assert len(set(text)) == len(text)
    tokenizer = character_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in text]
    size = len(tokenizer)
    shape = {"hidden_size": 128, "norm_placement": "pre", "tie_word_embeddings": False}
    model = looplm.LoopLMForCausalLM(
        tiny_config(vocab_size=size, eos_token_id=1, max_position_embeddings=1024, **shape)
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.core:
            for parameter in layer.parameters():
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        model.lm_head.weight.zero_()
        starts = [UNKNOWN, *(tokenizer.convert_tokens_to_ids(letter) for letter in after)]
        steps = [*((start, ids[0]) for start in starts), *zip(ids, [*ids[1:], 1], strict=True)]
        for here, following in steps:
            model.lm_head.weight[following, here] = 1
    return saved(folder, model, tokenizer)


def saved(folder, model, tokenizer):
    looplm.save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
