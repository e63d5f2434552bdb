"""Checks the rules of docs/architecture.md that linters do not cover. `make lint` runs it; it needs only Python.

    python scripts/check_house.py

Layers import in one direction, `keras.src` and the environment are each used in one place, no two modules or public
classes share a name, classes and functions stay small, descriptions of arguments are complete, and the text avoids
words that mark a translation.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("phalanx")

LAYERS = (
    ("errors", "version", "compat"),
    ("config",),
    ("storage",),
    ("arrays", "monitoring"),
    ("keras_compat",),
    ("transport",),
    ("runtime",),
    ("devices",),
    ("cluster",),
    ("collectives",),
    ("compression",),
    ("planning",),
    ("elastic",),
    ("data",),
    ("engines",),
    ("parameter_server",),
    ("checkpoint",),
    ("training",),
    ("launcher", "coordinator"),
    ("strategies", "callbacks", "losses", "tuning"),
    ("supervisor", "evaluator", "tensorflow1"),
    ("horovod",),
    ("dashboard",),
    ("cli",),
)
"""Layers, lowest first. A module imports from its own layer and lower ones. Lazy imports in functions count too."""

PUBLIC_FACADES = {"__init__", "__main__", "cluster_resolver", "experimental", "tpu"}
"""Modules that only re-export and may import from anywhere."""

LAZY_EXPORTS = {"phalanx/config/__init__.py", "phalanx/elastic/__init__.py"} | {
    f"phalanx/compat/v1/{name}.py" for name in ("__init__", "layers", "train")
}
"""Public names from a higher layer that are imported on first use."""

SHARED_MODULE_NAMES = {"callbacks", "compression", "elastic", "functions", "mpi_ops"}
"""Module names of Horovod that each of its frameworks repeats."""

MAX_METHODS, MAX_ATTRIBUTES, MAX_LINES, MAX_ARGUMENTS = 20, 15, 50, 8

ODD_WORDS = re.compile(
    r"\b(anew|nobody|somebody|everybody|whoever|in vain|in the place of|of one's own|of its own accord|thereby|lest"
    r"|is to be had|for ever|call(s|ed)? upon|comes? and go(es)?)\b",
    re.I,
)
TEXT = ("phalanx", "docs", "examples", "tests", "benchmarks", "README.md")

EXCEPTIONS = {
    "RunOptions": "tf.distribute has a class of this name, and `phalanx run` has options",
    "Server": "tf.distribute has a class of this name for Keras models, and tf.train one for graphs",
    "Supervisor": "as Server",
    "MultiWorkerMirroredStrategy": "tf.distribute.experimental has a strategy of this name with other arguments",
    "phalanx/strategies/strategy.py:Strategy": "the methods of tf.distribute.Strategy",
    "phalanx/monitoring/job_view.py:JobView": "one flat record, as programs that read its JSON want it",
    "phalanx/monitoring/job_view.py:MemberView": "one flat record, as programs that read its JSON want it",
    "phalanx/training/fit_arguments.py:FitArguments": "the arguments of keras.Model.fit",
}
"""Exceptions to the rules, and their reasons."""

LONG_SIGNATURES = {
    "phalanx/cluster/resolvers/gce.py:__init__",
    "phalanx/cluster/resolvers/kubernetes.py:__init__",
    "phalanx/evaluator/sidecar_evaluator.py:__init__",
    "phalanx/horovod/keras/keras_optimizer.py:DistributedOptimizer",
    "phalanx/horovod/keras/keras_optimizer.py:PartialDistributedOptimizer",
    "phalanx/horovod/run_function.py:run",
    "phalanx/horovod/tensorflow/__init__.py:DistributedOptimizer",
    "phalanx/horovod/tensorflow/tape.py:DistributedGradientTape",
    "phalanx/horovod/tensorflow/tape.py:PartialDistributedGradientTape",
    "phalanx/horovod/torch/optimizer.py:DistributedOptimizer",
    "phalanx/strategies/cluster_server.py:__init__",
    "phalanx/strategies/parameter_server_strategy.py:__init__",
    "phalanx/supervisor/supervisor.py:__init__",
    "phalanx/tensorflow1/graph_layers.py:batch_normalization",
    "phalanx/tensorflow1/graph_layers.py:conv2d",
    "phalanx/tensorflow1/graph_layers.py:dense",
}
"""Functions that users call with the arguments of the originals, in their order, and with additions of Phalanx."""


def main() -> int:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    problems = [
        *layer_problems(trees),
        *home_problems(trees),
        *duplicate_problems(trees),
        *size_problems(trees),
        *description_problems(trees),
        *word_problems(),
    ]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "The house is in order.")
    return bool(problems)


def layer_of(module: str) -> str:
    """Layer of a module, such as `training` for `phalanx.training.fit_loop`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of each import, with `from package import module` resolved to the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def layer_problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    rank = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path, tree in trees.items():
        own = layer_of(".".join(path.with_suffix("").parts))
        if own in PUBLIC_FACADES or str(path) in LAZY_EXPORTS:
            continue
        if own not in rank:
            yield f"{path}: {own} is in no layer of scripts/check_house.py"
            continue
        for line, module in imports(_without_type_checking(tree)):
            layer = layer_of(module) if module.startswith("phalanx.") else None
            if layer in rank and rank[layer] > rank[own]:
                yield f"{path}:{line}: {own} imports {module}, which is a layer above it"


