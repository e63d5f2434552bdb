"""Fails the build unless every public name is in the API reference of the site and has a docstring."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
HOROVOD = ("numpy", "keras", "torch", "tensorflow", "tensorflow.keras", "jax")
FOREIGN = ("keras.", "torch.", "tensorflow.")
"""Overrides of methods of these packages have the contract of the original."""


def on_post_build(config: MkDocsConfig) -> None:
    package = load()
    rendered = {canonical(package, path) for path in config.plugins["mkdocstrings"].handlers.inventory}
    problems = []
    for name, item in public_names(package):
        if not item.is_module and item.path not in rendered:
            problems.append(f"{name} ({item.path}) is on no page of docs/reference/api")
        problems += [f"{each.path} has no docstring" for each in (item, *members(item)) if not has_docstring(each)]
    if problems:
        raise PluginError("The API reference is incomplete:\n" + "\n".join(sorted(set(problems))))


def load() -> griffe.Module:
    extensions = griffe.load_extensions(str(ROOT / "scripts" / "docs_griffe.py"))
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], extensions=extensions)
    package = loader.load("phalanx")
    loader.resolve_aliases(external=False)
    assert isinstance(package, griffe.Module)
    return package


def public_names(package: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """Yield each name that a program may import, and its object."""
    modules = {
        "phalanx": package,
        "phalanx.compat.v1": package["compat.v1"],
        **{f"phalanx.horovod.{name}": package[f"horovod.{name}"] for name in HOROVOD},
    }
    while modules:
        path, module = modules.popitem()
        yield path, module
        for name, member in module.members.items():
            if not is_exported(module, name) or name == "__version__":
                continue
            item = target(member)
            if item.is_module:
                modules[f"{path}.{name}"] = item
            else:
                yield f"{path}.{name}", item


def is_exported(module: griffe.Module, name: str) -> bool:
    if module.exports is not None:
        return name in module.exports
    return not name.startswith("_") and not module.members[name].is_alias


def members(item: griffe.Object) -> Iterator[griffe.Object]:
    """The public methods and properties that a class adds to its bases."""
    if isinstance(item, griffe.Class):
        inherited = {name for base in item.mro() for name in base.members}
        foreign = any(str(base).startswith(FOREIGN) for each in (item, *item.mro()) for base in each.bases)
        for name, member in item.members.items():
            is_field = member.is_attribute and "property" not in member.labels
            if name.startswith("_") or name in inherited or member.is_alias or is_field:
                continue
            if not (foreign and name.startswith(("on_", "call", "get_config", "from_config", "build", "set_"))):
                yield member


def has_docstring(item: griffe.Object) -> bool:
    return item.docstring is not None and bool(item.docstring.value.strip())


def canonical(package: griffe.Module, path: str) -> str:
    try:
        return target(package[path.removeprefix("phalanx.")]).path
    except (KeyError, griffe.GriffeError):
        return path


def target(item: griffe.Object | griffe.Alias) -> griffe.Object:
    return item.final_target if isinstance(item, griffe.Alias) else item
