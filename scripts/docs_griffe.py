"""Adds what Griffe, which reads the source for the API reference, cannot detect by itself.

- Horovod's tensor functions are built from a table (`phalanx.horovod.framework_bindings.make_collective_function`).
- `name = other_function` is a function with the docstring of the other.
- The house style writes short sections on one line (`Returns: the sum.`). Griffe expects Google's form with two lines.
- A doctest is an example without a heading.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import griffe

from phalanx.horovod.framework_bindings import ARRAY_FUNCTIONS, make_collective_function

_ONE_LINE = re.compile(r"^(?P<section>Returns|Raises): (?P<text>\S.*(?:\n(?!\n).+)*)", re.M)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)
_ERROR = re.compile(r"`?(?P<error>\w+)`?:? (?P<when>.+)", re.S)
_ERRORS = re.compile(r"\b\w+(?:Error|Exception|Interrupt)\b")


class HouseStyle(griffe.Extension):
    """Griffe extension; see the module."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.exports is not None and "ARRAY_FUNCTIONS" in mod.imports:
            mod.exports = [name for name in mod.exports if str(name) != "ARRAY_FUNCTIONS"] + ARRAY_FUNCTIONS
        if mod.path.startswith("phalanx.horovod."):
            for attribute in [each for each in mod.members.values() if each.kind is griffe.Kind.ATTRIBUTE]:
                if (function := _made(mod, attribute)) is not None:
                    mod.set_member(attribute.name, function)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _DOCTEST.sub(_as_examples, obj.docstring.value)
            obj.docstring.value = _ONE_LINE.sub(_as_google, text)


def _made(module: griffe.Module, attribute: Any) -> griffe.Function | None:
    """Return the function that an attribute is assigned: from `_function("allreduce", ...)`, or another name."""
    call = ast.parse(str(attribute.value), mode="eval").body
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "_function":
        constants = {
            name: ast.literal_eval(str(value.value)) for name, value in module.members.items() if _is_text(value)
        }
        names = [eval(compile(ast.Expression(each), "", "eval"), {}, constants) for each in call.args]
        made = make_collective_function(module.path, *names, run=lambda *_: [])
        parameters = [
            griffe.Parameter(each.name, kind=griffe.ParameterKind.positional_or_keyword, default=_default(each))
            for each in inspect.signature(made).parameters.values()
        ]
        return _function(module, attribute, griffe.Parameters(*parameters), made.__doc__ or "")
    if isinstance(call, ast.Name) and isinstance(other := module.members.get(call.id), griffe.Function):
        return _function(module, attribute, other.parameters, other.docstring.value if other.docstring else "")
    return None


def _is_text(member: Any) -> bool:
    return member.kind is griffe.Kind.ATTRIBUTE and str(member.value)[:1] in "'\""


def _default(parameter: inspect.Parameter) -> str | None:
    if parameter.default is inspect.Parameter.empty:
        return None
    value = parameter.default
    if isinstance(value, type):
        return {"NoneCompressor": "Compression.none"}.get(value.__name__, value.__name__)
    if hasattr(value, "process_set_id"):
        return "global_process_set"
    return getattr(value, "name", repr(value)).capitalize() if hasattr(value, "value") else repr(value)


def _function(module: griffe.Module, attribute: Any, parameters: griffe.Parameters, docstring: str) -> griffe.Function:
    function = griffe.Function(
        attribute.name, parameters=parameters, lineno=attribute.lineno, endlineno=attribute.endlineno, parent=module
    )
    function.docstring = griffe.Docstring(inspect.cleandoc(docstring), parent=function)
    return function


def _as_examples(match: re.Match[str]) -> str:
    return "Examples:\n" + textwrap.indent(match.group(), "    ")


def _as_google(match: re.Match[str]) -> str:
    section, text = match["section"], match["text"]
    if section == "Raises":
        error = _ERROR.fullmatch(text)
        if error is None or len(_ERRORS.findall(text)) > 1:
            return f"**Raises:** {text}"
        text = f"{error['error']}: {error['when']}"
    return f"{section}:\n    " + text.replace("\n", "\n        ")
