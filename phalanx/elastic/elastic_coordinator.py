"""The keeper: who takes part in a job from which members are lost and to which others come. No socket comes near it.

There is one keeper in a job, in the launcher, so there is one authority: members that are cut off from it cannot go on
by themselves, and there are never two chiefs. It knows *candidates*, which have started but take no part yet, and
*members*, which form a *generation*.

                    all have come                  a member reports, or is gone
    gathering  ----------------------->  running  ----------------------------->  regrouping
                                            ^                                          |
                                            +----------  all others have reported -----+

A member that meets a loss in a collective leaves the generation and reports where it stands. When every member has
reported or is gone, the next generation is formed. All report the same collective, or some are one ahead: those hand
its result on to the others (`collectives.elastic`). Members that both live and cannot reach each other are told apart
(`quarrels`). Only when all stand before the merge of the same training step,
candidates come in: what they are given (weights, position) is then the same on all. To let candidates in (or members
out) while nothing fails, the keeper asks the chief to leave the generation before the next step, which makes the
others report as well: one road for losing and for joining, and nothing to pay for it in a step.

A program calls the methods that all members take part in (`fit`, `evaluate`, ...) one after the other: its *entries*,
numbered. A candidate runs the same program. Of entries that are over it is given the result; at the running one it
waits to be let in. So a script needs to know nothing of all this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.cluster.compatibility import TaskDescription, describe_disagreement
from phalanx.cluster.spec import CHIEF
from phalanx.elastic.membership_messages import (
    NOT_KEPT,
    Dismissed,
    EntryBegan,
    EntryFinished,
    EntryQuery,
    EntryResult,
    FormGeneration,
    FromKeeper,
    JoinResponse,
    LeaveNotice,
    LossReport,
    MemberAddress,
    PastEntry,
    ReadyToJoin,
    RegroupRequest,
    ToKeeper,
)
from phalanx.elastic.partitions import ConnectionFailures, choose_evictions
from phalanx.elastic.stragglers import StepTiming

STUCK_GRACE_S = 1.0
"""Once a member has waited in vain for the whole timeout: how long the others that also wait have to say so."""
KEPT_BYTES = 2**30
"""Of the results of all entries together, in the launcher's memory."""
NAP_S = 2.0
"""Longer between two ticks, this process itself was stopped: the silence of the others meanwhile means nothing."""


@dataclass
class ElasticMember:
    """A process that is a candidate or a member.

    Attributes:
        number: in the order of coming.
        asks: the entry of which it wants to know, as a candidate.
        ready: the entry at which it waits to be let in.
        report: how it left the present generation.
        heard_at: when it came, or last said anything.
    """

    statement: TaskDescription
    number: int
    heard_at: float
    asks: int | None = None
    ready: int | None = None
    report: LossReport | None = None
    pulse: StepTiming = field(default_factory=StepTiming)

    @property
    def task(self) -> str:
        return self.statement.task


@dataclass(frozen=True)
class MembershipLimits:
    """How many members a job may have, and how long things may take.

    Attributes:
        minimum, maximum: members.
        expected: with how many the job begins, if they come in time.
        start_s: how long it waits for them, and for a minimum that is not there any more.
        timeout_s: how long a member may make no progress while others wait for it.
    """

    minimum: int
    maximum: int
    expected: int
    start_s: float
    timeout_s: float


Send = Callable[[str, FromKeeper], None]


