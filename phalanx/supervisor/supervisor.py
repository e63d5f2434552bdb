"""`Supervisor`: the counterpart of TensorFlow 1's `tf.train.Supervisor` for Keras 3 models.

It restores the newest checkpoint automatically at the start. Only the chief initializes, saves and writes summaries;
the other workers wait until the chief is ready. `ParameterServerStrategy` places variables, which is what
`replica_device_setter` did in TensorFlow 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.checkpoint.checkpoint_directory import DEFAULT_BASENAME, CheckpointDirectory, StoredCheckpoint
from phalanx.cluster.resolvers.auto_resolver import resolve
from phalanx.config.environment_variables import RENDEZVOUS_TIMEOUT
from phalanx.config.job_config import JobConfig
from phalanx.errors import ConfigurationError, PeerLostError, RendezvousError
from phalanx.evaluator.completion_marker import remove_marker, write_marker
from phalanx.keras_compat.patching import overridden_methods
from phalanx.monitoring import event_writer
from phalanx.monitoring.event_writer import EventWriter
from phalanx.storage.paths import storage_path
from phalanx.strategies.replica_context import owning_strategy
from phalanx.supervisor.looper_threads import LooperThreads
from phalanx.supervisor.managed_session import ManagedSession, SessionServices
from phalanx.supervisor.saver import Saver
from phalanx.supervisor.step_counter import StepCounter
from phalanx.training import model_dispatch, state_sync
from phalanx.training.replica import Replica
from phalanx.training.servers.parameter_server_worker import ParameterServerWorker

logger = logging.getLogger(__name__)

DEFAULT_SAVE_MODEL_SECS = 600
DEFAULT_SAVE_SUMMARIES_SECS = 120
DEFAULT_STOP_GRACE_SECS = 120
"""Seconds; the defaults of TensorFlow 1."""
POLL_S = 0.5
"""Seconds between two scans of a directory that another process saves to."""


class Supervisor:
    """Saves, restores and watches the training of a model (`tf.train.Supervisor`).

    Every worker creates one, with the same arguments:

    >>> supervisor = phalanx.Supervisor("runs/1", save_model_secs=60)  # doctest: +SKIP
    >>> with supervisor.managed_session(model) as session:  # doctest: +SKIP
    ...     model.fit(x, y, epochs=10)

    After a restart, the program continues from the newest checkpoint in `logdir`: weights, optimizer, step, and the
    epoch of `fit`.

    Args:
        logdir: Directory for checkpoints and event files. Only the chief needs it. None saves nothing automatically.
        is_chief: Whether this process initializes and saves. None: decided by the strategy or the cluster.
        save_model_secs: Seconds between two checkpoints; 0 writes none automatically.
        saver: A `Saver`, which defines how many checkpoints are kept; None saves and restores nothing automatically.
        global_step: A `keras.Variable` or a function that returns the step. None: `strategy.global_step` with
            parameter servers, otherwise the optimizer's iterations.
        save_summaries_secs: Seconds between two summaries of the steps per second for TensorBoard; 0 writes none. None:
            120 if tensorboardX is installed.
        checkpoint_basename: Prefix of checkpoint names.
        init_fn: Function that initializes the model. Called with the session, on the chief, if there is no checkpoint.
        stop_grace_secs: Seconds that threads of `loop` may take to stop.

    Raises: ConfigurationError if an argument has the wrong type or range.
    """

    USE_DEFAULT = 0
    """Marks an argument as default, as in TensorFlow 1."""

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
        self._logdir = None if logdir is None else storage_path(logdir, "logdir")
        self._given_chief = is_chief
        self._is_chief = _is_chief_here() if is_chief is None else bool(is_chief)
        self._save_model_secs = save_model_secs
        self._saver: Saver | None = Saver() if isinstance(saver, int) else saver
        self._counter = None if isinstance(global_step, int) else global_step
        self._save_summaries_secs = save_summaries_secs
        self._basename = checkpoint_basename
        self._init_fn = init_fn
        self._stop_grace_secs = stop_grace_secs
        self._loops = LooperThreads()
        self._session: ManagedSession | None = None  # while one is open
        self._writer: EventWriter | None = None  # of the current session
        self._saves_automatically = False  # whether this process saves automatically in the current session
        if save_summaries_secs and self._logdir is not None and self._is_chief:
            EventWriter(self._logdir)  # reports early what is missing

    # The arguments.

    @property
    def is_chief(self) -> bool:
        """Whether this process initializes, saves and writes summaries."""
        return self._is_chief

    @property
    def saver(self) -> Saver | None:
        """The saver, for explicit saves: `supervisor.saver.save(session)`."""
        return self._saver

    @property
    def save_path(self) -> str | None:
        """Directory and name prefix of checkpoints; None without `logdir`."""
        return None if self._logdir is None else str(self._logdir / self._basename)

    @property
    def save_model_secs(self) -> float:
        """Seconds between two checkpoints; 0 if none is written automatically."""
        return self._save_model_secs

    @property
    def global_step(self) -> int:
        """The step of the current session; 0 outside a session."""
        return 0 if self._session is None else self._session.global_step

    # The session.

    @contextlib.contextmanager
    def managed_session(self, model: Any, *, start_standard_services: bool = True) -> Iterator[ManagedSession]:
        """Restore `model` from the newest checkpoint if there is one, and save it while it trains.

        All workers but the chief wait until the chief is ready. At the end, the chief saves once more. An error inside
        the block stops the threads of `loop` and is raised again; nothing is saved. Errors of these threads are also
        raised.

        Args:
            model: A built model, compiled if it is trained by `fit`.
            start_standard_services: Whether the chief saves and writes summaries automatically.

        Raises:
            ConfigurationError: the model is not built, or no checkpoint can be read, or it is of another model.
            OSError: the chief cannot write to `logdir`.
            CollectiveTimeoutError, PeerLostError, RendezvousError: the chief did not become ready; names it.
        """
        if self._session is not None:
            raise ConfigurationError("This supervisor has a managed session already: leave it before the next one.")
        self._loops.clear()
        session = self._session = self._open_session(model, start_standard_services)
        grace_s = self._stop_grace_secs
        try:
            with overridden_methods(model, **session.methods):
                yield session
                # Threads stop before the last checkpoint, which includes their changes.
                self._loops.request_stop()
                grace_s = 0.0  # for the handler below: the grace period is used up
                self._loops.join(self._stop_grace_secs, session.requests.serve)
                session.finish()
        except BaseException as error:
            self._loops.request_stop(error)
            session.requests.close()  # no more boundaries: threads that wait for one get an error and stop
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
            if self._saves_automatically and session.checkpoints is not None:
                write_marker(session.checkpoints.directory, session.checkpoints.claim)
        finally:
            self._session = None
            session.close()

    def _open_session(self, model: Any, services_start: bool) -> ManagedSession:
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
        self._saves_automatically = self._is_chief and services_start and self._saver is not None
        self._writer = self._build_writer() if services_start else None
        checkpoints = None
        if self._logdir is not None:
            keep = None if self._saver is None else self._saver.max_to_keep
            generation = (lambda: member.generation) if isinstance(member, Replica) else (lambda: 0)
            checkpoints = CheckpointDirectory(self._logdir, basename=self._basename, keep=keep, generation=generation)
        counter = StepCounter(self._counter, model, member)
        session = ManagedSession(
            model,
            is_chief=self._is_chief,
            services=SessionServices(
                checkpoints,
                self._save_model_secs if self._saves_automatically and checkpoints is not None else 0.0,
                self._writer,
                self._summaries_s,
            ),
            loops=self._loops,
            read_step=counter.read,
        )
        try:
            # First the chief restores or initializes the values; then the other workers receive them.
            restored = self._initialize(session, checkpoints, counter) if self._is_chief else None
            self._wait_for_chief(session, checkpoints, member, counter)
            if session.restored is None:
                session.begin(restored)
        except BaseException:
            session.close()  # otherwise this process would block all other writers of the directory
            raise
        return session

    def _initialize(
        self, session: ManagedSession, checkpoints: CheckpointDirectory | None, counter: StepCounter
    ) -> StoredCheckpoint | None:
        """On the chief: restore the newest checkpoint, or save the initial values now, so that a directory that is not
        writable raises before training."""
        restored = None
        if checkpoints is not None and self._saver is not None:
            if self._saves_automatically:
                checkpoints.remove_partial_files()  # leftovers of a writer that was killed
            restored = checkpoints.restore(session.model)
        if restored is not None:
            counter.continue_from(restored.step)
            logger.info("Restored step %d from %s.", restored.step, restored.path)
        elif self._init_fn is not None:
            self._init_fn(session)
        if checkpoints is not None and self._saves_automatically:
            if restored is None and self._save_model_secs:
                session.save()  # workers without a strategy wait for it
            # Even if nothing was saved, because the end of this session is announced too.
            remove_marker(checkpoints.directory, checkpoints.claim)
        return restored

    def _wait_for_chief(
        self,
        session: ManagedSession,
        checkpoints: CheckpointDirectory | None,
        member: model_dispatch.Member | None,
        counter: StepCounter,
    ) -> None:
        if isinstance(member, ParameterServerWorker):
            try:
                member.synchronize_session_start()
            except PeerLostError as error:
                error.add_note("This worker was waiting for the chief to begin its managed session.")
                raise
        elif isinstance(member, Replica) and member.world_size > 1:
            state_sync.synchronize(session.model, member)
            state_sync.seed_per_rank(member)
            step: Any = member.broadcast_from_chief(session.global_step)
            counter.continue_from(int(step))
        elif not self._is_chief and checkpoints is not None:
            session.begin(_wait_for_a_checkpoint(checkpoints, session.model))

    def _chief_of(self, member: model_dispatch.Member | None) -> bool:
        """Return whether this process is the chief, given the model's membership."""
        if member is None or (isinstance(member, Replica) and member.world_size == 1):
            return self._is_chief
        if self._given_chief is not None and self._given_chief != member.is_chief:
            who = "the chief" if member.is_chief else "not the chief"
            raise ConfigurationError(
                f"is_chief={self._given_chief} was passed, but this process is {who} of the model's strategy. Leave "
                f"is_chief out."
            )
        return member.is_chief

    # Summaries.

    @property
    def _summaries_s(self) -> float:
        given = self._save_summaries_secs
        return DEFAULT_SAVE_SUMMARIES_SECS if given is None else given

    def _build_writer(self) -> EventWriter | None:
        if not self._is_chief or self._logdir is None or not self._summaries_s:
            return None
        if self._save_summaries_secs is None and not event_writer.is_available():
            logger.info("No event files are written to %s: %s is not installed.", self._logdir, event_writer.PACKAGE)
            return None
        return EventWriter(self._logdir)

    def summary_computed(
        self, session: ManagedSession, summary: Mapping[str, Any], global_step: int | None = None
    ) -> None:
        """Write scalars by name to the event file, on the chief. Does nothing on other workers.

        Args:
            summary: Scalars by name.
            global_step: The step that they belong to; None: the current one.

        Raises: ConfigurationError on a chief that writes no event files, with the reason.
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

    # Threads and stopping.

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> threading.Thread:
        """Call `target` in a thread, immediately and then every `timer_interval_secs`, until a stop.

        An error in it requests a stop and is raised again at the end of the session.
        """
        return self._loops.start(timer_interval_secs, target, args or (), kwargs)

    def should_stop(self) -> bool:
        """Whether a stop was requested. In a custom training loop, call this once per step, between two steps: the
        chief then saves a checkpoint if one is due."""
        return self._loops.should_stop() if self._session is None else self._session.should_stop()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Request a stop: `should_stop` returns True, threads of `loop` stop, and `fit` stops after its epoch.

        Args:
            ex: An error to raise at the end of the session.
        """
        self._loops.request_stop(ex)

    def stop(self) -> None:
        """Request a stop and wait for the threads of `loop`.

        Raises: their first error; RuntimeError naming a thread that does not stop.
        """
        self._loops.request_stop()
        session = self._session
        serves = session is not None and session.is_training_thread  # otherwise it serves them at its next step
        self._loops.join(self._stop_grace_secs, session.requests.serve if session and serves else lambda: None)
        if self._loops.error is not None:
            raise self._loops.error

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Wait for a stop request, for at most `timeout_s` seconds (None: forever). Returns whether there was one."""
        return self._loops.wait_for_stop(timeout_s)

    @contextlib.contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """For custom threads: an error in the block requests a stop and is raised again at the end of the session."""
        try:
            yield
        except Exception as error:
            self._loops.request_stop(error)


def _is_chief_here() -> bool:
    """Whether this process is the chief, judging by the strategy or the cluster, before a model is given."""
    strategy = owning_strategy()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        return strategy.is_chief
    resolver = resolve()
    spec, task = resolver.cluster_spec(), resolver.task()
    return not spec or task is None or task == spec.chief


def _wait_for_a_checkpoint(checkpoints: CheckpointDirectory, model: Any) -> StoredCheckpoint:
    """Wait for a checkpoint of a chief that shares no strategy with this process."""
    bound_s = JobConfig.from_environment().rendezvous_timeout_s
    until = time.monotonic() + bound_s
    while (found := checkpoints.restore(model, rename_damaged=False)) is None:
        if time.monotonic() > until:
            raise RendezvousError(
                f"The chief did not save a checkpoint in {checkpoints.directory} within {bound_s:g} s "
                f"({RENDEZVOUS_TIMEOUT}). Is it started, with the same logdir on the same file system?"
            )
        time.sleep(POLL_S)
    return found
