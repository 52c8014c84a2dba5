"""The models a gateway serves: each with its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ekiden.core.errors import NotFound, SetupError
from ekiden.text.chat import ChatMessage, ChatTemplate, no_template
from ekiden.text.tokenizer import Tokenizer


class ServedModel:
    """One served name: text to tokens and back."""

    def __init__(self, name: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, name: str, directory: Path) -> ServedModel:
        """Raises SetupError when the directory has no usable tokenizer or a broken template."""
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer.settings, tokenizer.special_texts())
        return cls(name, tokenizer, template)

    def chat_tokens(self, messages: list[ChatMessage]) -> list[int]:
        """The prompt of a conversation; BadRequest where there is no template or it refuses."""
        if self._template is None:
            raise no_template(self.name)
        return self.tokenizer.encode(self._template.render(messages), add_special_tokens=False)


class Catalog:
    """Served models by name."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = dict(models)

    @classmethod
    def load(cls, directories: Mapping[str, Path]) -> Catalog:
        if not directories:
            raise SetupError("the gateway serves no model: name at least one with --model")
        return cls({name: ServedModel.load(name, path) for name, path in directories.items()})

    def get(self, name: str) -> ServedModel:
        """Raises NotFound naming the models that are served."""
        if (model := self._models.get(name)) is not None:
            return model
        served = ", ".join(self._models)
        raise NotFound(f"model {name[:80]} is not served here: choose {served}", field="model")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())
