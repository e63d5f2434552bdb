"""To the structure of TensorFlow's tutorial "Save and load a model using a distribution strategy"."""

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

keras.utils.set_random_seed(1)
mirrored_strategy = distribute.MirroredStrategy()


def get_data():
    (train_images, train_labels), (test_images, test_labels) = digits()
    BATCH_SIZE_PER_REPLICA = 16
    BATCH_SIZE = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync

    def scale(image, label):
        return tf.cast(image, tf.float32)[..., None] / 16, label

    train_dataset = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    eval_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
    train_dataset = train_dataset.map(scale).cache().shuffle(1000, seed=1).batch(BATCH_SIZE)
    return train_dataset, eval_dataset.map(scale).batch(BATCH_SIZE)


def get_model():
    with mirrored_strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
        return model


train_dataset, eval_dataset = get_data()
model = get_model()
model.fit(train_dataset, epochs=2)

# Keras's own format, and training goes on, without a strategy and with another one.
keras_model_path = "keras_save.keras"
model.save(keras_model_path)
restored_keras_model = keras.models.load_model(keras_model_path)
plain = restored_keras_model.fit(train_dataset, epochs=2).history

another_strategy = distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_keras_model_ds = keras.models.load_model(keras_model_path)
    one_device = restored_keras_model_ds.fit(train_dataset, epochs=2).history

with mirrored_strategy.scope():
    restored_keras_model_ds = keras.models.load_model(keras_model_path)
mirrored = restored_keras_model_ds.fit(train_dataset, epochs=2).history

# TensorFlow's format, for inference, distributed and not.
model = get_model()
if mirrored_strategy.is_chief:  # changed: the chief alone writes a SavedModel
    model.export("tf_save")
mirrored_strategy.reduce("SUM", 1, axis=None)  # changed: all wait until it is written

DEFAULT_FUNCTION_KEY = "serving_default"
loaded = tf.saved_model.load("tf_save")
inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]
predict_dataset = eval_dataset.map(lambda image, label: image)
predicted = [next(iter(inference_func(batch).values())) for batch in predict_dataset.take(1)]

with mirrored_strategy.scope():
    loaded = tf.saved_model.load("tf_save")
    inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]
    dist_predict_dataset = mirrored_strategy.experimental_distribute_dataset(predict_dataset)
    gathered = []
    for batch in dist_predict_dataset:
        result = mirrored_strategy.run(inference_func, args=(batch,))
        gathered.append(mirrored_strategy.gather(next(iter(result.values())), axis=0))

report(
    plain=plain["loss"],
    one_device=one_device["loss"],
    mirrored=mirrored["loss"],
    predicted=predicted,
    gathered=gathered,
)
