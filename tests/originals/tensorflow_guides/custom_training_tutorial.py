"""To the structure of TensorFlow's tutorial "Custom training with tf.distribute.Strategy"."""

import os

import keras
import tensorflow as tf

import phalanx as distribute  # was: from tensorflow import distribute
from tests.originals.report import digits, report

(train_images, train_labels), (test_images, test_labels) = digits()
train_images = train_images[..., None] / 16
test_images = test_images[..., None] / 16

strategy = distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

BATCH_SIZE_PER_REPLICA = 16
GLOBAL_BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync
EPOCHS = 3

train_dataset = (
    tf.data.Dataset.from_tensor_slices((train_images, train_labels)).shuffle(1000, seed=1).batch(GLOBAL_BATCH_SIZE)
)
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(1e-4)),
        ]
    )


checkpoint_prefix = os.path.join("training_checkpoints", "ckpt")

with strategy.scope():
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def compute_loss(labels, predictions, model_losses):
        per_example_loss = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
        if model_losses:
            loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
        return loss

    test_loss = keras.metrics.Mean(name="test_loss")
    train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    model = create_model()
    optimizer = keras.optimizers.Adam(learning_rate=0.01)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(dataset_inputs):
    per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
    return strategy.reduce(distribute.ReduceOp.SUM, per_replica_losses, axis=None)


@tf.function
def distributed_test_step(dataset_inputs):
    return strategy.run(test_step, args=(dataset_inputs,))


seen = []
for epoch in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    for x in train_dist_dataset:
        total_loss += distributed_train_step(x)
        num_batches += 1
    train_loss = total_loss / num_batches
    for x in test_dist_dataset:
        distributed_test_step(x)
    if epoch % 2 == 0 and strategy.is_chief:  # changed: the chief alone writes a checkpoint of TensorFlow's
        checkpoint.save(checkpoint_prefix)
    template = "Epoch {}, Loss: {}, Accuracy: {}, Test Loss: {}, Test Accuracy: {}"
    seen.append([train_loss, train_accuracy.result(), test_loss.result(), test_accuracy.result()])
    print(template.format(epoch + 1, *(float(each) for each in seen[-1])))
    test_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()

strategy.reduce("SUM", 1, axis=None)  # changed: all wait until it is written
# Restored without a strategy.
eval_accuracy = keras.metrics.SparseCategoricalAccuracy(name="eval_accuracy")
new_model = create_model()
new_optimizer = keras.optimizers.Adam()
test_dataset = tf.data.Dataset.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH_SIZE)


@tf.function
def eval_step(images, labels):
    predictions = new_model(images, training=False)
    eval_accuracy.update_state(labels, predictions)


new_model(test_images[:1])
new_checkpoint = tf.train.Checkpoint(optimizer=new_optimizer, model=new_model)
new_checkpoint.restore(tf.train.latest_checkpoint("training_checkpoints"))
for images, labels in test_dataset:
    eval_step(images, labels)
print("Accuracy after restoring the saved model without strategy:", float(eval_accuracy.result()))

# Iterated with an iterator, a number of steps at a time.
for _ in range(EPOCHS):
    total_loss = 0.0
    num_batches = 0
    train_iter = iter(train_dist_dataset)
    for _ in range(10):
        total_loss += distributed_train_step(next(train_iter))
        num_batches += 1
    average_train_loss = total_loss / num_batches
    seen.append([average_train_loss, train_accuracy.result()])
    train_accuracy.reset_state()


# Iterated inside a tf.function.
@tf.function
def distributed_train_epoch(dataset):
    total_loss = 0.0
    num_batches = 0
    for x in dataset:
        per_replica_losses = strategy.run(train_step, args=(x,))
        total_loss += strategy.reduce(distribute.ReduceOp.SUM, per_replica_losses, axis=None)
        num_batches += 1
    return total_loss / tf.cast(num_batches, dtype=tf.float32)


for _ in range(EPOCHS):
    train_loss = distributed_train_epoch(train_dist_dataset)
    seen.append([train_loss, train_accuracy.result()])
    train_accuracy.reset_state()

report(seen=seen, restored=eval_accuracy.result(), weights=model.get_weights())
