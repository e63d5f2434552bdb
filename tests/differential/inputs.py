"""Draws data, and the forms in which `fit`, `evaluate` and `predict` receive them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.differential.architectures import VOCABULARY, Architecture, Input, Output
from tests.differential.writer import Writer

WEIGHTS = (
    "rng.uniform(0.1, 2.0, {n}).astype('float32')",
    "np.linspace(3.0, 0.0, {n}, dtype='float32')",
    "(np.arange({n}) % 2).astype('float32')",
    "np.linspace(2.0, -0.5, {n}, dtype='float32')",
)


@dataclass(frozen=True)
class Data:
    """Arrays in the variables `x`, `y` and, if there are any, `w`, with a suffix.

    Attributes:
        samples: how many rows there are.
        weighted: whether there are sample weights.
    """

    suffix: str
    samples: int
    weighted: bool

    @property
    def x(self) -> str:
        return f"x{self.suffix}"

    @property
    def y(self) -> str:
        return f"y{self.suffix}"

    @property
    def w(self) -> str:
        return f"w{self.suffix}"

    @property
    def names(self) -> list[str]:
        return [self.x, self.y, *([self.w] if self.weighted else [])]


def draw_data(w: Writer, architecture: Architecture, suffix: str, *, weighted: bool) -> Data:
    """Write the lines that make a data set."""
    size = architecture.batch_size
    if w.backend == "torch" and architecture.is_masked:
        weighted = False  # there, plain Keras multiplies them by the mask (`docs/concepts/numbers.md`)
    data = Data(suffix, w.one_of([10, 6, 17, 24, 2] if size is None else [2 * size, size, 4 * size]), weighted)
    has_dicts = "dicts" in architecture.form
    inputs = [_values(given, data.samples) for given in architecture.inputs]
    names = [given.name for given in architecture.inputs]
    w.write(f"{data.x} = {_nest(names, inputs, has_dicts=has_dicts and len(inputs) > 1)}")
    outputs = [output.name for output in architecture.outputs]
    targets = [_targets(output, data.samples) for output in architecture.outputs]
    w.write(f"{data.y} = {_nest(outputs, targets, has_dicts=has_dicts)}")
    if weighted:
        weights = [_weights(w, output, data.samples) for output in architecture.outputs]
        w.write(f"{data.w} = {_nest(outputs, weights, has_dicts=has_dicts)}")
    return data


def _nest(names: list[str], items: list[str], *, has_dicts: bool) -> str:
    if has_dicts:
        return "{" + ", ".join(f"{name!r}: {item}" for name, item in zip(names, items, strict=True)) + "}"
    return items[0] if len(items) == 1 else f"({', '.join(items)})"


def _weights(w: Writer, output: Output, samples: int) -> str:
    weights = str(w.one_of(WEIGHTS)).format(n=samples)
    return f"np.outer({weights}, np.linspace(1.0, 0.5, {output.steps}, dtype='float32'))" if output.steps else weights


def _values(given: Input, samples: int) -> str:
    shape = (samples, *given.shape)
    if given.kind == "tokens":
        return f"rng.integers(0, {VOCABULARY}, {shape}).astype('int32')"
    return f"rng.normal(size={shape}).astype('{given.dtype}')"


def _targets(output: Output, samples: int) -> str:
    shape = (samples, output.steps) if output.steps else (samples,)
    return {
        "regression": f"rng.normal(size={(*shape, output.units)}).astype('float32')",
        "binary": f"rng.integers(0, 2, {(*shape, output.units)}).astype('float32')",
        "classes": f"rng.integers(0, {output.units}, {shape if output.is_flat else (*shape, 1)}).astype('int32')",
        "one_hot": f"np.eye({output.units}, dtype='float32')[rng.integers(0, {output.units}, {samples})]",
    }[output.task]


ROWS = """
    def rows(data, start, stop):
        if isinstance(data, dict):
            return {name: item[start:stop] for name, item in data.items()}
        if isinstance(data, tuple):
            return tuple(item[start:stop] for item in data)
        return data[start:stop]
    """


@dataclass
class Source:
    """How data are passed to `fit`, `evaluate` or `predict`.

    Attributes:
        arguments: the positional ones.
        keywords: arguments by name.
        is_dataset: whether the only argument yields batches.
        is_endless: whether it yields them without an end.
        is_once: whether it yields them only once.
    """

    arguments: list[str]
    keywords: dict[str, str] = field(default_factory=dict)
    is_dataset: bool = True
    is_endless: bool = False
    is_once: bool = False

    def call(self, method: str, **more: str) -> str:
        named = (f"{name}={value}" for name, value in {**self.keywords, **more, "verbose": "0"}.items())
        return f"model.{method}({', '.join([*self.arguments, *named])})"


def draw_source(w: Writer, architecture: Architecture, data: Data, *, only_x: bool = False) -> Source:
    kind = _draw_kind(w, architecture, data, only_x=only_x)
    # A dataset may have targets that `predict` does not need.
    only_x = only_x and not (kind in ("pydataset", "tf", "loader") and w.chance())
    names = [data.x] if only_x else data.names
    size = str(architecture.batch_size or w.one_of([4, 8, 3, 1, 32]))
    given = ", ".join(names)
    if kind in ("generator", "once"):
        w.define("rows", ROWS)
        w.define("batches", GENERATOR)
        if kind == "once":
            one_pass = -(-data.samples // int(size))
            batches = f"batches({given}, size={size}, samples={data.samples})"
            source = Source([f"(batch for _, batch in zip(range({one_pass}), {batches}))"], is_once=True)
            if w.backend == "tensorflow" and not only_x:
                # Without XLA Keras counts one step more where such data end (`docs/concepts/numbers.md`).
                source.keywords["steps_per_epoch"] = str(one_pass)
            return source
        return Source([f"batches({given}, size={size}, samples={data.samples})"], is_endless=True)
    if kind == "drawn":
        w.define("rows", ROWS)
        w.define("drawn", DRAWN)
        position = w.one_of(_positions(w))
        return Source([f"drawn({given}, size={size}, position=lambda: {position}({data.samples}))"], is_endless=True)
    if kind == "pydataset":
        return Source([f"{_py_dataset(w)}({given}, size={size})"])
    if kind == "tf":
        dataset = _tf_dataset(w, names, size)
        return Source([dataset], is_endless=dataset.endswith(".repeat()"))
    if kind == "loader":
        w.imports.add("import torch")
        tensors = ", ".join(f"torch.as_tensor({name})" for name in names)
        choices = ["", *([", drop_last=True"] if int(size) <= data.samples else [])]
        choices += [] if only_x else [", shuffle=True", _SAMPLER.format(n=data.samples)]
        shuffle = w.one_of(choices)
        return Source([f"torch.utils.data.DataLoader(torch.utils.data.TensorDataset({tensors}), {size}{shuffle})"])
    form = "{}"
    if kind == "arrays" and all(_is_nested(architecture, name) for name in names) and "dicts" not in architecture.form:
        form = w.one_of(["{}", "list({})"])
    if kind == "tensors":
        form = "keras.tree.map_structure(ops.convert_to_tensor, {})"
    elif kind == "pandas":
        w.imports.add("import pandas")
        form = "pandas.DataFrame({})"
    keywords = {"batch_size": size}
    if len(names) > 2:
        keywords["sample_weight"] = data.w
    return Source([form.format(name) for name in names[:2]], keywords, is_dataset=False)


def _draw_kind(w: Writer, architecture: Architecture, data: Data, *, only_x: bool) -> str:
    nested = any(_is_nested(architecture, name) for name in ([data.x] if only_x else data.names))
    kinds = ["arrays", "arrays", "generator", "pydataset", "tensors", "once"]
    if w.backend == "tensorflow" or w.chance(4):
        kinds.append("tf")
    if w.backend != "tensorflow":  # there, Keras reads ahead, and so draws more than it trains on
        kinds.append("drawn")
    if not nested and not _is_nested(architecture, data.y) and (w.backend == "torch" or w.chance(4)):
        kinds.append("loader")
    if architecture.inputs[0].kind == "vector" and not nested:
        kinds.append("pandas")
    return str(w.one_of(kinds))


def _is_nested(architecture: Architecture, name: str) -> bool:
    several = len(architecture.inputs) if name.startswith("x") else len(architecture.outputs)
    return several > 1 or "dicts" in architecture.form


_SAMPLER = (
    ", sampler=torch.utils.data.WeightedRandomSampler(np.arange(1, {n} + 1), {n}, "
    "generator=torch.Generator().manual_seed(1))"
)

GENERATOR = """
    def batches(*arrays, size, samples):
        while True:
            for start in range(0, samples, size):
                yield tuple(rows(array, start, start + size) for array in arrays)
    """


DRAWN = """
    def drawn(*arrays, size, position):  # draws from the program's generators for each batch
        while True:
            start = int(position())
            yield tuple(rows(array, start, start + size) for array in arrays)
    """


def _positions(w: Writer) -> list[str]:
    """Functions that draw a number below their argument from a generator of the program's."""
    w.imports.add("import random")
    found = ["random.randrange", "np.random.randint"]
    if w.backend == "torch":
        w.imports.add("import torch")
        w.define("of_torch", "def of_torch(below):\n    return torch.randint(below, ())")
        found.append("of_torch")
    return found


