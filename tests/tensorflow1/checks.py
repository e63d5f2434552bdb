"""What one process can check of `phalanx.compat.v1`, in the mode of TensorFlow 1. Run as a program."""

from __future__ import annotations

import socket

import numpy as np
import pytest

import phalanx.compat.v1 as tf
from phalanx.errors import ConfigurationError, PeerLostError, RendezvousError
from phalanx.tensorflow1.session_setup import add_device_filters, translate_lost_task_errors


def check_names() -> None:
    assert not tf.executing_eagerly()
    assert tf.train.AdagradOptimizer is tf.compat.v1.train.AdagradOptimizer
    for read, instead in (
        (lambda: tf.estimator, "MonitoredTrainingSession"),
        (lambda: tf.contrib, "tf-slim"),
        (lambda: tf.examples, "load_data"),
        (lambda: tf.layers.conv1d, "tf.nn"),
        (lambda: tf.layers.Dense, "function"),
        (lambda: tf.no_such_name, "no attribute"),
        (lambda: tf.train.no_such_name, "no attribute"),
    ):
        with pytest.raises(AttributeError, match=instead):
            read()


def check_a_local_server() -> None:
    server = tf.train.Server.create_local_server()
    with tf.Graph().as_default():
        count = tf.get_variable("count", initializer=0)
        following = count + 1
        with tf.train.MonitoredTrainingSession(server.target) as session:
            assert session.run(following) == 1
        with tf.Session(server.target) as session:
            assert session.run(count) == 0
        session = tf.InteractiveSession(server.target)
        assert count.eval() == 0
        session.close()
        for create in (tf.train.ChiefSessionCreator, tf.train.WorkerSessionCreator):
            with tf.train.MonitoredSession(create(master=server.target)) as session:
                assert session.run(following) == 1
    with pytest.raises(ConfigurationError, match="found no cluster"):
        tf.train.Server()
    with pytest.raises(ConfigurationError, match="Add the workers"):
        server.join()


def check_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for index in (0, None):
            with pytest.raises(ConfigurationError, match=f"port {port} of this host is taken"):
                tf.train.Server({"worker": [f"127.0.0.1:{port}"]}, job_name="worker", task_index=index)


def check_servers_that_do_not_come_are_named() -> None:
    """This runs with PHALANX_RENDEZVOUS_TIMEOUT=1."""
    with socket.socket() as unused, socket.socket() as own:
        for each in (unused, own):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))  # reserved for a server; without a listener, it refuses
        cluster = {
            "ps": [f"127.0.0.1:{unused.getsockname()[1]}"],
            "worker": [f"127.0.0.1:{own.getsockname()[1]}", "127.0.0.1:1"],
        }
        server = tf.train.Server(cluster, job_name="worker", task_index=0)
        with tf.Graph().as_default() as graph:
            with tf.device(tf.train.replica_device_setter(worker_device="/job:worker/task:0", cluster=cluster)):
                step = tf.train.get_or_create_global_step()
                loss = tf.get_variable("w", initializer=1.0)
            tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)
            # Only the tasks of the graph are needed, so worker/1 is not waited for.
            filters = add_device_filters(server.target, None, graph).device_filters
            assert list(filters) == ["/job:ps/task:0", "/job:worker/task:0"]
            # Unless there is no graph yet.
            filters = add_device_filters(server.target, None, tf.Graph()).device_filters
            assert list(filters) == ["/job:ps/task:0", "/job:worker/task:0"]
            for enter in (
                lambda: tf.Session(server.target, tf.Graph()),
                lambda: tf.Session(server.target),
                lambda: tf.InteractiveSession(server.target),
                lambda: tf.train.MonitoredTrainingSession(server.target),
                lambda: tf.train.MonitoredTrainingSession(server.target, is_chief=False),
                lambda: tf.train.MonitoredSession(tf.train.ChiefSessionCreator(master=server.target)),
                lambda: tf.train.MonitoredSession(tf.train.WorkerSessionCreator(master=server.target)),
                lambda: tf.train.Supervisor().managed_session(server.target).__enter__(),
            ):
                with pytest.raises(RendezvousError, match=r"ps/0 at 127.0.0.1:\d+ refuses connections"):
                    enter()
        with pytest.raises(PeerLostError, match="ps/0 at 127"), translate_lost_task_errors(server.target):
            raise tf.errors.UnavailableError(None, None, "Connection reset")
        # A server that has been started again answers, but it has lost its variables.
        again = tf.train.Server(cluster, job_name="ps", task_index=0)
        for text, expected in (("target /job:ps/replica:0/task:0", PeerLostError), ("", tf.errors.AbortedError)):
            with pytest.raises(expected), translate_lost_task_errors(server.target):
                raise tf.errors.AbortedError(None, None, text)
        del again
        with pytest.raises(tf.errors.DataLossError), translate_lost_task_errors(server.target):
            raise tf.errors.DataLossError(None, None, "another error")


def check_a_chief_that_does_not_come_is_named() -> None:
    with tf.Graph().as_default():
        with tf.device("/cpu:0"):
            tf.get_variable("w", initializer=1.0)
        supervisor = tf.train.Supervisor(is_chief=False)
        with pytest.raises(RendezvousError, match="is_chief=True"):
            supervisor.prepare_or_wait_for_session()
        supervisor.summary_computed(None, b"")  # not the chief: nothing


