"""Immutable parts of objects: attributes that are set once, and lists that cannot be changed."""
from ggjit.ops.core.errors import ReadOnly


class Fixed:
    """An attribute that is set once; setting it again raises ReadOnly with the remedy.

        class Graph:
            nodes = Fixed("make another Graph")

    There is no __get__, so reading finds the value in the object's own dictionary, at the speed of any attribute.
    """

    def __init__(self, remedy):
        self.remedy = remedy

    def __set_name__(self, owner, name):
        self.name = name

    def __set__(self, owner, value):
        if self.name in owner.__dict__:
            raise ReadOnly(f"{owner!r}: .{self.name} cannot be set; {self.remedy}")
        owner.__dict__[self.name] = value

    def __delete__(self, owner):
        raise ReadOnly(f"{owner!r}: .{self.name} cannot be deleted; {self.remedy}")


class FixedList(list):
    """A list that others may read and copy, but not change."""
    __slots__ = ()

    def _refuse(self, *args, **kwargs):
        raise ReadOnly("this list belongs to a graph and cannot be changed; change a copy of it, list(...)")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self):
        return list, (list(self),)


def fixed_array(a):
    """The array, read-only from now on."""
    a.flags.writeable = False
    return a
