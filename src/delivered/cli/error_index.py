"""Every error code with its causes and next steps.

The index is read from this package's own source, where every call that makes an error names its code, its message and
its next step: no code can be missing, and no text is written twice.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable

from delivered.model.errors import UsageError

PREFIX = "DELIVERED_"
_CODE = re.compile(rf"(?:{PREFIX})?([A-Z<][A-Z0-9_<>]+)")
_PARAMETERS = {
    "Finding": ("code", "message", "refuses", "next_step"),
    "Problem": ("code", "message", "next_step"),
    "Reason": ("code", "message", "next_step", "transient"),
    "Unfit": ("message", "next_step", "code"),
}
"""Parameters of what becomes an error later; of errors: code, message, next_step."""
_ALIASES = {"text": "message", "reason": "message", "way_out": "next_step"}
_ERROR = ("code", "message", "next_step")
_DEPTH_MAX = 6
_ALLOWED = "write what the message says is allowed"


@dataclass(frozen=True)
class Cause:
    """One place that makes an error.

    Attributes:
        kind: class of the error, or of the finding that becomes one.
        message: what happened, with <names> where an error has values.
        next_step: what to run or change; empty: nothing is said.
        module: the module that makes it, below `delivered`.
    """

    kind: str
    message: str
    next_step: str
    module: str
    line: int


@dataclass
class Index:
    """
    Attributes:
        causes: by code, with its prefix. <X> stands for a part that is known only when the error is made.
        meanings: class of an error -> what it means.
        unresolved: places whose code the source does not tell.
    """

    causes: dict[str, list[Cause]] = field(default_factory=lambda: defaultdict(list))
    meanings: dict[str, str] = field(default_factory=dict)
    unresolved: list[str] = field(default_factory=list)

    def find(self, code: str) -> tuple[str, list[Cause]]:
        """
        Args:
            code: with or without its prefix, in any case, also in brackets.

        Raises:
            UsageError: there is no such code.
        """
        wanted = PREFIX + code.strip().strip("[]").upper().removeprefix(PREFIX)
        for known, causes in self.causes.items():
            if re.fullmatch(re.sub(r"<\w+>", "[A-Z0-9_]+", known), wanted):
                return known, causes
        near = get_close_matches(wanted, self.causes, n=3)
        raise UsageError(
            "CODE_UNKNOWN",
            f"There is no error code {code!r}.",
            next_step=f"delivered explain {near[0]}" if near else "delivered explain, which lists all codes",
        )


@dataclass(frozen=True)
class _Module:
    name: str
    constants: Mapping[str, ast.expr]
    functions: Mapping[str, ast.FunctionDef]


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands, and so what its names may stand for: an assignment of its function, a constant of its
    module, a caller's argument (`bound`)."""

    module: _Module
    class_name: str = ""
    function: ast.FunctionDef | None = None
    bound: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> ast.expr | None:
        for node in ast.walk(self.function) if self.function else ():
            match node:
                case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                    return value
                case ast.Assign(targets=[ast.Tuple(elts=[*to])], value=ast.Tuple(elts=[*values])):
                    for target, value in zip(to, values, strict=False):
                        if isinstance(target, ast.Name) and target.id == name:
                            return value
        if self.function is None or name not in self.parameters:
            return self.module.constants.get(name)
        defaults = zip(reversed(self.function.args.args), reversed(self.function.args.defaults), strict=False)
        return next((value for argument, value in defaults if argument.arg == name), None)

    def takes(self, *nodes: ast.expr | None) -> bool:
        """One of them is a parameter of the function."""
        return any(isinstance(n, ast.Name) and n.id in self.parameters for n in nodes)

    @property
    def parameters(self) -> list[str]:
        """Of the function, without self or cls."""
        if self.function is None:
            return []
        spec = self.function.args
        return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ("self", "cls")]