def check_options_of_layers() -> None:
    random = np.random.default_rng(0)
    images, rows = random.normal(size=(2, 3, 3, 4)), random.normal(size=(6, 4))
    with tf.Graph().as_default():
        options = {"training": True, "momentum": 0.5, "gamma_regularizer": tf.nn.l2_loss, "beta_constraint": abs}
        tf.layers.batch_normalization(tf.constant(images), fused=True, **options)
        tf.layers.batch_normalization(tf.constant(images), fused=False, **options)
        tf.layers.batch_normalization(tf.constant(rows), beta_regularizer=tf.nn.l2_loss, **options)
        dense = tf.layers.dense(tf.constant(rows), 3, activity_regularizer=tf.nn.l2_loss)
        with pytest.raises(NotImplementedError, match="renorm"):
            tf.layers.batch_normalization(tf.constant(rows), renorm=True)
        losses = tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
        variances = [each for each in tf.global_variables() if "moving_variance" in each.name]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
            found, outputs, penalties = session.run([variances, dense, losses])
    pixels = images.reshape(-1, 4)
    for variance, expected in zip(found, (pixels.var(0, ddof=1), pixels.var(0), rows.var(0)), strict=True):
        np.testing.assert_allclose(variance, 0.5 + 0.5 * expected, rtol=1e-6)
    # gamma of one, beta of zero; and the mean of the samples' penalties
    np.testing.assert_allclose(penalties, [2, 2, 2, 0, (outputs**2).sum() / 2 / 6], rtol=1e-6)


def check_layers() -> None:
    random = np.random.default_rng(0)
    images = random.normal(size=(2, 6, 6, 3)).astype("float32")
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, [None, 6, 6, 3])
        training = tf.placeholder(tf.bool, [])
        convolved = tf.layers.conv2d(fed, 4, 3, activation=tf.nn.relu, padding="same")
        pooled = tf.layers.max_pooling2d(convolved, 2, 2)
        mean = tf.layers.average_pooling2d(convolved, 2, 2)
        normal = tf.layers.batch_normalization(pooled, training=training)
        flat = tf.layers.flatten(normal)
        dropped = tf.layers.dropout(flat, 0.5, training=training)
        regularizer = tf.nn.l2_loss
        first = tf.layers.dense(dropped, 5, kernel_regularizer=regularizer, name="logits")
        again = tf.layers.dense(dropped, 5, name="logits", reuse=True)
        tf.layers.dense(flat, 1)
        tf.layers.dense(flat, 1)
        names = [each.name for each in tf.trainable_variables()]
        assert names == [
            *("conv2d/kernel:0", "conv2d/bias:0", "batch_normalization/gamma:0", "batch_normalization/beta:0"),
            *("logits/kernel:0", "logits/bias:0", "dense/kernel:0", "dense/bias:0", "dense_1/kernel:0"),
            "dense_1/bias:0",
        ]
        assert [each.shape.as_list() for each in tf.trainable_variables()[:5]] == [[3, 3, 3, 4], [4], [4], [4], [36, 5]]
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        moving = [each for each in tf.global_variables() if "moving" in each.name]
        losses = tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            feeds = {fed: images, training: False}
            kernel, logits = session.run([names[0], names[4]], feeds)
            one, two, given, penalty, small, wide = session.run(
                [first, again, flat, losses[0], pooled, convolved], feeds
            )
            session.run(updates, feeds)
            before = session.run(moving)
            _, batch, zeros = session.run([updates, normal, dropped], {fed: images, training: True})
            after = session.run(moving)
            averages = session.run(mean, feeds)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = sum(padded[:, i : i + 6, j : j + 6] @ kernel[i, j] for i in range(3) for j in range(3)).clip(0)
    np.testing.assert_allclose(wide, expected, rtol=1e-4, atol=1e-5)
    windows = expected.reshape(2, 3, 2, 3, 2, 4)
    np.testing.assert_allclose(small, windows.max(axis=(2, 4)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(averages, windows.mean(axis=(2, 4)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(given, (small / np.sqrt(1.001)).reshape(2, -1), rtol=1e-4)
    np.testing.assert_allclose(one, given @ logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(penalty, (logits**2).sum() / 2, rtol=1e-5)
    np.testing.assert_array_equal(before, [np.zeros(4), np.ones(4)])
    statistics = [small.mean(axis=(0, 1, 2)), small.var(axis=(0, 1, 2))]
    np.testing.assert_allclose(after[0], 0.01 * statistics[0], rtol=1e-4)
    np.testing.assert_allclose(after[1], 0.99 + 0.01 * statistics[1] * 18 / 17, rtol=1e-4)  # of 18 pixels
    np.testing.assert_allclose(batch, (small - statistics[0]) / np.sqrt(statistics[1] + 1e-3), rtol=1e-3, atol=1e-3)
    assert ((zeros == 0) | np.isclose(zeros, 2 * batch.reshape(2, -1), rtol=1e-4)).all()
    assert 0 < (zeros == 0).sum() < zeros.size


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name)
