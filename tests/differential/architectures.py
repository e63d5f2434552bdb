"""Draws models: their inputs, layers and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.differential.writer import Writer

ACTIVATIONS = ("tanh", "linear", "sigmoid", "softplus", "gelu")
"""Smooth: where a slope jumps, rounding decides."""
TASKS = ("regression", "binary", "classes", "one_hot")
VOCABULARY = 7
SHAPES = {"vector": ((3,), (2,)), "tokens": ((4,),), "sequence": ((4, 3),), "image": ((4, 5, 1),)}
"""Few, and small: on JAX nearly all of the time is compilation, once for each shape."""


STATEFUL_BATCH = 6
"""Jobs of one, two and three divide it evenly."""


@dataclass(frozen=True)
class Input:
    """`kind` is "vector", "tokens", "sequence" or "image"; `shape` is without the batch."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Output:
    """`task` says what the targets are, `units` how many, `logits` whether there is no final activation, `is_flat`
    whether they have one axis less, and `steps` of how many steps of a sequence they are; 0: of none."""

    name: str
    task: str
    units: int
    logits: bool = False
    is_flat: bool = False
    steps: int = 0


@dataclass
class Architecture:
    """What the rest of a program needs to know about its model."""

    inputs: list[Input]
    outputs: list[Output]
    is_built: bool = True
    form: str = "functional"
    is_masked: bool = False

    @property
    def batch_size(self) -> int | None:
        """Of all batches, where the model keeps a state for each sample of one."""
        return STATEFUL_BATCH if self.form == "stateful" else None


def draw_architecture(w: Writer) -> Architecture:
    """Write the lines that make `model`."""
    if w.backend != "torch" and w.chance(20):  # on PyTorch Keras itself cannot train them
        return _write_stateful(w)
    if w.chance(10):
        return _write_tagging(w)
    inputs = [_input(w, f"in{index}") for index in range(1 + w.chance(4))]
    outputs = [_output(w, f"out{index}") for index in range(1 + w.chance(4))]
    forms = ["functional"]
    if len(inputs) == len(outputs) == 1:
        forms = ["sequential", "unbuilt", "network", *forms]
    form = w.one_of([*forms, "subclass", "stepping"])
    architecture = Architecture(inputs, outputs, form not in ("unbuilt", "network"), form)
    if form in ("sequential", "unbuilt"):
        _write_sequential(w, architecture)
    elif form == "network":
        _write_network(w, architecture)
    else:
        _write_functional(w, architecture)
    return architecture


def _write_stateful(w: Writer) -> Architecture:
    (shape,) = SHAPES["sequence"]
    output = _output(w, "out0")
    part = f"{STATEFUL_BATCH} // replicas"
    if w.chance(4):
        part = str(STATEFUL_BATCH)  # is refused: a replica has fewer samples
    w.write("replicas = getattr(getattr(scope, '__self__', None), 'num_replicas_in_sync', 1)")
    w.write(f"given = keras.Input(batch_shape=({part}, {', '.join(map(str, shape))}))")
    layer = w.one_of(["LSTM", "GRU", "SimpleRNN"])
    w.write(f"h = layers.{layer}(3, stateful=True)(given)")
    w.write(f"model = keras.Model(given, {_head(output)}(h))")
    return Architecture([Input("in0", "sequence", shape)], [output], form="stateful")


def _write_tagging(w: Writer) -> Architecture:
    """A model with an output for each step of a sequence, and masks that reach its loss and metrics."""
    given = Input("in0", *w.one_of([("tokens", (4,)), ("sequence", (4, 3))]))
    task = w.one_of(["classes", "regression", "binary"])
    output = Output("out0", task, 3 if task == "classes" else 1, is_flat=task == "classes", steps=4)
    is_masked = w.chance()
    w.write(f"given = h = keras.Input({given.shape}{_dtype(given)})")
    if given.kind == "tokens":
        w.write(f"h = layers.Embedding({VOCABULARY}, 3{', mask_zero=True' if is_masked else ''})(h)")
    elif is_masked:
        w.write("h = layers.Masking(0.0)(h)")
    for _ in range(w.number(0, 2)):
        w.write(f"h = {w.one_of(_LAYERS_OF_STEPS)}")
    w.write(f"model = keras.Model(given, {_head(output)}(h))")
    return Architecture([given], [output], form="tagging", is_masked=is_masked)


