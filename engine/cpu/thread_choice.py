"""How many of its threads run a plan: a thread leaves if waiting for it costs more than it saves, and later returns.

Beside other processes a thread may be descheduled, and all others wait for it at the next barrier: two threads of a
decoder were half as fast as one.  So runs are timed as they come, and now and then a few of them are made with half as
many threads, or with twice as many; what was faster stays.  Results do not depend on it: every number of threads gives
the same bits.

    fewer    tried where recent runs are slower than the fastest one by SLOW, else rarely
    more     tried after a moment, and more rarely each time it did not help or not for long, but within seconds of
             computing: the other processes may have ended
    judged   by the mean of a few runs without the slowest quarter, in seconds for each nanosecond of planned work;
             plans of about the same work share what was found: a decoder has a new plan whenever its context has grown

GGJIT_TUNE=off: always all threads.
"""
import collections
import math

from ggjit.ops.matmul import choices

LEAST_NANOSECONDS = 2e5         # plans of less work always use all threads: timing would cost too much
RECENT, TRIAL = 8, 4            # runs whose mean is what a number of threads takes; runs of a trial
SLOW, LEAST_GAIN = 1.25, 1.05
# the time of the fastest run is multiplied by this after each run, so that it is forgotten
FADING = 1.002
FIRST, MOST = 64, 4096          # runs between regular trials: at first, at most
SOON_SECONDS = 0.2              # a larger number is first tried after so long, if that is less than FIRST runs
# seconds, and at least so many runs, after which a larger number is tried in any case
MOST_SECONDS, LONG_RUNS = 5.0, 256
FIRST_SLOW, MOST_SLOW = 8, 256  # runs between trials that slow runs caused: at first, at most
LASTS = 256                     # a larger number of threads that lasts so many runs counts as a success


class ThreadChoice:
    """The number of threads for runs of one amount of work.  Before a run: `n_threads()`; after it: `ran(time)`.

    unit: the seconds of a time of 1."""

    def __init__(self, most, unit=1.0):
        self.most = self.n = most           # n: threads outside trials
        self.unit = unit
        self._tried = 0                     # threads of the trial under way, 0: none
        self._trial = []
        self._fewer_after, self._more_after = FIRST, 0          # 0: not known yet
        self._slow_after = FIRST_SLOW
        self._settle(most, ())

    def n_threads(self):
        """Threads of the next run."""
        return self._tried or self.n

    def ran(self, time):
        """The run was done.  time: of all runs in the same unit."""
        if self._tried:
            self._trial.append(time)
            if len(self._trial) == TRIAL:
                self._judge()
            return
        self._recent.append(time)
        self._fastest = min(self._fastest * FADING, time)
        self._runs += 1
        self._since += 1
        if self._since >= MOST_SLOW:
            self._slow_after = FIRST_SLOW
        if len(self._recent) == RECENT:
            self._tried = self._next_trial()

    def _next_trial(self):
        """Threads to try now, 0: none."""
        if self.n < self.most and self._since >= self._more_after:
            return min(2 * self.n, self.most)
        slow = mean(self._recent) > SLOW * self._fastest
        if self.n > 1 and self._since >= (min(self._slow_after, self._fewer_after) if slow else self._fewer_after):
            return (self.n + 1) // 2
        return 0

    def _judge(self):
        n, more = self._tried, self._tried > self.n
        better = LEAST_GAIN * mean(self._trial) <= mean(self._recent)
        if better:
            if not more:                    # a larger number that did not last is tried less often
                self._more_after = self._later() if self._runs < LASTS else self._soon()
            self._fewer_after, self._slow_after = FIRST, FIRST_SLOW
            self._settle(n, self._trial)
        elif more:
            self._more_after = self._later()
        else:
            self._fewer_after = min(8 * self._fewer_after, MOST)
            self._slow_after = min(2 * self._slow_after, MOST_SLOW)
        self._tried, self._trial, self._since = 0, [], 0

    def _soon(self):
        """Runs until a larger number is tried for the first time."""
        return min(FIRST, max(RECENT, int(SOON_SECONDS / (mean(self._recent) * self.unit))))

    def _later(self):
        """Runs between two trials of a larger number, after one that did not help or not for long."""
        most = max(int(MOST_SECONDS / (mean(self._recent) * self.unit)), LONG_RUNS)
        return min(2 * (self._more_after or self._soon()), MOST, most)

    def _settle(self, n, known):
        self.n, self._recent = n, collections.deque(known, RECENT)
        self._fastest = min(known, default=math.inf)
        self._runs = self._since = 0

    def __repr__(self):
        return f"<ThreadChoice {self.n} of {self.most}>"


def mean(times):
    """The mean of all but the slowest quarter, since some runs are slow on any machine."""
    kept = sorted(times)[:len(times) - len(times) // 4]
    return sum(kept) / len(kept)


_choices = {}                   # (threads, doublings of the work) -> ThreadChoice


def choice_of(n_threads, nanoseconds):
    """The ThreadChoice of plans of about that work, None where all threads run always."""
    if n_threads < 2 or nanoseconds < LEAST_NANOSECONDS or choices.SETTING == "off":
        return None
    key = n_threads, int(nanoseconds).bit_length()
    return _choices.setdefault(key, ThreadChoice(n_threads, nanoseconds))
