"""The assignment of cache rows to the tokens of texts.

    cache of a layer    | row 0 | row 1 | ...                   n_rows of them, which all texts share
    a text              position p lies in rows[p % len(rows)]  rows: those it was given when it began

Texts that begin alike may share the rows of their beginning: no text writes to them any more.  A row is free when no
text has it.

Where windows are chunks, a token sees those of the w positions from the last multiple of w on.

In pages (`paged`) rows are given and shared 64 at a time, so that one kernel finds those of any text by a table and
masks need no place for the rows of others (flash_attn_paged).  A beginning that ends inside a page is copied: what to
copy stands in `Text.copies`.

A layer that looks back w tokens needs these and the batch that is being read.  Where that is less than the context, the
caches of such layers have w - 1 + n_batch rows for each text, used in turn.  Masks tell every token the rows it sees.

A recurrent layer keeps states, each a row of n_state_rows.  A batch reads one row and writes another, so that an
interrupted call leaves the text as it was:

    row 0           empty, never written: where a text begins
    the others      of the texts as they are, and as they are after the batch
"""
import numpy as np
from numpy.lib.stride_tricks import as_strided

from ggjit.models.blocks.description import mask_name, pages_name, rows_name

KV_STEP = 256                   # attention reads a multiple of so many cache rows
ALL = 1 << 31                   # tokens: more than a text can have
PAGE = 64                       # rows of a page


class SlotMapping:
    """The rows of one text in the caches of layers with one window.  since: the first position that they hold."""

    __slots__ = ("first", "n", "rows", "since", "tops")

    def __init__(self, rows, since=0):
        self.rows, self.n, self.since = rows, len(rows), since
        straight = self.n and int(rows[-1]) - int(rows[0]) == self.n - 1 and (np.diff(rows) == 1).all()
        self.first = int(rows[0]) if straight else -1           # -1: the rows do not follow each other
        self.tops = None if straight else np.maximum.accumulate(rows) + 1

    def top(self, end):
        """How many rows from row 0 on contain all rows of the first `end` tokens."""
        end = min(end, self.n)
        return self.first + end if self.first >= 0 else int(self.tops[end - 1])

    def at(self, first, end):
        """Rows of the positions first .. end - 1."""
        return self.rows[first:end] if end <= self.n else self.rows[np.arange(first, end) % self.n]


class Text:
    """A text in the caches: `ids`, its tokens so far.

    written: positions that rows were written for; it stays where it is when the text gets shorter again.
    exact: what the caches know of the first so many tokens is what the network computes of these alone.  Those behind
    them were read under hooks, or know tokens that a context shift dropped.
    hooked: the first that was read under hooks.
    copies: {window: (rows, rows to copy them to)} of a shared beginning, until they are copied.
    saved: (n, positions that pictures among the first n tokens take less than they have tokens), as it was last asked.
    """

    __slots__ = ("broken", "copies", "exact", "hooked", "ids", "mappings", "saved", "state_row", "written")

    def __init__(self, mappings):
        self.mappings, self.ids, self.state_row, self.written, self.exact, self.hooked = mappings, [], 0, 0, ALL, ALL
        self.copies, self.saved = {}, (0, 0)
        self.broken = False             # an interrupted call has overwritten rows that the text needs

    def add(self, ids, state_row):
        """Note that these tokens were read; the states lie in `state_row`."""
        self.ids += ids.tolist()
        self.state_row = state_row

    def holds(self, n):
        """Do the windows of a text that ends after n tokens lie in the caches?"""
        return all(max(n - window + 1, 0) >= max(mapping.since, self.written - mapping.n)
                   for window, mapping in self.mappings.items() if window)

    def forget(self):
        """Forget all tokens; the text keeps its rows."""
        self.ids, self.state_row, self.written, self.broken, self.exact, self.hooked = [], 0, 0, False, ALL, ALL
        self.saved = 0, 0
        for mapping in self.mappings.values():
            mapping.since = 0

    def cut(self, n, state_row):
        """Keep the first n tokens of the text, and the states as they were after them."""
        del self.ids[n:]
        self.state_row, self.broken = state_row, not self.holds(n)
        self.exact = self.exact if self.exact < n else ALL
        self.hooked = self.hooked if self.hooked < n else ALL


