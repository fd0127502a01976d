"""Chat templates: Jinja source that comes with a model and is trusted with nothing.

The names and helpers are those that public templates use: ``raise_exception``, ``strftime_now``, ``tojson``,
``break`` and ``continue``, ``generation`` blocks, blocks trimmed on both sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.tokenizer.errors import ChatTemplateError

#: A rendering that goes past one of these is a runaway: real ones stay far below.
MAX_LOOP_STEPS = 1_000_000
MAX_CHARACTERS = 8_000_000
MAX_EXPONENT = 64
MAX_BITS = 4096
#: Widest padding of a number or string that a template may ask for.
MAX_WIDTH = 1_000

_BUDGET = "octavo loop budget"  # with spaces: no template can name it
#: Formats with a width of four digits or more, or one that is itself an argument.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "wordwrap"}


class _Budget:
    """How many more loop steps one rendering may take."""

    def __init__(self) -> None:
        self.left = MAX_LOOP_STEPS

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise SecurityError(f"it loops more than {MAX_LOOP_STEPS} times")


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    # `parent` holds what render() was given; a template's own {% set %} cannot reach it.
    budget: _Budget = context.parent[_BUDGET]
    for item in items:
        budget.spend()
        yield item


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARACTERS:
        raise SecurityError(f"it builds something longer than {MAX_CHARACTERS} characters or items")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"it computes a number of more than {MAX_BITS} bits")
    return value


def _check_growth(name: str, text: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse, before it runs, a method or filter ``name`` of ``text`` that would build something huge."""
    given = [*args, *kwargs.values()]
    wide = name in _PADDING and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in given)
    wide |= name in {"format", "format_map"} and bool(_WIDE_BRACES.search(text) or _WIDE_PERCENT.search(text))
    if wide:
        raise SecurityError(f"it pads a text past {MAX_WIDTH} characters")
    if name == "replace" and len(given) >= 2:
        old, new = str(given[0]), str(given[1])
        if len(text) + text.count(old) * len(new) > MAX_CHARACTERS:
            raise SecurityError(f"it replaces into more than {MAX_CHARACTERS} characters")


def _joinable(items: Iterable[Any], separator: Any) -> Iterator[Any]:
    """``items``, as long as joining them stays within bounds."""
    length = 0
    for item in items:
        length += (len(item) if isinstance(item, str) else 1) + len(str(separator))
        if length > MAX_CHARACTERS:
            raise SecurityError(f"it joins more than {MAX_CHARACTERS} characters")
        yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on loops and on the size of what is built."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own gives an undefined value, which prints as nothing.
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(right) <= MAX_EXPONENT and abs(left) <= MAX_CHARACTERS):
            raise SecurityError(
                f"it takes a power with an exponent above {MAX_EXPONENT}, or of a huge number"
            )
        for many, times in ((left, right), (right, left)) if operator == "*" else ():
            repeats = isinstance(many, str | list | tuple) and isinstance(times, int)
            if repeats and len(many) * times > MAX_CHARACTERS:
                raise SecurityError(f"it repeats something past {MAX_CHARACTERS} characters")
        if operator == "%" and isinstance(left, str):
            _check_growth("format", left, (), {})
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format when the attribute is looked up.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str):
            _check_growth(name, owner, args, kwargs)
            if name == "join" and args:
                args = (_joinable(args[0], owner), *args[1:])
        return _bounded(super().call(context, function, *args, **kwargs))


class _GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks a reply for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja wants a set on the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models do not expect.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _sandbox() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks])
    environment.filters.update(tojson=_tojson, _counted=_counted, _bounded=_bounded)
    for name in ("center", "format", "indent", "wordwrap", "replace", "join"):
        environment.filters[name] = _guarded(name, environment.filters[name])
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _guarded(name: str, function: Any) -> Any:
    """The filter ``name``, refused where its result would be huge."""
    wanted = getattr(function, "jinja_pass_arg", None)  # the environment, say, as the first argument
    hidden = 0 if wanted is None else 1

    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, given = args[hidden], args[hidden + 1 :]
        if name != "join":
            _check_growth(name, str(value), given, kwargs)
        elif len(given) < 2 and "attribute" not in kwargs:
            value = _joinable(value, given[0] if given else kwargs.get("d", ""))
        return _bounded(function(*args[:hidden], value, *given, **kwargs))

    if wanted is not None:
        guarded.jinja_pass_arg = wanted  # type: ignore[attr-defined]  # jinja reads it
    return guarded


class ChatTemplate:
    """A compiled chat template.

    Rendering is a function of its arguments (and of the date, where the template asks for it). A fault
    of the source, or of the template while it renders, is a :class:`ChatTemplateError`.
    """

    def __init__(self, source: str) -> None:
        environment = _sandbox()
        try:
            tree = environment.parse(source)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = _filtered(loop.iter, "_counted")
            for concat in list(tree.find_all(nodes.Concat)):
                # In place: a node does not know its parent. [inner concat, bound] keeps the value.
                inner = nodes.Concat(concat.nodes, lineno=concat.lineno)
                concat.nodes = [_filtered(inner, "_bounded")]
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template is not valid: {_reason(error)}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """The text for ``variables``; see the class for errors."""
        pieces, length = [], 0
        try:
            for piece in self._template.generate({**variables, _BUDGET: _Budget()}):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise SecurityError(f"it writes more than {MAX_CHARACTERS} characters")
        except SecurityError as error:
            raise ChatTemplateError(f"the chat template does what it may not: {_reason(error)}") from error
        except jinja2.UndefinedError as error:
            raise ChatTemplateError(
                f"the chat template needs what it was not given: {_reason(error)}"
            ) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {_reason(error)}") from error
        except Exception as error:
            # The template is foreign code: it can raise whatever Python can.
            raise ChatTemplateError(f"the chat template fails on these messages: {_reason(error)}") from error
        return "".join(pieces)


def _filtered(expression: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(expression, name, [], [], None, None, lineno=expression.lineno)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    text = " ".join(str(error).split())
    return text if text else type(error).__name__
