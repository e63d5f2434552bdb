"""Overridden steps, and the ways to run one."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from keras import layers, ops

from tests.training.scenarios.common import (
    BATCH,
    CLASSES,
    FEATURES,
    classifier,
    compiled,
    features,
    fitted,
    labels,
    numbers,
    observed,
    regressor,
    weights,
)
from tests.training.scenarios.registry import BACKENDS, EACH_KIND, ONE_BACKEND, Setting, scenario


def _body(cls: type) -> Any:
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    return cls(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))


class JaxStep(keras.Model):
    """As in the Keras guide "Customizing what happens in fit() with JAX"."""

    weighs_loss = True

    def compute_loss_and_updates(  # type: ignore[no-untyped-def]
        self, trainable_variables, non_trainable_variables, x, y, sample_weight, training=False
    ):
        y_pred, non_trainable_variables = self.stateless_call(
            trainable_variables, non_trainable_variables, x, training=training
        )
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        return loss, (y_pred, non_trainable_variables)

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metric_values = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient_function = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable)), grads = gradient_function(
            trainable, non_trainable, x, y, sample_weight, training=True
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, new_values = {}, []
        for metric in self.metrics:
            values = metric_values[: len(metric.variables)]
            metric_values = metric_values[len(metric.variables) :]
            if metric.name == "loss":
                size = ops.shape(x)[0] if self.weighs_loss else None
                values = metric.stateless_update_state(values, loss, sample_weight=size)
            else:
                values = metric.stateless_update_state(values, y, y_pred, sample_weight=sample_weight)
            logs[metric.name] = metric.stateless_result(values)
            new_values += values
        return logs, (trainable, non_trainable, optimizer, new_values)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, metric_values = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=False)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        new_values = []
        logs = {}
        for metric in self.metrics:
            values = metric_values[: len(metric.variables)]
            metric_values = metric_values[len(metric.variables) :]
            if metric.name == "loss":
                values = metric.stateless_update_state(values, loss, sample_weight=ops.shape(x)[0])
            else:
                values = metric.stateless_update_state(values, y, y_pred)
            logs[metric.name] = metric.stateless_result(values)
            new_values += values
        return logs, (trainable, non_trainable, new_values)


class TensorFlowStep(keras.Model):
    weighs_loss = True

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return _updated(self, x, y, y_pred, loss, sample_weight)

    def test_step(self, data: Any) -> Any:
        return _tested(self, data)


class TorchStep(keras.Model):
    weighs_loss = True

    def train_step(self, data: Any) -> Any:
        import torch

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss.backward()
        gradients = [weight.value.grad for weight in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return _updated(self, x, y, y_pred, loss, sample_weight)

    def test_step(self, data: Any) -> Any:
        return _tested(self, data)


def _updated(model: Any, x: Any, y: Any, y_pred: Any, loss: Any, sample_weight: Any) -> dict[str, Any]:
    for metric in model.metrics:
        if metric.name == "loss":
            metric.update_state(loss, sample_weight=ops.shape(x)[0] if model.weighs_loss else None)
        else:
            metric.update_state(y, y_pred, sample_weight)
    return {metric.name: metric.result() for metric in model.metrics}


def _tested(model: Any, data: Any) -> dict[str, Any]:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=False)
    loss = model.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
    return _updated(model, x, y, y_pred, loss, None)


STEPS = {"jax": JaxStep, "tensorflow": TensorFlowStep, "torch": TorchStep}


@scenario(quick=EACH_KIND)
def what_steps_get_of_single_batches(setting: Setting) -> dict[str, Any]:
    """All three parts of a batch, while those that are absent are left out of the batches of arrays. Neither makes the
    other's step compile again."""
    got: set[tuple[str, int]] = set()

    class Noting(STEPS[setting.backend]):  # type: ignore[misc]
        def train_step(self, *arguments: Any) -> Any:
            got.add(("train", len(arguments[-1])))
            return super().train_step(*arguments)

        def test_step(self, *arguments: Any) -> Any:
            got.add(("test", len(arguments[-1])))
            return super().test_step(*arguments)

        def predict_step(self, *arguments: Any) -> Any:
            got.add(("predict", len(arguments[-1]) if isinstance(arguments[-1], tuple | list) else 0))
            return super().predict_step(*arguments)

    def seen(*results: Any) -> list[Any]:
        found = [*sorted(got), *results]
        got.clear()
        return found

    x, y = features(BATCH), labels(BATCH)
    model = compiled(setting, lambda: _body(Noting))
    found = {"fit": seen(fitted(model, x, y)), "train_on_batch": seen(model.train_on_batch(x, y))}
    found["evaluate"] = seen(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    found |= {"test_on_batch": seen(model.test_on_batch(x, y)), "predict": seen(model.predict(x, verbose=0))}
    found["predict_on_batch"] = seen(model.predict_on_batch(x))
    found["fit again"] = seen(fitted(model, x, y))
    return found | {"weighted": seen(model.train_on_batch(x, y, weights(BATCH)))}


@scenario(quick=BACKENDS)
def own_train_step_and_test_step(setting: Setting) -> dict[str, Any]:
    model = compiled(
        setting,
        lambda: _body(STEPS[setting.backend]),
        optimizer=keras.optimizers.Adam(0.02),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return fitted(model, sample_weight=weights()) | observed(model)


@scenario(quick=ONE_BACKEND)
def own_test_step_whose_last_batch_is_small(setting: Setting) -> dict[str, Any]:
    """Keras shows what it logged of the last batch."""

    class Distance(keras.Model):
        def test_step(self, *arguments: Any) -> Any:
            x, y = arguments[-1][:2]
            if setting.backend != "jax":
                return {"distance": ops.mean(ops.square(self(x, training=False) - y))}
            trainable, others, metrics = arguments[0]
            outputs, _ = self.stateless_call(trainable, others, x, training=False)
            return {"distance": ops.mean(ops.square(outputs - y))}, (trainable, others, metrics)

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Distance(inputs, keras.layers.Dense(1)(inputs))

    model = compiled(setting, build, loss="mse")
    x = features()[:7]
    found = {size: model.evaluate(x, x[:, :1], batch_size=size, verbose=0, return_dict=True) for size in (4, 6, 7)}
    return {f"in batches of {size}": logs for size, logs in found.items()}


@scenario(quick=ONE_BACKEND)
def own_train_step_that_counts_steps(setting: Setting) -> dict[str, Any]:
    """`loss_tracker.update_state(loss)`, as in the Keras guide: a mean over steps of unequal parts."""

    class CountingSteps(STEPS[setting.backend]):  # type: ignore[misc]
        weighs_loss = False

    return fitted(compiled(setting, lambda: _body(CountingSteps), metrics=["accuracy"]))


@scenario()
def own_train_step_with_a_sum_loss(setting: Setting) -> dict[str, Any]:
    model = compiled(
        setting,
        lambda: _body(STEPS[setting.backend]),
        loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        optimizer=keras.optimizers.SGD(0.01),
    )
    return fitted(model)


class MeansOfSteps(keras.Model):
    """As the trackers of Keras's guides: one number for each step, no sample weight."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.confidence = keras.metrics.Mean(name="confidence")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        self.confidence.update_state(ops.mean(ops.max(y_pred, axis=-1)))
        return super().compute_metrics(x, y, y_pred, sample_weight)  # type: ignore[no-any-return]


@scenario(quick=ONE_BACKEND)
def means_of_steps(setting: Setting) -> dict[str, Any]:
    """Trained, tested and given as a metric function; the ranks' parts of the last batch differ in size."""

    def scalar_metric(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_pred))

    model = compiled(setting, lambda: _body(MeansOfSteps), metrics=["accuracy", scalar_metric])
    return fitted(model, sample_weight=weights()) | observed(model)


class OwnLoss(keras.Model):
    def compute_loss(  # type: ignore[no-untyped-def]
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        error = ops.mean(ops.square(y - y_pred))
        return error + 0.01 * ops.mean(ops.abs(x)) + 0.05 * sum(ops.sum(ops.square(w)) for w in self.trainable_weights)


@scenario()
def own_compute_loss(setting: Setting) -> dict[str, Any]:
    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return OwnLoss(inputs, layers.Dense(1)(inputs))

    model = compiled(setting, build, loss=None, optimizer=keras.optimizers.SGD(0.05))
    return fitted(model, y=numbers()) | observed(model, y=numbers())


class OwnMetrics(keras.Model):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results["confidence"] = ops.mean(ops.max(y_pred, axis=-1))
        return results  # type: ignore[no-any-return]


@scenario()
def own_compute_metrics(setting: Setting) -> dict[str, Any]:
    """What it logs beside metrics is of the last batch, here of all its samples."""
    model = compiled(setting, lambda: _body(OwnMetrics), metrics=["accuracy"])
    return fitted(model) | observed(model)


@scenario()
def own_compute_metrics_with_a_metric_that_starts_at_zero(setting: Setting) -> dict[str, Any]:
    """No hit in the first steps: the metric's state stays at zero for a while, and yet it is no log of the step's."""
    from tests.training.scenarios.common import features

    hits = keras.metrics.TruePositives(name="hits")

    class Hits(keras.Model):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            hits.update_state(y, y_pred)
            return super().compute_metrics(x, y, y_pred, sample_weight) | {"hits": hits.result()}

        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, hits]

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Hits(
            inputs, layers.Dense(1, activation="sigmoid", kernel_initializer="zeros", bias_initializer="ones")(inputs)
        )

    y = (features()[:, :1] > 0).astype("float32")
    y[:12] = 0.0
    model = compiled(setting, build, loss="binary_crossentropy")
    return fitted(model, y=y, batch_size=6) | observed(model, y=y)


@scenario()
def run_eagerly(setting: Setting) -> dict[str, Any]:
    model = compiled(setting, optimizer="adam", metrics=["accuracy"], run_eagerly=True)
    return fitted(model) | observed(model)


@scenario(backends=("jax", "tensorflow"))
def jit_compiled(setting: Setting) -> dict[str, Any]:
    """Convolutions, state and a sparse gradient under XLA."""
    model = compiled(setting, optimizer="adam", metrics=["accuracy"], jit_compile=True)
    return fitted(model) | observed(model)


@scenario(backends=("torch",))
def jit_compiled_by_inductor(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, optimizer="adam", jit_compile=True))