_LAYERS_OF_STEPS = (
    "layers.LSTM(3, return_sequences=True)(h)",
    "layers.Bidirectional(layers.GRU(2, return_sequences=True), merge_mode='ave')(h)",
    "layers.TimeDistributed(layers.Dense(3, activation='tanh'))(h)",
    "layers.Conv1D(3, 2, padding='causal', activation='tanh')(h)",
    "layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True)",
    "layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)], return_sequences=True)(h)",
    "layers.Attention(use_scale=True)([h, h])",
    "layers.LayerNormalization()(h)",
)


def _input(w: Writer, name: str) -> Input:
    kind = w.one_of(["vector", "vector", "tokens", "sequence", "image"])
    shape = w.one_of(SHAPES[kind])
    return Input(name, kind, shape, "float64" if w.chance(8) else "float32")


def _output(w: Writer, name: str) -> Output:
    task = w.one_of(TASKS)
    units = w.one_of([3, 2]) if task in ("classes", "one_hot") else w.one_of([1, 2])
    return Output(name, task, units, task != "regression" and w.chance(3), is_flat=task == "classes" and w.chance(3))


def _head(output: Output) -> str:
    activations = {"binary": "sigmoid", "classes": "softmax", "one_hot": "softmax"}
    activation = None if output.logits else activations.get(output.task)
    return f"layers.Dense({output.units}{f', activation={activation!r}' if activation else ''}, name={output.name!r})"


def _write_sequential(w: Writer, architecture: Architecture) -> None:
    (given,), (output,) = architecture.inputs, architecture.outputs
    found = _body(w, given)
    given_layers = [f"keras.Input({given.shape}{_dtype(given)})"] if architecture.is_built else []
    lines = (f"    {layer}," for layer in [*given_layers, *found, _head(output)])
    w.write("\n".join(["model = keras.Sequential([", *lines, "])"]))


def _write_network(w: Writer, architecture: Architecture) -> None:
    """A subclass that makes its layers itself, and builds them when it is first called."""
    (given,), (output,) = architecture.inputs, architecture.outputs
    found = [_vector_layer(w) for _ in range(w.number(1, 3))]
    start = f"layers.Embedding({VOCABULARY}, 3)" if given.kind == "tokens" else "layers.Rescaling(0.5)"
    parts = [start, "layers.Flatten()", *found, _head(output)]
    lines = [f"{' ' * 20}{part}," for part in parts]
    w.define(
        "Network",
        "\n".join(
            [
                '@keras.saving.register_keras_serializable("program")',
                "class Network(keras.Model):",
                "    def __init__(self, **kwargs):",
                "        super().__init__(**kwargs)",
                "        self.parts = [",
                *(line[8:] for line in lines),
                "        ]",
                "",
                "    def call(self, inputs):",
                "        for part in self.parts:",
                "            inputs = part(inputs)",
                "        return inputs",
            ]
        ),
    )
    w.write("model = Network()")


