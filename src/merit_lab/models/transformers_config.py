"""The configuration of a causal language model of Hugging Face's transformers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from merit_lab.checks import check_choice, check_size
from merit_lab.models.config import LONGEST_CONTEXT, ModelConfig
from merit_optim.spelling import did_you_mean, nearest

if TYPE_CHECKING:
    import torch

HuggingFaceAttention = Literal[
    "auto", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"
]

_LONGEST_BY_DEFAULT = 1024  # models often support many more positions than needed for training
# Settings about the origin of a configuration, not the model. Weights are float32 in the lab.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A model that transformers builds and initializes.

    The settings are all those of a config.json, so that its folder is not needed again.

    Example:
        >>> sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 256, "n_positions": 128}
        >>> config = HuggingFaceConfig(settings={"model_type": "gpt2", **sizes}, context=64)
        >>> config.family, config.layers, config.attention_width, config.vocab_size
        ('gpt2', 2, 64, 256)
    """

    settings: Mapping[str, Any] = field(hash=False, metadata={"option": False})
    """Its config.json."""
    options: tuple[str, ...] = ()
    """Settings to change, as NAME=VALUE with the value as JSON or a string: num_hidden_layers=4."""
    context: int = _LONGEST_BY_DEFAULT
    """Length of the training sequences in tokens; at most the number of positions of the model."""
    attention: HuggingFaceAttention = "auto"
    """Transformers' implementation of attention. auto: transformers chooses, usually sdpa."""

    def __post_init__(self) -> None:
        check_size("model.context", self.context, LONGEST_CONTEXT)
        check_choice("model.attention", self.attention, get_args(HuggingFaceAttention))
        for text in self.options:
            name, equals, _ = text.partition("=")
            if not name.isidentifier() or not equals:
                raise ValueError(
                    f"model.options has {text!r}; write NAME=VALUE, as in num_hidden_layers=4 or "
                    "hidden_act=silu"
                )

    @cached_property
    def configuration(self) -> Any:
        """The validated configuration object of transformers."""
        transformers = import_transformers()
        made = _made(self.settings)
        if changes := {text.partition("=")[0]: _value(text.partition("=")[2]) for text in self.options}:
            for name in changes:
                if not hasattr(made, name):
                    known = [*self.settings, *made.attribute_map]
                    similar = ", ".join(nearest(name, known, num=3, similarity=0.0))
                    raise ValueError(
                        f"model.options has {name}, which a {self.family} configuration does not have; the "
                        f"nearest are {similar}"
                    )
            changes = {made.attribute_map.get(name, name): value for name, value in changes.items()}
            made = _made({**_without_what_follows(self.settings), **changes})
        if made.is_encoder_decoder or type(made) not in transformers.AutoModelForCausalLM._model_mapping:
            raise not_causal(self.family)
        if not isinstance(getattr(made.get_text_config(), "vocab_size", None), int):
            raise ValueError(
                f"the configuration of {self.family} has no vocab_size; it is not a language model"
            )
        positions = _positions(made)
        if positions is not None and self.context > positions:
            raise ValueError(
                f"model.context is {self.context}, but the {self.family} model has {positions} positions; "
                f"choose at most {positions} with --model.context, or give it more with --model.options "
                f"max_position_embeddings={self.context}"
            )
        return made

    @property
    def family(self) -> str:
        """Transformers' name of the architecture."""
        return str(self.settings["model_type"])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._text.vocab_size)

    @property
    def layers(self) -> int:
        """Blocks."""
        return int(self._text.num_hidden_layers)

    @property
    def attention_width(self) -> int | None:
        """Width of all heads together; None for a model that has none, or whose layers differ in it."""
        heads = getattr(self._text, "num_attention_heads", None)
        try:
            return heads and heads * (
                getattr(self._text, "head_dim", None) or self._text.hidden_size // heads
            )
        except RuntimeError:  # transformers': the value differs by layer
            return None

    def with_vocab(self, num_tokens: int) -> HuggingFaceConfig:
        """Return the same model: its vocabulary is fixed, but must be large enough for the data."""
        if num_tokens > self.vocab_size:
            raise ValueError(
                f"the data has a vocabulary of {num_tokens} tokens, but the {self.family} model has "
                f"{self.vocab_size}; prepare the data with the model's tokenizer, or give the model the "
                f"data's vocabulary: --model.options vocab_size={num_tokens}"
            )
        return self

    def to_measure(self, *, twice: bool) -> HuggingFaceConfig:
        """Return the same model for any device; ``twice`` if it must be twice differentiable."""
        return replace(self, attention="eager" if twice else "auto")

    def gives_largest_logits(self, device: torch.device, *, compiled: bool) -> bool:  # noqa: ARG002
        """Whether the attention kernel returns the largest logits at almost no cost."""
        return self.attention == "flex_attention" and device.type == "cuda"

    @property
    def _text(self) -> Any:
        """The language model's part of the configuration, usually all of it."""
        return self.configuration.get_text_config()


