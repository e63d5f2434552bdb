"""What all tasks of a supervised job run: `python -m tests.supervisor.program FOLDER STRATEGY SAVES EPOCHS`.

STRATEGY is `replicas`, `servers` or `synchronous` (servers); SAVES says who saves: `supervisor`, or `.weights.h5` or
`.keras` for Keras's ModelCheckpoint. In FOLDER appear `run` with the checkpoints, and what each task found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.supervisor.models import BATCH, make_data, make_model


def main() -> None:
    import keras

    import phalanx

    folder, kind, saves, epochs = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if kind == "replicas":
        strategy: Any = phalanx.MultiWorkerMirroredStrategy()
    else:
        strategy = phalanx.ParameterServerStrategy(synchronous=kind == "synchronous")
    with strategy.scope():
        model = make_model()
    x, y = make_data()
    run = folder / "run"

    def append(name: str, content: Any) -> None:
        with open(folder / name, "a") as file:
            file.write(json.dumps(content) + "\n")

    if strategy.cluster_resolver.task_type == "evaluator":

        class Note(keras.callbacks.Callback):
            def on_test_end(self, logs: Any = None) -> None:
                append("evaluated", [int(self.model.optimizer.iterations), float(logs["loss"])])

        logs = folder / "logs" if "LOGS" in os.environ else None
        evaluator = phalanx.SidecarEvaluator(model, (x, y), run, callbacks=[Note()], log_dir=logs, verbose=0)
        evaluator.start()
        append("evaluator", [evaluator.evaluations, evaluator.best])
        return

    def end_of_epoch(epoch: int, logs: Any) -> None:
        append(f"{strategy.rank}.epochs", [epoch, os.getpid()])

    noted = [keras.callbacks.LambdaCallback(on_epoch_end=end_of_epoch)]
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": 0}
    if saves == "supervisor":
        seconds = float(os.environ.get("SAVE_SECS", "1e-6"))
        supervisor = phalanx.Supervisor(run, save_model_secs=seconds, saver=phalanx.Saver(None))
        with supervisor.managed_session(model) as session:
            restored = None if session.restored is None else session.restored.step
            append(f"{strategy.rank}.begins", [restored, session.global_step])
            model.fit(x, y, callbacks=noted, **options)
            append(f"{strategy.rank}.ends", [session.global_step, supervisor.is_chief])
    else:
        own = saves == ".weights.h5"
        save = keras.callbacks.ModelCheckpoint(str(run / f"{{epoch}}{saves}"), save_weights_only=own)
        model.fit(x, y, callbacks=[*noted, save], **options)


if __name__ == "__main__":
    main()