class KVCells:
    """The rows of all caches.  values: {window: what a mask holds by distance, from 1 - n_ctx to n_ctx}.

    chunked: are windows chunks?  n_cells: rows of all texts together, None: n_ctx.  paged: are rows given in pages?
    """

    def __init__(self, n_ctx, windows, n_batch, n_seqs, values, chunked=False, n_cells=None, paged=False):
        self.n_ctx, self.n_seqs, self.values, self.chunked, self.paged = n_ctx, n_seqs, values, chunked, paged
        each = {w: min(n_ctx, w - 1 + n_batch) if w else n_ctx for w in windows}
        n_cells = max(n_ctx, n_cells or 0)
        self.n_rows = {w: min(n_cells, n_seqs * n) for w, n in each.items()}
        if paged:
            self.n_rows = dict.fromkeys(each, whole_pages(n_cells))
        self._each = {w: n if self.n_rows[w] < n_ctx else n_ctx for w, n in each.items()}
        self._windows = [(w, rows_name(w), mask_name(w), values[w]) for w in windows]
        self.most = max(self.n_rows.values(), default=0)
        self.n_state_rows = 1 + max(2 * n_seqs, n_seqs + 2)
        self.has_states = True          # does a layer keep states?
        self.clear()

    def clear(self):
        """Forget all texts and the rows that they hold."""
        self.texts, self.kept = [], []          # kept: texts that ended and give their rows back when others need them
        self._n_texts = {w: np.zeros(n, np.int32) for w, n in self.n_rows.items()}      # [how many texts use each row]

    @property
    def can_share(self):
        """May texts share rows?  Not with windows, whose rows are overwritten, nor with states of recurrent layers."""
        return not self.has_states and min(self._each.values(), default=0) >= self.n_ctx

    def open(self, n_tokens, like=None, n_shared=0):
        """A Text with rows for so many tokens, or None while others hold too many.

        n_shared: tokens that it has in common with the text `like`, which has read them; where can_share.
        """
        if len(self.texts) == self.n_seqs:
            return None
        if self.paged:
            return self._open_pages(n_tokens, like, n_shared)
        found = {w: _first_fit(n == 0, min(n_tokens, self._each[w]) - n_shared) for w, n in self._n_texts.items()}
        if any(rows is None for rows in found.values()):
            return None
        if n_shared:
            found = {w: np.concatenate([like.mappings[w].rows[:n_shared], rows]) for w, rows in found.items()}
        for w, rows in found.items():
            self._n_texts[w][rows] += 1
        text = Text({w: SlotMapping(rows) for w, rows in found.items()})
        if n_shared:
            text.ids, text.written = like.ids[:n_shared], n_shared
        self.texts.append(text)
        return text

    def _open_pages(self, n_tokens, like, n_shared):
        """As `open`: whole pages are shared, the rows of the last one are copied."""
        n_whole, found, copies = n_shared // PAGE * PAGE, {}, {}
        for w, n in self._n_texts.items():
            pages = np.flatnonzero(n[::PAGE] == 0)[:(whole_pages(n_tokens) - n_whole) // PAGE]
            if len(pages) < (whole_pages(n_tokens) - n_whole) // PAGE:
                return None
            rows = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
            if n_shared:
                copies[w] = like.mappings[w].rows[n_whole:n_shared], rows[:n_shared - n_whole]
                rows = np.concatenate([like.mappings[w].rows[:n_whole], rows])
            found[w] = rows
        for w, rows in found.items():
            self._n_texts[w][rows] += 1
        text = Text({w: SlotMapping(rows) for w, rows in found.items()})
        if n_shared:
            text.ids, text.written = like.ids[:n_shared], n_shared
            text.copies = copies if n_shared > n_whole else {}
        self.texts.append(text)
        return text

    def keep(self, text):
        """The text has ended: it no longer counts towards n_seqs, and keeps only the rows of the tokens that were
        read."""
        n = whole_pages(text.written) if self.paged else text.written
        for w, mapping in text.mappings.items():
            self._n_texts[w][mapping.rows[n:]] -= 1
            text.mappings[w] = SlotMapping(mapping.rows[:n], mapping.since)
        self.texts.remove(text)
        self.kept.append(text)

    def close(self, text):
        """Give the rows of a text back."""
        (self.kept if text in self.kept else self.texts).remove(text)
        for w, mapping in text.mappings.items():
            self._n_texts[w][mapping.rows] -= 1

    def free_state_rows(self, n, *kept):
        """n state rows that hold no text's states, nor those of `kept`."""
        if not self.has_states:
            return [0] * n
        used = {0, *kept, *(text.state_row for text in self.texts)}
        return [s for s in range(self.n_state_rows) if s not in used][:n]

    def n_kv(self, runs):
        """Cache rows that are looked at for these runs [(text, ids)], rounded up; the masks hide the rest."""
        n = 0
        for text, ids in runs:
            end = len(text.ids) + len(ids)
            for mapping in text.mappings.values():
                top = mapping.top(end)
                n = top if top > n else n
        return self.rounded(n)

    def rounded(self, n):
        return min(-(-n // KV_STEP) * KV_STEP, self.most)

    def n_keys(self, runs):
        """Tokens of the longest of these runs and what is before it, rounded up: the width of masks of pages."""
        longest = max(len(text.ids) + len(ids) for text, ids in runs)
        return min(-(-longest // KV_STEP) * KV_STEP, whole_pages(self.n_ctx))

    # ------------------------------------------------------------ inputs of a graph
    def place_pages(self, inputs, at, text, n, table):
        """Write rows and masks of the next n tokens of a text, which are the batch's from `at` on, and its page table,
        which is number `table`."""
        past = len(text.ids)
        end, lowest = past + n, self.n_ctx - 1 - past
        text.written = max(text.written, end)
        for window, rows, mask, values in self._windows:
            mapping, mask, pages = text.mappings[window], inputs[mask], inputs[pages_name(window)]
            inputs[rows][at:at + n] = mapping.rows[past:end]
            mask[at:at + n] = _band(values, lowest, n, mask.shape[1])
            n_pages = -(-end // PAGE)
            pages[table, :n_pages] = mapping.rows[:end:PAGE] // PAGE

    def place(self, inputs, at, text, n):
        """Write rows and masks of the next n tokens of a text, which are the batch's from `at` on."""
        past = len(text.ids)
        end, lowest = past + n, self.n_ctx - 1 - past           # of `values`: the distance of position 0
        if end > text.written:
            text.written = end
        for window, rows, mask, values in self._windows:
            mapping, mask = text.mappings[window], inputs[mask]
            seen = max(past - window + 1, 0) if window else 0
            if mapping.first == 0 and end <= mapping.n:         # the row number of a token is its position
                if n == 1:
                    inputs[rows][at] = past
                    mask[at] = values[lowest:lowest + mask.shape[1]]
                else:
                    inputs[rows][at:at + n] = mapping.rows[past:end]
                    mask[at:at + n] = _band(values, lowest, n, mask.shape[1])
            else:
                inputs[rows][at:at + n] = mapping.at(past, end)
                columns = mapping.at(seen, end) if mapping.first < 0 or end > mapping.n else \
                    slice(mapping.first + seen, mapping.first + end)
                mask[at:at + n] = -np.inf
                mask[at:at + n, columns] = _band(values, lowest + seen, n, end - seen)
            if self.chunked and window:
                for i, stop, start in chunks(past, n, window):
                    if start > seen:
                        mask[at + i:at + stop, mapping.at(seen, start)] = -np.inf

    def open_mask(self, inputs, at, text, start, stop, paged):
        """The next tokens start .. stop - 1 of a text, which are the batch's from `at` on, see each other, also those
        behind."""
        past = len(text.ids)
        for window, _, mask, _ in self._windows:
            columns = np.arange(past + start, past + stop) if paged else \
                text.mappings[window].at(past + start, past + stop)
            rows = inputs[mask][at + start:at + stop]
            for i in range(stop - start):
                rows[i, columns[i + 1:]] = 0

    def mask(self, window, n):
        """(n, n): the mask of the first n tokens of a text among themselves."""
        values = self.values[window]
        mask = np.array([values[self.n_ctx - 1 - i:][:n] for i in range(n)], np.float32)
        for i, stop, start in chunks(0, n, window) if self.chunked and window else ():
            mask[i:stop, :start] = -np.inf
        return mask


def whole_pages(n):
    """Rows of the pages that hold n tokens."""
    return -(-n // PAGE) * PAGE


def chunks(past, n, window):
    """(first, stop, start) of the runs of the n tokens that lie in one chunk, which begins at position `start`."""
    for start in range(past // window * window, past + n, window):
        yield max(start - past, 0), min(start + window - past, n), start


def _first_fit(free, n):
    """The first n free rows that follow each other; else the first n free ones; None where there are fewer."""
    rows = np.flatnonzero(free)
    if len(rows) < n or not n:
        return None if n else rows[:0]
    runs = np.flatnonzero(rows[n - 1:] - rows[:len(rows) - n + 1] == n - 1)
    first = int(runs[0]) if len(runs) else 0
    return rows[first:first + n]


def _band(values, at, n, width):
    """[i, j]: values[at - i + j], a view."""
    if n == 1:
        return values[at:at + width]
    step = values.strides[0]
    return as_strided(values[at:], (n, width), (-step, step))