def _write_functional(w: Writer, architecture: Architecture) -> None:
    vectors = []
    for given in architecture.inputs:
        w.write(f"{given.name} = h = keras.Input({given.shape}, name={given.name!r}{_dtype(given)})")
        for layer in _body(w, given):
            w.write(f"h = {layer}(h)")
        if w.chance(4):
            w.write("same = layers.Dense(3, activation='tanh')")
            w.write("h = same(same(layers.Dense(3)(h)))  # a shared layer")
        elif w.chance(4):
            w.write(_ATTENTION)
        elif w.chance(4):
            w.write("h = layers.Dense(3)(h)")
            w.write("h = layers.Add()([h, layers.Dense(3, activation='tanh')(h)])")
        elif w.chance(4):
            w.write("h = ops.tanh(layers.Dense(3)(h)) * 2.0 + 1.0")
        elif w.chance(4):
            w.write(_FROZEN_BASE)
        vectors.append(f"end_{given.name}")
        w.write(f"end_{given.name} = h")
    if len(vectors) > 1:
        w.write(f"h = layers.Concatenate()([{', '.join(vectors)}])")
    heads = [f"{_head(output)}(h)" for output in architecture.outputs]
    names = [given.name for given in architecture.inputs]
    has_dicts = w.chance(4)
    if has_dicts:
        ends = "{" + ", ".join(f"{o.name!r}: {head}" for o, head in zip(architecture.outputs, heads, strict=True)) + "}"
    else:
        ends = heads[0] if len(heads) == 1 else f"[{', '.join(heads)}]"
    starts = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    if has_dicts and w.chance():
        starts = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
    made = f"keras.Model({starts}, {ends})"
    if architecture.form == "subclass":
        w.define(
            "Wrapped",
            """
            @keras.saving.register_keras_serializable("program")
            class Wrapped(keras.Model):
                def __init__(self, inner, **kwargs):
                    super().__init__(**kwargs)
                    self.inner = inner

                def call(self, inputs, training=None):
                    return self.inner(inputs, training=training)

                def get_config(self):
                    return {**super().get_config(), "inner": keras.saving.serialize_keras_object(self.inner)}

                @classmethod
                def from_config(cls, config):
                    return cls(keras.saving.deserialize_keras_object(config.pop("inner")), **config)
            """,
        )
        made = f"Wrapped({made})"
    if architecture.form == "stepping":
        w.imports.add("import tensorflow as tf" if w.backend == "tensorflow" else f"import {w.backend}")
        w.define("Stepping", STEPPING[w.backend])
        made = f"Stepping({starts}, {ends})"
    w.write(f"model = {made}")
    architecture.form += " with dicts" if has_dicts else ""


_ATTENTION = """
h = layers.Reshape((3, 2))(layers.Dense(6)(h))
h = layers.Flatten()(layers.MultiHeadAttention(1, 2)(h, h))
"""

_FROZEN_BASE = """
base = keras.Sequential([layers.Dense(4, activation='tanh'), layers.BatchNormalization(), layers.Dense(3)])
base.trainable = False
h = base(layers.Flatten()(h), training=False)
"""

STEPPING = {
    "jax": """
        @keras.saving.register_keras_serializable("program")
        class Stepping(keras.Model):
            def train_step(self, state, data):
                trainable, others, optimizer, metric_values = state
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

                def loss_of(trainable):
                    prediction, changed, losses = self.stateless_call(
                        trainable, others, x, training=True, return_losses=True
                    )
                    loss, _ = self.stateless_compute_loss(
                        trainable, others, metric_values, x=x, y=y, y_pred=prediction, sample_weight=sample_weight
                    )
                    return loss + sum(losses), (prediction, changed)

                (loss, (prediction, others)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
                trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
                values = zip(self.metrics_variables, metric_values, strict=True)
                with keras.StatelessScope(state_mapping=list(values)) as scope:
                    self._loss_tracker.update_state(loss)
                    logs = self.compute_metrics(x, y, prediction, sample_weight)
                    metric_values = [scope.get_current_value(v) for v in self.metrics_variables]
                return {**logs, "own": 2.0 * loss}, (trainable, others, optimizer, metric_values)
        """,
    "tensorflow": """
        @keras.saving.register_keras_serializable("program")
        class Stepping(keras.Model):
            def train_step(self, data):
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
                with tf.GradientTape() as tape:
                    prediction = self(x, training=True)
                    loss = self.compute_loss(x, y, prediction, sample_weight)
                gradients = tape.gradient(loss, self.trainable_weights)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
                self._loss_tracker.update_state(loss)
                return {**self.compute_metrics(x, y, prediction, sample_weight), "own": 2.0 * loss}
        """,
    "torch": """
        @keras.saving.register_keras_serializable("program")
        class Stepping(keras.Model):
            def train_step(self, data):
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
                self.zero_grad()
                prediction = self(x, training=True)
                loss = self.compute_loss(x, y, prediction, sample_weight)
                loss.backward()
                weights = [w for w in self.trainable_weights if w.value.grad is not None]
                with torch.no_grad():
                    self.optimizer.apply([w.value.grad for w in weights], weights)
                self._loss_tracker.update_state(loss.detach())
                return {**self.compute_metrics(x, y, prediction, sample_weight), "own": 2.0 * loss.detach()}
        """,
}


