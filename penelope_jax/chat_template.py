"""Renders a conversation with a model's own chat template.

Templates are Jinja2 programs written against the environment that transformers gives them; the same environment is
made here, so that a prompt is byte for byte what the model was trained on. Templates come with the weights and are
not trusted: they run sandboxed and cannot change what they are given.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote; rendering shows the body as it is."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Replaces Jinja2's filter, which escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _name_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives a message's reasoning the two names that templates read, whichever of the three it came under."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One or more named templates of a model, compiled at birth.

    Args:
        sources: template source by name; a model with one template calls it `default`.
        special_tokens: text by name (`bos_token`, `eos_token`, ...), visible to the templates.
        where: what to name in errors.

    Raises:
        ValueError: a template has a syntax error.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], where: str):
        self._where = where
        self._special_tokens = dict(special_tokens)
        self._templates = {}
        environment = _environment()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(f"{where}: chat template {name!r}, line {error.lineno}: {error.message}.") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """Returns the prompt of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` and what else the template reads (`tool_calls`, ...). Reasoning
                may be called `reasoning_content`, `thinking` or `reasoning`.
            tools: JSON schemas of the tools, if any.
            documents: documents for retrieval, if any.
            add_generation_prompt: whether to end with the opening of an assistant message.
            name: which template; by default `tool_use` when there are tools and the model has one, else `default`.
            **variables: further variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: the model has no such template, or the template refuses the conversation.
        """
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = ", ".join(self._templates) or "none"
            raise ValueError(f"{self._where}: no chat template {name!r}; known: {known}.")
        try:
            return self._templates[name].render(
                messages=[_name_reasoning(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{self._where}: chat template {name!r}: {error}") from error
