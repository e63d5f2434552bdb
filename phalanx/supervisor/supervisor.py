"""`Supervisor`: the role of TensorFlow 1's `tf.train.Supervisor`, for Keras 3 models.

It restores the newest checkpoint at the start without being asked, lets only the chief initialise, save and write
summaries, and lets the others wait until the chief is ready. What placed variables there, `replica_device_setter`, is
here the placement of `ParameterServerStrategy`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from phalanx.checkpoint.checkpoint_directory import DEFAULT_BASENAME, CheckpointDirectory, StoredCheckpoint
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.config.job_config import JobConfig
from phalanx.config.variables import RENDEZVOUS_TIMEOUT
from phalanx.errors import ConfigurationError, PeerLostError, RendezvousError
from phalanx.evaluator.completion_marker import announce_beginning, announce_end
from phalanx.keras_compat.patching import overridden_methods
from phalanx.monitoring import event_writer
from phalanx.monitoring.event_writer import EventWriter
from phalanx.strategies.replica_context import current_strategy
from phalanx.supervisor.looper_threads import LooperThreads
from phalanx.supervisor.managed_session import ManagedSession, SessionServices
from phalanx.supervisor.saver import Saver
from phalanx.training import model_dispatch, state_sync
from phalanx.training.parameter_server_worker import ParameterServerWorker
from phalanx.training.replica import Replica

logger = logging.getLogger(__name__)

DEFAULT_SAVE_MODEL_SECS = 600
DEFAULT_SAVE_SUMMARIES_SECS = 120
DEFAULT_STOP_GRACE_SECS = 120
"""These three as in TensorFlow 1."""
POLL_S = 0.5
"""Between two looks into a directory in which another process saves."""


class Supervisor:
    """Saves, restores and watches the training of a model (`tf.train.Supervisor`).

    Every worker makes one, with the same arguments:

    >>> supervisor = phalanx.Supervisor("runs/1", save_model_secs=60)  # doctest: +SKIP
    >>> with supervisor.managed_session(model) as session:  # doctest: +SKIP
    ...     model.fit(x, y, epochs=10)

    Started again after whatever ended it, the program goes on from the newest checkpoint in `logdir`: weights,
    optimizer, step, and the epoch of `fit`.

    Args:
        logdir: directory of checkpoints and event files. Only the chief needs it. None: nothing is saved by itself.
        is_chief: whether this process initialises and saves. None: as the strategy or the cluster says.
        save_model_secs: seconds between two checkpoints; 0: none is written by itself.
        saver: a `Saver`, which says how many are kept; None: nothing is saved or restored by itself.
        global_step: what counts the steps: a `keras.Variable` or a function. None: `strategy.global_step` with
            parameter servers, else the optimizer's iterations.
        save_summaries_secs: seconds between two notes of the steps per second for TensorBoard; 0: none. None: 120 if
            the package for it is installed.
        checkpoint_basename: names of checkpoints begin with it.
        init_fn: called with the session on the chief, if there is no checkpoint, to give the model its first values.
        stop_grace_secs: how long threads of `loop` may take to end.

    Raises: ConfigurationError if arguments do not fit.
    """

    USE_DEFAULT = 0
    """For arguments that have a default of their own, as in TensorFlow 1."""

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        is_chief: bool | None = None,
        save_model_secs: float = DEFAULT_SAVE_MODEL_SECS,
        saver: Saver | int | None = USE_DEFAULT,
        global_step: Any = USE_DEFAULT,
        *,
        save_summaries_secs: float | None = None,
        checkpoint_basename: str = DEFAULT_BASENAME,
        init_fn: Callable[[ManagedSession], Any] | None = None,
        stop_grace_secs: float = DEFAULT_STOP_GRACE_SECS,
    ):
        for name, seconds in (
            ("save_model_secs", save_model_secs),
            ("save_summaries_secs", save_summaries_secs or 0),
            ("stop_grace_secs", stop_grace_secs),
        ):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
                raise ConfigurationError(f"{name} is {seconds!r}; write a number of seconds, 0 or more.")
        if saver is not None and saver != Supervisor.USE_DEFAULT and not isinstance(saver, Saver):
            raise ConfigurationError(f"saver is {saver!r}; pass a phalanx.Saver, or None to save nothing.")
        self._logdir = None if logdir is None else Path(logdir)
        self._given_chief = is_chief
        self._is_chief = _is_chief_here() if is_chief is None else bool(is_chief)
        self._save_model_secs = save_model_secs
        self._saver = Saver() if saver == Supervisor.USE_DEFAULT else saver
        self._counter = None if isinstance(global_step, int) else global_step
        self._save_summaries_secs = save_summaries_secs
        self._basename = checkpoint_basename
        self._init_fn = init_fn
        self._stop_grace_secs = stop_grace_secs
        self._loops = LooperThreads()
        self._session: ManagedSession | None = None
        self._writer: EventWriter | None = None
        self._writes = False
        if save_summaries_secs and self._logdir is not None and self._is_chief:
            EventWriter(self._logdir)  # says now what is missing

    # What was set.

    @property
    def is_chief(self) -> bool:
        """Whether this process initialises, saves and writes summaries."""
        return self._is_chief

    @property
    def saver(self) -> Saver | None:
        """For saving by hand: `supervisor.saver.save(session)`."""
        return self._saver if isinstance(self._saver, Saver) else None

    @property
    def save_path(self) -> str | None:
        """Directory and beginning of the names of checkpoints; None without `logdir`."""
        return None if self._logdir is None else str(self._logdir / self._basename)

    @property
    def save_model_secs(self) -> float:
        return self._save_model_secs

    @property
    def global_step(self) -> int:
        """The step of the present session; 0 outside of one."""
        return 0 if self._session is None else self._session.global_step

    # The session.

    @contextlib.contextmanager
    def managed_session(self, model: Any, *, start_standard_services: bool = True) -> Iterator[ManagedSession]:
        """Inside, `model` has the values of the newest checkpoint, or its first ones, and is saved as it is trained.

        On other workers than the chief this waits until the chief is ready. At the end the chief saves once more. An
        error inside stops the threads of `loop`, saves nothing, and is raised again; so is an error of such a thread.

        Args:
            model: built, and compiled if it is trained by `fit`.
            start_standard_services: whether the chief saves and writes summaries by itself.

        Raises:
            ConfigurationError: the model is not built, or no checkpoint can be read, or it is of another model.
            OSError: the chief cannot write to `logdir`.
            CollectiveTimeoutError, PeerLostError, RendezvousError: the chief did not become ready; names it.
        """
        if self._session is not None:
            raise ConfigurationError("This supervisor has a managed session already: leave it before the next one.")
        self._loops.clear()
        session = self._session = self._begin(model, start_standard_services)
        grace_s = self._stop_grace_secs
        try:
            with overridden_methods(model, **session.methods):
                yield session
                self._loops.request_stop()
                grace_s = 0.0  # below: it was waited for
                self._loops.join(self._stop_grace_secs, session.serve)
                session.finish()
        except BaseException as error:
            self._loops.request_stop(error)
            session.close()
            try:
                self._loops.join(grace_s)
            except RuntimeError as late:
                if grace_s:
                    error.add_note(str(late))
            if self._loops.error is not None and self._loops.error is not error:
                raise self._loops.error  # it came first  # noqa: B904
            raise
        else:
            if self._loops.error is not None:
                raise self._loops.error
            if self._writes and self._logdir is not None:
                announce_end(self._logdir)
        finally:
            self._session = None
            session.close()
            self._close_writer()

    def _begin(self, model: Any, services_start: bool) -> ManagedSession:
        if not hasattr(model, "save_weights"):
            raise ConfigurationError(f"managed_session() takes the Keras model that is to be trained; got {model!r}.")
        if not model.built:
            raise ConfigurationError(
                "The model is not built, so there is nothing to restore yet: begin it with keras.Input(shape), or call "
                "model.build(shape), before managed_session()."
            )
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # on all workers, which must have the same variables
        member = model_dispatch.member_of(model)
        self._is_chief = self._chief_of(member)
        self._writes = self._is_chief and services_start and self._saver is not None
        self._writer = self._make_writer() if services_start else None
        checkpoints = None
        if self._logdir is not None:
            keep = self._saver.max_to_keep if isinstance(self._saver, Saver) else None
            checkpoints = CheckpointDirectory(self._logdir, basename=self._basename, keep=keep)
        session = ManagedSession(
            model,
            is_chief=self._is_chief,
            services=SessionServices(
                checkpoints,
                self._save_model_secs if self._writes and checkpoints is not None else 0.0,
                self._writer,
                self._summaries_s,
            ),
            loops=self._loops,
            read_step=lambda: self._read_step(model, member),
        )
        restored = None
        if self._is_chief:
            restored = self._initialise(session, checkpoints, member)
        self._wait_for_the_chief(session, checkpoints, member)
        if session.restored is None:
            session.begin(restored)
        return session

    def _initialise(
        self, session: ManagedSession, checkpoints: CheckpointDirectory | None, member: model_dispatch.Member | None
    ) -> StoredCheckpoint | None:
        """The chief's part: the newest checkpoint, or the first values, which are saved at once, so that a directory
        that cannot be written to is found out before the training."""
        restored = None
        if checkpoints is not None and self._saver is not None:
            checkpoints.sweep()
            restored = checkpoints.restore(session.model)
        if restored is not None:
            self._count_from(restored.step, member)
            logger.info("Restored step %d from %s.", restored.step, restored.path)
        elif self._init_fn is not None:
            self._init_fn(session)
        if checkpoints is not None and self._writes and self._save_model_secs:
            if restored is None:
                session.save()
            announce_beginning(checkpoints.directory)
        return restored

    def _wait_for_the_chief(
        self, session: ManagedSession, checkpoints: CheckpointDirectory | None, member: model_dispatch.Member | None
    ) -> None:
        if isinstance(member, ParameterServerWorker):
            try:
                member.begin_session()
            except PeerLostError as error:
                error.add_note("It was waited for the chief to begin its managed session.")
                raise
        elif isinstance(member, Replica) and member.world_size > 1:
            state_sync.synchronise(session.model, member)
            step: Any = member.broadcast_from_chief(session.global_step)
            self._count_from(int(step), member)
        elif not self._is_chief and checkpoints is not None:
            session.begin(_wait_for_a_checkpoint(checkpoints, session.model))

    def _chief_of(self, member: model_dispatch.Member | None) -> bool:
        """Whether this process is the chief, now that the model is known."""
        if member is None or (isinstance(member, Replica) and member.world_size == 1):
            return self._is_chief
        if self._given_chief is not None and self._given_chief != member.is_chief:
            who = "the chief" if member.is_chief else "not the chief"
            raise ConfigurationError(
                f"is_chief={self._given_chief} was passed, but this process is {who} of the model's strategy. Leave "
                f"is_chief out."
            )
        return member.is_chief

    # Steps.

    def _read_step(self, model: Any, member: model_dispatch.Member | None) -> int:
        counter = self._counter
        if counter is not None:
            value = counter() if callable(counter) and not isinstance(counter, keras.Variable) else counter
            return int(keras.ops.convert_to_numpy(value))
        if isinstance(member, ParameterServerWorker):
            return member.global_step
        optimizer = getattr(model, "optimizer", None)
        return 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))

    def _count_from(self, step: int, member: model_dispatch.Member | None) -> None:
        """Let what counts the steps, and is not restored with the model, go on."""
        if isinstance(self._counter, keras.Variable):
            self._counter.assign(step)
        if isinstance(member, ParameterServerWorker):
            member.global_step = max(member.global_step, step)

    # Summaries.

    @property
    def _summaries_s(self) -> float:
        given = self._save_summaries_secs
        return DEFAULT_SAVE_SUMMARIES_SECS if given is None else given

    def _make_writer(self) -> EventWriter | None:
        if not self._is_chief or self._logdir is None or not self._summaries_s:
            return None
        if self._save_summaries_secs is None and not event_writer.is_available():
            logger.info("No event files are written to %s: %s is not installed.", self._logdir, event_writer.PACKAGE)
            return None
        return EventWriter(self._logdir)

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def summary_computed(
        self, session: ManagedSession, summary: Mapping[str, Any], global_step: int | None = None
    ) -> None:
        """Write numbers by their names to the event file, on the chief; on other workers nothing happens.

        Args:
            global_step: of which they are; None: the present one.

        Raises: ConfigurationError on a chief that writes no event files; says why.
        """
        if self._is_chief and self._writer is None:
            reason = (
                "has no logdir" if self._logdir is None else f"was told not to, or {event_writer.PACKAGE} is missing"
            )
            raise ConfigurationError(
                f"The supervisor writes no event files: it {reason}. `pip install {event_writer.PACKAGE}`, and leave "
                f"save_summaries_secs above 0."
            )
        session.summarise(summary, global_step)

    # Threads, and the end.

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> threading.Thread:
        """Call `target` in a thread, at once and then every so many seconds (None: without a pause), until a stop.

        An error in it asks for a stop and is raised again at the end of the session.
        """
        return self._loops.start(timer_interval_secs, target, args or (), kwargs)

    def should_stop(self) -> bool:
        """Whether somebody has asked to stop. In a loop of one's own ask it once for each step, between two steps: the
        chief then saves, if it is time."""
        return self._loops.should_stop() if self._session is None else self._session.should_stop()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Ask for a stop: `should_stop` says so, threads of `loop` end, `fit` ends with its epoch.

        Args:
            ex: an error to be raised at the end of the session.
        """
        self._loops.request_stop(ex)

    def stop(self) -> None:
        """Ask for a stop and wait for the threads of `loop`.

        Raises: the first error of theirs; RuntimeError naming one that does not end.
        """
        self._loops.request_stop()
        session = self._session
        self._loops.join(self._stop_grace_secs, (lambda: None) if session is None else session.serve)
        if self._loops.error is not None:
            raise self._loops.error

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody asks for a stop, at most so long; whether somebody did."""
        return self._loops.wait_for_stop(timeout_s)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """For threads of one's own: an error inside asks for a stop and is raised again at the end of the session."""
        try:
            yield
        except Exception as error:
            self._loops.request_stop(error)


def _is_chief_here() -> bool:
    """Whether this process is the chief, as far as is known without a model."""
    strategy = current_strategy()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        return strategy.is_chief
    resolver = resolve()
    spec, task = resolver.cluster_spec(), resolver.task()
    return not spec or task is None or task == spec.chief


def _wait_for_a_checkpoint(checkpoints: CheckpointDirectory, model: Any) -> StoredCheckpoint:
    """What another process saves, with which this one has no strategy in common."""
    bound_s = JobConfig.from_environment().rendezvous_timeout_s
    until = time.monotonic() + bound_s
    while (found := checkpoints.restore(model, tidy=False)) is None:
        if time.monotonic() > until:
            raise RendezvousError(
                f"The chief did not save a checkpoint in {checkpoints.directory} within {bound_s:g} s "
                f"({RENDEZVOUS_TIMEOUT}). Is it started, with the same logdir on the same file system?"
            )
        time.sleep(POLL_S)
    return found
