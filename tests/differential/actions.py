"""Draws what a program does with its model: trainings, evaluations, and changes between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.differential.architectures import Architecture
from tests.differential.compilation import SCHEDULES, draw_compile
from tests.differential.inputs import Data, Source, draw_data, draw_source
from tests.differential.writer import Writer


@dataclass
class Actions:
    """Writes the lines after the model is compiled; `data` are what it trains on."""

    w: Writer
    architecture: Architecture
    data: Data

    def draw(self) -> None:
        self.fit()
        kinds: list[Callable[[], None]] = [
            self.evaluate,
            self.predict,
            self.fit,
            *([self.train_on_batch, self.test_on_batch] if self.architecture.batch_size is None else []),
            self.change_and_fit,
            self.change_and_fit,
            self.fit_another,
        ]
        for _ in range(self.w.number(0, 3)):
            self.w.one_of(kinds)()

    def state(self) -> None:
        self.w.write('yield "state", snapshot(model)')

    def fit(self) -> None:
        w = self.w
        source = draw_source(w, self.architecture, self.data)
        keywords = source.keywords
        keywords["epochs"] = "1" if source.is_once else str(w.number(1, 3))
        if source.is_endless:
            keywords["steps_per_epoch"] = str(w.number(1, 3))
        elif w.chance(6):
            keywords["steps_per_epoch"] = "1"  # all data sets have one batch
        elif not source.is_once and "shuffle(" not in source.arguments[0] and w.chance(6):
            keywords["steps_per_epoch"] = str(w.number(2, 3))
        trains = keywords["epochs"] != "1" or w.backend != "tensorflow"  # else only Phalanx builds the optimizer
        if not source.is_once and trains and w.chance(8):
            keywords["initial_epoch"] = "1"
        if not source.is_dataset:
            self._add_options_of_arrays(source)
        if "validation_split" not in keywords and w.chance(3):
            self._add_validation(keywords)
        kept = self._add_callbacks(keywords, halves=w.backend != "jax" or not source.is_once)
        w.write(f'yield "history", {source.call("fit")}.history')
        w.write('yield "epochs", [model.history.epoch, model.history.params]')
        if kept:
            w.write('yield "logs", kept.logs')
        self.state()

    def _add_options_of_arrays(self, source: Source) -> None:
        w = self.w
        if w.chance(4):
            source.keywords["shuffle"] = "False"
        if self.architecture.batch_size:
            return
        if w.chance(5) and self.data.samples > 4 and "tensor" not in source.arguments[0]:
            source.keywords["validation_split"] = "0.25"
        (output, *others) = self.architecture.outputs
        is_single = not others and "dicts" not in self.architecture.form and not self.data.weighted
        if is_single and output.task in ("classes", "one_hot") and w.chance(4):
            source.keywords["class_weight"] = "{0: 0.5, 1: 2.0, 2: 1.0, 3: 0.7}"

    def _add_validation(self, keywords: dict[str, str]) -> None:
        w = self.w
        data = draw_data(w, self.architecture, "_val", weighted=w.chance(2 if self.data.weighted else 6))
        source = draw_source(w, self.architecture, data)
        if source.is_dataset and not source.is_endless and not source.is_once:
            keywords["validation_data"] = source.arguments[0]
        else:
            keywords["validation_data"] = f"({', '.join(data.names)})"
            if self.architecture.batch_size is None and w.chance(3):
                keywords["validation_batch_size"] = str(w.one_of([1, 3, 32]))
            elif self.architecture.batch_size:
                keywords["validation_batch_size"] = str(self.architecture.batch_size)
            if w.chance(5):
                keywords["validation_steps"] = "1"
        if w.chance(4):
            keywords["validation_freq"] = w.one_of(["2", "[1, 3]"])

    def _add_callbacks(self, keywords: dict[str, str], *, halves: bool) -> bool:
        w = self.w
        anneals = w.anneals and w.chance()
        if not w.chance(3) and not anneals:
            return False
        validates = "validation_data" in keywords or "validation_split" in keywords
        monitor = "val_loss" if validates and "validation_freq" not in keywords else "loss"
        choices = {
            "keep": "kept",
            "plateau": f"ReduceLROnPlateau('{monitor}', patience=0, factor=0.5, min_delta=10.0)",
            "early": f"EarlyStopping('{monitor}', patience=0, min_delta=0.01, restore_best_weights=True)",
            "schedule": "LearningRateScheduler(lambda epoch, rate: 0.5 * float(rate))",
            "checkpoint": f"ModelCheckpoint(folder / 'best.keras', monitor='{monitor}', save_best_only=True)",
            "stop": "StopAt(1)",
            "momentum": "Change()",
            "rate": "ChangeRate()",
            "nan": "TerminateOnNaN()",
            "swap": "*([SwapEMAWeights()] if getattr(model.optimizer, 'use_ema', False) else [])",
            "predict": "seen",
            # At the end of a stream, plain Keras on JAX loses what was set (`docs/concepts/numbers.md`).
            **({"halve": "Halve()"} if halves else {}),
            "log": "CSVLogger(folder / 'log.csv')",
            "anneal": "Anneal(weight)",
        }
        if w.has_several_rates:
            choices = {name: made for name, made in choices.items() if name not in _SETS_RATE}
        names = dict.fromkeys(w.one_of([name for name in choices if name != "anneal"]) for _ in range(w.number(1, 2)))
        if anneals:
            names["anneal"] = None
        if names.keys() & _SETS_RATE:
            w.write(_CAN_SET_RATE)
            choices |= {name: f"*([{choices[name]}] if can_set_rate else [])" for name in names.keys() & _SETS_RATE}
        if "keep" in names:
            w.define("Keep", KEEP)
            w.write("kept = Keep()")
        if "stop" in names:
            w.define("StopAt", STOP)
        if "momentum" in names:
            w.define("Change", CHANGE)
        if "predict" in names:
            w.define("Predict", PREDICT)
            w.write(f"seen = Predict({self.data.x}, {self.architecture.batch_size or 3})")
        if "halve" in names:
            w.define("Halve", HALVE)
        if "anneal" in names:
            w.define("Anneal", ANNEAL)
        if "rate" in names:
            w.define("ChangeRate", CHANGE_RATE)
        w.imports.add(
            "from keras.callbacks import CSVLogger, EarlyStopping, LearningRateScheduler, ModelCheckpoint, "
            "ReduceLROnPlateau, SwapEMAWeights, TerminateOnNaN"
        )
        keywords["callbacks"] = f"[{', '.join(choices[name] for name in names)}]"
        return "keep" in names

    def _passed(self) -> dict[str, str]:
        """Now and then a callback, for `evaluate` and `predict`."""
        if not self.w.chance(5):
            return {}
        self.w.define("Note", NOTE)
        self.w.write("notes = Note()")
        return {"callbacks": "[notes]"}

    def evaluate(self) -> None:
        source = draw_source(self.w, self.architecture, self.data)
        steps = {"steps": str(self.w.number(1, 3))} if source.is_endless else {}
        if (number := source.keywords.pop("steps_per_epoch", None)) is not None:  # its name in `fit`
            steps["steps"] = number
        results = {"return_dict": "True"} if self.w.chance() else {}
        passed = self._passed()
        self.w.write(f'yield "evaluation", {source.call("evaluate", **steps, **results, **passed)}')
        if passed:
            self.w.write('yield "notes", notes.seen')

    def predict(self) -> None:
        source = draw_source(self.w, self.architecture, self.data, only_x=True)
        steps = {"steps": str(self.w.number(1, 3))} if source.is_endless else {}
        passed = self._passed()
        self.w.write(f'yield "predictions", {source.call("predict", **steps, **passed)}')
        if passed:
            self.w.write('yield "notes", notes.seen')

    def train_on_batch(self) -> None:
        arguments = ", ".join(self.data.names)
        for _ in range(self.w.number(1, 2)):
            self.w.write(f'yield "train_on_batch", model.train_on_batch({arguments})')
        self.state()

    def test_on_batch(self) -> None:
        arguments = ", ".join(self.data.names)
        self.w.write(f'yield "test_on_batch", model.test_on_batch({arguments}, return_dict=True)')
        self.w.write(f'yield "predict_on_batch", model.predict_on_batch({self.data.x})')

    def change_and_fit(self) -> None:
        w = self.w
        change = w.one_of([each for each in CHANGES if not (w.has_several_rates and "learning_rate" in each)])
        if change == "compile":
            with w.in_scope():
                w.write(draw_compile(w, self.architecture))
        elif change in ("freeze", "unfreeze"):
            with w.in_scope():
                # Not all of an inner model, where normalization may be frozen that is not over the global batch.
                layer = "model.inner.layers[-1]" if "subclass" in self.architecture.form else "model.layers[-1]"
                w.write(f"{layer}.trainable = {change == 'unfreeze'}")
                w.write(draw_compile(w, self.architecture))
        elif change == "lora":
            with w.in_scope():
                w.write("""
                    for layer in model._flatten_layers():
                        if type(layer) is layers.Dense and layer.built and not layer.lora_enabled:
                            layer.enable_lora(2)
                    """)
                w.write(draw_compile(w, self.architecture))
        elif change in ("int8", "float8"):
            with w.in_scope():
                w.write(f"model.quantize({change!r})")
                w.write(draw_compile(w, self.architecture))
        elif change == "load":
            w.write("model.save(folder / 'model.keras')")
            with w.in_scope():
                w.write("model = keras.saving.load_model(folder / 'model.keras')")
        elif change == "load weights":
            w.write("model.save_weights(folder / 'model.weights.h5')")
            self.fit()
            w.write("model.load_weights(folder / 'model.weights.h5')")
        elif change == "backup":
            self._fit_with_backup()
        else:
            w.write(change)
        self.fit()

    def _fit_with_backup(self) -> None:
        """A `fit` that continues after the epochs of another one, as in a program that was started again."""
        w = self.w
        w.imports.add("from keras.callbacks import BackupAndRestore")
        w.write("backup = BackupAndRestore(folder / 'backup', delete_checkpoint=False)")
        size = self.architecture.batch_size or w.one_of([4, 8])
        weights = f", sample_weight={self.data.w}" if self.data.weighted else ""
        for epochs in (1, 3):
            arguments = f"{self.data.x}, {self.data.y}{weights}, batch_size={size}, epochs={epochs}, verbose=0"
            w.write(f'yield "history", model.fit({arguments}, callbacks=[backup]).history')
        self.state()

    def fit_another(self) -> None:
        """Two models train in turn."""
        w = self.w
        with w.in_scope():
            w.write("model, other = keras.models.clone_model(model), model")
            w.write(draw_compile(w, self.architecture))
        self.fit()
        w.write("model, other = other, model")
        self.fit()


CHANGES = (
    "model.optimizer.learning_rate = 0.02",
    f"model.optimizer.learning_rate = {SCHEDULES[0]}",
    "model.optimizer.learning_rate.assign(0.03) if hasattr(model.optimizer.learning_rate, 'assign') else None",
    "model.set_weights([0.5 * value for value in model.get_weights()])",
    "model.trainable_variables[0].assign(0.5 * model.trainable_variables[0])",
    "model.optimizer.clipnorm = 0.1",
    "model.optimizer.weight_decay = 0.1",
    "model.optimizer.momentum = 0.5",
    "model.optimizer.loss_scale_factor = 4.0",
    """
    for layer in model._flatten_layers():
        if type(layer) is layers.Dense:
            layer.activation = keras.activations.tanh
    """,
    "model.reset_metrics()",
    "compile",
    "freeze",
    "unfreeze",
    "load",
    "load weights",
    "keras.utils.set_random_seed(7)",
    "backup",
    "lora",
    "int8",
    "float8",
)

_SETS_RATE = {"plateau", "schedule", "rate"}
"""Callbacks that set the learning rate."""
_CAN_SET_RATE = """
inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
can_set_rate = not isinstance(inner._learning_rate, optimizers.schedules.LearningRateSchedule)
"""

KEEP = """
    class Keep(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.logs = []

        def on_train_batch_end(self, batch, logs=None):
            self.logs.append((batch, {name: float(value) for name, value in logs.items()}))

        def on_test_end(self, logs=None):
            self.logs.append({name: float(value) for name, value in logs.items()})

        def on_epoch_end(self, epoch, logs=None):
            self.logs.append((epoch, {name: float(value) for name, value in logs.items()}))
    """
STOP = """
    class StopAt(keras.callbacks.Callback):
        def __init__(self, batch):
            super().__init__()
            self.batch = batch

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.batch:
                self.model.stop_training = True
    """
CHANGE = """
    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            for name in ("momentum", "beta_1", "weight_decay"):
                if getattr(self.model.optimizer, name, None):  # without one, SGD has made no variables for momentum
                    setattr(self.model.optimizer, name, 0.5 / (1 + epoch))
    """
CHANGE_RATE = """
    class ChangeRate(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.02 / (1 + batch)
    """
ANNEAL = """
    class Anneal(keras.callbacks.Callback):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def on_epoch_begin(self, epoch, logs=None):
            self.weight.assign(0.5 * epoch)
    """
PREDICT = """
    class Predict(keras.callbacks.Callback):
        def __init__(self, x, size):
            super().__init__()
            self.x, self.size = x, size

        def on_epoch_end(self, epoch, logs=None):
            predicted = self.model.predict(self.x, batch_size=self.size, verbose=0)
            logs["predicted"] = sum(float(np.sum(each)) for each in keras.tree.flatten(predicted))
    """
HALVE = """
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.set_weights([0.5 * value for value in self.model.get_weights()])
    """
NOTE = """
    class Note(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_test_batch_end(self, batch, logs=None):
            self.seen.append((batch, {name: float(value) for name, value in logs.items()}))

        def on_predict_batch_end(self, batch, logs=None):
            self.seen.append((batch, keras.tree.map_structure(ops.convert_to_numpy, logs["outputs"])))
    """