class _Finder:
    """Classes, and calls and tables that may make errors, each with its scope."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        constants = {
            n.targets[0].id: n.value
            for n in tree.body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        }
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.classes: list[tuple[ast.ClassDef, _Scope]] = []
        self.calls: list[tuple[ast.Call, _Scope]] = []
        self.tuples: list[tuple[ast.Tuple, _Scope]] = []
        self._find(tree, _Scope(_Module(name, constants, functions)))

    def _find(self, node: ast.AST, scope: _Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            match child:
                case ast.ClassDef():
                    self.classes.append((child, scope))
                    inner = _Scope(scope.module, child.name)
                case ast.FunctionDef():
                    inner = _Scope(scope.module, scope.class_name, child)
                case ast.Call():
                    self.calls.append((child, scope))
                case ast.Tuple():
                    self.tuples.append((child, scope))
                case ast.Name() | ast.Constant() | ast.expr_context():
                    continue
            self._find(child, inner)


def _placeholder(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return f"<{name.strip('_').lower()}>"
        case ast.Attribute(attr=name):
            return f"<{name.strip('_').lower()}>"
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[part]):
            return _placeholder(part)
        case ast.Call(args=[part, *_]) if not isinstance(part, ast.Constant):
            return _placeholder(part)
        case ast.Call(func=ast.Attribute(value=part)) if not isinstance(part, ast.Constant):
            return _placeholder(part)
        case ast.Call(func=ast.Name(id=name)):
            return f"<{name.strip('_').lower()}>"
        case ast.GeneratorExp(elt=part) | ast.ListComp(elt=part):
            return _placeholder(part)
        case ast.BinOp(left=part) | ast.Subscript(value=part) | ast.Starred(value=part) | ast.Await(value=part):
            return _placeholder(part)
        case ast.BoolOp(values=[part, *_]) | ast.IfExp(body=part):
            return _placeholder(part)
    return "<...>"


def _text(node: ast.expr | None, scope: _Scope, depth: int = 0) -> str:
    """A text as the source builds it: <name> for a value, (a | b) for a choice, [a] for what may be missing."""
    if node is None or depth > _DEPTH_MAX:
        return ""
    match node:
        case ast.Constant(value=value):
            return "" if value is None else str(value)
        case ast.JoinedStr(values=values):
            return "".join(_text(v, scope, depth) for v in values)
        case ast.FormattedValue(value=ast.Name() | ast.IfExp() | ast.Constant() as value):
            return _text(value, scope, depth + 1)
        case ast.FormattedValue(value=value):
            return _placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, scope, depth) + _text(right, scope, depth)
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr() as left, op=ast.Mult()):
            return f"[{_text(left, scope, depth)}]"
        case ast.IfExp(body=body, orelse=other) | ast.BoolOp(values=[body, other]):
            found = [t for t in dict.fromkeys((_text(body, scope, depth + 1), _text(other, scope, depth + 1))) if t]
            return f"({' | '.join(found)})" if len(found) > 1 else f"[{found[0]}]" if found else ""
        case ast.Name(id=name) if name in scope.bound:
            return scope.bound[name]
        case ast.Name(id=name):
            value = scope.value(name)
            text = _text(value, scope, depth + 1) if isinstance(value, _TEXTUAL) else ""
            return text if text and not _CODE.fullmatch(text) else _placeholder(node)
        case ast.Subscript(value=ast.Name(id=name)) if isinstance(table := scope.value(name), ast.Dict):
            return f"({' | '.join(dict.fromkeys(_text(v, scope, depth + 1) for v in table.values))})"
        case ast.Call(func=ast.Name(id=name)) if name in scope.module.functions:
            function = scope.module.functions[name]
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
            if len(returned) == 1 and isinstance(returned[0], _TEXTUAL):
                inner = _Scope(scope.module, "", function)
                given = _arguments(node, inner.parameters)
                bound = {n: _text(v, scope, depth + 1) for n, v in given.items()}
                return _text(returned[0], replace(inner, bound=bound), depth + 1)
    return _placeholder(node)


_TEXTUAL = (ast.Name, ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp, ast.BoolOp)


def _codes(node: ast.expr | None, scope: _Scope) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            found = _CODE.fullmatch(text)
            return [found[1]] if found else []
        case ast.IfExp(body=body, orelse=other):
            return [*_codes(body, scope), *_codes(other, scope)]
        case ast.JoinedStr():
            found = _CODE.fullmatch(re.sub(r"<\w+>", lambda m: m[0].upper(), _text(node, scope)))
            return [found[1]] if found else []
        case ast.Name(id=name):
            return _codes(scope.value(name), scope)
    return []


def _is_code_of_another(node: ast.expr | None) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "code" for n in ast.walk(node or ast.Load()))


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _arguments(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    given = dict(zip(names, call.args, strict=False))
    return given | {_ALIASES.get(k.arg, k.arg): k.value for k in call.keywords if k.arg}


class _Reader:
    def __init__(self, modules: Sequence[_Finder]) -> None:
        self.index = Index()
        self.defaults: dict[str, str] = {}
        self.errors = self._errors([c for m in modules for c in m.classes])
        self.forwards: dict[str, list[tuple[ast.Call, _Scope]]] = defaultdict(list)
        calls = [call for m in modules for call in m.calls]
        for call, scope in calls:
            self._made(call, scope)
        by_name = defaultdict(list)
        for call, scope in calls:
            by_name[_called(call)].append((call, scope))
        for name, made in self.forwards.items():
            for call, scope in made:
                self._forwarded(call, scope, by_name[name])
        for table, scope in (t for m in modules for t in m.tuples):
            match table.elts:  # a server's errors: class, code, next step
                case [ast.Name(id=kind), code, step, *_] if kind in self.errors:
                    for found in _codes(code, scope):
                        self._add(found, kind, "<what the server reported>", _text(step, scope), scope, table.lineno)
        self.index.causes = dict(sorted(self.index.causes.items()))

    def _errors(self, classes: Sequence[tuple[ast.ClassDef, _Scope]]) -> frozenset[str]:
        """Names of the error classes; fills `meanings` and `defaults`."""
        bases = {c.name: [b.id for b in c.bases if isinstance(b, ast.Name)] for c, _ in classes}
        steps = {
            c.name: _text(f.args.defaults[-1], scope)
            for c, scope in classes
            for f in c.body
            if isinstance(f, ast.FunctionDef) and f.name == "__init__" and f.args.defaults
        }

        def is_error(name: str) -> bool:
            return name == "DeliveredError" or any(map(is_error, bases.get(name, [])))

        def default(name: str) -> str:
            return steps[name] if name in steps else "".join(map(default, bases.get(name, [])))

        found = frozenset(filter(is_error, bases))
        for c, _ in classes:
            if c.name in found:
                self.index.meanings[c.name] = (ast.get_docstring(c) or "").partition("\n\n")[0].replace("\n", " ")
                self.defaults[c.name] = default(c.name)
        return found

    def _kind(self, call: ast.Call, scope: _Scope) -> str:
        """The error, or what becomes one, that a call makes; empty: none."""
        name = _called(call)
        match call.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__") | ast.Name(id="cls"):
                name = scope.class_name
        return name if name in self.errors or name in _PARAMETERS else ""

    def _made(self, call: ast.Call, scope: _Scope) -> None:
        kind = self._kind(call, scope)
        if not kind:
            return
        given = _arguments(call, _PARAMETERS.get(kind, _ERROR))
        code, message, step = (given.get(n) for n in _ERROR)
        if isinstance(refuses := given.get("refuses"), ast.Constant) and refuses.value is False:
            return  # a warning, shown without its code
        text, next_step = _text(message, scope), _text(step, scope) or self.defaults.get(kind, "")
        found = _codes(code, scope)
        if kind == "Unfit":  # becomes the error of an option, whose type has an example
            text, next_step = f"<owner>: option <name> {text}.", next_step or _ALLOWED
            found = found or ["OPTION_VALUE"]
        function = scope.function
        if function is not None and function.name != "__init__" and scope.takes(code, message, step):
            self.forwards[function.name].append((call, scope))
        elif found:
            for each in found:
                self._add(each, kind, text, next_step, scope, call.lineno)
        elif kind in self.errors and len(call.args) > 1 and not scope.takes(code) and not _is_code_of_another(code):
            self.index.unresolved.append(f"{scope.module.name}:{call.lineno}")

    def _forwarded(self, made: ast.Call, inner: _Scope, calls: Sequence[tuple[ast.Call, _Scope]]) -> None:
        """What a function makes of the code, message or next step that its callers give it."""
        kind = self._kind(made, inner)
        fields = _arguments(made, _PARAMETERS.get(kind, _ERROR))
        code = fields.get("code")
        for call, scope in calls:
            given = _arguments(call, inner.parameters)
            bound = replace(inner, bound={n: _text(v, scope) for n, v in given.items()})
            codes = _codes(given.get(code.id), scope) if isinstance(code, ast.Name) and inner.takes(code) else []
            for each in codes or _codes(code, inner):
                step = _text(fields.get("next_step"), bound) or self.defaults.get(kind, "")
                self._add(each, kind, _text(fields.get("message"), bound), step, scope, call.lineno)

    def _add(self, code: str, kind: str, message: str, step: str, scope: _Scope, line: int) -> None:
        cause = Cause(kind, message.strip(), step.strip(), scope.module.name, line)
        self.index.causes[PREFIX + code.removeprefix(PREFIX)].append(cause)


def _sources(folder: Traversable, name: str = "") -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _sources(entry, f"{name}{entry.name}.")
        elif entry.name.endswith(".py"):
            yield (name + entry.name.removesuffix(".py")).removesuffix(".__init__"), entry.read_text(encoding="utf-8")


def read_index() -> Index:
    """Every error code of this package, from its source; about a second."""
    gc.disable()  # else it walks a million nodes again and again
    try:
        texts = (text for package in ("delivered", "delivered_lab") for text in _sources(files(package)))
        return _Reader([_Finder(name, ast.parse(text)) for name, text in texts]).index
    finally:
        gc.enable()
