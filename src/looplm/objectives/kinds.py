"""Choices that a recipe makes by a `kind`, declared without pydantic, which this room does not import."""

from typing import Any


class ByKind:
    """Annotation of a union of dataclasses: pydantic is told to choose among them by their `kind`."""

    def __init__(self, *choices: Any) -> None:
        self.choices = choices

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        choices = {choice.kind: handler.generate_schema(choice) for choice in self.choices}
        return {"type": "tagged-union", "choices": choices, "discriminator": "kind"}
