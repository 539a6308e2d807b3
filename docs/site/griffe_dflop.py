"""Extends griffe, which reads the API for mkdocstrings, by what is special about this package.

The stubs of the compiled module have the types, and the module itself has the documentation. Both are put
together here.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
import textwrap
from importlib import import_module
from typing import Any

import griffe

NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?!`)(?!\])")
CONSOLE = re.compile(r"^\s*(>>>|\.\.\. )")
# A block of code as in reStructuredText: indented, after a line that ends in two colons.
LITERAL = re.compile(r"::\n\n((?:[ \t]+\S.*(?:\n|$)|\n(?=[ \t]))+)")
RUN_IN = re.compile(r"^(Args|Raises|Attributes): (?=\w+: )", re.MULTILINE)


class PackageExtension(griffe.Extension):
    """Documents compiled classes, splits run-in sections, and links names in backticks."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Completes the package after it has been read."""
        if pkg.path != "dflop":
            return
        native = pkg.members["_native"]
        _document(native, import_module("dflop._native"), loader)
        aliases = {name: one.value for name, one in native.members.items() if _is_private_type(one)}
        package = import_module("dflop")
        is_module = {name: inspect.ismodule(getattr(package, name, None)) for name in package.__all__}
        public = {name: f"dflop.{name}" for name, is_one in is_module.items() if not is_one}
        for module in ("torch", "monitor", "hugging_face", "example"):
            own = import_module(f"dflop.{module}")
            names = getattr(own, "__all__", dir(own))
            public |= {f"dflop.{module}.{name}": f"dflop.{module}.{name}" for name in names if name[0] != "_"}
        _rewrite(pkg, public, aliases)


def _is_private_type(member: griffe.Object | griffe.Alias) -> bool:
    """Whether a member is a private alias of a type, such as that of paths."""
    is_alias = not member.is_alias and member.is_attribute and str(member.annotation) == "TypeAlias"
    return is_alias and member.name.startswith("_")


def _document(node: griffe.Object | griffe.Alias, value: Any, loader: griffe.GriffeLoader) -> None:
    """Gives an object of the stubs the documentation that it has at run time."""
    for name, member in list(node.members.items()):
        if member.is_alias:
            continue
        found = inspect.getattr_static(value, name, None)
        if found is None:
            continue
        if member.docstring is None and not (name.startswith("__") and member.is_function):
            text = inspect.getdoc(getattr(value, name, found))
            is_inherited = text == inspect.getdoc(type(found)) and not inspect.isclass(found)
            if text and not is_inherited:
                member.docstring = griffe.Docstring(
                    text,
                    parent=member,
                    parser=loader.docstring_parser,
                    parser_options=loader.docstring_options,
                )
        if member.is_class:
            _document(member, getattr(value, name), loader)
            _construct(member)


def _construct(cls: griffe.Object | griffe.Alias) -> None:
    """Shows the parameters of ``__new__`` as those of the class."""
    made = cls.members.get("__new__")
    if made is None or not made.is_function or "__init__" in cls.members:
        return
    made = cls.members.pop("__new__")
    made.name = "__init__"
    made.docstring = None
    cls.set_member("__init__", made)


def _rewrite(node: griffe.Object, public: dict[str, str], aliases: dict[str, Any]) -> None:
    if node.docstring:
        text = LITERAL.sub(_fenced, node.docstring.value)
        node.docstring.value = linked(sections(text, _parameters(node)), node, public)
    if node.is_function:
        node.returns = spelled_out(node.returns, aliases)
        for parameter in node.parameters:
            parameter.annotation = spelled_out(parameter.annotation, aliases)
    elif node.is_attribute:
        node.annotation = spelled_out(node.annotation, aliases)
    for member in node.members.values():
        if not member.is_alias:
            _rewrite(member, public, aliases)


def spelled_out(type_: Any, aliases: dict[str, Any]) -> Any:
    """Returns a type in which private aliases are replaced by what they stand for."""
    if isinstance(type_, griffe.ExprName):
        return spelled_out(aliases[type_.name], aliases) if type_.name in aliases else type_
    if isinstance(type_, (list, tuple)):
        return type(type_)(spelled_out(part, aliases) for part in type_)
    if not isinstance(type_, griffe.Expr):
        return type_
    parts = {one.name: getattr(type_, one.name) for one in dataclasses.fields(type_) if one.name != "parent"}
    return dataclasses.replace(type_, **{name: spelled_out(part, aliases) for name, part in parts.items()})


def _fenced(found: re.Match[str]) -> str:
    """A literal block as a fenced one, which is highlighted."""
    code = textwrap.dedent(found[1]).strip("\n")
    return f":\n\n```python\n{code}\n```\n"


def _parameters(node: griffe.Object) -> list[str]:
    constructor = node.members.get("__init__") if node.is_class else node
    return [one.name for one in getattr(constructor, "parameters", ()) if one.name != "self"]


def sections(text: str, parameters: list[str]) -> str:
    """Gives each parameter and exception a line of its own where a section is written as one paragraph."""
    parts = text.split("\n\n")
    return "\n\n".join(_section(part, parameters) for part in parts)


def _section(part: str, parameters: list[str]) -> str:
    found = RUN_IN.match(part)
    flat = " ".join(part[found.end() :].split()) if found else ""
    if not found:
        # A section of lines, of which one may hold several exceptions.
        return (
            re.sub(r"(?<=\.) (?=(?:[A-Z]\w*Error): )", "\n    ", part)
            if part.startswith("Raises:\n")
            else part
        )
    names = "|".join(map(re.escape, parameters)) if found[1] != "Raises" else r"[A-Z]\w*Error"
    if not names:
        return part
    entries = re.split(rf"(?:^|(?<=\. )|(?<=\.) )(?=(?:{names}): )", flat)
    lines = "\n".join(f"    {entry.strip()}" for entry in entries if entry.strip())
    return f"{found[1]}:\n{lines}"


def linked(text: str, node: griffe.Object, public: dict[str, str]) -> str:
    """Links public names in single backticks to their documentation."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        target = public.get(name) or public.get(name.removeprefix("dflop."))
        if target is None and "." in name:
            owner, _, member = name.rpartition(".")
            target = f"{public[owner]}.{member}" if owner in public and not hasattr(builtins, owner) else None
        return f"[`{name}`][{target}]" if target and target != node.path else found[0]

    lines = []
    is_code = False
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        lines.append(line if is_code or CONSOLE.match(line) else NAME.sub(link, line))
    return "\n".join(lines)