DECODERS = [f"msgspec.{form}.{name}" for form in ("msgpack", "json") for name in ("decode", "Decoder")]


def home_problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        if path.parts[1] != "keras_compat":
            for line, module in imports(tree):
                if module.startswith("keras.src"):
                    yield f"{path}:{line}: keras.src is imported in keras_compat alone"
        if path.stem not in ("decoding", "serialization"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in DECODERS:
                    yield f"{path}:{node.lineno}: messages are decoded by transport/decoding alone"
        if path.parts[1] != "config":
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                    yield f"{path}:{node.lineno}: the environment is read in config alone"


def duplicate_problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    modules: dict[str, list[Path]] = collections.defaultdict(list)
    classes: dict[str, list[Path]] = collections.defaultdict(list)
    for path, tree in trees.items():
        if path.name != "__init__.py" and path.stem not in SHARED_MODULE_NAMES:
            modules[path.stem].append(path)
        if path.parts[1] != "horovod":
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(path)
    for kind, found in (("modules", modules), ("classes", classes)):
        for name, paths in found.items():
            if len(paths) > 1 and name not in EXCEPTIONS:
                yield f"{kind} called {name}: {', '.join(map(str, paths))}"


def size_problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if f"{path}:{node.name}" in EXCEPTIONS:
                continue
            if isinstance(node, ast.ClassDef):
                methods, attributes = _members(node)
                if methods > MAX_METHODS or attributes > MAX_ATTRIBUTES:
                    yield f"{path}:{node.lineno}: {node.name} has {methods} methods and {attributes} attributes"
            else:
                if (lines := _lines(node)) > MAX_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines"
                if (count := _arguments(node)) > MAX_ARGUMENTS and f"{path}:{node.name}" not in LONG_SIGNATURES:
                    yield f"{path}:{node.lineno}: {node.name} has {count} arguments"


SECTION = re.compile(r"\n( *)(?:Args|Attributes):\n((?:\1 +.*\n|\n)+)")
ENTRY = re.compile(r"^( *)[*\w, ]+: (\S+)")
FRAGMENTS = {"Of", "of", "with", "from", "to", "by", "for", "in", "as", "at", "on"}


def description_problems(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find descriptions of arguments and attributes that only continue the name: `name: of the thread`."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for _, entries in SECTION.findall(f"\n{ast.get_docstring(node) or ''}\n"):
                    lines = [match for line in entries.splitlines() if (match := ENTRY.match(line))]
                    for match in lines:
                        if match[1] == lines[0][1] and match[2] in FRAGMENTS:
                            yield f"{path}:{node.lineno}: {node.name} describes {match[0].strip()!r}, a fragment"


def word_problems() -> Iterator[str]:
    files = subprocess.run(["git", "ls-files", "--", *TEXT], capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        if name.endswith((".py", ".md")) and "results" not in name:
            for number, line in enumerate(Path(name).read_text().splitlines(), 1):
                for match in ODD_WORDS.finditer(line):
                    yield f"{name}:{number}: write something plainer than {match.group()!r}"


def _without_type_checking(tree: ast.Module) -> ast.Module:
    """Return the code that runs: imports only for annotations may point upward."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(body=kept, type_ignores=[])


def _members(node: ast.ClassDef) -> tuple[int, int]:
    """Count methods, and attributes: annotated fields, and assignments of methods to `self`."""
    methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assigned = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self"
    }
    return methods, len(fields | assigned)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count arguments without `self`, `cls`, `*args` and `**kwargs`."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in given)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count lines without the docstring."""
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    hidden = docstring.end_lineno - docstring.lineno + 1 if docstring is not None and docstring.end_lineno else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - hidden


if __name__ == "__main__":
    sys.exit(main())
