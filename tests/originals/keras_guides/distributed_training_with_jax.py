"""To the structure of Keras's guide "Multi-GPU distributed training with JAX", with processes in place of its mesh."""

import jax
import keras
import numpy as np
import tensorflow as tf

import phalanx  # was: from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.originals.report import digits, report


def get_model():
    inputs = keras.Input(shape=(8, 8, 1))
    x = keras.layers.Rescaling(1.0 / 16)(inputs)
    x = keras.layers.Conv2D(8, 3, use_bias=False)(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(16, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    return keras.Model(inputs, outputs)


num_epochs = 2
batch_size = 32
keras.utils.set_random_seed(1)
(x_train, y_train), _ = digits()
train_data = tf.data.Dataset.from_tensor_slices((x_train[..., None], y_train)).batch(batch_size)

model = get_model()
optimizer = keras.optimizers.Adam(1e-3)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
(one_batch, one_batch_labels) = next(iter(train_data))
model.build(tuple(one_batch.shape))
optimizer.build(model.trainable_variables)


def compute_loss(trainable_variables, non_trainable_variables, x, y):
    y_pred, updated_non_trainable_variables = model.stateless_call(trainable_variables, non_trainable_variables, x)
    loss_value = loss(y, y_pred) / batch_size
    return loss_value, updated_non_trainable_variables


compute_gradients = jax.jit(jax.value_and_grad(compute_loss, has_aux=True))
apply_gradients = jax.jit(optimizer.stateless_apply)

strategy = phalanx.MultiWorkerMirroredStrategy()  # changed: a strategy in place of a mesh and its shardings
trainable_variables, non_trainable_variables, optimizer_variables = (
    [variable.value for variable in variables]
    for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
)


def train_step(x, y):
    global trainable_variables, non_trainable_variables, optimizer_variables
    (loss_value, non_trainable_variables), grads = compute_gradients(trainable_variables, non_trainable_variables, x, y)
    loss_value, grads = strategy.reduce("SUM", (loss_value, grads))  # changed: sums between two jitted functions
    trainable_variables, optimizer_variables = apply_gradients(optimizer_variables, grads, trainable_variables)
    return loss_value


losses = []
for epoch in range(num_epochs):
    loss_value = None
    for x, y in strategy.experimental_distribute_dataset(train_data):
        loss_value = train_step(x, y)
        losses.append(loss_value)
    print("Epoch", epoch, "loss:", float(loss_value))

for variable, value in zip(model.trainable_variables, trainable_variables, strict=True):
    variable.assign(value)
report(losses=[np.asarray(each) for each in losses], weights=model.get_weights())