def _py_dataset(w: Writer) -> str:
    w.define("rows", ROWS)
    if w.chance(3):
        return w.define("Shuffled", _SHUFFLED)
    if w.chance():
        return w.define(
            "Refilled",
            """
            class Refilled(keras.utils.PyDataset):  # fills the same memory for each batch
                def __init__(self, *arrays, size):
                    super().__init__(workers=0)  # with more, Keras itself reads ahead into the same memory
                    self.arrays, self.size = arrays, size
                    self.samples = len(keras.tree.flatten(arrays)[0])
                    self.buffers = keras.tree.map_structure(lambda array: np.empty_like(array[:size]), arrays)

                def __len__(self):
                    return -(-self.samples // self.size)

                def __getitem__(self, index):
                    start = index * self.size
                    count = min(self.size, self.samples - start)

                    def fill(buffer, array):
                        buffer[:count] = array[start : start + count]
                        return buffer[:count]

                    return keras.tree.map_structure(fill, self.buffers, self.arrays)
            """,
        )
    return w.define(
        "Batches",
        """
        class Batches(keras.utils.PyDataset):
            def __init__(self, *arrays, size):
                super().__init__()
                self.arrays, self.size = arrays, size
                self.samples = len(keras.tree.flatten(arrays)[0])

            def __len__(self):
                return -(-self.samples // self.size)

            def __getitem__(self, index):
                start = index * self.size
                return tuple(rows(array, start, start + self.size) for array in self.arrays)
        """,
    )