@scenario()
def not_jit_compiled(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, jit_compile=False, metrics=["accuracy"]))


@scenario(backends=("jax", "tensorflow"), quick=BACKENDS)
def steps_per_execution(setting: Setting) -> dict[str, Any]:
    """Five steps in groups of three; callbacks see two groups."""
    seen: list[int] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

    model = compiled(setting, steps_per_execution=3, metrics=["accuracy"])
    found = fitted(model, batch_size=7, callbacks=[Watch()])
    return found | observed(model) | {"seen": seen}


@scenario(error={"torch": ("ValueError", "steps_per_execution")}, backends=("torch",), quick=BACKENDS)
def steps_per_execution_on_torch(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, steps_per_execution=3))


@scenario()
def labels_as_they_are(setting: Setting) -> dict[str, Any]:
    """Targets of int64 and features of float64 become what Keras makes of them."""
    from tests.training.scenarios.common import features

    return fitted(compiled(setting, classifier), features().astype("float64"), labels().astype("int64"))


@scenario()
def untrained_model_is_evaluated(setting: Setting) -> dict[str, Any]:
    return observed(compiled(setting, regressor, loss="mse", metrics=["mae"]), y=numbers())


@scenario(worlds=(2,))
def predict_warns_as_often_as_keras(setting: Setting) -> dict[str, Any]:
    with setting.scope():
        first, second = keras.Input((2,)), keras.Input((2,))
        model = keras.Model({"first": first, "second": second}, layers.Add()([first, second]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outputs = model.predict([features(5, 2), features(5, 2)], verbose=0)
    return {"outputs": outputs, "warnings": sum("structure of `inputs`" in str(each.message) for each in found)}


@scenario(backends=("tensorflow",), error={"tensorflow": ("UnsupportedError", "predicts ragged tensors")})
def predict_of_ragged_outputs(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    with setting.scope():
        words = layers.TextVectorization(ragged=True, vocabulary=["one", "two"])
        model = keras.Sequential([keras.Input((1,), dtype="string"), words])
    texts = tf.data.Dataset.from_tensor_slices([["one two"], ["two"], ["one"]]).batch(2)
    return {"predict": str(model.predict(texts, verbose=0))}


@scenario(quick=BACKENDS)
def predict_without_compile(setting: Setting) -> dict[str, Any]:
    with setting.scope():
        model = classifier()
    from tests.training.scenarios.common import features

    return {"predict": model.predict(features(), batch_size=16, verbose=0)}


def _gradients(loss_of: Any, variables: Any) -> Any:
    """Gradients of a loss outside of Keras's own step, on TensorFlow or PyTorch."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
        return loss, tape.gradient(loss, [variable.value for variable in variables])
    import torch

    loss = loss_of()
    return loss.detach(), list(torch.autograd.grad(loss, [variable.value for variable in variables]))


class TwoOptimizers(keras.Model):
    """Two parts, each with an optimizer of its own, as in a GAN; only its `train_step` says what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh")])
        self.head = keras.Sequential([keras.Input((8,)), layers.Dense(CLASSES, activation="softmax")])
        self.head_optimizer = keras.optimizers.SGD(0.3, momentum=0.5)

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, self.head(self.body(x))))

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for part, optimizer in ((self.head, self.head_optimizer), (self.body, self.optimizer)):
            loss, gradients = _gradients(lambda: self.loss_of(x, y), part.trainable_variables)
            optimizer.apply(gradients, part.trainable_variables)
        return {"own_loss": loss}


class TwoOptimizersCalled(TwoOptimizers):
    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


def _two_optimizers(setting: Setting, cls: type) -> dict[str, Any]:
    with setting.scope():
        model = cls()
        for part, optimizer in ((model.head, model.head_optimizer),):
            optimizer.build(part.trainable_variables)
        model.compile(optimizer=keras.optimizers.SGD(0.2))
        model.optimizer.build(model.body.trainable_variables)
    history = model.fit(features(32), labels(32), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"loss": history["own_loss"], "weights": model.get_weights()}


@scenario(backends=("tensorflow",), quick=BACKENDS)
def two_optimizers_in_a_model_without_call(setting: Setting) -> dict[str, Any]:
    return _two_optimizers(setting, TwoOptimizers)


@scenario(backends=("torch",), quick=BACKENDS)
def two_optimizers(setting: Setting) -> dict[str, Any]:
    return _two_optimizers(setting, TwoOptimizersCalled)


class OptimizerInside(TwoOptimizersCalled):
    """The optimizer of a part is the one that the part was compiled with."""

    def compile(self, *arguments: Any, **named: Any) -> None:
        super().compile(*arguments, **named)
        self.head.compile(self.head_optimizer)
        del self.head_optimizer

    def train_step(self, data: Any) -> Any:
        self.head_optimizer = self.head.optimizer
        try:
            return super().train_step(data)
        finally:
            del self.head_optimizer


@scenario(backends=("tensorflow", "torch"), quick=ONE_BACKEND)
def optimizer_of_a_model_inside(setting: Setting) -> dict[str, Any]:
    return _two_optimizers(setting, OptimizerInside)


class AveragedStep(JaxStep):
    """Computes with the weights after the update, as a target network does."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, (trainable, non_trainable, optimizer, metric_values) = super().train_step(state, data)
        return {**logs, "size": ops.sum(0.5 * trainable[0])}, (trainable, non_trainable, optimizer, metric_values)


@scenario(backends=("jax",), quick=BACKENDS)
def weights_after_the_update_inside_the_step(setting: Setting) -> dict[str, Any]:
    return fitted(compiled(setting, lambda: _body(AveragedStep)))


class StatelessGan(keras.Model):
    """Generator and discriminator in turn, each with its optimizer, of which Keras on JAX knows one.

    Args:
        keeps: Where the variables of the second optimizer are: among the model's ("model"), in an attribute, which
            works without compilation ("attribute"), or nowhere ("one"): one optimizer is applied twice.
    """

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps = keeps
        self.critic = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), layers.Dense(FEATURES)])
        self.maker_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    def call(self, x: Any) -> Any:
        return self.critic(self.maker(x))

    def compile(self, optimizer: Any, **arguments: Any) -> None:
        super().compile(optimizer, **arguments)
        if self.keeps == "one":
            optimizer.build(self.trainable_variables)
            return
        optimizer.build(self.critic.trainable_variables)
        self.maker_optimizer.build(self.maker.trainable_variables)
        if self.keeps == "model":
            self.maker_state = list(self.maker_optimizer.variables)

    def losses_of(self, critic: Any, maker: Any, x: Any, y: Any) -> tuple[Any, Any]:
        made, _ = self.maker.stateless_call(maker, [], x)
        (real, _), (fake, _) = (self.critic.stateless_call(critic, [], each) for each in (x, made))
        return ops.mean(ops.softplus(-real) + ops.softplus(fake)), ops.mean(ops.softplus(-fake) * (1 + y[:, None]))

    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metric_values = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        size = len(self.critic.trainable_variables)
        critic, maker = trainable[:size], trainable[size:]
        critic_loss, gradients = jax.value_and_grad(lambda own: self.losses_of(own, maker, x, y)[0])(critic)
        if self.keeps == "one":
            gradients = [*gradients, *map(ops.zeros_like, maker)]
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            critic, maker = trainable[:size], trainable[size:]
        else:
            critic, optimizer = self.optimizer.stateless_apply(optimizer, gradients, critic)
        maker_loss, gradients = jax.value_and_grad(lambda own: self.losses_of(critic, own, x, y)[1])(maker)
        if self.keeps == "one":
            gradients = [*map(ops.zeros_like, critic), *gradients]
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        elif self.keeps == "model":
            maker, others = self.maker_optimizer.stateless_apply(others, gradients, maker)
        else:
            kept = vars(self).setdefault("kept", [variable.value for variable in self.maker_optimizer.variables])
            maker, vars(self)["kept"] = self.maker_optimizer.stateless_apply(kept, gradients, maker)
        if self.keeps != "one":
            trainable = [*critic, *maker]
        logs = {"critic_loss": critic_loss, "maker_loss": maker_loss}
        return logs, (trainable, others, optimizer, metric_values)


def _trained_gan(setting: Setting, keeps: str, **arguments: Any) -> dict[str, Any]:
    optimizer = keras.optimizers.Adam(0.01)
    model = compiled(setting, lambda: StatelessGan(keeps), optimizer=optimizer, loss=None, **arguments)
    # As many samples in each batch: the logs are those of the last one.
    found = fitted(model, batch_size=11)
    return {**found, "optimizer": [ops.convert_to_numpy(variable) for variable in model.optimizer.variables]}


@scenario(backends=("jax",), quick=BACKENDS)
def two_optimizers_on_jax(setting: Setting) -> dict[str, Any]:
    return _trained_gan(setting, "model")


@scenario(backends=("jax",))
def two_optimizers_on_jax_without_compilation(setting: Setting) -> dict[str, Any]:
    return {
        "eager": _trained_gan(setting, "attribute", run_eagerly=True),
        "not compiled": _trained_gan(setting, "model", jit_compile=False),
    }


@scenario(backends=("jax",))
def one_optimizer_that_is_applied_twice(setting: Setting) -> dict[str, Any]:
    return _trained_gan(setting, "one")


@scenario(
    backends=("jax",), error={"jax": ("UnsupportedError", "changes weights or optimizer variables other than by")}
)
def own_train_step_that_updates_by_itself_on_jax(setting: Setting) -> dict[str, Any]:
    class ByHand(StatelessGan):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, (trainable, *others) = super().train_step(state, data)
            return logs, ([0.9 * value for value in trainable], *others)

    model = compiled(setting, lambda: ByHand("model"), loss=None)
    return fitted(model)


_GLOBAL_OPTIMIZERS: list[Any] = []


def _own_backend_step(model: Any, data: Any, update: Any) -> dict[str, Any]:
    x, y = data[:2]
    if keras.backend.backend() == "torch":
        import torch

        model.zero_grad()
        loss = ops.mean(ops.square(model(x, training=True) - y))
        loss.backward()
        with torch.no_grad():
            update([weight.value.grad for weight in model.trainable_weights])
        return {"loss": loss}
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(model(x, training=True) - y))
    update(tape.gradient(loss, model.trainable_weights))
    return {"loss": loss}


@scenario(backends=("tensorflow", "torch"))
def own_train_step_with_an_optimizer_of_no_model(setting: Setting) -> dict[str, Any]:
    """As in the tutorials whose optimizers are global variables."""
    _GLOBAL_OPTIMIZERS[:] = [keras.optimizers.Adam(0.05)]

    class Trained(keras.Model):
        def train_step(self, data: Any) -> Any:
            return _own_backend_step(self, data, lambda g: _GLOBAL_OPTIMIZERS[0].apply(g, self.trainable_weights))

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        model = Trained(inputs, layers.Dense(1)(inputs))
        _GLOBAL_OPTIMIZERS[0].build(model.trainable_weights)
        return model

    return {"weights": fitted(compiled(setting, build, loss=None), features(), numbers())["weights"]}


@scenario(
    backends=("tensorflow", "torch"),
    quick=("torch",),
    error=dict.fromkeys(("tensorflow", "torch"), ("UnsupportedError", "global_clipnorm")),
)
def own_train_step_that_clips(setting: Setting) -> dict[str, Any]:
    class Clips(keras.Model):
        def train_step(self, data: Any) -> Any:
            def update(gradients: Any) -> None:
                self.optimizer.apply(self._clipped(gradients), self.trainable_weights)

            return _own_backend_step(self, data, update)

        def _clipped(self, gradients: Any) -> Any:
            if setting.backend == "torch":
                import torch

                torch.nn.utils.clip_grad_norm_([weight.value for weight in self.trainable_weights], 0.1)
                return [weight.value.grad for weight in self.trainable_weights]
            import tensorflow as tf

            return tf.clip_by_global_norm(gradients, 0.1)[0]

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Clips(inputs, layers.Dense(1)(inputs))

    return fitted(compiled(setting, build, loss=None), features(), numbers())


@scenario(
    backends=("tensorflow", "torch"),
    error=dict.fromkeys(("tensorflow", "torch"), ("UnsupportedError", "with gradients that are not merged")),
)
def own_train_step_that_updates_by_itself(setting: Setting) -> dict[str, Any]:
    class Trained(keras.Model):
        def train_step(self, data: Any) -> Any:
            def update(gradients: Any) -> None:
                for weight, gradient in zip(self.trainable_weights, gradients, strict=True):
                    weight.assign(weight - 0.05 * gradient)

            return _own_backend_step(self, data, update)

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Trained(inputs, layers.Dense(1)(inputs))

    return fitted(compiled(setting, build, loss=None), features(), numbers())


@scenario(backends=("tensorflow", "torch"))
def own_train_step_that_trains_nothing(setting: Setting) -> dict[str, Any]:
    class Counted(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data[:2]
            return self.compute_metrics(x, y, self(x, training=True))

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Counted(inputs, layers.Dense(1, trainable=False)(inputs))

    return fitted(compiled(setting, build, loss="mse", metrics=["mae"]), features(), numbers())


@scenario(backends=("tensorflow", "torch"), plain=False)
def own_train_step_that_builds_its_parts(setting: Setting) -> dict[str, Any]:
    class Parts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = keras.Sequential([layers.Dense(4), layers.Dense(1)])

        def call(self, x: Any, training: bool = False) -> Any:
            return self.part(x, training=training)

        def train_step(self, data: Any) -> Any:
            return _own_backend_step(self, data, lambda g: self.optimizer.apply(g, self.trainable_weights))

    return {"weights": fitted(compiled(setting, Parts, loss=None), features(), numbers())["weights"]}


class Unpacking:
    """Steps that take what they are given apart, as in the guides: no sample weights, no `None` in their place."""

    def taken_apart(self, data: Any) -> Any:
        x, y = data
        return x, y, None

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args[:-1], self.taken_apart(args[-1]))  # type: ignore[misc]

    def test_step(self, *args: Any) -> Any:
        return super().test_step(*args[:-1], self.taken_apart(args[-1]))  # type: ignore[misc]

    def predict_step(self, *args: Any) -> Any:
        assert not isinstance(args[-1], tuple)
        return super().predict_step(*args)  # type: ignore[misc]


@scenario()
def own_steps_that_unpack_two(setting: Setting) -> dict[str, Any]:
    kind = type("Unpacking", (Unpacking, STEPS[setting.backend]), {})
    model = compiled(setting, lambda: _body(kind), metrics=["accuracy"])
    return fitted(model) | observed(model)


@scenario(backends=("tensorflow", "torch"))
def own_train_step_of_inputs_alone(setting: Setting) -> dict[str, Any]:
    """As in the Keras example of a variational autoencoder: `data` is the inputs."""

    class Autoencoder(keras.Model):
        def train_step(self, data: Any) -> Any:
            assert not isinstance(data, tuple)
            return _own_backend_step(self, (data, data), lambda g: self.optimizer.apply(g, self.trainable_weights))

    def build() -> Any:
        inputs = keras.Input((FEATURES,))
        return Autoencoder(inputs, layers.Dense(FEATURES)(inputs))

    model = compiled(setting, build, loss=None)
    model.fit(features(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights()}


class _Siamese(keras.Model):
    """As in Keras's example of a triplet loss: no `call` that takes what the data are, and a loss of many values."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        return self.network(inputs)

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            near, far = self.network(data)
            loss = tf.maximum(near - far + 0.5, 0.0)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]