class ElasticCoordinator:
    """See the top of the file. Every method takes the time, by any steady clock.

    Args:
        send: takes an incarnation and a message for it.
        evict: is told the incarnation of a member that is to be killed.
        over: is told the tasks of the members when all of them have finished, and with them the job.
        failed: is called when the job cannot go on.
        released: is told the task of a member that is sent away as fewer are wanted.
        note: is told what happens, a line each, for people.
    """

    def __init__(
        self,
        bounds: MembershipLimits,
        now: float,
        *,
        send: Send,
        evict: Callable[[str], None],
        over: Callable[[list[str]], None],
        failed: Callable[[], None],
        released: Callable[[str], None],
        note: Callable[[str], None],
    ):
        self.bounds = bounds
        self.generation = 0
        self.entry = -1
        self.members: list[str] = []
        self.people: dict[str, ElasticMember] = {}
        self.failure = ""
        self._send = send
        self._evict = evict
        self._over = over
        self._failed = failed
        self._released = released
        self._note = note
        self._results: dict[int, bytes] = {}
        self._notes: dict[int, bytes] = {}
        self._come = 0
        self._replicas = bounds.expected
        self._since = now
        self._regrouping = False
        self._asked = False
        self._waiting_since: float | None = None  # the first that has reported waits for the others
        self._late_since: float | None = None
        self._formed_at = now
        self._quarrels = ConnectionFailures()
        self._kept = 0  # bytes
        self._ticked = self._awake_since = now
        self._finished: list[str] = []  # tasks
        self._short_since: float | None = None
        self._limit: int | None = None  # of processes that there may be still
        self._withdrawn: set[str] = set()  # tasks
        self._chief = ""  # of the present generation
        self._misses_chief = False  # it was lost, and nobody is chief after it yet
        self._given_up: set[str] = set()  # incarnations of which only the launcher has said that they are gone

    @property
    def is_regrouping(self) -> bool:
        """Whether a generation has ended, and the next one is not formed yet."""
        return self._regrouping

    # What happens.

    def disagreement(self, statement: TaskDescription) -> str | None:
        """Why this process cannot take part; None if it can."""
        known = next(iter(self.people.values()), None)
        return None if known is None else describe_disagreement(known.statement, statement)

    def arrive(self, statement: TaskDescription, now: float) -> JoinResponse:
        """A process has come."""
        for incarnation, person in list(self.people.items()):
            if person.task == statement.task:  # its former life, whose end was not heard of yet
                self.depart(incarnation, now)
        self.people[statement.incarnation] = ElasticMember(statement, self._come, now)
        self._come += 1
        return JoinResponse(self.generation > 0, self._replicas)

    def hear(self, incarnation: str, message: ToKeeper, now: float) -> None:
        """A process says something."""
        person = self.people.get(incarnation)
        if person is None:  # somebody who was sent away
            if incarnation in self._given_up:  # and who lives: it must not go on beside its successor
                self._send(incarnation, Dismissed("it was taken for lost", "evicted"))
            return
        person.heard_at = now
        match message:
            case EntryQuery(entry):
                person.asks = entry
                self._answer(incarnation, person)
            case ReadyToJoin(entry):
                person.ready = entry
                self._answer(incarnation, person)
            case LossReport(generation):
                if generation == self.generation and incarnation in self.members:
                    person.report = message
                    self._begin_regrouping(now)
                    if not message.linked:  # the others have waited for links since it was formed
                        self._waiting_since = self._formed_at
                    elif self._waiting_since is None:
                        self._waiting_since = now
                    if message.late and self._late_since is None:
                        self._late_since = now
            case EntryBegan(entry):
                self.entry = max(self.entry, entry)
                self._notes[entry] = message.note
                self._answer_all()
            case EntryFinished(entry, result):
                self.entry = max(self.entry, entry + 1)
                self._keep(entry, result)
                self._answer_all()
            case StepTiming():
                person.pulse = message
            case LeaveNotice():
                if incarnation in self.members:
                    self._finished.append(person.task)
                self._remove(incarnation)
        self._decide(now)

    def depart(self, incarnation: str, now: float) -> None:
        """A process is gone, without a word."""
        person = self.people.get(incarnation)
        if person is None:
            self._given_up.discard(incarnation)
            return
        was_member = incarnation in self.members
        self._remove(incarnation)
        if was_member:
            self._note(f"{person.task} is lost; {len(self.members)} of {self.bounds.maximum} remain")
            self._miss(incarnation, now)
        self._decide(now)

    def lose(self, task: str, now: float) -> None:
        """The process of a task is gone, as its launcher knows."""
        for incarnation in [i for i, person in self.people.items() if person.task == task]:
            self._given_up.add(incarnation)
            self.depart(incarnation, now)

    def resize(self, minimum: int, maximum: int, now: float) -> None:
        """Another number of members is wanted from now on."""
        self.bounds = MembershipLimits(
            minimum, maximum, self.bounds.expected, self.bounds.start_s, self.bounds.timeout_s
        )
        self._asked = False
        self._decide(now)

    def limit(self, workers: int, now: float) -> None:
        """There will never be more processes than these: nobody needs to wait for others in vain."""
        self._limit = workers
        self._decide(now)

    def withdraw(self, task: str, now: float) -> None:
        """This task is to take no part any more, from a next step on: its host is taken back."""
        self._withdrawn.add(task)
        self._decide(now)

    def readmit(self, task: str) -> None:
        """The next process of this task may take part."""
        self._withdrawn.discard(task)

    def tick(self, now: float) -> None:
        """Time has passed. To be called several times in a second."""
        if now > self._ticked + NAP_S:
            self._awake_since = now
        self._ticked = now
        self._evict_silent(now)
        self._decide(now)

    # What follows from it.

    def _evict_silent(self, now: float) -> None:
        """Processes send pulses as long as they live: one that was stopped, or is cut off, does not. Where it is all
        that is left, or waits to be let in, no other notices."""
        for incarnation, person in list(self.people.items()):
            if self.failure:
                return
            if now > max(person.heard_at, self._awake_since) + self.bounds.timeout_s + STUCK_GRACE_S:
                was_member = incarnation in self.members
                self._send_away(incarnation, "evicted", f"it has not been heard of for {now - person.heard_at:.1f} s")
                if was_member:
                    self._miss(incarnation, now)

    def _miss(self, incarnation: str, now: float) -> None:
        """A member is gone."""
        self._misses_chief |= incarnation == self._chief
        if self.members:
            self._begin_regrouping(now)
        elif not self._finished or self._misses_chief:  # a chief that is lost when others have finished had work to do
            self._fail("all members of the job were lost at once, so nobody has its state any more")

    def _keep(self, entry: int, result: bytes) -> None:
        """Keep a result for those who come later, if there is room."""
        if entry not in self._results:
            self._results[entry] = result if self._kept + len(result) <= KEPT_BYTES else NOT_KEPT
            self._kept += len(self._results[entry])

    def _remove(self, incarnation: str) -> None:
        del self.people[incarnation]
        if incarnation in self.members:
            self.members.remove(incarnation)
            if all(self.people[i].report is None for i in self.members):  # nobody waits for the others any more
                self._waiting_since = self._late_since = None

    def _answer_all(self) -> None:
        for incarnation, person in self.people.items():
            self._answer(incarnation, person)

    def _answer(self, incarnation: str, person: ElasticMember) -> None:
        """Tell a candidate what has become of the entry at which it stands."""
        if incarnation in self.members:
            return
        stands_at = person.asks if person.ready is None else person.ready
        if stands_at is None:
            return
        if stands_at in self._results:
            person.asks = person.ready = None
            self._send(incarnation, PastEntry(stands_at, self._results[stands_at]))
        elif person.asks is not None and stands_at in self._notes:
            person.asks = None
            self._send(incarnation, EntryBegan(stands_at, self._notes[stands_at], len(self.members)))

    def _begin_regrouping(self, now: float) -> None:
        if not self._regrouping:
            self._regrouping = True
            self._waiting_since = None
            self._late_since = None
            self._short_since = None
            for incarnation in self.members:
                if self.people[incarnation].report is None:
                    self._send(incarnation, EntryResult(self.generation))

    def _candidates(self) -> list[str]:
        """Those who can take part now, in the order of their coming."""
        waiting = [
            (person.number, incarnation)
            for incarnation, person in self.people.items()
            if person.ready is not None and person.ready == max(self.entry, 0) and incarnation not in self.members
        ]
        return [incarnation for _, incarnation in sorted(waiting)]

    def _decide(self, now: float) -> None:
        if self.failure:
            return
        for incarnation, person in list(self.people.items()):
            waits = person.asks is not None or person.ready is not None
            if self.generation and waits and person.task in self._withdrawn and incarnation not in self.members:
                self._send_away(incarnation, "surplus", "its host is taken back")
        if self.generation == 0:
            self._gather(now)
        elif self._regrouping:
            self._regroup(now)
        elif self.members:
            self._ask(now)
        elif self._finished:
            self._send_home("over", "the job has ended")
            self._over(self._finished)

    def _gather(self, now: float) -> None:
        candidates = sorted(self._candidates(), key=lambda i: _order(self.people[i].task))
        if len(candidates) >= self.bounds.expected:
            self._form(candidates[: self.bounds.maximum], now)
        elif now >= self._since + self.bounds.start_s:
            if len(candidates) < self.bounds.minimum:
                self._fail(
                    f"{len(candidates)} of the {self.bounds.minimum} workers that are needed have come within "
                    f"{self.bounds.start_s:g} s"
                )
            else:
                self._form(candidates[: self.bounds.maximum], now)

    def _regroup(self, now: float) -> None:
        if not self.members and self._finished:
            if self._misses_chief:
                self._fail("the chief was lost after the last step, before its program had ended")
                return
            self._regrouping = False
            self._decide(now)
            return
        silent = [i for i in self.members if self.people[i].report is None]
        if silent:
            stuck = self._late_since is not None and now >= self._late_since + STUCK_GRACE_S
            waited = self._waiting_since is not None and now >= self._waiting_since + self.bounds.timeout_s
            if stuck or waited:  # else nobody waits for them: they may have much to do between two collectives
                self._misses_chief |= self._chief in silent
                for incarnation in silent:
                    self._send_away(incarnation, "evicted", "it made no progress while the others waited for it")
                self._regroup(now)
            return
        self._part_quarrellers()
        reports = [report for i in self.members if (report := self.people[i].report) is not None]
        if all(report.fresh for report in reports):
            self._fail("all members of the job were lost, so nobody has its state any more")
            return
        alike = len({report.completed for report in reports}) == 1 and all(report.boundary for report in reports)
        members = self.members
        if alike:
            for incarnation in self._surplus():
                withdrawn = self.people[incarnation].task in self._withdrawn
                self._send_away(
                    incarnation, "surplus", "its host is taken back" if withdrawn else "fewer workers are wanted"
                )
            members = self.members + self._candidates()[: self._room]
            if len(members) < self._needed:
                self._wait_for_more(len(members), now)
                return
        self._form(members, now)

    def _part_quarrellers(self) -> None:
        """All members have reported: of those that cannot reach each other some have to go."""
        reports = {i: report for i in self.members if (report := self.people[i].report) is not None}
        if not reports:
            return
        self._quarrels.hear(self.generation, reports)
        fresh = [incarnation for incarnation, report in reports.items() if report.fresh]
        for incarnation in choose_evictions(self.members, self._quarrels.severed, fresh):
            self._send_away(incarnation, "evicted", "the network between it and other members is cut")

    @property
    def _needed(self) -> int:
        """The members without which the job waits; once some have finished, the others only follow them."""
        return 1 if self._finished else self.bounds.minimum

    def _wait_for_more(self, count: int, now: float) -> None:
        if self._limit is not None and self._limit < self._needed:
            self._fail(f"{count} workers remain, {self.bounds.minimum} are needed, and no other will be started")
        elif self._short_since is None:
            self._short_since = now
            self._note(f"{count} workers remain, and {self.bounds.minimum} are needed: waiting for others")
        elif now >= self._short_since + self.bounds.start_s:
            self._fail(f"{count} workers remain, {self.bounds.minimum} are needed, and no other has come in time")

    def _ask(self, now: float) -> None:
        """Ask the chief for a regrouping where one would change something."""
        del now
        candidates = self._candidates()
        for incarnation in candidates[self._room :]:
            self._send_away(incarnation, "surplus", "fewer workers are wanted")
        self._ask_chief()

    def _ask_chief(self) -> None:
        """Once in a generation, if before the next training step somebody is to come, to go or to be waited for."""
        joining = bool(self._candidates()[: self._room])
        if not self._asked and (joining or self._surplus() or len(self.members) < self._needed):
            self._asked = True
            self._send(self.members[0], RegroupRequest(self.generation))

    @property
    def _room(self) -> int:
        """How many candidates may come in. Members whose hosts are taken back go soon, and do not count."""
        staying = sum(self.people[i].task not in self._withdrawn for i in self.members)
        return max(0, self.bounds.maximum - staying)

    def _surplus(self) -> list[str]:
        """The members that are to go: those whose hosts are taken back, then the last ones. One of those who have the
        job's state stays in any case."""
        leaving = [i for i in self.members if self.people[i].task in self._withdrawn]
        staying = [i for i in self.members if i not in leaving]
        if leaving and not any((r := self.people[i].report) is None or not r.fresh for i in staying):
            informed = [i for i in leaving if (r := self.people[i].report) is None or not r.fresh]
            staying = [*informed[:1], *staying]
            leaving = [i for i in leaving if i not in staying]
        return leaving + staying[self.bounds.maximum :]

    def _form(self, incarnations: list[str], now: float) -> None:
        newcomers = [i for i in incarnations if i not in self.members]
        # The chief must be one that has the job's state.
        incarnations = sorted(incarnations, key=lambda i: (r := self.people[i].report) is not None and r.fresh)
        self.generation += 1
        if self.generation == 1:
            self._replicas = len(incarnations)
        places = []
        for incarnation in incarnations:
            person = self.people[incarnation]
            statement = person.statement
            completed = person.report.completed if person.report else -1
            fresh = person.report.fresh if person.report else self.generation > 1
            places.append(
                MemberAddress(
                    incarnation, statement.task, statement.host, statement.address, statement.pid, completed, fresh
                )
            )
            person.report, person.ready, person.asks = None, None, None
        self.members, self._chief, self._formed_at = list(incarnations), incarnations[0], now
        self._regrouping, self._asked, self._misses_chief = False, False, False
        broken = self._quarrels.to_link_anew(incarnations)
        if self.generation > 1:
            joined = ", ".join(self.people[i].task for i in newcomers)
            self._note(
                f"generation {self.generation}: {len(incarnations)} workers" + (f"; {joined} joined" if joined else "")
            )
        self._ask_chief()  # before it hears of the generation: many steps could be over before it reads more
        for incarnation in incarnations:
            self._send(incarnation, FormGeneration(self.generation, places, broken))

    def _send_away(self, incarnation: str, cause: str, reason: str) -> None:
        task = self.people[incarnation].task
        if cause == "surplus":
            self._released(task)
        self._send(incarnation, Dismissed(reason, cause))
        self._remove(incarnation)
        self._note(f"{task} takes no part any more: {reason}")
        if cause == "evicted":
            self._evict(incarnation)

    def _send_home(self, cause: str, reason: str) -> None:
        for incarnation in list(self.people):
            self._send(incarnation, Dismissed(reason, cause))
            del self.people[incarnation]

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._note(f"the job cannot go on: {reason}")
        self.members.clear()
        self._send_home("failed", reason)
        self._failed()


def _order(task: str) -> tuple[bool, int]:
    """Ranks begin in the order of the tasks, the chief first."""
    kind, _, index = task.partition("/")
    return kind != CHIEF, int(index)