_SHUFFLED = """
    class Shuffled(keras.utils.PyDataset):  # in another order after each pass
        def __init__(self, *arrays, size):
            super().__init__()
            self.arrays, self.size = arrays, size
            self.random = np.random.default_rng(2)
            self.order = np.arange(len(keras.tree.flatten(arrays)[0]))

        def __len__(self):
            return -(-len(self.order) // self.size)

        def __getitem__(self, index):
            chosen = self.order[index * self.size : (index + 1) * self.size]
            return keras.tree.map_structure(lambda array: array[chosen], self.arrays)

        def on_epoch_end(self):
            self.random.shuffle(self.order)
    """


def _tf_dataset(w: Writer, names: list[str], size: str) -> str:
    w.imports.add("import tensorflow as tf")
    text = f"tf.data.Dataset.from_tensor_slices(({', '.join(names)},))"
    if w.chance(3):
        text += ".shuffle(50, seed=1)"
    text += f".batch({size}{w.one_of(['', ', drop_remainder=True'])})"
    # With `steps_per_epoch`, a seeded shuffle has other orders in a second `fit` (`docs/concepts/numbers.md`).
    endless = [".repeat()"] if "shuffle" not in text else []
    return text + w.one_of(["", ".prefetch(1)", ".repeat(2)", *endless])