AnyModelConfig = ModelConfig | HuggingFaceConfig
"""A model of the lab, or one of Hugging Face's transformers."""


def read_config(path: str) -> tuple[str, HuggingFaceConfig]:
    """Return a name for the model at ``path``, and its configuration.

    Args:
        path: a folder with a config.json, such a file, or a name on the Hugging Face hub.
    """
    transformers = import_transformers()
    local = Path(path).expanduser()
    file = local / "config.json" if local.is_dir() else local
    if file.is_file():
        settings, name = _read_json(file), file.resolve().parent.name
    elif local.exists() or path.count("/") > 1 or path.startswith(("/", ".", "~")) or not path:
        raise ValueError(
            f"hf:{path}: there is no {file}; name a folder with a config.json, that file, or a model of the "
            "Hugging Face hub, as in hf:openai-community/gpt2"
        )
    else:
        try:  # code that comes with the configuration is never run
            with quiet("huggingface_hub"):  # about each of its attempts; the last is reported below
                downloaded = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"hf:{path} is neither a local folder nor a model available on the Hugging Face hub "
                f"({' '.join(str(error).split())}); name a folder with a config.json"
            ) from error
        settings, name = downloaded.to_dict(), path.rpartition("/")[2]
    made = _made(settings)
    complete = json.loads(made.to_json_string())
    for key in _ORIGIN:
        complete.pop(key, None)
    context = min(_positions(made) or _LONGEST_BY_DEFAULT, _LONGEST_BY_DEFAULT)
    config = HuggingFaceConfig(settings=complete, context=context)
    assert config.configuration is not None, "this validates it"
    return name, config


@contextlib.contextmanager
def quiet(*libraries: str) -> Iterator[None]:
    """Let loggers of libraries, which must have been imported, report errors only."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def import_transformers() -> Any:
    """Import transformers, an optional dependency."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"a Hugging Face model needs transformers, which cannot be imported ({error}); install it with "
            "pip install 'merit-optim[hf]', or use a model of the lab"
        ) from error
    return transformers


def not_causal(family: str) -> ValueError:
    """Return the error for a model that does not predict the next token from those before it."""
    return ValueError(
        f"a {family} model is not a causal language model, which predicts every token from those before it; "
        "use one that AutoModelForCausalLM opens as a decoder, such as gpt2, llama, qwen2 or gpt_neox"
    )


def _with_infinities(value: Any) -> Any:
    """Undo transformers' notation of numbers that JSON lacks, as in {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(one) for key, one in value.items()}
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def _made(settings: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object for some settings."""
    family = settings.get("model_type")
    known = import_transformers().CONFIG_MAPPING
    if family not in known:
        hint = did_you_mean(family, list(known))
        raise ValueError(
            f"model_type is {family!r}, which this version of transformers does not know{hint} Code that "
            "comes with a config.json is not run; use a newer version, or another model."
        )
    try:
        return known[family].from_dict(_with_infinities(dict(settings)))
    except Exception as error:  # checks of the library raise errors of many kinds
        raise ValueError(f"transformers refuses the {family} configuration: {error}") from error


def _without_what_follows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that are defaults or follow from others.

    A saved configuration has all of them; otherwise the width of a head or the kinds of the layers would not
    follow a change of the width or of the number of layers.
    """
    whole, left = _made(settings).to_dict(), dict(settings)
    for name in settings:
        fewer = {key: value for key, value in left.items() if key != name}
        with contextlib.suppress(ValueError):  # it cannot be left out
            if _made(fewer).to_dict() == whole:
                left = fewer
    return left


def _positions(made: Any) -> int | None:
    """Return the maximum length of a sequence; None if it is unknown."""
    positions = getattr(made.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); it must be a config.json of transformers") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ValueError(f"{file} has no model_type; it must be a config.json of transformers")
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
