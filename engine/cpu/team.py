"""The threads that take part in a run: threads that cost more waiting than they save are left out, and come back.

A walk is cut into stretches, each with a team of threads.  At a barrier where all threads meet, thread 0 may end the
stretch; the others leave, and the next one begins with half the team, or with twice as many:

    one of two is descheduled    | 2 threads ... waits | 1 thread, 8 ms | 2 ... waits | 1 thread, 16 ms | ...
    nothing else runs            | 2 threads, the whole run

    fewer    where waits took a third of a window, and 3 ms, about a turn of the system: somewhere a thread had no core
    more     after a pause, which doubles while it does not help, and is short again after a window without such waits

A wait is counted from where a spinning thread would yield.  Waits for thread 0 while it does a node alone are none.
Results do not depend on it: every number of threads gives the same bits.  The team is the pool's: what one plan found
serves the next.  thread_choice.py compares whole runs, and so chooses well for plans that run again and again; a prompt
runs once.
"""
from ggjit.ops.native.jit import exact
from ggjit.ops.native.mem import cycles, ld_i64, load_acquire, st_i64, store_release
from ggjit.ops.native.node import S_WAITED

# sync page, continued from walk.py: byte offsets
S_MILLISECOND = 896     # cycles of a millisecond
S_MOST = 904            # threads of this run at most; 0: its team does not change
S_BEGAN = 912           # clock when this stretch began
S_SPENT = 920           # cycles of the window before this stretch
S_TEAM = 928            # threads at present; 0: all
S_UNTIL = 936           # clock until which the team stays small
S_PAUSE = 944           # cycles of the last such pause
S_NEXT = 952            # threads of the next stretch
S_POSTED = 960          # workers of the last stretch that had any: S_DONE when they have left
S_LEAVE_AT = 520        # NODE at whose barrier this stretch ends; beside S_STOP_AT, which is read with it

LEAST_WAITED, SHARE = 3, 3                      # milliseconds; a third of the window
WINDOW, FIRST_PAUSE, MOST_PAUSE = 50, 8, 512    # milliseconds


@exact
def begin(sync, nth, changes):
    """Threads of a run's first stretch, nth where the team of this run does not change, as that of one thread."""
    st_i64(sync + S_MOST, nth if changes and nth > 1 else 0)
    st_i64(sync + S_POSTED, 0)
    store_release(sync + S_LEAVE_AT, 0)
    if nth == 1:
        return nth
    now, team = cycles(), ld_i64(sync + S_TEAM)
    st_i64(sync + S_BEGAN, now)
    if not changes:
        return nth
    if 0 < team < nth and now >= ld_i64(sync + S_UNTIL):
        team = _grown(sync, team, nth)
    return team if 0 < team < nth else nth


@exact
def end(sync, nth):
    """Note how long the last stretch of a run of nth threads took."""
    if nth > 1:
        st_i64(sync + S_SPENT, ld_i64(sync + S_SPENT) + cycles() - ld_i64(sync + S_BEGAN))


@exact
def _window(sync, now):
    """Begin to count again."""
    st_i64(sync + S_WAITED, 0)
    st_i64(sync + S_SPENT, 0)
    st_i64(sync + S_BEGAN, now)


@exact
def _grown(sync, team, most):
    team = min(2 * team, most)
    st_i64(sync + S_TEAM, team if team < most else 0)
    _window(sync, cycles())
    return team


@exact
def _shrunk(sync, team, now):
    ms, pause = ld_i64(sync + S_MILLISECOND), ld_i64(sync + S_PAUSE)
    pause = min(max(2 * pause, FIRST_PAUSE * ms), MOST_PAUSE * ms)
    st_i64(sync + S_PAUSE, pause)
    st_i64(sync + S_UNTIL, now + pause)
    team = (team + 1) // 2
    st_i64(sync + S_TEAM, team)
    _window(sync, now)
    return team


@exact
def leaves(sync, nth, node, done):
    """Asked by thread 0 before all meet after `node`: does the stretch end there?  done: address of the count of
    workers that have left."""
    most = ld_i64(sync + S_MOST)
    if most == 0:
        return
    now, ms = cycles(), ld_i64(sync + S_MILLISECOND)
    span, waited = ld_i64(sync + S_SPENT) + now - ld_i64(sync + S_BEGAN), ld_i64(sync + S_WAITED)
    if nth > 1 and waited > LEAST_WAITED * ms and SHARE * waited > span:
        st_i64(sync + S_NEXT, _shrunk(sync, nth, now))
        store_release(sync + S_LEAVE_AT, node)
    elif nth < most and now >= ld_i64(sync + S_UNTIL) and load_acquire(done) == ld_i64(sync + S_POSTED):
        st_i64(sync + S_NEXT, _grown(sync, nth, most))
        store_release(sync + S_LEAVE_AT, node)
    elif span > WINDOW * ms:
        if nth == most:
            st_i64(sync + S_PAUSE, 0)
        _window(sync, now)
