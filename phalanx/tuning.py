"""Hyperparameter search in a job of several replicas, which all train each trial.

The chief holds the study, or the tuner that decides, and the others receive its decisions. This module imports Optuna
and KerasTuner only if the program has done so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.errors import ConfigurationError
from phalanx.strategies.strategy import Strategy

__all__ = ["SharedStudy", "SharedTrial", "call_on_chief", "share_trials"]


def call_on_chief(function: Callable[[], Any], strategy: Strategy) -> Any:
    """Call a function on the chief, and return its result on every replica. All replicas must call this.

    Args:
        function: Takes no arguments; returns numbers, strings, booleans, None, or lists and dictionaries of them.
        strategy: Strategy of the job.

    Raises: the function's own error on the chief; ConfigurationError with its text on all others.
    """
    outcome: tuple[Any, str | None] = (None, None)
    failure: Exception | None = None
    if strategy.is_chief:
        try:
            found = function()
            outcome = (found.item() if isinstance(found, np.generic) else found, None)
        except Exception as error:  # sent to every replica
            failure, outcome = error, (None, f"{type(error).__name__}: {error}")
    result, message = strategy.broadcast_from_chief(outcome)
    if failure is not None:
        raise failure
    if message is not None:
        raise ConfigurationError(f"The chief's call failed with {message}")
    return result


class SharedTrial:
    """An Optuna trial that all replicas train. It has the methods of `optuna.Trial`.

    The chief calls each method, and every replica receives the result: parameters, or whether to prune.
    """

    def __init__(self, trial: Any, strategy: Strategy) -> None:
        self._trial = trial
        self._strategy = strategy

    @property
    def number(self) -> int:
        """Number of the trial."""
        return int(call_on_chief(lambda: self._trial.number, self._strategy))

    @property
    def params(self) -> dict[str, Any]:
        """The parameters suggested so far."""
        return dict(call_on_chief(lambda: self._trial.params, self._strategy))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: call_on_chief(
            lambda: getattr(self._trial, name)(*args, **kwargs), self._strategy
        )


class SharedStudy:
    """An Optuna study in a job of several replicas, which all train each trial.

    The chief holds the study. Its sampler and pruner decide, and its storage records the trials.

    Args:
        create_study: Function that only the chief calls: `optuna.create_study`, or one that creates or loads a study.
        strategy: Strategy of the job. Jobs with parameter servers and elastic jobs are not supported.

    Attributes:
        study: The study on the chief; None on the others.
    """

    def __init__(self, create_study: Callable[[], Any], strategy: Strategy) -> None:
        self.study = create_study() if strategy.is_chief else None
        self._strategy = strategy

    def optimize(self, objective: Callable[[SharedTrial], float], n_trials: int) -> None:
        """Run trials, like `optuna.Study.optimize`. All replicas must call this, with the same arguments.

        Args:
            objective: Function that trains a model with the trial's parameters and returns a value that is equal on all
                replicas, such as one of `History`. It may raise `optuna.TrialPruned` on all replicas.
            n_trials: Number of trials to run.
        """
        from optuna import TrialPruned
        from optuna.trial import TrialState

        for _ in range(n_trials):
            trial = None if self.study is None else self.study.ask()
            state, values = TrialState.FAIL, None
            try:
                values, state = objective(SharedTrial(trial, self._strategy)), TrialState.COMPLETE
            except TrialPruned:
                state = TrialState.PRUNED
            finally:
                if self.study is not None:
                    self.study.tell(trial, values, state)

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial, on every replica."""
        return dict(call_on_chief(lambda: self._on_chief().best_params, self._strategy))

    @property
    def best_value(self) -> float:
        """The value of the best trial, on every replica."""
        return float(call_on_chief(lambda: self._on_chief().best_value, self._strategy))

    def _on_chief(self) -> Any:
        return self.study


def share_trials(tuner: Any, strategy: Strategy) -> None:
    """Make all replicas of a job train each trial of a KerasTuner tuner, with the chief's hyperparameters.

    Call this on every replica, after the tuner is created and before `tuner.search`. Build the model in
    `strategy.scope()`, and give each replica's tuner its own `directory`. (KerasTuner's `distribution_strategy` is for
    TensorFlow's strategies.)

    Args:
        tuner: A `keras_tuner.Tuner`, such as `RandomSearch`, created with the same arguments on every replica.
        strategy: Strategy of the job. Jobs with parameter servers and elastic jobs are not supported.
    """
    oracle = tuner.oracle
    state = call_on_chief(oracle.get_state, strategy)
    if not strategy.is_chief:
        oracle.set_state(state)  # its seed, and the search space
        oracle.verbose = 0
    create = oracle.create_trial

    def create_trial(tuner_id: str) -> Any:
        # Each replica's oracle keeps its own record of the same trials; the chief's hyperparameters apply.
        trial = create(tuner_id)
        trial.set_state(call_on_chief(trial.get_state, strategy))
        return trial

    oracle.create_trial = create_trial
