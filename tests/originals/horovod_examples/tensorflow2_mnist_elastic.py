"""To the structure of Horovod's examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py."""

import keras
import tensorflow as tf

import phalanx.horovod.tensorflow as hvd  # was: import horovod.tensorflow as hvd
from tests.originals.report import digits, report


def main():
    hvd.init()
    (mnist_images, mnist_labels), _ = digits()
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(mnist_images[..., tf.newaxis] / 16.0, tf.float32), tf.cast(mnist_labels, tf.int64))
    )
    dataset = dataset.repeat().shuffle(1000).batch(32)
    mnist_model = keras.Sequential(
        [
            keras.layers.Conv2D(8, [3, 3], activation="relu"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss = tf.losses.SparseCategoricalCrossentropy()
    lr = 0.001
    opt = tf.optimizers.Adam(lr * hvd.size())

    @tf.function
    def training_step(images, labels, allreduce=True):
        with tf.GradientTape() as tape:
            probs = mnist_model(images, training=True)
            loss_value = loss(labels, probs)
        if allreduce:
            tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, mnist_model.trainable_variables)
        opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))
        return loss_value

    # The first step creates the variables, before their state is synchronized.
    for images, labels in dataset.take(1):
        training_step(images, labels, allreduce=False)

    @hvd.elastic.run
    def train(state):
        start_batch = state.batch
        for batch_idx, (images, labels) in enumerate(dataset.skip(start_batch).take(40 // hvd.size() - start_batch)):
            state.batch = start_batch + batch_idx
            loss_value = training_step(images, labels)
            if state.batch % 10 == 0 and hvd.rank() == 0:
                print(f"Step #{state.batch}\tLoss: {loss_value:.6f}")
            if state.batch % 10 == 0:
                state.commit()

    def on_state_reset():
        opt.learning_rate.assign(lr * hvd.size())

    state = hvd.elastic.TensorFlowKerasState(mnist_model, opt, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    report(weights=mnist_model.get_weights())


if __name__ == "__main__":
    main()
