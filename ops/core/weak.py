"""Weak references whose callbacks are C code.

An object dies at any moment, in the middle of any line of Python.  What a signal handler raises inside a Python
function that is called then (Ctrl-C in a callback of `weakref`) is printed and dropped by the interpreter.  Here such
a function is never called: C code appends to a deque or deletes from a dict, and Python code looks later.
"""
import collections
import functools
import operator
import weakref


class NumberedRef(weakref.ref):
    """A weak reference with a number.  NumberedRef(x, deque.append): it is put into the deque when x dies."""
    __slots__ = ("number",)


class WeakValues:
    """{number: object}, the objects held weakly."""

    def __init__(self):
        self._refs, self._gone = {}, collections.deque()

    def __setitem__(self, number, x):
        ref = NumberedRef(x, self._gone.append)
        ref.number = number
        self._forget()
        self._refs[number] = ref

    def get(self, number):
        """The object, or None."""
        ref = self._refs.get(number)
        return None if ref is None else ref()

    def __len__(self):
        self._forget()
        return len(self._refs)

    def _forget(self):
        while self._gone:
            try:
                ref = self._gone.popleft()
            except IndexError:                          # another thread has removed the last entry
                return
            # an interrupt came before the number was set
            self._refs.pop(getattr(ref, "number", None), None)


class WeakKeys(dict):
    """{object: value}, the objects held weakly: a value is dropped the moment its object dies.

    The keys of the dict are weak references; `put`, `of` and `objects` take and give the objects themselves.
    """
    __slots__ = ("__weakref__",)

    def put(self, x, value=None):
        # the callback holds the dict weakly, since the dict holds the callback
        self[weakref.ref(x, functools.partial(operator.delitem, weakref.proxy(self)))] = value

    def of(self, x):
        """The value of x, or None."""
        return self.get(weakref.ref(x))

    def objects(self):
        """The objects that are alive."""
        return [x for x in (ref() for ref in list(self)) if x is not None]