def _dtype(given: Input) -> str:
    return ", dtype='int32'" if given.kind == "tokens" else ""


def _body(w: Writer, given: Input) -> list[str]:
    """Layers from an input to a vector."""
    found = []
    kind = given.kind
    if kind == "tokens":
        mask = ", mask_zero=True" if w.chance() else ""
        found.append(f"layers.Embedding({VOCABULARY}, 3{mask})")
        kind = "sequence"
        if mask:
            found.append(w.one_of(["layers.LSTM(3)", "layers.GlobalAveragePooling1D()", "layers.GRU(3)"]))
            kind = "vector"
    elif w.chance(8):
        w.define("adapted", _ADAPTED)
        found.append(f"adapted(layers.Normalization(), {given.shape[-1]})")
    if kind == "sequence":
        for _ in range(w.number(0, 1)):
            found.append(w.one_of(_known_to_run(w, _SEQUENCE_LAYERS)))
        found.append(w.one_of(_SEQUENCE_ENDS))
    elif kind == "image":
        for _ in range(w.number(0, 2)):
            found.append(w.one_of(_known_to_run(w, _IMAGE_LAYERS)))
        if w.chance(3):
            found.append(_normalization(w))
        found.append(w.one_of(["layers.Flatten()", "layers.GlobalAveragePooling2D()"]))
    elif w.chance(8):
        found.append(_normalization(w))
    for _ in range(w.number(0, 2)):
        found.append(_vector_layer(w))
    return found


_SEQUENCE_LAYERS = (
    "layers.LSTM(3, return_sequences=True)",
    "layers.Bidirectional(layers.GRU(2, return_sequences=True))",
    "layers.Conv1D(3, 2, padding='same', activation='tanh')",
    "layers.TimeDistributed(layers.Dense(2, activation='tanh'))",
    "layers.LayerNormalization()",
    "layers.SimpleRNN(3, return_sequences=True)",
    "layers.Masking(0.0)",
    "layers.Conv1DTranspose(2, 2, activation='tanh')",
)
_SEQUENCE_ENDS = (
    "layers.Flatten()",
    "layers.GlobalAveragePooling1D()",
    "layers.GRU(3)",
    "layers.LSTM(2)",
    "layers.SimpleRNN(3)",
)
_IMAGE_LAYERS = (
    "layers.Conv2D(3, 2, activation='tanh')",
    "layers.DepthwiseConv2D(2, padding='same')",
    "layers.AveragePooling2D(2, padding='same')",
    "layers.SeparableConv2D(2, 2, padding='same', activation='tanh')",
    "layers.GroupNormalization(groups=1)",
    "layers.BatchNormalization(trainable=False)",
    "layers.UpSampling2D(2)",
    "layers.ZeroPadding2D(1)",
    "layers.Conv2DTranspose(2, 2, activation='tanh')",
)


SYNCHRONIZED = """
synchronized = {"synchronized": True} if hasattr(scope, "__self__") else {}  # plain Keras has it on TensorFlow only
"""


def _normalization(w: Writer) -> str:
    """Over the global batch."""
    w.write(SYNCHRONIZED)
    return f"layers.BatchNormalization({w.one_of(['', 'momentum=0.7, ', 'center=False, '])}**synchronized)"


