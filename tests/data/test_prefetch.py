import gc
import threading

import pytest

from phalanx.data.prefetch import Prefetch


class Source:
    """Yields 0, 1, 2, ... and tells the test when it was asked for each."""

    def __init__(self, end=None):
        self.asked = threading.Semaphore(0)
        self.count = 0
        self.end = end
        self.closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.count == self.end:
            raise StopIteration
        self.count += 1
        self.asked.release()
        return self.count - 1

    def close(self):
        self.closed.set()


def test_items_come_in_order_and_the_thread_ends_with_them():
    ahead = Prefetch(Source(100))
    assert list(ahead) == list(range(100))
    assert list(ahead) == []
    assert not ahead._thread.is_alive()


def test_nothing_is_read_before_the_first_item_is_asked_for():
    source = Source()
    ahead = Prefetch(source)
    assert source.count == 0
    ahead.close()
    assert ahead._thread is None


def test_no_more_than_the_depth_is_read_ahead():
    source = Source()
    ahead = Prefetch(source, depth=2)
    assert next(ahead) == 0
    # One was taken, two wait, one is held by the producer.
    for _ in range(4):
        assert source.asked.acquire(timeout=10)
    assert not source.asked.acquire(timeout=0.3)
    ahead.close()


def test_close_ends_the_thread_and_the_source_and_may_be_called_twice():
    source = Source()
    ahead = Prefetch(source)
    next(ahead)
    ahead.close()
    ahead.close()
    assert not ahead._thread.is_alive()
    assert source.closed.is_set()
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_collected_iterator_leaves_no_thread():
    ahead = Prefetch(Source())
    next(ahead)
    thread = ahead._thread
    del ahead
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_comes_after_the_items_before_it():
    def failing():
        yield 1
        yield 2
        raise OSError("gone")

    ahead = Prefetch(failing())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
