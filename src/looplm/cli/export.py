"""`looplm export`: a checkpoint rewritten in another layout."""

from pathlib import Path

from transformers import AutoTokenizer

from looplm.cli.paths import open_checkpoint
from looplm.models import load, save


def export_checkpoint(checkpoint: str, out: Path, layout: str) -> Path:
    """Read `checkpoint` in its own dtype and write it to `out`, with its tokenizer if it has one."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give a new folder")
    folder = open_checkpoint(checkpoint)
    save(load(folder, dtype="auto"), out, layout)
    if (folder / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return out
