"""Where a verb's checkpoint argument leads."""

from pathlib import Path

from looplm.models.reading import find_folder


def open_checkpoint(argument: str, weights: bool = True) -> Path:
    """A checkpoint folder: the argument itself, the newest of a run folder, or a hub id's snapshot."""
    path = Path(argument)
    if path.is_dir() and not (path / "config.json").exists():
        from looplm.training.opening import latest_checkpoint

        return latest_checkpoint(path)
    return find_folder(argument, weights)
