"""To the structure of the evaluation in TensorFlow's parameter server tutorial, by a task next to the training."""

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
(x, y), (test_x, test_y) = digits()
strategy = distribute.MultiWorkerMirroredStrategy()
BATCH_SIZE_PER_REPLICA = 16
global_batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

with strategy.scope():
    model = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.SGD(0.001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

if strategy.cluster_resolver.task_type == "evaluator":
    data = tf.data.Dataset.from_tensor_slices((test_x, test_y)).batch(64)
    evaluator = distribute.SidecarEvaluator(
        model=model, data=data, checkpoint_dir="ckpt", steps=None, max_evaluations=3
    )
    evaluator.start()
    print("evaluated up to step", int(model.optimizer.iterations))
else:
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)
    save = keras.callbacks.ModelCheckpoint("ckpt/ckpt-{epoch}.weights.h5", save_weights_only=True)
    history = model.fit(dataset, epochs=3, callbacks=[save]).history
    report(loss=history["loss"], weights=model.get_weights())