@scenario(backends=("tensorflow",))
def a_loss_with_a_value_for_each_sample_is_summed(setting: Setting) -> dict[str, Any]:
    return _siamese(setting)


@scenario(backends=("tensorflow",))
def a_loss_with_a_value_for_each_sample_is_summed_eagerly(setting: Setting) -> dict[str, Any]:
    return _siamese(setting, run_eagerly=True)


def _siamese(setting: Setting, **arguments: Any) -> dict[str, Any]:
    import tensorflow as tf

    x = features()
    triples = (x, x[::-1].copy(), numbers() * x)
    with setting.scope():
        embedding = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4)])
        inputs = [keras.Input((FEATURES,), name=name) for name in ("anchor", "positive", "negative")]
        anchor, positive, negative = map(embedding, inputs)
        distances = [ops.sum(ops.square(anchor - other), -1) for other in (positive, negative)]
        model = _Siamese(keras.Model(inputs, distances))
        model.compile(optimizer=keras.optimizers.SGD(0.001), **arguments)
    history = model.fit(tf.data.Dataset.from_tensor_slices(triples).batch(8), epochs=2, verbose=0)
    return {"history": history.history, "weights": model.network.get_weights()}


class _FirstOfData(keras.Model):
    """`data[0]`, as one must write where the elements of the data are `(x,)`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.dense.build((None, FEATURES))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        loss = self._trained(data[0])
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}

    def _trained(self, x: Any) -> Any:
        if keras.backend.backend() == "torch":
            import torch

            self.zero_grad()
            loss = ops.mean(self.dense(x) ** 2)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return loss
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.mean(self.dense(x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return loss

    def test_step(self, data: Any) -> Any:
        self._loss_tracker.update_state(len(data) * ops.mean(self.dense(data[0]) ** 2))
        return {"loss": self._loss_tracker.result()}

    def predict_step(self, data: Any) -> Any:
        return 2 * self.dense(data[0])


@scenario(backends=("tensorflow", "torch"))
def data_of_one_in_a_tuple(setting: Setting) -> dict[str, Any]:
    return _first_of_data(setting, items=1)


@scenario(backends=("tensorflow", "torch"))
def data_of_four_in_a_tuple(setting: Setting) -> dict[str, Any]:
    return _first_of_data(setting, items=4)


def _first_of_data(setting: Setting, items: int) -> dict[str, Any]:
    with setting.scope():
        model = _FirstOfData()
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    if setting.backend == "torch":
        from torch.utils.data import DataLoader, TensorDataset

        data: Any = DataLoader(TensorDataset(*[ops.convert_to_tensor(features())] * items), batch_size=8)
    else:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((features(),) * items).batch(8)
    return {
        "history": model.fit(data, epochs=2, validation_data=(features(), labels()), verbose=0).history,
        "evaluate": model.evaluate(data, verbose=0),
        "predict": model.predict(data, verbose=0),
        "weights": model.get_weights(),
    }


@scenario(plain=False, error=dict.fromkeys(BACKENDS, ("UnsupportedError", "has its own make_train_function()")))
def own_function_for_a_step(setting: Setting) -> dict[str, Any]:
    class Model(keras.Model):
        def make_train_function(self, force: bool = False) -> Any:
            return super().make_train_function(force)

    return fitted(compiled(setting, lambda: _body(Model)))


def _with_own_evaluate(setting: Setting, *, passes_on: bool) -> dict[str, Any]:
    """As KerasHub's models, whose `evaluate` prepares the data that `fit` has prepared already unless `fit` calls it.

    Args:
        passes_on: Whether Keras's own method learns that `fit` called.
    """

    class Model(keras.Model):
        def evaluate(self, x: Any = None, y: Any = None, **options: Any) -> Any:
            if not options.get("_use_cached_eval_dataset"):
                x = 2 * x
            elif not passes_on:
                del options["_use_cached_eval_dataset"]
                x, y = x[: len(x) // 2], y[: len(y) // 2]
            return {**super().evaluate(x=x, y=y, **options), "twice": 2.0}

    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_evaluating = batch == 1

    model = compiled(setting, lambda: _body(Model))
    data = {"validation_data": (features()[::-1].copy(), labels()[::-1].copy()), "validation_batch_size": 8}
    found = fitted(model, epochs=2, callbacks=[Stop()], **data)
    return {**found, "own": model.evaluate(features(), labels(), verbose=0, return_dict=True)}


@scenario(quick=EACH_KIND)
def own_evaluate_for_validation(setting: Setting) -> dict[str, Any]:
    return _with_own_evaluate(setting, passes_on=True)


@scenario(quick=ONE_BACKEND)
def own_evaluate_for_validation_of_its_own_data(setting: Setting) -> dict[str, Any]:
    return _with_own_evaluate(setting, passes_on=False)


def _twins(one: Any) -> type:
    """Two nets of one shape, each updated by an optimizer of its own.

    Args:
        one: Gets the function that updates one, and calls it as part of the step.
    """
    import tensorflow as tf

    class Twins(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.nets = [layers.Dense(CLASSES), layers.Dense(CLASSES)]
            self.optimizers = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05)]

        def call(self, x: Any) -> Any:
            return sum(net(x) for net in self.nets)

        def update(self, number: int, x: Any, y: Any) -> Any:
            net = self.nets[number]
            with tf.GradientTape() as tape:
                loss = ops.mean((net(x) - (1 - 4 * number) * y) ** 2)
            self.optimizers[number].apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
            return loss

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            return {f"loss_{number}": one(lambda number=number: self.update(number, x, y)) for number in (0, 1)}

    return Twins


def _trained_twins(setting: Setting, one: Any) -> dict[str, Any]:
    def build() -> Any:
        model = _twins(one)()
        model(features()[:1])
        for net, optimizer in zip(model.nets, model.optimizers, strict=True):
            optimizer.build(net.trainable_variables)
        return model

    return fitted(compiled(setting, build, loss="mse"), y=features()[:, :CLASSES], epochs=25)


@scenario(backends=("tensorflow",))
def updates_in_functions_of_their_own(setting: Setting) -> dict[str, Any]:
    """TensorFlow does not order them by itself."""
    import tensorflow as tf

    return _trained_twins(setting, lambda update: tf.function(update)())


@scenario(backends=("tensorflow",))
def updates_in_branches(setting: Setting) -> dict[str, Any]:
    import tensorflow as tf

    return _trained_twins(setting, lambda update: tf.cond(tf.random.uniform([]) < 2.0, update, lambda: 0.0))
