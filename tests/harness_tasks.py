"""Small tasks in lm-eval's own form, a tokenizer, and models, for tests of the harness."""

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

DOCS = [
    {"question": f"{word} goes with", "choices": [" red", " green and blue", f" {word}"], "gold": number % 3}
    for number, word in enumerate(("one", "two hundred", "three", "four and five", "six", "seven", "eight", "nine"))
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(starts: bool = False) -> PreTrainedTokenizerFast:
    """Every ASCII character is a token; `starts`: texts begin with a start token, as with Llama's."""
    letters = {chr(code): code - 29 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?u": 2, **letters}, unk_token="?u"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if starts:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _task(name, **config):
    data = DatasetDict({"test": Dataset.from_list(DOCS), "train": Dataset.from_list(DOCS[::-1])})
    common = {"task": name, "dataset_path": "none", "custom_dataset": lambda **_: data, "test_split": "test"}
    shots = {"training_split": "train", "fewshot_split": "train", "doc_to_text": "{{question}}"}
    return ConfigurableTask(config=common | shots | config)


def choice(num_fewshot=2):
    """Multiple choice with few-shot examples."""
    return _task(
        "choice", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{gold}}",
        target_delimiter="", num_fewshot=num_fewshot, metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip


def written(max_gen_toks=9, **settings):
    """Generation up to a stop string."""
    return _task(
        "written", output_type="generate_until", doc_to_target="{{question}}",
        generation_kwargs={"until": ["zz", "q", "</s>"], "max_gen_toks": max_gen_toks, **settings},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip


def rolling():
    """The likelihood of whole texts."""
    return _task(
        "rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{question}} one and all",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    )  # fmt: skip