def _vector_layer(w: Writer) -> str:
    kind = w.one_of(["dense", "dense", "other", "defined"])
    if kind == "other":
        return w.one_of(
            [
                "layers.Dropout(0.0)",
                "layers.LayerNormalization()",
                "layers.Rescaling(2.0, -0.5)",
                "layers.BatchNormalization(trainable=False)",
                "layers.ActivityRegularization(l2=0.1)",
                "layers.UnitNormalization()",
                "layers.Dense(3, trainable=False)",
                "layers.PReLU()",
                "layers.RMSNormalization()",
                "layers.SpectralNormalization(layers.Dense(3))",
                "layers.GaussianNoise(0.0)",
            ]
        )
    if kind == "defined":
        name = w.one_of(sorted(_DEFINED))
        return f"{w.define(name, _DEFINED[name])}()"
    options = w.one_of(
        [
            "",
            ", use_bias=False",
            ", kernel_regularizer='l2'",
            ", kernel_constraint=keras.constraints.MaxNorm(1.0)",
            ", bias_regularizer=keras.regularizers.L1L2(0.01, 0.01)",
            ", activity_regularizer=keras.regularizers.L2(0.1)",
            ", activity_regularizer=cubes",
        ]
    )
    if "cubes" in options:
        w.define("cubes", _CUBES)
    return f"layers.Dense({w.one_of([3, 2, 4])}, activation={w.one_of(ACTIVATIONS)!r}{options})"


_CUBES = """
    @keras.saving.register_keras_serializable("program")
    def cubes(activity):
        return 0.1 * ops.sum(ops.abs(activity) ** 3)
    """

_ADAPTED = """
    def adapted(layer, width):
        layer.adapt(np.random.default_rng(5).normal(1.0, 2.0, (20, width)).astype("float32"))
        return layer
    """

_DEFINED = {
    "Penalized": """
        @keras.saving.register_keras_serializable("program")
        class Penalized(layers.Layer):
            def call(self, inputs):
                self.add_loss(0.1 * ops.mean(ops.square(inputs)))
                return inputs
        """,
    "Watched": """
        @keras.saving.register_keras_serializable("program")
        class Watched(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.size = metrics.Mean(name="size")
                self.square = metrics.Mean(name="square")

            def call(self, inputs):
                self.size.update_state(ops.abs(inputs))
                self.square.update_state(ops.mean(ops.square(inputs)))
                return inputs
        """,
    "Scaled": """
        @keras.saving.register_keras_serializable("program")
        class Scaled(layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

            def call(self, inputs):
                return self.scale * inputs
        """,
    "Averaging": """
        @keras.saving.register_keras_serializable("program")
        class Averaging(layers.Layer):
            def build(self, shape):
                self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

            def call(self, inputs, training=None):
                before = ops.stop_gradient(self.mean + 0.0)
                if training:
                    mean = ops.cast(ops.mean(inputs, axis=0), self.mean.dtype)
                    self.mean.assign(0.9 * self.mean + 0.1 * mean)
                return inputs - ops.cast(before, inputs.dtype)
        """,
    "Centered": """
        @keras.saving.register_keras_serializable("program")
        class Centered(layers.Layer):
            def call(self, inputs, training=None):
                if not training:
                    return inputs
                import phalanx

                mean = ops.mean(inputs, axis=0)
                return inputs - phalanx.get_replica_context().all_reduce("MEAN", mean)
        """,
    "Gathering": """
        @keras.saving.register_keras_serializable("program")
        class Gathering(layers.Layer):
            def call(self, inputs, training=None):
                if not training:
                    return inputs
                import phalanx

                return inputs - ops.mean(phalanx.get_replica_context().all_gather(inputs, axis=0), axis=0)
        """,
}


def _known_to_run(w: Writer, made: tuple[str, ...]) -> list[str]:
    """Without the transposed convolutions, whose gradient PyTorch does not compute for a batch of one sample."""
    return [layer for layer in made if w.backend != "torch" or "Transpose" not in layer]
